// The kernels, compiled as C++ and run on the shim, against the scalar backend.
#include <gtest/gtest.h>

#include <cstdio>

#include "tests/cuda/codec_case.h"
#include "tests/cuda/shim_executor.h"
#include "tests/differential/planes.h"

namespace spectrumkv::testing {
namespace {

constexpr DType kDTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};

class ShimCodecTest : public ::testing::TestWithParam<uint32_t> {
 protected:
  static void SetUpTestSuite() { seed_ = Seed(); }
  static void TearDownTestSuite() {
    std::printf("%llu cases, %llu checks equal bit for bit\n", static_cast<unsigned long long>(cases_),
                static_cast<unsigned long long>(checks_));
  }
  void SetUp() override { rng_.seed(seed_ + GetParam()); }

  uint32_t Random(uint32_t below) { return static_cast<uint32_t>(rng_() % below); }

  PoolShape RandomShape() {
    PoolShape shape;
    shape.order = static_cast<PageOrder>(Random(3));
    shape.fused = Random(2) == 0;
    shape.shuffled = Random(4) != 0;
    constexpr uint32_t kPages[] = {1, 5, 16, 64};
    shape.page_tokens = kPages[Random(4)];
    shape.skip = Random(shape.page_tokens);
    if (Random(2) == 0) {
      shape.pad_bytes = Random(12);
      shape.misalignment = Random(64);
    }
    return shape;
  }

  void Run(const CodecCase& test) {
    const shim::Order order = static_cast<shim::Order>(cases_ % 3);
    const std::unique_ptr<Executor> executor = MakeShimExecutor(order, static_cast<unsigned>(test.seed));
    EXPECT_EQ(RunCodecCase(test, executor.get(), &checks_), "") << executor->name() << ": " << NameOf(test);
    ++cases_;
  }

  static inline uint64_t seed_ = 0, cases_ = 0, checks_ = 0;
  std::mt19937_64 rng_;
};

TEST_P(ShimCodecTest, EqualsScalar) {
  for (DType dtype : kDTypes) {
    for (uint32_t tokens : {1u, 2u, 63u, 65u}) {
      for (uint32_t heads : {1u, 3u}) {
        if (GetParam() * tokens * heads > 20000) continue;  // seconds, not minutes
        CodecCase test;
        test.dims = ChunkDims{tokens, heads, GetParam(), dtype, Random(5) != 0};
        test.shape = RandomShape();
        test.seed = rng_();
        test.target = Random(2) == 0 ? dtype : kDTypes[Random(3)];
        Run(test);
        if (HasFailure()) return;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(HeadDims, ShimCodecTest,
                         ::testing::Values(8, 16, 24, 32, 40, 48, 64, 72, 80, 96, 112, 128, 136, 160, 192, 256, 264,
                                           320, 512, 576, 768, 1024));

}  // namespace
}  // namespace spectrumkv::testing
