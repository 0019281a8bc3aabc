// Free memory as the driver's management library tells it. The library is a stand-in (fake_management.cc): the real one
// comes with a driver, and where there is one it is asked too.
#include "kernels/cuda/management.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "kernels/cuda/runtime.h"

namespace spectrumkv::gpu {
namespace {

constexpr uint8_t kGpu[16] = {0xFA, 0xCE, 0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08, 0x09, 0x0A, 0x0B, 0x0C, 0x0D};
constexpr uint8_t kInstance[16] = {0x31, 0x60};
constexpr uint8_t kUnknown[16] = {0x99};

TEST(ManagementTest, TellsTheFreeMemoryOfAGpuAndOfAMigInstance) {
  setenv("FAKE_MANAGEMENT_FREE", "123456789012", 1);
  const Management management(FAKE_MANAGEMENT);
  uint64_t bytes = 0;
  ASSERT_TRUE(management.FreeBytes(kGpu, &bytes));
  EXPECT_EQ(bytes, 123456789012u);
  setenv("FAKE_MANAGEMENT_FREE", "7", 1);
  ASSERT_TRUE(management.FreeBytes(kInstance, &bytes));
  EXPECT_EQ(bytes, 7u);
  EXPECT_FALSE(management.FreeBytes(kUnknown, &bytes));
  EXPECT_EQ(bytes, 7u);
  unsetenv("FAKE_MANAGEMENT_FREE");
  EXPECT_FALSE(management.FreeBytes(kGpu, &bytes)) << "an error of the library";
}

TEST(ManagementTest, WithoutTheLibraryNothingIsKnown) {
  uint64_t bytes = 0;
  EXPECT_FALSE(Management("/nowhere/libnvidia-ml.so.1").FreeBytes(kGpu, &bytes));
  EXPECT_FALSE(Management("libc.so.6").FreeBytes(kGpu, &bytes)) << "another library";
  setenv("FAKE_MANAGEMENT_INIT", "9", 1);  // NVML_ERROR_DRIVER_NOT_LOADED
  EXPECT_FALSE(Management(FAKE_MANAGEMENT).FreeBytes(kGpu, &bytes));
  unsetenv("FAKE_MANAGEMENT_INIT");
}

TEST(ManagementTest, KnowsTheDevicesOfThisMachine) {
  int devices = 0;
  if (const CallStatus counted = CudaRuntime()->CountDevices(&devices); devices == 0) {
    std::printf("SKIPPED: the driver's own library: %s\n", counted.words);
    return;
  }
  const Management management("libnvidia-ml.so.1");
  for (int i = 0; i < devices; ++i) {
    DeviceProperties properties;
    ASSERT_TRUE(CudaRuntime()->Describe(i, &properties).ok());
    uint64_t bytes = 0;
    ASSERT_TRUE(management.FreeBytes(properties.uuid, &bytes));
    EXPECT_GT(bytes, 0u);
    EXPECT_LE(bytes, properties.total_bytes);
  }
}

}  // namespace
}  // namespace spectrumkv::gpu
