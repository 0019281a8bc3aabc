// The kernels on a GPU, through the seam the daemon uses, against the scalar backend: the cases of the shim. Exits with 77
// where there is no GPU. "fake": on the fake GPU, a few cases, to try this program itself.
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "tests/cuda/batch_case.h"
#include "tests/cuda/codec_case.h"
#include "tests/cuda/fake/fake_runtime.h"
#include "tests/cuda/runtime_executor.h"

namespace spectrumkv::testing {
namespace {

constexpr DType kDTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};

CodecCase CaseOf(uint64_t seed, uint32_t head_dim, DType dtype, bool small) {
  CodecCase test;
  test.dims = ChunkDims{small ? 9u : static_cast<uint32_t>(40 + seed % 90), head_dim <= 64 ? 3u : 1u, head_dim, dtype,
                        seed % 7 != 0};
  test.seed = seed;
  test.target = kDTypes[seed % 3];
  test.shape.page_tokens = seed % 2 == 0 ? 4 : 16;
  test.shape.skip = seed % 4;
  test.shape.order = static_cast<PageOrder>(seed / 3 % 3);
  test.shape.fused = seed % 2 == 0;
  if (seed % 4 == 0) test.shape.misalignment = 2;
  if (seed % 5 == 0) test.shape.pad_bytes = 1;
  return test;
}

int RunCases(gpu::Runtime* runtime, bool small) {
  const std::unique_ptr<Executor> executor = MakeRuntimeExecutor(runtime);
  uint64_t seed = 0, checks = 0;
  for (uint32_t head_dim : {8u, 24u, 64u, 80u, 96u, 128u, 192u, 256u, 320u, 576u, 1024u}) {
    if (small && head_dim > 128) break;
    for (DType dtype : kDTypes) {
      for (int repeat = 0; repeat < (small ? 1 : 6); ++repeat) {
        const CodecCase test = CaseOf(++seed, head_dim, dtype, small);
        const std::string differs = RunCodecCase(test, executor.get(), &checks);
        if (differs.empty()) continue;
        std::printf("FAILED: %s: %s\n", NameOf(test).c_str(), differs.c_str());
        return 1;
      }
    }
  }
  for (DType dtype : kDTypes) {
    const std::string differs = RunBatchCase(BatchDims(dtype, 128), ++seed, executor.get(), &checks);
    if (differs.empty()) continue;
    std::printf("FAILED: batch: %s\n", differs.c_str());
    return 1;
  }
  std::printf("%llu cases, %llu checks\n", static_cast<unsigned long long>(seed),
              static_cast<unsigned long long>(checks));
  return 0;
}

int Main(bool fake) {
  if (fake) {
    FakeRuntime runtime;
    const int code = RunCases(&runtime, /*small=*/true);
    for (const std::string& violation : runtime.violations()) std::printf("FAILED: %s\n", violation.c_str());
    return runtime.violations().empty() ? code : 1;
  }
  int devices = 0;
  const gpu::CallStatus counted = gpu::CudaRuntime()->CountDevices(&devices);
  if (devices == 0) {
    std::printf("SKIPPED: no GPU: %s\n", counted.ok() ? "the driver has none" : counted.words);
    return 77;
  }
  return RunCases(gpu::CudaRuntime(), /*small=*/false);
}

}  // namespace
}  // namespace spectrumkv::testing

int main(int argc, char** argv) {
  try {
    return spectrumkv::testing::Main(argc > 1 && std::strcmp(argv[1], "fake") == 0);
  } catch (const std::runtime_error& error) {
    std::printf("FAILED: %s\n", error.what());
    return 1;
  }
}
