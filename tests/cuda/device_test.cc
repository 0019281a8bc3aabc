// One program for machines with a device and without: it starts, says which it is, and codes on the CPU all the same.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>

#include "kernels/codec/registry.h"
#include "kernels/cpu/cpu_backends.h"
#include "kernels/cuda/codec.h"

namespace spectrumkv::gpu {
namespace {

TEST(DeviceTest, StartsWithoutADevice) {
  const DeviceCount count = CountDevices();
  std::printf("CUDA devices: %d %s\n", count.devices, count.why_none);
  EXPECT_GE(count.devices, 0);
  EXPECT_EQ(count.devices == 0, std::strlen(count.why_none) != 0);
  if (count.devices != 0) std::printf("SKIPPED: a machine without a device, this one has one\n");
  BackendRegistry registry;
  AddCpuBackends(&registry);
  std::string error;
  const Backend* backend = registry.Choose("auto", &error);
  ASSERT_NE(backend, nullptr) << error;
  std::printf("codec backend: %s\n", backend->name());
  EXPECT_TRUE(SelfTest(*backend, &error)) << error;
}

// A launch without a device is a status, never a crash.
TEST(DeviceTest, LaunchWithoutADeviceSaysWhy) {
  if (CountDevices().devices != 0) {
    std::printf("SKIPPED: launches without a device, there is one\n");
    return;
  }
  alignas(16) uint8_t memory[4096] = {};
  TokenRun run;
  ScanJob job{ChunkDims{1, 1, 8, DType::kFloat16, true}, DevicePlane{memory, &run, 1, 16, 16, 2},
              reinterpret_cast<TokenScan*>(memory + 64)};
  const LaunchStatus status = LaunchScan(&job, 1, nullptr);
  EXPECT_FALSE(status.ok());
  std::printf("launch: %s (%d)\n", status.wrong, status.error);
}

}  // namespace
}  // namespace spectrumkv::gpu
