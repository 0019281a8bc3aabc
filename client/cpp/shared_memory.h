// A POSIX shared memory segment that a daemon may map: mode 0660, the group of /dev/shm, every page populated (the
// daemon refuses segments with holes and never touches a worker's memory first).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "spectrumkv/v1/schema.pb.h"

namespace spectrumkv::client {

// Owns the name and one mapping of it. Movable; not thread-safe, the bytes are the caller's to guard.
class SharedMemory {
 public:
  // `name` is as for shm_open(3), "/my-engine-kv"; "": one that is free, and what the dead left is swept first.
  // ALREADY_EXISTS for a name in use, RESOURCE_EXHAUSTED where /dev/shm has no room, INVALID_ARGUMENT for a bad name or
  // size 0. Bytes start as zeros.
  static absl::StatusOr<SharedMemory> Create(const std::string& name, size_t size_bytes);

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  // Unmaps and unlinks. A daemon that has it mapped keeps the memory until it unregisters the pool.
  ~SharedMemory();

  uint8_t* data() const { return data_; }
  size_t size_bytes() const { return size_bytes_; }
  const std::string& name() const { return name_; }
  v1::MemorySegment ToProto() const;

 private:
  SharedMemory(std::string name, uint8_t* data, size_t size_bytes)
      : name_(std::move(name)), data_(data), size_bytes_(size_bytes) {}
  void Release();

  std::string name_;  // empty once moved from
  uint8_t* data_ = nullptr;
  size_t size_bytes_ = 0;
};

// What segments are called whose maker gave no name.
inline constexpr char kStalePrefix[] = "spectrumkv-kv-";

// Removes segments that processes of this user left behind when they were killed; their names. A segment is locked
// (flock) as long as the process that made it, or one that was forked from it since, has it mapped, whatever pid
// namespace it lives in; one that nobody has locked is stale. Files of others, names that do not begin with `prefix`,
// and what cannot be opened are left alone. The prefix must be one that only segments of this library have: other
// programs do not lock their files. Where `remove` is false, only says which they are.
std::vector<std::string> SweepStaleSegments(const std::string& directory = "/dev/shm",
                                            const std::string& prefix = kStalePrefix, bool remove = true);

}  // namespace spectrumkv::client
