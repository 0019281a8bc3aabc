#include "server/memory/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "server/base/status.h"
#include "server/memory/available.h"
#include "server/memory/open_beneath.h"

namespace spectrumkv {
namespace {

constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;
constexpr uint64_t kMaxBytes = uint64_t{1} << 47;  // the address space of a process
constexpr uint64_t kStatBlockBytes = 512;  // of st_blocks, whatever the file system
constexpr size_t kMaxNameBytes = 255;
constexpr char kShmDir[] = "/dev/shm";  // where shm_open(3) of Linux has its objects

absl::Status Refuse(absl::StatusCode code, const std::string& reason, const std::string& segment,
                    const std::string& what, Metadata metadata = {}) {
  metadata.emplace("segment", segment);
  return MakeError(code, reason, "segment \"" + segment + "\" " + what, metadata);
}

absl::Status OpenError(int error, const std::string& segment) {
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return Refuse(absl::StatusCode::kNotFound, "SEGMENT_NOT_FOUND", segment, "does not exist");
    case ELOOP:
      return Refuse(absl::StatusCode::kInvalidArgument, "SEGMENT_OUTSIDE_DIR", segment, "is reached by a symlink");
    case EXDEV:
    case EINVAL:
    case ENAMETOOLONG:
      return Refuse(absl::StatusCode::kInvalidArgument, "SEGMENT_OUTSIDE_DIR", segment,
                    "is not a relative path inside its directory");
    case EISDIR:
    case ENXIO:
    case ENODEV:
      return Refuse(absl::StatusCode::kInvalidArgument, "SEGMENT_NOT_REGULAR", segment, "is not a regular file");
    case EACCES:
    case EPERM:
    case EROFS:
      return Refuse(absl::StatusCode::kPermissionDenied, "SEGMENT_NO_ACCESS", segment,
                    "cannot be opened for reading and writing: " + std::generic_category().message(error));
    default:
      return Refuse(absl::StatusCode::kResourceExhausted, "SEGMENT_MAP_FAILED", segment,
                    "cannot be opened: " + std::generic_category().message(error));
  }
}

absl::Status CheckFile(const struct stat& info, uint64_t size, const std::string& segment,
                       const SegmentOwners& owners) {
  if (!S_ISREG(info.st_mode)) {
    return Refuse(absl::StatusCode::kInvalidArgument, "SEGMENT_NOT_REGULAR", segment, "is not a regular file");
  }
  if (std::find(owners.begin(), owners.end(), info.st_uid) == owners.end()) {
    std::string allowed;
    for (const uint32_t owner : owners) allowed += (allowed.empty() ? "" : ", ") + std::to_string(owner);
    return Refuse(absl::StatusCode::kPermissionDenied, "SEGMENT_NOT_OWNED", segment,
                  "belongs to user " + std::to_string(info.st_uid) + "; this caller may register those of " + allowed +
                      " (its own, and memory.allowed_owners)",
                  {{"value", std::to_string(info.st_uid)}, {"limit", allowed}});
  }
  const uint64_t file_bytes = static_cast<uint64_t>(info.st_size);
  if (file_bytes < size) {
    return Refuse(absl::StatusCode::kInvalidArgument, "SEGMENT_TOO_SHORT", segment,
                  "has " + std::to_string(file_bytes) + " bytes, " + std::to_string(size) + " are registered",
                  {{"actual_bytes", std::to_string(file_bytes)}, {"size_bytes", std::to_string(size)}});
  }
  const uint64_t stored_bytes = static_cast<uint64_t>(info.st_blocks) * kStatBlockBytes;
  if (stored_bytes < file_bytes) {
    return Refuse(absl::StatusCode::kInvalidArgument, "SEGMENT_SPARSE", segment,
                  "has holes (" + std::to_string(stored_bytes) + " of " + std::to_string(file_bytes) +
                      " bytes are there): its owner must write every page before it registers",
                  {{"stored_bytes", std::to_string(stored_bytes)}, {"size_bytes", std::to_string(size)}});
  }
  return absl::OkStatus();
}

bool GoodShmName(const std::string& name) {
  return name.size() >= 2 && name.size() <= kMaxNameBytes && name[0] == '/' && name.find('/', 1) == std::string::npos &&
         name.find('\0') == std::string::npos && name != "/." && name != "/..";
}

absl::Status CheckSize(uint64_t size, const std::string& segment) {
  if (size >= 1 && size <= kMaxBytes) return absl::OkStatus();
  return Refuse(absl::StatusCode::kInvalidArgument, "INVALID_SCHEMA", segment,
                "has size " + std::to_string(size) + ", allowed are 1 to " + std::to_string(kMaxBytes));
}

}  // namespace

Mapping::Mapping(void* address, size_t mapped_bytes, uint8_t* data, uint64_t size, int fd)
    : address_(address), mapped_bytes_(mapped_bytes), data_(data), size_(size), fd_(fd) {
  if (fd >= 0) guard_ = std::make_unique<SigbusGuard>(address, mapped_bytes);
}

