// Events of a worker, on which whoever reads its GPU memory waits: what the worker's streams had queued when it recorded
// them was the writing of what is read.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/memory/device.h"

namespace spectrumkv {

// Thread-safe. Closes its events when destroyed: no lane may have a wait for them queued.
class DeviceEvents {
 public:
  // Most that one source may have: one for each of its Advances.
  static constexpr size_t kMax = 4096;

  explicit DeviceEvents(Device* device) : device_(device) {}
  ~DeviceEvents();
  DeviceEvents(const DeviceEvents&) = delete;
  DeviceEvents& operator=(const DeviceEvents&) = delete;

  // As cudaIpcGetEventHandle gave it. INVALID_ARGUMENT INVALID_IPC_HANDLE (its length); FAILED_PRECONDITION
  // IPC_HANDLE_REFUSED; RESOURCE_EXHAUSTED TOO_MANY_EVENTS.
  absl::Status Add(const std::string& handle);

  // What is queued on the lane from now on runs after all events so far. The host waits for nothing.
  void QueueWaits(DeviceLane* lane) const;

 private:
  Device* const device_;
  mutable std::mutex mutex_;
  std::vector<gpu::Event> events_;
};

}  // namespace spectrumkv
