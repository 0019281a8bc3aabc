#include "server/lifecycle/socket_guard.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "server/base/status.h"

namespace spectrumkv {
namespace {

absl::Status SystemError(const std::string& what, const std::string& path, const std::string& why) {
  return MakeError(absl::StatusCode::kUnavailable, "SOCKET_PATH", what + " " + path + ": " + why, {{"path", path}});
}

absl::Status MakeDirectory(const std::string& path) {
  const std::filesystem::path parent = std::filesystem::path(path).parent_path();
  std::error_code error;
  if (parent.empty() || std::filesystem::is_directory(parent, error)) return absl::OkStatus();
  std::filesystem::create_directories(parent.parent_path(), error);
  if (mkdir(parent.c_str(), 0750) != 0 && errno != EEXIST) {
    return SystemError("cannot create", parent.string(), std::generic_category().message(errno));
  }
  return absl::OkStatus();
}

absl::Status RemoveStale(const std::string& path) {
  struct stat info {};
  if (lstat(path.c_str(), &info) != 0) return absl::OkStatus();
  if (!S_ISSOCK(info.st_mode)) {
    return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_SOCKET_PATH",
                     path + " exists and is no socket; it is left alone", {{"path", path}});
  }
  if (unlink(path.c_str()) != 0) return SystemError("cannot remove", path, std::generic_category().message(errno));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<SocketGuard>> SocketGuard::Take(const std::string& path) {
  if (path.empty() || path.size() >= sizeof(sockaddr_un::sun_path)) {
    return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_SOCKET_PATH",
                     path + " has " + std::to_string(path.size()) + " characters, a socket takes 1 to " +
                         std::to_string(sizeof(sockaddr_un::sun_path) - 1),
                     {{"path", path}});
  }
  const absl::Status directory = MakeDirectory(path);
  if (!directory.ok()) return directory;
  const std::string lock_path = path + ".lock";
  const int lock = open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (lock < 0) return SystemError("cannot open", lock_path, std::generic_category().message(errno));
  // Owns the lock from here on; a guard that fails below removes nothing of another daemon.
  if (flock(lock, LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    close(lock);
    if (error != EWOULDBLOCK) return SystemError("cannot lock", lock_path, std::generic_category().message(error));
    return MakeError(absl::StatusCode::kUnavailable, "SOCKET_IN_USE",
                     path + " belongs to another daemon that is running", {{"path", path}});
  }
  const absl::Status stale = RemoveStale(path);
  if (!stale.ok()) {
    close(lock);
    return stale;
  }
  return std::unique_ptr<SocketGuard>(new SocketGuard(path, lock));
}

SocketGuard::~SocketGuard() {
  // The lock file stays: removing it could give two daemons a lock each.
  unlink(path_.c_str());
  close(lock_);
}

absl::Status SocketGuard::SetMode(unsigned mode) const {
  if (chmod(path_.c_str(), mode) != 0)
    return SystemError("cannot set the mode of", path_, std::generic_category().message(errno));
  return absl::OkStatus();
}

PrivateUmask::PrivateUmask(unsigned mode) : before_(umask(0777 & ~mode)) {}
PrivateUmask::~PrivateUmask() { umask(before_); }

}  // namespace spectrumkv
