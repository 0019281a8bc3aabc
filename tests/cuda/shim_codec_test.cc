// The kernels, compiled as C++ and run on the shim, against the scalar backend.
#include <gtest/gtest.h>

#include <cstdio>

#include "kernels/cuda/jobs.h"
#include "tests/cuda/attend_case.h"
#include "tests/cuda/batch_case.h"
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

TEST(ShimBatchTest, ChunksOfOneLaunchAreThoseOfManyLaunches) {
  uint64_t checks = 0, seed = 0;
  for (DType dtype : kDTypes) {
    for (uint32_t head_dim : {8u, 64u, 320u, 576u}) {
      for (int order = 0; order < 3; ++order) {
        const std::unique_ptr<Executor> executor = MakeShimExecutor(static_cast<shim::Order>(order), 1);
        EXPECT_EQ(RunBatchCase(BatchDims(dtype, head_dim), ++seed, executor.get(), &checks), "") << head_dim;
      }
    }
  }
  std::vector<ChunkDims> most(gpu::kMaxBatch, ChunkDims{5, 2, 64, DType::kFloat16, true});
  EXPECT_EQ(RunBatchCase(most, 1, MakeShimExecutor(shim::Order::kRandom, 1).get(), &checks), "");
  std::printf("%llu checks equal bit for bit\n", static_cast<unsigned long long>(checks));
}

// More heads, and more queries, than the workspace has room for at a time; and a tile of which nothing is seen.
TEST(ShimAttendTest, PassesOverHeadsAndQueriesChangeNothing) {
  uint64_t checks = 0;
  const AttendCase cases[] = {{{2048, 3, 8, DType::kFloat16, false}, {}, 1, 1000, 70, 0.0f},
                              {{2048, 1, 8, DType::kBFloat16, false}, {}, 2, 2100, 40, 0.0f},
                              {{300, 2, 40, DType::kFloat32, false}, {}, 3, 70, 0, 3.0f}};
  for (const AttendCase& test : cases) {
    const gpu::AttendPasses passes = gpu::PassesOf(test.dims, test.queries);
    std::printf("%u of %u heads, %u of %u queries at a time\n", passes.heads, test.dims.heads, passes.queries, test.queries);
    const std::unique_ptr<Executor> executor = MakeShimExecutor(static_cast<shim::Order>(test.seed % 3), 1);
    EXPECT_EQ(RunAttendCase(test, executor.get(), &checks), "") << executor->name();
  }
  EXPECT_LT(gpu::PassesOf(cases[0].dims, cases[0].queries).heads, cases[0].dims.heads);
  EXPECT_LT(gpu::PassesOf(cases[1].dims, cases[1].queries).queries, cases[1].queries);
}

INSTANTIATE_TEST_SUITE_P(HeadDims, ShimCodecTest,
                         ::testing::Values(8, 16, 24, 32, 40, 48, 64, 72, 80, 96, 112, 128, 136, 160, 192, 256, 264,
                                           320, 512, 576, 768, 1024));

}  // namespace
}  // namespace spectrumkv::testing
