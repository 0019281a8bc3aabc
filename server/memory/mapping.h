// Host memory mapped into the daemon: a worker's segment, or the daemon's own. RAII.
//
// A worker's segment is checked and mapped, never written or touched here: where its pages lie is the worker's choice,
// and a hole would be filled by whoever touches it first. It is guarded against later truncation (sigbus_guard.h); a file
// that was cut and grown again reads as zeros without a fault, so that StillWhole asks the file. It stays open for that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/memory/sigbus_guard.h"

namespace spectrumkv {

// The users whose files may be mapped.
using SegmentOwners = std::vector<uint32_t>;

// Unmapped when destroyed. The memory itself may be used by any thread; failed() and StillWhole() are thread-safe.
class Mapping {
 public:
  // Consumes `fd`, the segment's file; -1: owned memory, which needs no guard.
  Mapping(void* address, size_t mapped_bytes, uint8_t* data, uint64_t size, int fd);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  uint8_t* data() const { return data_; }
  uint64_t size() const { return size_; }
  // True for ever once the owner was caught having truncated the segment: what is read since may be zeros.
  bool failed() const { return guard_ != nullptr && guard_->failed(); }
  // Looks at the file: false, as failed() is from then on, where it is shorter than what is mapped or has holes.
  bool StillWhole();

  // Which object it is: equal for two mappings of one segment, whatever their names. 0, 0 for owned memory.
  uint64_t device = 0, inode = 0;

 private:
  friend absl::StatusOr<std::unique_ptr<Mapping>> MapSegment(int, uint64_t, const std::string&, const SegmentOwners&);
  void* const address_;
  const size_t mapped_bytes_;
  uint8_t* const data_;
  const uint64_t size_;
  const int fd_;
  std::unique_ptr<SigbusGuard> guard_;
};

// POSIX shared memory `name` ("/x", no other slash), which must begin with `prefix`: the regular file /dev/shm/x, reached
// without any symlink below /dev/shm. Maps its first `size` bytes.
// Whose it is, is asked of the open file, before anything else about it is told.
// Errors of both: NOT_FOUND SEGMENT_NOT_FOUND; INVALID_ARGUMENT SEGMENT_OUTSIDE_DIR (bad name, symlink, not under the
// prefix or directory), SEGMENT_NOT_REGULAR, SEGMENT_TOO_SHORT, SEGMENT_SPARSE; PERMISSION_DENIED SEGMENT_NO_ACCESS,
// SEGMENT_NOT_OWNED; RESOURCE_EXHAUSTED SEGMENT_MAP_FAILED.
absl::StatusOr<std::unique_ptr<Mapping>> OpenShmSegment(const std::string& name, const std::string& prefix,
                                                        uint64_t size, const SegmentOwners& owners);

// The regular file `path`, relative to `shared_dir`, reached without any symlink below shared_dir.
absl::StatusOr<std::unique_ptr<Mapping>> OpenFileSegment(const std::string& shared_dir, const std::string& path,
                                                         uint64_t size, const SegmentOwners& owners);

// Zeroed, populated memory of the daemon, 2 MiB aligned, huge pages advised. RESOURCE_EXHAUSTED OUT_OF_MEMORY.
absl::StatusOr<std::unique_ptr<Mapping>> AllocateOwned(uint64_t size);

}  // namespace spectrumkv
