#include "server/memory/device_error.h"

#include "server/base/status.h"

namespace spectrumkv {
namespace {

struct Meaning {
  absl::StatusCode code;
  const char* reason;
  int64_t retry_after_ms = -1;
};

constexpr int64_t kRetryMs = 1000;

Meaning MeaningOf(int error) {
  if (gpu::IsSticky(error)) return {absl::StatusCode::kInternal, "DEVICE_FAILED"};
  switch (error) {
    case gpu::kWithoutCuda: return {absl::StatusCode::kUnimplemented, "CUDA_NOT_AVAILABLE"};
    case gpu::kInsufficientDriver: return {absl::StatusCode::kFailedPrecondition, "NO_DRIVER"};
    case gpu::kDriverTooOld:
    case gpu::kDriverMismatch: return {absl::StatusCode::kFailedPrecondition, "DRIVER_TOO_OLD"};
    case gpu::kNoDevice: return {absl::StatusCode::kFailedPrecondition, "NO_DEVICE"};
    case gpu::kNoKernelImage: return {absl::StatusCode::kFailedPrecondition, "DEVICE_TOO_OLD"};
    case gpu::kOutOfMemory: return {absl::StatusCode::kResourceExhausted, "OUT_OF_DEVICE_MEMORY", kRetryMs};
    case gpu::kDevicesUnavailable:
    case gpu::kSystemNotReady: return {absl::StatusCode::kUnavailable, "DEVICE_BUSY", kRetryMs};
    default: return {absl::StatusCode::kInternal, "DEVICE_ERROR"};
  }
}

Metadata MetadataFor(const gpu::CallStatus& status) {
  return {{"cuda_error", status.name}, {"cuda_code", std::to_string(status.error)}};
}

}  // namespace

absl::Status DeviceError(const gpu::CallStatus& status, const std::string& doing) {
  const Meaning meaning = MeaningOf(status.error);
  return MakeError(meaning.code, meaning.reason,
                   doing + ": " + status.name + " (" + std::to_string(status.error) + "), " + status.words,
                   MetadataFor(status), meaning.retry_after_ms);
}

absl::Status LaunchError(const gpu::LaunchStatus& status, const std::string& doing) {
  if (status.error != gpu::kSuccess) return DeviceError({status.error, status.wrong, "when it was launched"}, doing);
  return MakeError(absl::StatusCode::kInternal, "DEVICE_ERROR",
                   doing + ": the job's " + status.wrong + " was refused", {{"field", status.wrong}});
}

absl::Status CheckHandleLength(const std::string& handle, const std::string& maker) {
  if (handle.size() == gpu::kIpcHandleBytes) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_IPC_HANDLE",
                   "the handle has " + std::to_string(handle.size()) + " bytes, " + maker + " gives " +
                       std::to_string(gpu::kIpcHandleBytes));
}

absl::Status ImportError(const gpu::CallStatus& status, const std::string& what, const std::string& maker) {
  switch (status.error) {
    case gpu::kInvalidValue:
    case gpu::kInvalidDevice:
    case gpu::kContextUninitialized:
    case gpu::kMapFailed:
    case gpu::kInvalidHandle:
    case gpu::kNotPermitted:
    case gpu::kNotSupported:
    case gpu::kTooManyPeers: break;
    default: return DeviceError(status, "opening the handle of " + what);
  }
  return MakeError(
      absl::StatusCode::kFailedPrecondition, "IPC_HANDLE_REFUSED",
      "the handle of " + what + " cannot be opened: " + status.name + " (" + std::to_string(status.error) +
          "), " + status.words +
          ". It must come from " + maker + " in another process that still lives, on this device and, with MIG, in "
          "the same GPU instance; both processes must share one PID and one IPC namespace (containers: hostPID or "
          "shareProcessNamespace, and hostIPC)",
      MetadataFor(status));
}

}  // namespace spectrumkv
