// The launches of kernels/cuda/codec.h on a device.
#include <cuda_runtime_api.h>

#include "kernels/cuda/codec.h"
#include "kernels/cuda/pipeline.cuh"

namespace spectrumkv::gpu {
namespace {

// Queues kernels on a stream; remembers the first launch that failed, and queues nothing after it.
class DeviceLauncher {
 public:
  explicit DeviceLauncher(Stream stream) : stream_(stream) {}

  template <typename Args>
  void operator()(void (*kernel)(const Args), uint32_t blocks, uint32_t threads, const Args& args, uint32_t rows = 1) {
    if (error_ != cudaSuccess) return;
    kernel<<<dim3(blocks, rows), threads, 0, stream_>>>(args);
    error_ = cudaGetLastError();
  }

  LaunchStatus status() const {
    if (error_ == cudaSuccess) return LaunchStatus{};
    return LaunchStatus{cudaGetErrorName(error_), static_cast<int>(error_)};
  }

 private:
  Stream stream_;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace

LaunchStatus LaunchEncode(const EncodeJob* jobs, uint32_t count, void* workspace, size_t workspace_bytes, Stream stream) {
  if (const char* wrong = Check(jobs, count, workspace, workspace_bytes)) return LaunchStatus{wrong, 0};
  DeviceLauncher launch(stream);
  RunEncode(jobs, count, workspace, launch);
  return launch.status();
}

LaunchStatus LaunchDecode(const DecodeJob* jobs, uint32_t count, void* workspace, size_t workspace_bytes, Stream stream) {
  if (const char* wrong = Check(jobs, count, workspace, workspace_bytes)) return LaunchStatus{wrong, 0};
  DeviceLauncher launch(stream);
  RunDecode(jobs, count, workspace, launch);
  return launch.status();
}

LaunchStatus LaunchScan(const ScanJob* jobs, uint32_t count, Stream stream) {
  if (const char* wrong = Check(jobs, count)) return LaunchStatus{wrong, 0};
  DeviceLauncher launch(stream);
  RunScan(jobs, count, launch);
  return launch.status();
}

LaunchStatus LaunchSpread(const SpreadJob* jobs, uint32_t count, Stream stream) {
  if (const char* wrong = Check(jobs, count)) return LaunchStatus{wrong, 0};
  DeviceLauncher launch(stream);
  RunSpread(jobs, count, launch);
  return launch.status();
}

LaunchStatus LaunchAttend(const AttendJob& job, void* workspace, size_t workspace_bytes, Stream stream) {
  if (const char* wrong = Check(job, workspace, workspace_bytes)) return LaunchStatus{wrong, 0};
  DeviceLauncher launch(stream);
  RunAttend(job, workspace, launch);
  return launch.status();
}

LaunchStatus LaunchZero(const ZeroJob& job, Stream stream) {
  if (const char* wrong = Check(job)) return LaunchStatus{wrong, 0};
  DeviceLauncher launch(stream);
  RunZero(job, launch);
  return launch.status();
}

DeviceCount CountDevices() {
  int devices = 0, driver = 0;
  switch (const cudaError_t error = cudaGetDeviceCount(&devices)) {
    case cudaSuccess: return DeviceCount{devices, devices == 0 ? "no CUDA device" : ""};
    case cudaErrorNoDevice: return DeviceCount{0, "no CUDA device"};
    case cudaErrorInsufficientDriver:
      cudaDriverGetVersion(&driver);  // 0 where there is none
      return DeviceCount{0, driver == 0 ? "no CUDA device: no driver"
                                        : "no CUDA device: the driver is older than this program's runtime"};
    default: return DeviceCount{0, cudaGetErrorString(error)};
  }
}

}  // namespace spectrumkv::gpu
