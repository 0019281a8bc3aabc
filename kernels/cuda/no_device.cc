// The interface of kernels/cuda/codec.h in a build without CUDA.
#include "kernels/cuda/codec.h"

namespace spectrumkv::gpu {
namespace {

constexpr const char* kWhy = "this program was built without CUDA";

}  // namespace

LaunchStatus LaunchEncode(const EncodeJob*, uint32_t, void*, size_t, Stream) { return LaunchStatus{kWhy, 0}; }
LaunchStatus LaunchDecode(const DecodeJob*, uint32_t, void*, size_t, Stream) { return LaunchStatus{kWhy, 0}; }
LaunchStatus LaunchScan(const ScanJob*, uint32_t, Stream) { return LaunchStatus{kWhy, 0}; }
LaunchStatus LaunchSpread(const SpreadJob*, uint32_t, Stream) { return LaunchStatus{kWhy, 0}; }
LaunchStatus LaunchAttend(const AttendJob&, void*, size_t, Stream) { return LaunchStatus{kWhy, 0}; }
LaunchStatus LaunchZero(const ZeroJob&, Stream) { return LaunchStatus{kWhy, 0}; }
DeviceCount CountDevices() { return DeviceCount{0, kWhy}; }

}  // namespace spectrumkv::gpu
