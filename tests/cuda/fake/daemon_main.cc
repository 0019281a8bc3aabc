// spectrumkvd with two GPUs that are not there (fake_runtime.h), for tests that drive a whole daemon. Arguments:
// --ready-file PATH, then those of spectrumkvd. SPECTRUMKV_FAKE_GPU_SEED: the order of streams. SPECTRUMKV_FAKE_GPU_FAIL:
// "Allocate:2 Allocate:700 Encode:719:late Pin:2:always", what the next calls of these names come to, in this order.
// Exits with 3 where the daemon did what no device would forgive, and says what.
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "server/config/command_line.h"
#include "server/config/config.h"
#include "server/lifecycle/run.h"
#include "tests/cuda/fake/fake_runtime.h"

namespace {

void FailAsAsked(spectrumkv::testing::FakeRuntime* gpus) {
  const char* const asked = std::getenv("SPECTRUMKV_FAKE_GPU_FAIL");
  std::istringstream failures(asked == nullptr ? "" : asked);
  for (std::string failure; failures >> failure;) {
    std::istringstream parts(failure);
    std::string call, error, how;
    std::getline(parts, call, ':');
    std::getline(parts, error, ':');
    std::getline(parts, how);
    gpus->Fail(call, std::stoi(error), 0, how == "late", how == "always");
  }
}

}  // namespace

int main(int argc, char** argv) {
  spectrumkv::PrepareProcess();
  std::vector<std::string> args(argv + 1, argv + argc);
  if (args.size() < 2 || args[0] != "--ready-file") {
    std::fprintf(stderr, "usage: spectrumkvd_fake_gpu --ready-file PATH [arguments of spectrumkvd]\n");
    return 2;
  }
  const std::string ready_file = args[1];
  args.erase(args.begin(), args.begin() + 2);
  const auto line = spectrumkv::ParseCommandLine(args, spectrumkv::ProcessEnvironment());
  if (!line.ok()) {
    std::fprintf(stderr, "%s\n", std::string(line.status().message()).c_str());
    return 2;
  }
  const auto config = spectrumkv::LoadConfig(line->sources);
  if (!config.ok()) {
    std::fprintf(stderr, "%s\n", std::string(config.status().message()).c_str());
    return 2;
  }
  const char* const seed = std::getenv("SPECTRUMKV_FAKE_GPU_SEED");
  spectrumkv::testing::FakeOptions options;
  options.devices = 2;
  if (seed != nullptr) options.seed = static_cast<uint32_t>(std::strtoul(seed, nullptr, 10));
  spectrumkv::testing::FakeRuntime gpus(options);
  FailAsAsked(&gpus);
  const int code = spectrumkv::RunDaemon(*config, ready_file, &gpus);
  for (const std::string& violation : gpus.violations()) std::fprintf(stderr, "VIOLATION: %s\n", violation.c_str());
  using Kind = spectrumkv::testing::FakeMemory::Kind;
  // What has failed for good gives nothing back.
  const size_t left = gpus.failed() ? 0 : gpus.memory().live(Kind::kDevice) + gpus.memory().live(Kind::kPinned);
  if (left != 0) std::fprintf(stderr, "VIOLATION: %zu allocations are left\n", left);
  return code != 0 ? code : gpus.violations().empty() && left == 0 ? 0 : 3;
}
