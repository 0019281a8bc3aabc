// Small cases for the shim under a sanitizer: every kernel, every tier. With an argument a fault is seeded, which the
// sanitizer must report: "race" (ThreadSanitizer), "overrun" (AddressSanitizer).
#include <cstdio>
#include <cstring>
#include <vector>

#include "tests/cuda/shim/cuda_shim.h"
// Behind the shim:
#include "tests/cuda/batch_case.h"
#include "tests/cuda/codec_case.h"
#include "tests/cuda/faults.cuh"
#include "tests/cuda/shim_executor.h"

namespace spectrumkv::testing {
namespace {

// No ranges are given: the sanitizer alone looks at memory.
void Seed(void (*kernel)(const gpu::FaultArgs)) {
  std::vector<uint8_t> memory(64 + 4 * gpu::kFaultThreads);
  shim::Launcher launch(shim::Options{});
  launch(kernel, 1, gpu::kFaultThreads, gpu::FaultArgs{memory.data(), static_cast<uint32_t>(memory.size())});
}

int RunCases() {
  uint64_t seed = 0, checks = 0;
#if defined(__SANITIZE_THREAD__)
  const std::vector<uint32_t> head_dims = {80, 320};  // some twenty times slower
#else
  const std::vector<uint32_t> head_dims = {8, 80, 128, 320, 1024};
#endif
  for (uint32_t head_dim : head_dims) {
    for (DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
      CodecCase test;
      test.dims = ChunkDims{head_dim <= 128 ? 9u : 7u, head_dim <= 128 ? 2u : 1u, head_dim, dtype, true};
      test.seed = ++seed;
      test.target = seed % 2 == 0 ? dtype : DType::kFloat16;
      test.shape.page_tokens = 4;
      test.shape.order = static_cast<PageOrder>(seed % 3);
      test.shape.misalignment = seed % 2 == 0 ? 1 : 0;
      for (uint32_t t = 0; t < test.dims.tokens; ++t) {
        test.tiers.push_back(TierMapByte(static_cast<Tier>(t % kTierCount), static_cast<Tier>((t + 3) % kTierCount)));
      }
      const auto order = static_cast<shim::Order>(seed % 3);
      const std::unique_ptr<Executor> executor = MakeShimExecutor(order, static_cast<unsigned>(seed));
      const std::string differs = RunCodecCase(test, executor.get(), &checks);
      if (differs.empty()) continue;
      std::printf("FAILED: %s: %s: %s\n", executor->name().c_str(), NameOf(test).c_str(), differs.c_str());
      return 1;
    }
  }
  const std::unique_ptr<Executor> executor = MakeShimExecutor(shim::Order::kRandom, 1);
  const std::string differs = RunBatchCase(BatchDims(DType::kFloat16, 64), 1, executor.get(), &checks);
  if (!differs.empty()) {
    std::printf("FAILED: batch: %s\n", differs.c_str());
    return 1;
  }
  std::printf("%llu cases, %llu checks\n", static_cast<unsigned long long>(seed),
              static_cast<unsigned long long>(checks));
  return 0;
}

int Main(const char* fault) {
  if (fault == nullptr) return RunCases();
  if (std::strcmp(fault, "race") == 0) Seed(gpu::MissingBarrier<true>);
  if (std::strcmp(fault, "overrun") == 0) Seed(gpu::OutOfBounds<true>);
  return 0;
}

}  // namespace
}  // namespace spectrumkv::testing

int main(int argc, char** argv) { return spectrumkv::testing::Main(argc > 1 ? argv[1] : nullptr); }
