// Events of a worker that stand behind its writes to GPU memory: it is read when all have been reached. They are asked,
// not waited for, so that a worker whose event never comes holds no stream and no thread of the daemon.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/memory/device.h"

namespace spectrumkv {

// Thread-safe. Closes its events when they have been reached, or when destroyed.
class DeviceEvents {
 public:
  // Most that may be awaited at a time.
  static constexpr size_t kMax = 4096;

  explicit DeviceEvents(Device* device) : device_(device) {}
  ~DeviceEvents();
  DeviceEvents(const DeviceEvents&) = delete;
  DeviceEvents& operator=(const DeviceEvents&) = delete;

  // As cudaIpcGetEventHandle gave it. INVALID_ARGUMENT INVALID_IPC_HANDLE (its length); FAILED_PRECONDITION
  // IPC_HANDLE_REFUSED; RESOURCE_EXHAUSTED TOO_MANY_EVENTS.
  absl::Status Add(const std::string& handle);

  // Whether all have been reached. Errors: those of the device.
  absl::StatusOr<bool> Reached();

 private:
  Device* const device_;
  void Close(gpu::Event event);
  std::mutex mutex_;
  std::vector<gpu::Event> events_;
};

}  // namespace spectrumkv
