// What the host makes of a job: refused fields by name, runs from addresses, the workspace's size.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "kernels/cuda/jobs.h"

namespace spectrumkv::gpu {
namespace {

class JobsTest : public ::testing::Test {
 protected:
  EncodeJob Encode() {
    EncodeJob job;
    job.dims = ChunkDims{16, 2, 64, DType::kFloat16, true};
    job.k = job.v = DevicePlane{memory_, &run_, 1, 256, 128, 2};
    job.tiers = memory_;
    job.chunk = memory_;
    job.capacity = sizeof(memory_);
    job.report = &report_;
    return job;
  }
  std::string Wrong(const EncodeJob& job) {
    const char* wrong = Check(&job, 1, memory_, WorkspaceBytes(ChunkDims{16, 2, 64, DType::kFloat16, true}));
    return wrong == nullptr ? "" : wrong;
  }

  alignas(16) uint8_t memory_[4096] = {};
  TokenRun run_;
  ChunkReport report_;
};

TEST_F(JobsTest, WrongFieldsAreNamed) {
  EXPECT_EQ(Wrong(Encode()), "");
  const auto with = [this](auto change) {
    EncodeJob job = Encode();
    change(&job);
    return Wrong(job);
  };
  EXPECT_EQ(with([](EncodeJob* j) { j->dims.tokens = 0; }), "dims.tokens");
  EXPECT_EQ(with([](EncodeJob* j) { j->dims.tokens = 4097; }), "dims.tokens");
  EXPECT_EQ(with([](EncodeJob* j) { j->dims.heads = 1025; }), "dims.heads");
  EXPECT_EQ(with([](EncodeJob* j) { j->dims.head_dim = 12; }), "dims.head_dim");
  EXPECT_EQ(with([](EncodeJob* j) { j->dims.head_dim = 1032; }), "dims.head_dim");
  EXPECT_EQ(with([](EncodeJob* j) { j->dims.dtype = static_cast<DType>(4); }), "dims.dtype");
  EXPECT_EQ(with([](EncodeJob* j) { j->k.runs = nullptr; }), "k");
  EXPECT_EQ(with([](EncodeJob* j) { j->v.run_count = 0; }), "v");
  EXPECT_EQ(with([](EncodeJob* j) { j->v.run_count = 0, j->dims.has_v = false; }), "");
  EXPECT_EQ(with([](EncodeJob* j) { ++j->chunk; }), "chunk");
  EXPECT_EQ(with([](EncodeJob* j) { j->report = nullptr; }), "report");
  EXPECT_EQ(with([](EncodeJob* j) { j->tiers = nullptr; }), "tiers");
  EXPECT_EQ(with([](EncodeJob* j) { j->dims.tokens = 17; }), "workspace_bytes");
  EncodeJob two[] = {Encode(), Encode()};
  EXPECT_STREQ(Check(two, 1, nullptr, 1 << 20), "workspace");
  EXPECT_STREQ(Check(two, 0, memory_, 1 << 20), "count");
  EXPECT_STREQ(Check(two, kMaxBatch + 1, memory_, 1 << 20), "count");
  EXPECT_STREQ(Check(two, 2, memory_, 2 * WorkspaceBytes(two[0].dims)), nullptr);
  EXPECT_STREQ(Check(two, 2, memory_, 2 * WorkspaceBytes(two[0].dims) - 1), "workspace_bytes");
  two[1].dims.head_dim = 256;
  EXPECT_STREQ(Check(two, 2, memory_, 1 << 20), nullptr);
  two[1].dims.head_dim = 264;
  EXPECT_STREQ(Check(two, 2, memory_, 1 << 20), "kind");
  two[1] = Encode();
  two[1].dims.dtype = DType::kBFloat16;
  EXPECT_STREQ(Check(two, 2, memory_, 1 << 20), "kind");
}

TEST_F(JobsTest, PlanesOfOneLaunchAreChecked) {
  alignas(2) TokenScan scans[16];
  uint8_t spreads[16];
  const ChunkDims dims{16, 2, 64, DType::kFloat16, true};
  const DevicePlane plane{memory_, &run_, 1, 256, 128, 2};
  std::vector<ScanJob> scan(kMaxPlanes + 1, ScanJob{dims, plane, scans});
  std::vector<SpreadJob> spread(kMaxPlanes + 1, SpreadJob{dims, plane, true, 0, spreads});
  EXPECT_STREQ(Check(scan.data(), kMaxPlanes), nullptr);
  EXPECT_STREQ(Check(spread.data(), kMaxPlanes), nullptr);
  EXPECT_STREQ(Check(scan.data(), kMaxPlanes + 1), "count");
  EXPECT_STREQ(Check(spread.data(), 0), "count");
  scan[3].scans = nullptr;
  spread[3].spreads = nullptr;
  EXPECT_STREQ(Check(scan.data(), 3), nullptr);
  EXPECT_STREQ(Check(scan.data(), 4), "scans");
  EXPECT_STREQ(Check(spread.data(), 4), "spreads");
  scan[2].dims.dtype = DType::kFloat32;
  EXPECT_STREQ(Check(scan.data(), 3), "kind");
  scan[1].plane.runs = nullptr;
  EXPECT_STREQ(Check(scan.data(), 3), "plane");
}

TEST_F(JobsTest, RunsFollowAddresses) {
  const uint8_t* base = memory_;
  const uint8_t* rows[] = {base + 64, base + 80, base + 96, base, base + 16, base + 128};
  TokenRun runs[6];
  ASSERT_EQ(RunsOf(rows, 6, base, 16, runs), 3u);
  EXPECT_EQ(runs[0].offset_bytes, 64);
  EXPECT_EQ(runs[1].first_token, 3u);
  EXPECT_EQ(runs[1].offset_bytes, 0);
  EXPECT_EQ(runs[2].first_token, 5u);
  EXPECT_EQ(runs[2].offset_bytes, 128);
  EXPECT_EQ(RunsOf(rows, 1, base, 16, runs), 1u);
  EXPECT_EQ(RunsOf(rows + 3, 2, rows[5], 16, runs), 1u);
  EXPECT_EQ(runs[0].offset_bytes, -128);
}

// The kernel's shared memory holds every sample, in whole groups of eight.
TEST(SpreadArgsTest, NoShapeSamplesMoreThanTheKernelHolds) {
  uint32_t most = 0;
  for (uint32_t heads = 1; heads <= kMaxHeads; ++heads) {
    for (uint32_t head_dim = 8; head_dim <= kMaxHeadDim; head_dim += 8) {
      SpreadJob job;
      job.dims = ChunkDims{1, heads, head_dim, DType::kFloat16, true};
      const SpreadArgs args = ArgsOf(&job, 1).planes[0];
      ASSERT_EQ(args.sample_dims % 8, 0u);
      ASSERT_LE(uint64_t{args.sample_heads - 1} * args.head_step, heads - 1);
      most = std::max(most, args.sample_heads * args.sample_dims);
    }
  }
  EXPECT_EQ(most, kSpreadValues);
}

}  // namespace
}  // namespace spectrumkv::gpu
