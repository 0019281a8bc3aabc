// Any bytes as a configuration file: LoadConfigText answers with a valid Config or with INVALID_ARGUMENT and at least
// one error that names its place. A Config it accepts prints to YAML that loads to the same.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "server/base/status.h"
#include "server/config/config.h"

namespace {

void Check(bool held, const char* what, const std::string& detail) {
  if (held) return;
  std::fprintf(stderr, "config_fuzz: %s\n%s\n", what, detail.c_str());
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using spectrumkv::LoadConfigText;
  const std::string text(reinterpret_cast<const char*>(data), size);
  // Plain peers, so that inputs without certificates can be valid too.
  const spectrumkv::ConfigSources sources = {"", {{"SPECTRUMKV_PEER_SECURITY", "plain"}}, {}};
  const auto config = LoadConfigText("fuzz.yaml", text, sources);
  if (!config.ok()) {
    const std::string message(config.status().message());
    Check(config.status().code() == absl::StatusCode::kInvalidArgument, "another code", config.status().ToString());
    Check(!spectrumkv::ReasonOf(config.status()).empty(), "no reason", message);
    Check(message.find("fuzz.yaml") != std::string::npos, "no place", message);
    return 0;
  }
  const std::string printed = PrintConfig(*config);
  const auto again = LoadConfigText("printed.yaml", printed, {});
  Check(again.ok(), "what was printed does not load", again.ok() ? "" : again.status().ToString() + "\n" + printed);
  Check(PrintConfig(*again) == printed, "what was printed loads to another configuration", printed);
  return 0;
}
