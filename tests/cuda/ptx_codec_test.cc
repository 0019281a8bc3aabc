// The PTX that nvcc wrote of the kernels, executed on the CPU, against the scalar backend. argv[1]: the PTX.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>

#include "tests/cuda/codec_case.h"
#include "tests/cuda/ptx_executor.h"

namespace spectrumkv::testing {
namespace {

const ptx::Module* module = nullptr;
ptx::Counters counters;
uint64_t cases = 0, checks = 0;

void RunCase(const CodecCase& test) {
  const shim::Order order = static_cast<shim::Order>(cases % 3);
  const std::unique_ptr<Executor> executor =
      MakePtxExecutor(module, order, static_cast<unsigned>(test.seed), &counters);
  EXPECT_EQ(RunCodecCase(test, executor.get(), &checks), "") << NameOf(test);
  ++cases;
}

constexpr DType kDTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};

// Of every tier one token at least, K and V.
std::vector<uint8_t> AllTiers(uint32_t tokens) {
  std::vector<uint8_t> tiers(tokens);
  for (uint32_t t = 0; t < tokens; ++t) {
    tiers[t] = TierMapByte(static_cast<Tier>(t % kTierCount), static_cast<Tier>((t + t / kTierCount) % kTierCount));
  }
  return tiers;
}

TEST(PtxCodecTest, NothingIsRefused) { EXPECT_EQ(module->Refused(), std::vector<std::string>()); }

TEST(PtxCodecTest, EqualsScalar) {
  uint64_t seed = 7;
  for (uint32_t head_dim : {8u, 24u, 64u, 80u, 128u, 256u, 320u, 1024u}) {
    for (DType dtype : kDTypes) {
      CodecCase test;
      const uint32_t tokens = head_dim <= 128 ? 9 : 7;
      test.dims = ChunkDims{tokens, head_dim <= 64 ? 3u : 1u, head_dim, dtype, true};
      test.seed = ++seed;
      test.tiers = AllTiers(tokens);
      test.target = kDTypes[seed % 3];
      test.shape.page_tokens = 4;
      test.shape.skip = seed % 4;
      test.shape.order = static_cast<PageOrder>(seed / 3 % 3);
      test.shape.fused = seed % 2 == 0;
      if (seed % 4 == 0) test.shape.misalignment = 2;
      if (seed % 5 == 0) test.shape.pad_bytes = 1;
      RunCase(test);
    }
  }
}

// Two runs of centres, and a tier map longer than the layout kernel's block.
TEST(PtxCodecTest, LongChunks) {
  for (DType dtype : kDTypes) {
    CodecCase test;
    test.dims = ChunkDims{dtype == DType::kFloat16 ? 300u : 66u, 1, 8, dtype, dtype != DType::kBFloat16};
    test.seed = 100 + static_cast<uint64_t>(dtype);
    test.target = dtype;
    RunCase(test);
  }
}

}  // namespace
}  // namespace spectrumkv::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (argc != 2) {
    std::printf("usage: %s FILE.ptx\n", argv[0]);
    return 2;
  }
  const auto start = std::chrono::steady_clock::now();
  const spectrumkv::ptx::Module module = spectrumkv::ptx::Module::Load(argv[1]);
  spectrumkv::testing::module = &module;
  const int result = RUN_ALL_TESTS();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  using spectrumkv::testing::counters;
  std::printf("PTX executed on CPU, no GPU: %llu cases, %llu checks equal bit for bit, %.1f M instructions in %.1f s\n",
              static_cast<unsigned long long>(spectrumkv::testing::cases),
              static_cast<unsigned long long>(spectrumkv::testing::checks),
              static_cast<double>(counters.instructions) / 1e6, seconds);
  return result;
}
