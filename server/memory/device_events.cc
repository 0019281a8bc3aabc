#include "server/memory/device_events.h"

#include "server/base/status.h"
#include "server/memory/device_error.h"

namespace spectrumkv {

DeviceEvents::~DeviceEvents() {
  for (gpu::Event event : events_) Close(event);
}

void DeviceEvents::Close(gpu::Event event) {
  device_->Note(device_->runtime().DestroyEvent(device_->ordinal(), event), "closing an event").IgnoreError();
}

absl::Status DeviceEvents::Add(const std::string& handle) {
  if (absl::Status length = CheckHandleLength(handle, "cudaIpcGetEventHandle"); !length.ok()) return length;
  if (absl::Status context = device_->NeedContext(); !context.ok()) return context;
  std::lock_guard<std::mutex> lock(mutex_);
  if (events_.size() >= kMax) {
    return MakeError(absl::StatusCode::kResourceExhausted, "TOO_MANY_EVENTS",
                     "a source may name " + std::to_string(kMax) + " events that have not been reached, this one has");
  }
  gpu::Event event = nullptr;
  const gpu::CallStatus opened = device_->runtime().OpenEvent(
      device_->ordinal(), reinterpret_cast<const uint8_t*>(handle.data()), &event);
  if (!opened.ok()) {
    device_->Note(opened, "opening an event").IgnoreError();
    return ImportError(opened, "an event", "cudaIpcGetEventHandle");
  }
  events_.push_back(event);
  return absl::OkStatus();
}

absl::StatusOr<bool> DeviceEvents::Reached() {
  std::lock_guard<std::mutex> lock(mutex_);
  while (!events_.empty()) {
    const gpu::CallStatus status = device_->runtime().Query(device_->ordinal(), events_.back());
    if (status.error == gpu::kNotReady) return false;
    if (absl::Status noted = device_->Note(status, "asking for an event"); !noted.ok()) return noted;
    Close(events_.back());
    events_.pop_back();
  }
  return true;
}

}  // namespace spectrumkv
