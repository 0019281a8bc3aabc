#include "client/cpp/shared_memory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <random>
#include <system_error>
#include <utility>

#include "client/cpp/status.h"

namespace spectrumkv::client {
namespace {

absl::Status Failure(int error, const std::string& what) {
  const std::string message = what + ": " + std::generic_category().message(error);
  switch (error) {
    case EEXIST: return MakeError(absl::StatusCode::kAlreadyExists, "SEGMENT_EXISTS", message);
    case ENOSPC:
    case ENOMEM:
    case EMFILE:
    case ENFILE: return MakeError(absl::StatusCode::kResourceExhausted, "SEGMENT_NO_SPACE", message);
    case EACCES:
    case EPERM: return MakeError(absl::StatusCode::kPermissionDenied, "SEGMENT_PERMISSION", message);
    default: return MakeError(absl::StatusCode::kInvalidArgument, "SEGMENT_FAILED", message);
  }
}

// 0 or an errno. Mode and group by hand: the umask would narrow the first, and only the directory tells the second.
int Prepare(int fd, size_t size_bytes) {
  struct stat directory;
  if (::stat("/dev/shm", &directory) == 0 && ::fchown(fd, static_cast<uid_t>(-1), directory.st_gid) != 0 &&
      errno != EPERM) {
    return errno;  // EPERM: not a member of that group; the daemon then needs this user's own group
  }
  if (::fchmod(fd, 0660) != 0) return errno;
  // Allocates every page, where writing to a mapping beyond the free memory would be a SIGBUS.
  return ::posix_fallocate(fd, 0, static_cast<off_t>(size_bytes));
}

std::string FreeName() {
  std::random_device device;
  return "/" + std::string(kStalePrefix) + std::to_string(::getpid()) + "-" + std::to_string(device()) +
         std::to_string(device());
}

// A new segment, locked as long as it is open or mapped; < 0 and errno where there is none.
int OpenLocked(const std::string& name, std::string* chosen) {
  constexpr int kAttempts = 100;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    *chosen = name.empty() ? FreeName() : name;
    const int fd = ::shm_open(chosen->c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0) return fd;
    // A sweep that saw the file before it was locked holds it, to remove it, or has removed it.
    struct stat file;
    if (::flock(fd, LOCK_EX | LOCK_NB) == 0 && ::fstat(fd, &file) == 0 && file.st_nlink > 0) return fd;
    ::close(fd);
  }
  errno = EAGAIN;
  return -1;
}

bool IsStale(const std::string& path, bool remove) {
  struct stat seen, file;
  if (::lstat(path.c_str(), &seen) != 0 || !S_ISREG(seen.st_mode)) return false;
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) return false;
  // While it is locked here nobody can take it for a new one of the same name.
  const bool stale = ::fstat(fd, &file) == 0 && S_ISREG(file.st_mode) && file.st_uid == ::geteuid() &&
                     ::flock(fd, LOCK_EX | LOCK_NB) == 0 && ::lstat(path.c_str(), &seen) == 0 &&
                     seen.st_ino == file.st_ino && (!remove || ::unlink(path.c_str()) == 0);
  ::close(fd);
  return stale;
}

}  // namespace

std::vector<std::string> SweepStaleSegments(const std::string& directory, const std::string& prefix, bool remove) {
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename();
    if (name.compare(0, prefix.size(), prefix) == 0 && IsStale(directory + "/" + name, remove)) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

absl::StatusOr<SharedMemory> SharedMemory::Create(const std::string& name, size_t size_bytes) {
  const bool named = !name.empty();
  if ((named && (name.size() < 2 || name[0] != '/' || name.find('/', 1) != std::string::npos)) || size_bytes == 0) {
    return MakeError(absl::StatusCode::kInvalidArgument, "SEGMENT_FAILED",
                     "a segment needs a name such as /engine-kv and at least one byte; got \"" + name + "\", " +
                         std::to_string(size_bytes));
  }
  if (!named) SweepStaleSegments();
  std::string chosen;
  const int fd = OpenLocked(name, &chosen);
  if (fd < 0) return Failure(errno, "shm_open(" + chosen + ")");
  int error = Prepare(fd, size_bytes);
  void* data = MAP_FAILED;
  if (error == 0) {
    data = ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (data == MAP_FAILED) error = errno;
  }
  ::close(fd);
  if (error != 0) {
    ::shm_unlink(chosen.c_str());
    return Failure(error, "segment " + chosen + " of " + std::to_string(size_bytes) + " bytes");
  }
  return SharedMemory(chosen, static_cast<uint8_t*>(data), size_bytes);
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : name_(std::exchange(other.name_, {})),
      data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  if (this != &other) {
    Release();
    name_ = std::exchange(other.name_, {});
    data_ = std::exchange(other.data_, nullptr);
    size_bytes_ = std::exchange(other.size_bytes_, 0);
  }
  return *this;
}

SharedMemory::~SharedMemory() { Release(); }

void SharedMemory::Release() {
  if (data_ != nullptr) ::munmap(data_, size_bytes_);
  if (!name_.empty()) ::shm_unlink(name_.c_str());
  data_ = nullptr;
  name_.clear();
}

v1::MemorySegment SharedMemory::ToProto() const {
  v1::MemorySegment segment;
  segment.mutable_posix_shm()->set_name(name_);
  segment.mutable_posix_shm()->set_size_bytes(size_bytes_);
  return segment;
}

}  // namespace spectrumkv::client
