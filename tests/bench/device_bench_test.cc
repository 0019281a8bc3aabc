// The benchmark for a GPU, on one that is not there: that it runs and leaves nothing; no figure means anything.
#include "tests/bench/device_bench.h"

#include <gtest/gtest.h>

#include "tests/cuda/fake/fake_runtime.h"

namespace spectrumkv::bench {
namespace {

using testing::FakeMemory;

TEST(DeviceBenchTest, MeasuresEveryStageAndFreesItsMemory) {
  testing::FakeRuntime runtime;
  const DeviceBenchOptions options{"P8", {64}, {DType::kFloat16}, {1}, 0.0, true};
  ::testing::internal::CaptureStdout();
  EXPECT_EQ(RunDeviceBench(options, &runtime), 0);
  const std::string row = ::testing::internal::GetCapturedStdout();
  for (const char* name : {"\"backend\": \"cuda\"", "\"tier\": \"P8\"", "encode_gbs", "decode_gbs", "scan_gbs", "copy_gbs"}) {
    EXPECT_NE(row.find(name), std::string::npos) << name << " in " << row;
  }
  EXPECT_TRUE(runtime.violations().empty()) << runtime.violations().front();
  EXPECT_EQ(runtime.memory().live(FakeMemory::Kind::kDevice), 0u);
  EXPECT_EQ(runtime.memory().live(FakeMemory::Kind::kPinned), 0u);
}

TEST(DeviceBenchTest, SaysWhyThereIsNoGpuAndWhichCallFailed) {
  testing::FakeRuntime runtime;
  const DeviceBenchOptions options{"P8", {64}, {DType::kFloat16}, {1}, 0.0, true};
  runtime.Fail("CountDevices", gpu::kNoDevice);
  EXPECT_EQ(RunDeviceBench(options, &runtime), 77);
  runtime.Fail("Encode", gpu::kNoKernelImage);
  EXPECT_EQ(RunDeviceBench(options, &runtime), 1);
  EXPECT_EQ(runtime.memory().live(FakeMemory::Kind::kDevice), 0u);
}

}  // namespace
}  // namespace spectrumkv::bench