Mapping::~Mapping() {
  // The guard goes first: once unmapped, the range may be given to another mapping.
  guard_.reset();
  munmap(address_, mapped_bytes_);
  if (fd_ >= 0) close(fd_);
}

bool Mapping::StillWhole() {
  if (guard_ == nullptr) return true;
  if (guard_->failed()) return false;
  // Not all that a new segment is asked for: its owner may have made the file longer, and need not fill what we do not
  // map.
  struct stat info = {};
  const bool whole = fstat(fd_, &info) == 0 && static_cast<uint64_t>(info.st_size) >= size_ &&
                     static_cast<uint64_t>(info.st_blocks) * kStatBlockBytes >= size_;
  if (!whole) guard_->Fail();
  return whole;
}

// Consumes `fd`.
absl::StatusOr<std::unique_ptr<Mapping>> MapSegment(int fd, uint64_t size, const std::string& segment,
                                                    const SegmentOwners& owners) {
  struct stat info = {};
  absl::Status status = fstat(fd, &info) == 0 ? CheckFile(info, size, segment, owners) : OpenError(errno, segment);
  if (!status.ok()) {
    close(fd);
    return status;
  }
  void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) {
    const int error = errno;
    close(fd);
    return Refuse(absl::StatusCode::kResourceExhausted, "SEGMENT_MAP_FAILED", segment,
                  "cannot be mapped: " + std::generic_category().message(error));
  }
  auto mapping = std::make_unique<Mapping>(address, size, static_cast<uint8_t*>(address), size, fd);
  if (!mapping->guard_->armed()) {
    return Refuse(absl::StatusCode::kResourceExhausted, "SEGMENT_MAP_FAILED", segment,
                  "is one more than the " + std::to_string(SigbusGuard::kMaxRanges) + " a daemon can guard");
  }
  mapping->device = info.st_dev;
  mapping->inode = info.st_ino;
  return mapping;
}

absl::StatusOr<std::unique_ptr<Mapping>> OpenShmSegment(const std::string& name, const std::string& prefix,
                                                        uint64_t size, const SegmentOwners& owners) {
  if (absl::Status status = CheckSize(size, name); !status.ok()) return status;
  if (!GoodShmName(name) || name.compare(0, prefix.size(), prefix) != 0) {
    return Refuse(absl::StatusCode::kInvalidArgument, "SEGMENT_OUTSIDE_DIR", name,
                  "is not a name \"/x\" that begins with \"" + prefix + "\"", {{"prefix", prefix}});
  }
  // Not shm_open: what workers name has one opener, with one rule.
  const int fd = OpenBeneath(kShmDir, name.substr(1));
  if (fd < 0) return OpenError(-fd, name);
  return MapSegment(fd, size, name, owners);
}

absl::StatusOr<std::unique_ptr<Mapping>> OpenFileSegment(const std::string& shared_dir, const std::string& path,
                                                         uint64_t size, const SegmentOwners& owners) {
  if (absl::Status status = CheckSize(size, path); !status.ok()) return status;
  if (shared_dir.empty()) {
    return Refuse(absl::StatusCode::kInvalidArgument, "SEGMENT_OUTSIDE_DIR", path,
                  "is a file, and memory.shared_dir is not set");
  }
  const int fd = OpenBeneath(shared_dir, path);
  if (fd < 0) return OpenError(-fd, path);
  return MapSegment(fd, size, path, owners);
}

absl::StatusOr<std::unique_ptr<Mapping>> AllocateOwned(uint64_t size) {
  const std::string segment = "daemon owned";
  absl::Status status = CheckSize(size, segment);
  if (status.ok()) status = CheckMemory("a segment owned by the daemon needs", size);
  if (!status.ok()) return status;
  const auto out_of_memory = [&](const char* what) {
    return Refuse(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY", segment,
                  std::string(what) + " " + std::to_string(size) + " bytes: " + std::generic_category().message(errno));
  };
  const uint64_t whole = (size + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  const uint64_t mapped = whole + kHugePageBytes;
  void* address = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) return out_of_memory("cannot map");
  const uintptr_t begin = reinterpret_cast<uintptr_t>(address);
  uint8_t* data = reinterpret_cast<uint8_t*>((begin + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes);
  auto mapping = std::make_unique<Mapping>(address, mapped, data, size, /*fd=*/-1);
  // Whole ones: many small segments would take more than their quotas count. Where the kernel has none, small are as right.
  if (const uint64_t huge = size / kHugePageBytes * kHugePageBytes; huge > 0) madvise(data, huge, MADV_HUGEPAGE);
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
  if (madvise(data, size, MADV_POPULATE_WRITE) != 0) {
    if (errno != EINVAL) return out_of_memory("cannot populate");
    std::memset(data, 0, size);  // kernels before 5.14
  }
  return mapping;
}

}  // namespace spectrumkv
