// GPUs of this machine, their memory and the streams that work on it, over the seam of kernels/cuda/runtime.h.
//
// A lane is one stream with pinned and device memory of its own. Whoever codes a chunk takes a lane, queues copies and
// kernels on it and waits for them before giving it back, so that nothing of a worker's is touched after that, while
// other lanes copy and compute beside it. There are as many lanes as Options says, and no more.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/runtime.h"

namespace spectrumkv {

class Device;
struct LaneState;

// Device memory of the daemon, or a part of an allocation of another process. Freed or closed when destroyed: nothing
// may be queued that touches it. Must not outlive its device.
class DeviceMemory {
 public:
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  uint8_t* data() const { return data_; }
  uint64_t size() const { return size_; }
  Device* device() const { return device_; }

 private:
  friend class Device;
  DeviceMemory(Device* device, uint8_t* data, uint64_t size, std::string handle)
      : device_(device), data_(data), size_(size), handle_(std::move(handle)) {}
  Device* const device_;
  uint8_t* const data_;
  const uint64_t size_;
  const std::string handle_;  // of the imported allocation; empty: the daemon's own
};

// A lane while somebody has it. Used by one thread. The first error stays: what is queued after it is not queued, and
// Finish tells it.
class DeviceLane {
 public:
  DeviceLane(DeviceLane&& other) noexcept;
  DeviceLane& operator=(DeviceLane&&) = delete;
  // Waits for what is queued and not yet finished.
  ~DeviceLane();

  // Memory of the lane, 256-byte aligned, contents undefined; grows to the most that was asked for. Null where there is
  // no more (Finish says so). REQUIRES: nothing is queued.
  uint8_t* Pinned(uint64_t bytes);
  uint8_t* OnDevice(uint64_t bytes);

  // Queued. Host memory must be pinned.
  void Copy(void* to, const void* from, uint64_t bytes);
  void CopyRows(gpu::Pitched to, gpu::Pitched from, size_t width_bytes, size_t rows);
  void Zero(void* memory, uint64_t bytes);
  void ZeroRows(gpu::Pitched memory, size_t width_bytes, size_t rows);
  void Encode(const gpu::EncodeJob* jobs, uint32_t count, void* workspace, size_t workspace_bytes);
  void Decode(const gpu::DecodeJob* jobs, uint32_t count, void* workspace, size_t workspace_bytes);
  void Scan(const gpu::ScanJob* jobs, uint32_t count);
  void Spread(const gpu::SpreadJob* jobs, uint32_t count);
  void Attend(const gpu::AttendJob& job, void* workspace, size_t workspace_bytes);

  // Host memory that copies may use beside the lane's own (Devices::PinWhenUsed).
  bool IsPinned(const void* memory) const;

  // Waits until all that is queued has run: OK, or what went wrong since the last Finish (DeviceError).
  absl::Status Finish();

 private:
  friend class Device;
  DeviceLane(Device* device, LaneState* state) : device_(device), state_(state) {}
  void Queued(const gpu::CallStatus& status, const char* doing);
  void Launched(const gpu::LaunchStatus& status, const char* doing);
  uint8_t* Grow(bool pinned, uint64_t bytes);

  Device* device_;
  LaneState* state_;
  bool dirty_ = false;
  absl::Status error_;
};

// Host memory of others that is pinned when the first GPU is used: pinning needs a context, which costs GPU memory, and
// most daemons on a machine with GPUs may never be given a pool there. Thread-safe.
class HostPins {
 public:
  // Where not all can be pinned: allow_unpinned uses it all the same, with a copy more for each chunk.
  HostPins(gpu::Runtime* runtime, bool allow_unpinned) : runtime_(runtime), allow_unpinned_(allow_unpinned) {}
  ~HostPins();
  void Add(void* memory, uint64_t bytes);
  // Once, in the context of the device that is the first; what cannot be pinned is logged. FAILED_PRECONDITION
  // HOST_FALLBACK_FORBIDDEN, each time, where that is not allowed.
  absl::Status PinAll(int device);
  bool IsPinned(const void* memory) const;

 private:
  struct Range {
    uint8_t* begin;
    uint64_t bytes;
    bool pinned;
  };
  gpu::Runtime* const runtime_;
  const bool allow_unpinned_;
  mutable std::mutex mutex_;
  bool done_ = false;
  int device_ = 0;  // whose context it was done in
  absl::Status failed_;
  std::vector<Range> ranges_;
};

// Thread-safe. REQUIRES at destruction: all lanes and memory have come back.
class Device {
 public:
  Device(gpu::Runtime* runtime, int ordinal, const gpu::DeviceProperties& properties, uint32_t lanes, HostPins* pins);
  ~Device();

