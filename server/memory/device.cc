#include "server/memory/device.h"

#include <algorithm>
#include <utility>

#include "server/base/log.h"
#include "server/base/status.h"
#include "server/memory/device_error.h"
#include "server/memory/lane_state.h"

namespace spectrumkv {
namespace {

std::string UuidText(const uint8_t (&uuid)[16]) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += kHex[uuid[i] >> 4];
    text += kHex[uuid[i] & 15];
  }
  return text;
}

absl::Status TooShort(uint64_t offset, uint64_t bytes, uint64_t allocation_bytes) {
  return MakeError(absl::StatusCode::kInvalidArgument, "SEGMENT_TOO_SHORT",
                   "the GPU allocation has " + std::to_string(allocation_bytes) + " bytes, the segment needs " +
                       std::to_string(bytes) + " from offset " + std::to_string(offset),
                   {{"size_bytes", std::to_string(allocation_bytes)}});
}

}  // namespace

DeviceMemory::~DeviceMemory() { device_->Release(*this); }

HostPins::~HostPins() {
  for (const Range& range : ranges_) {
    if (range.pinned) runtime_->Unpin(device_, range.begin);
  }
}

void HostPins::Add(void* memory, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  ranges_.push_back({static_cast<uint8_t*>(memory), bytes, false});
}

absl::Status HostPins::PinAll(int device) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (std::exchange(done_, true)) return failed_;
  device_ = device;
  for (Range& range : ranges_) {
    const gpu::CallStatus status = runtime_->Pin(device, range.begin, range.bytes);
    range.pinned = status.ok();
    if (status.ok()) continue;
    const std::string why(DeviceError(status, "pinning staging memory").message());
    SPECTRUMKV_LOG(kWarning, "memory", "staging memory cannot be pinned: chunks of GPU pools are copied once more",
                   {"allowed", allow_unpinned_}, {"bytes", range.bytes}, {"error", why});
    if (allow_unpinned_) continue;
    failed_ = MakeError(absl::StatusCode::kFailedPrecondition, "HOST_FALLBACK_FORBIDDEN",
                        why + "; chunks would be copied once more, which memory.allow_host_fallback forbids");
  }
  return failed_;
}

bool HostPins::IsPinned(const void* memory) const {
  const auto* at = static_cast<const uint8_t*>(memory);
  std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(ranges_.begin(), ranges_.end(), [at](const Range& range) {
    return range.pinned && at >= range.begin && at < range.begin + range.bytes;
  });
}

Device::Device(gpu::Runtime* runtime, int ordinal, const gpu::DeviceProperties& properties, uint32_t lanes,
               HostPins* pins)
    : runtime_(runtime),
      ordinal_(ordinal),
      uuid_(UuidText(properties.uuid)),
      name_(properties.name),
      total_bytes_(properties.total_bytes),
      lanes_max_(std::max(1u, lanes)),
      pins_(pins) {}

Device::~Device() {
  for (const auto& lane : lanes_) {
    if (lane->pinned != nullptr) Note(runtime_->FreePinned(ordinal_, lane->pinned), "freeing pinned memory").IgnoreError();
    if (lane->on_device != nullptr) Note(runtime_->Free(ordinal_, lane->on_device), "freeing device memory").IgnoreError();
    Note(runtime_->DestroyStream(lane->stream), "destroying a stream").IgnoreError();
  }
}

absl::Status Device::Note(const gpu::CallStatus& status, const char* doing) {
  if (status.ok()) return absl::OkStatus();
  absl::Status error = DeviceError(status, doing);
  if (!gpu::IsSticky(status.error)) return error;
  std::lock_guard<std::mutex> lock(mutex_);
  if (failed_.ok()) {
    failed_ = error;
    lane_free_.notify_all();  // there is nothing to wait for any more
    SPECTRUMKV_LOG(kError, "memory", "a GPU has failed: nothing works on it until the daemon is restarted",
                   {"device", uuid_}, {"error", std::string(error.message())});
  }
  return error;
}

absl::Status Device::Health() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failed_;
}

