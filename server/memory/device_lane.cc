#include <algorithm>
#include <utility>

#include "server/memory/device.h"
#include "server/memory/device_error.h"
#include "server/memory/lane_state.h"

namespace spectrumkv {
namespace {

// Lanes grow in steps, so that chunks that differ a little share one size.
constexpr uint64_t kLaneStepBytes = 256 << 10;

}  // namespace

DeviceLane::DeviceLane(DeviceLane&& other) noexcept
    : device_(other.device_),
      state_(std::exchange(other.state_, nullptr)),
      dirty_(std::exchange(other.dirty_, false)),
      error_(std::move(other.error_)) {}

DeviceLane::~DeviceLane() {
  if (state_ == nullptr) return;
  if (dirty_) Finish().IgnoreError();
  device_->GiveBack(state_);
}

uint8_t* DeviceLane::Grow(bool pinned, uint64_t bytes) {
  gpu::Runtime& runtime = device_->runtime();
  const int ordinal = device_->ordinal();
  void*& memory = pinned ? state_->pinned : state_->on_device;
  const uint64_t has = pinned ? state_->pinned_bytes : state_->on_device_bytes.load();
  if (bytes <= has) return static_cast<uint8_t*>(memory);
  if (!error_.ok()) return nullptr;
  if (memory != nullptr) {
    Queued(pinned ? runtime.FreePinned(ordinal, memory) : runtime.Free(ordinal, memory), "freeing a lane's memory");
    memory = nullptr;
  }
  const uint64_t wanted = (bytes + kLaneStepBytes - 1) / kLaneStepBytes * kLaneStepBytes;
  const gpu::CallStatus made =
      pinned ? runtime.AllocatePinned(ordinal, wanted, &memory) : runtime.Allocate(ordinal, wanted, &memory);
  if (!made.ok()) memory = nullptr;
  const uint64_t now = made.ok() ? wanted : 0;
  pinned ? void(state_->pinned_bytes = now) : state_->on_device_bytes.store(now);
  Queued(made, pinned ? "allocating pinned memory" : "allocating device memory");
  return static_cast<uint8_t*>(memory);
}

bool DeviceLane::IsPinned(const void* memory) const { return device_->pins_->IsPinned(memory); }

uint8_t* DeviceLane::Pinned(uint64_t bytes) { return Grow(true, bytes); }
uint8_t* DeviceLane::OnDevice(uint64_t bytes) { return Grow(false, bytes); }

void DeviceLane::Queued(const gpu::CallStatus& status, const char* doing) {
  absl::Status noted = device_->Note(status, doing);
  if (error_.ok()) error_ = std::move(noted);
}

void DeviceLane::Launched(const gpu::LaunchStatus& status, const char* doing) {
  dirty_ = true;
  if (status.ok()) return;
  if (status.error != gpu::kSuccess) return Queued({status.error, status.wrong, "when it was launched"}, doing);
  if (error_.ok()) error_ = LaunchError(status, doing);
}

void DeviceLane::Copy(void* to, const void* from, uint64_t bytes) {
  if (!error_.ok() || bytes == 0) return;
  dirty_ = true;
  Queued(device_->runtime().Copy(to, from, bytes, state_->stream), "copying");
}

void DeviceLane::CopyRows(gpu::Pitched to, gpu::Pitched from, size_t width_bytes, size_t rows) {
  if (!error_.ok() || rows == 0) return;
  dirty_ = true;
  Queued(device_->runtime().CopyRows(to, from, width_bytes, rows, state_->stream), "copying rows");
}

void DeviceLane::Zero(void* memory, uint64_t bytes) {
  if (!error_.ok() || bytes == 0) return;
  dirty_ = true;
  Queued(device_->runtime().Zero(memory, bytes, state_->stream), "zeroing device memory");
}

void DeviceLane::ZeroRows(gpu::Pitched memory, size_t width_bytes, size_t rows) {
  if (!error_.ok() || rows == 0) return;
  dirty_ = true;
  Queued(device_->runtime().ZeroRows(memory, width_bytes, rows, state_->stream), "zeroing rows");
}

void DeviceLane::Encode(const gpu::EncodeJob* jobs, uint32_t count, void* workspace, size_t workspace_bytes) {
  if (!error_.ok()) return;
  Launched(device_->runtime().EncodeBatch(jobs, count, workspace, workspace_bytes, state_->stream), "encoding");
}
void DeviceLane::Decode(const gpu::DecodeJob* jobs, uint32_t count, void* workspace, size_t workspace_bytes) {
  if (!error_.ok()) return;
  Launched(device_->runtime().DecodeBatch(jobs, count, workspace, workspace_bytes, state_->stream), "decoding");
}
void DeviceLane::Scan(const gpu::ScanJob* jobs, uint32_t count) {
  if (error_.ok()) Launched(device_->runtime().ScanBatch(jobs, count, state_->stream), "scanning");
}

void DeviceLane::Spread(const gpu::SpreadJob* jobs, uint32_t count) {
  if (error_.ok()) Launched(device_->runtime().SpreadBatch(jobs, count, state_->stream), "sampling");
}

void DeviceLane::Attend(const gpu::AttendJob& job, void* workspace, size_t workspace_bytes) {
  if (error_.ok()) Launched(device_->runtime().Attend(job, workspace, workspace_bytes, state_->stream), "attending");
}

absl::Status DeviceLane::Finish() {
  // Also after an error: what was queued before it still runs.
  if (std::exchange(dirty_, false)) Queued(device_->runtime().Synchronize(state_->stream), "waiting for the device");
  return std::exchange(error_, absl::OkStatus());
}

}  // namespace spectrumkv