  const std::string& uuid() const { return uuid_; }
  const std::string& name() const { return name_; }
  int ordinal() const { return ordinal_; }
  uint64_t total_bytes() const { return total_bytes_; }
  gpu::Runtime& runtime() const { return *runtime_; }

  // Makes the process's context on the device, which costs memory there, unless that was done: whatever works on the
  // device asks this first. Errors: DeviceError; the next call tries again.
  absl::Status NeedContext();

  // Zeroed. RESOURCE_EXHAUSTED OUT_OF_DEVICE_MEMORY; FAILED_PRECONDITION HOST_FALLBACK_FORBIDDEN.
  absl::StatusOr<std::unique_ptr<DeviceMemory>> Allocate(uint64_t bytes);
  // [offset, offset + bytes) of the allocation behind a handle of kIpcHandleBytes. Each allocation is opened once,
  // however often it is asked for, and closed with the last part of it. INVALID_ARGUMENT INVALID_IPC_HANDLE (its length),
  // SEGMENT_TOO_SHORT; FAILED_PRECONDITION IPC_HANDLE_REFUSED, HOST_FALLBACK_FORBIDDEN.
  absl::StatusOr<std::unique_ptr<DeviceMemory>> Import(const std::string& handle, uint64_t offset, uint64_t bytes);

  // Blocks until a lane is free. Errors: DeviceError, where a lane could not be made and there is none to wait for.
  absl::StatusOr<DeviceLane> TakeLane();

  // OK until an error after which nothing works on the device: then INTERNAL DEVICE_FAILED, for ever.
  absl::Status Health() const;
  // What the daemon has here: its context, its pools' own memory and what lanes have grown to; allocations imported.
  struct Use {
    std::optional<uint64_t> context_bytes = 0;  // none: there is a context, and what it takes is not known
    uint64_t owned_bytes = 0, lane_bytes = 0;
    uint64_t imports = 0;
    uint32_t lanes = 0;
  };
  // Waits for no call of the driver.
  Use use() const;

  // The status of a call, remembered where it means the end of the device.
  absl::Status Note(const gpu::CallStatus& status, const char* doing);

 private:
  friend class DeviceLane;
  friend class DeviceMemory;
  struct Imported {
    uint8_t* memory = nullptr;
    uint64_t bytes = 0;
    uint64_t users = 0;
  };
  void Release(const DeviceMemory& memory);
  void GiveBack(LaneState* lane);
  absl::StatusOr<std::unique_ptr<LaneState>> MakeLane();

  gpu::Runtime* const runtime_;
  const int ordinal_;
  const std::string uuid_, name_;
  const uint64_t total_bytes_;
  const uint32_t lanes_max_;
  HostPins* const pins_;

  std::mutex context_mutex_;  // held while the context is made

  std::mutex import_mutex_;  // opened and closed one at a time, so that none is opened while it is being closed
  std::map<std::string, Imported> imported_;
  std::atomic<uint64_t> imports_{0};  // in imported_, for those who do not wait while one is opened

  mutable std::mutex mutex_;
  std::condition_variable lane_free_;
  std::vector<std::unique_ptr<LaneState>> lanes_;
  uint32_t lanes_coming_ = 0;  // being made
  std::vector<LaneState*> free_lanes_;
  uint64_t owned_bytes_ = 0;
  bool has_context_ = false;
  std::optional<uint64_t> context_bytes_ = 0;
  absl::Status failed_;
};

// The devices there were when the daemon started.
class Devices {
 public:
  struct Options {
    uint32_t lanes_per_device = 4;
    bool allow_unpinned = true;  // of PinWhenUsed
  };
  // Never fails: where there is no device, `why_none` says so. `runtime` is borrowed.
  static std::unique_ptr<Devices> Find(gpu::Runtime* runtime, Options options);
  ~Devices();

  // By uuid as nvidia-smi writes it ("GPU-..." or "MIG-...", case does not matter; without the prefix too). NOT_FOUND UNKNOWN_DEVICE names those
  // there are; where there is none, why_none().
  absl::StatusOr<Device*> Get(const std::string& uuid) const;
  const std::vector<std::unique_ptr<Device>>& all() const { return devices_; }
  // OK where there is a device.
  const absl::Status& why_none() const { return why_none_; }
  gpu::Runtime* runtime() const { return runtime_; }
  // Host memory that chunks are copied to from devices. Until the devices are destroyed, it must stay.
  void PinWhenUsed(void* memory, uint64_t bytes) { pins_.Add(memory, bytes); }

 private:
  Devices(gpu::Runtime* runtime, const Options& options) : runtime_(runtime), pins_(runtime, options.allow_unpinned) {}
  gpu::Runtime* const runtime_;
  HostPins pins_;
  std::vector<std::unique_ptr<Device>> devices_;
  absl::Status why_none_;
};

}  // namespace spectrumkv