absl::Status Device::NeedContext() {
  if (absl::Status health = Health(); !health.ok()) return health;
  std::lock_guard<std::mutex> making(context_mutex_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (has_context_) return absl::OkStatus();
  }
  gpu::ContextCost cost;
  if (absl::Status made = Note(runtime_->MakeContext(ordinal_, &cost), "making a context"); !made.ok()) return made;
  SPECTRUMKV_LOG(kInfo, "memory", "a GPU is used from now on",
                 {"device", uuid_}, {"context_bytes", cost.known ? std::to_string(cost.bytes) : "unknown"});
  std::lock_guard<std::mutex> lock(mutex_);
  has_context_ = true;
  context_bytes_ = cost.known ? std::optional<uint64_t>(cost.bytes) : std::nullopt;
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<DeviceMemory>> Device::Allocate(uint64_t bytes) {
  if (absl::Status context = NeedContext(); !context.ok()) return context;
  void* memory = nullptr;
  if (absl::Status made = Note(runtime_->Allocate(ordinal_, bytes, &memory), "allocating device memory"); !made.ok()) {
    return made;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    owned_bytes_ += bytes;
  }
  std::unique_ptr<DeviceMemory> owned(new DeviceMemory(this, static_cast<uint8_t*>(memory), bytes, ""));
  absl::StatusOr<DeviceLane> lane = TakeLane();
  if (!lane.ok()) return lane.status();
  lane->Zero(memory, bytes);
  if (absl::Status zeroed = lane->Finish(); !zeroed.ok()) return zeroed;
  return owned;
}

absl::StatusOr<std::unique_ptr<DeviceMemory>> Device::Import(const std::string& handle, uint64_t offset,
                                                             uint64_t bytes) {
  if (absl::Status length = CheckHandleLength(handle, "cudaIpcGetMemHandle"); !length.ok()) return length;
  if (absl::Status context = NeedContext(); !context.ok()) return context;
  // A pool whose chunks could not be moved as they must be is refused now, not with its first transfer.
  if (absl::Status pinned = pins_->PinAll(ordinal_); !pinned.ok()) return pinned;
  std::lock_guard<std::mutex> lock(import_mutex_);
  const bool known = imported_.count(handle) != 0;
  Imported& allocation = imported_[handle];
  if (!known) {
    void* memory = nullptr;
    const gpu::CallStatus opened = runtime_->OpenMemory(
        ordinal_, reinterpret_cast<const uint8_t*>(handle.data()), &memory, &allocation.bytes);
    if (!opened.ok()) {
      imported_.erase(handle);
      Note(opened, "opening a handle of GPU memory").IgnoreError();
      return ImportError(opened, "GPU memory", "cudaIpcGetMemHandle");
    }
    allocation.memory = static_cast<uint8_t*>(memory);
  }
  const uint64_t length = allocation.bytes;
  if (offset > length || bytes > length - offset) {
    if (allocation.users == 0) {
      Note(runtime_->CloseMemory(ordinal_, allocation.memory), "closing a handle of GPU memory").IgnoreError();
      imported_.erase(handle);
    }
    return TooShort(offset, bytes, length);
  }
  ++allocation.users;
  imports_ = imported_.size();
  return std::unique_ptr<DeviceMemory>(new DeviceMemory(this, allocation.memory + offset, bytes, handle));
}

void Device::Release(const DeviceMemory& memory) {
  if (memory.handle_.empty()) {
    Note(runtime_->Free(ordinal_, memory.data_), "freeing device memory").IgnoreError();
    std::lock_guard<std::mutex> lock(mutex_);
    owned_bytes_ -= memory.size_;
    return;
  }
  std::lock_guard<std::mutex> lock(import_mutex_);
  const auto found = imported_.find(memory.handle_);
  if (found == imported_.end() || --found->second.users != 0) return;
  Note(runtime_->CloseMemory(ordinal_, found->second.memory), "closing a handle of GPU memory").IgnoreError();
  imported_.erase(found);
  imports_ = imported_.size();
}

absl::StatusOr<std::unique_ptr<LaneState>> Device::MakeLane() {
  if (absl::Status context = NeedContext(); !context.ok()) return context;
  auto lane = std::make_unique<LaneState>();
  if (absl::Status made = Note(runtime_->CreateStream(ordinal_, &lane->stream), "creating a stream"); !made.ok()) {
    return made;
  }
  if (absl::Status pinned = pins_->PinAll(ordinal_); !pinned.ok()) {
    Note(runtime_->DestroyStream(lane->stream), "destroying a stream").IgnoreError();
    return pinned;
  }
  return lane;
}

absl::StatusOr<DeviceLane> Device::TakeLane() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (bool may_make = true;;) {
    if (!failed_.ok()) return failed_;
    if (!free_lanes_.empty()) {
      LaneState* lane = free_lanes_.back();
      free_lanes_.pop_back();
      return DeviceLane(this, lane);
    }
    if (!may_make || lanes_.size() + lanes_coming_ >= lanes_max_) {
      lane_free_.wait(lock);
      continue;
    }
    ++lanes_coming_;
    lock.unlock();
    absl::StatusOr<std::unique_ptr<LaneState>> made = MakeLane();
    lock.lock();
    --lanes_coming_;
    if (made.ok()) {
      lanes_.push_back(*std::move(made));
      return DeviceLane(this, lanes_.back().get());
    }
    lane_free_.notify_one();  // may try in our place
    // Where others have lanes, one comes back.
    if (lanes_.empty()) return made.status();
    may_make = false;
  }
}

