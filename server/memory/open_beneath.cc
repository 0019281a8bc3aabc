#include "server/memory/open_beneath.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <vector>

namespace spectrumkv {
namespace {

// O_NONBLOCK: a FIFO put in place of the file must not block the daemon.
constexpr int kFileFlags = O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW | O_NOCTTY;
constexpr int kDirFlags = O_PATH | O_DIRECTORY | O_CLOEXEC;

// Empty and "." components are dropped. False where the path could leave its directory.
bool SplitPath(const std::string& path, std::vector<std::string>* parts) {
  if (path.front() == '/' || path.find('\0') != std::string::npos) return false;
  size_t at = 0;
  while (at <= path.size()) {
    size_t end = path.find('/', at);
    if (end == std::string::npos) end = path.size();
    const std::string part = path.substr(at, end - at);
    if (part == "..") return false;
    if (!part.empty() && part != ".") parts->push_back(part);
    at = end + 1;
  }
  return !parts->empty();
}

bool IsSymlink(int dir, const std::string& name) {
  struct stat info = {};
  return fstatat(dir, name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(info.st_mode);
}

// Consumes `dir`.
int Walk(int dir, const std::vector<std::string>& parts) {
  for (size_t i = 0; i < parts.size(); ++i) {
    const bool last = i + 1 == parts.size();
    const int flags = last ? kFileFlags : kDirFlags | O_NOFOLLOW;
    int next = openat(dir, parts[i].c_str(), flags);
    int error = errno;
    // A symlink where a directory is asked for is ENOTDIR; the caller wants to know it was one.
    if (next < 0 && error == ENOTDIR && IsSymlink(dir, parts[i])) error = ELOOP;
    close(dir);
    if (next < 0) return -error;
    dir = next;
  }
  return dir;
}

}  // namespace

int OpenBeneath(const std::string& dir_path, const std::string& path, BeneathMethod method) {
  if (path.empty() || dir_path.empty()) return -EINVAL;
  std::vector<std::string> parts;
  if (!SplitPath(path, &parts)) return -EXDEV;
  const int dir = open(dir_path.c_str(), kDirFlags);
  if (dir < 0) return -errno;
  if (method == BeneathMethod::kWalk) return Walk(dir, parts);

  struct open_how how = {};
  how.flags = static_cast<uint64_t>(kFileFlags);
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS;
  long fd = -1;
  // EAGAIN: something was renamed meanwhile and the kernel cannot be sure; asking again is what it wants.
  for (int attempt = 0; attempt < 8; ++attempt) {
    fd = syscall(SYS_openat2, dir, path.c_str(), &how, sizeof(how));
    if (fd >= 0 || errno != EAGAIN) break;
  }
  if (fd < 0 && (errno == ENOSYS || errno == EPERM)) return Walk(dir, parts);
  const int error = errno;
  close(dir);
  return fd < 0 ? -error : static_cast<int>(fd);
}

}  // namespace spectrumkv
