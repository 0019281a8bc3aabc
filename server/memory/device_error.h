// How a call of the GPU's runtime ended, as a status of the daemon.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "kernels/cuda/runtime.h"

namespace spectrumkv {

// `doing`: "copying to the device". Reasons:
//   UNIMPLEMENTED CUDA_NOT_AVAILABLE (built without CUDA); FAILED_PRECONDITION NO_DRIVER, DRIVER_TOO_OLD, NO_DEVICE,
//   DEVICE_TOO_OLD (no code for its architecture); RESOURCE_EXHAUSTED OUT_OF_DEVICE_MEMORY; UNAVAILABLE DEVICE_BUSY;
//   INTERNAL DEVICE_FAILED (nothing works on the device any more), DEVICE_ERROR (any other).
// Metadata: cuda_error (its name), cuda_code. REQUIRES: not ok().
absl::Status DeviceError(const gpu::CallStatus& status, const std::string& doing);
// The same for a launch; a job that was refused by the name of a field is INTERNAL DEVICE_ERROR.
absl::Status LaunchError(const gpu::LaunchStatus& status, const std::string& doing);

// A worker's handle, of `what` ("an event") that `maker` makes, could not be opened: says which of the known causes it
// may be. FAILED_PRECONDITION IPC_HANDLE_REFUSED, or as DeviceError where the handle is not to blame.
absl::Status ImportError(const gpu::CallStatus& status, const std::string& what, const std::string& maker);
// INVALID_ARGUMENT INVALID_IPC_HANDLE unless it has the length of one.
absl::Status CheckHandleLength(const std::string& handle, const std::string& maker);

}  // namespace spectrumkv