void Device::GiveBack(LaneState* lane) {
  std::lock_guard<std::mutex> lock(mutex_);
  free_lanes_.push_back(lane);
  lane_free_.notify_one();
}

Device::Use Device::use() const {
  Use use;
  use.imports = imports_.load();
  std::lock_guard<std::mutex> lock(mutex_);
  use.context_bytes = context_bytes_;
  use.owned_bytes = owned_bytes_;
  use.lanes = static_cast<uint32_t>(lanes_.size());
  for (const auto& lane : lanes_) use.lane_bytes += lane->on_device_bytes.load();
  return use;
}

std::unique_ptr<Devices> Devices::Find(gpu::Runtime* runtime, Options options) {
  std::unique_ptr<Devices> devices(new Devices(runtime, options));
  int count = 0;
  const gpu::CallStatus counted = runtime->CountDevices(&count);
  if (!counted.ok()) devices->why_none_ = DeviceError(counted, "no GPU");
  for (int i = 0; counted.ok() && i < count; ++i) {
    gpu::DeviceProperties properties;
    if (const gpu::CallStatus told = runtime->Describe(i, &properties); !told.ok()) {
      devices->why_none_ = DeviceError(told, "asking for the properties of GPU " + std::to_string(i));
      SPECTRUMKV_LOG(kWarning, "memory", "a GPU cannot be used",
                     {"error", std::string(devices->why_none_.message())});
      continue;
    }
    devices->devices_.push_back(std::make_unique<Device>(runtime, i, properties, options.lanes_per_device, &devices->pins_));
  }
  if (!devices->devices_.empty()) {
    devices->why_none_ = absl::OkStatus();
  } else if (devices->why_none_.ok()) {
    devices->why_none_ = MakeError(absl::StatusCode::kFailedPrecondition, "NO_DEVICE", "no GPU: the driver has none");
  }
  return devices;
}

Devices::~Devices() = default;

absl::StatusOr<Device*> Devices::Get(const std::string& uuid) const {
  if (!why_none_.ok()) return why_none_;
  // The runtime names a MIG device's uuid without saying that it is one.
  const auto bare = [](const std::string& text) {
    std::string rest = text;
    std::transform(rest.begin(), rest.end(), rest.begin(),
                   [](char c) { return static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c); });
    return rest.rfind("gpu-", 0) == 0 || rest.rfind("mig-", 0) == 0 ? rest.substr(4) : rest;
  };
  std::string known;
  for (const auto& device : devices_) {
    if (bare(device->uuid()) == bare(uuid)) return device.get();
    known += (known.empty() ? "" : ", ") + device->uuid();
  }
  const bool mig = uuid.rfind("MIG-", 0) == 0;
  return MakeError(absl::StatusCode::kNotFound, "UNKNOWN_DEVICE",
                   "this daemon sees no GPU \"" + uuid + "\", only " + known +
                       (mig ? ": memory is shared inside one MIG instance only, so the daemon must be given the worker's"
                            : ": CUDA_VISIBLE_DEVICES and the container decide which it sees"),
                   {{"device_uuid", uuid}, {"known", known}});
}

}  // namespace spectrumkv
