#include "server/config/text_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "server/base/status.h"

namespace spectrumkv {

absl::Status TextFileError(absl::StatusCode code, const std::string& what, const std::string& path,
                           const std::string& problem) {
  return MakeError(code, "CONFIG_FILE", what + " " + path + " " + problem, {{"file", path}});
}

absl::StatusOr<std::string> ReadTextFile(const std::string& what, const std::string& path) {
  // O_NONBLOCK: a FIFO must not hang the start.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    return TextFileError(absl::StatusCode::kNotFound, what, path,
                         std::string("cannot be opened: ") + std::generic_category().message(errno));
  }
  struct stat info {};
  std::string text(kMaxTextFileBytes + 1, '\0');
  size_t size = 0;
  absl::Status status;
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    status = TextFileError(absl::StatusCode::kInvalidArgument, what, path, "is not a regular file");
  }
  while (status.ok() && size < text.size()) {
    const ssize_t got = read(fd, text.data() + size, text.size() - size);
    if (got == 0) break;
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      status = TextFileError(absl::StatusCode::kInvalidArgument, what, path,
                             std::string("cannot be read: ") + std::generic_category().message(errno));
    } else {
      size += static_cast<size_t>(got);
    }
  }
  close(fd);
  if (!status.ok()) return status;
  if (size > kMaxTextFileBytes) {
    return TextFileError(absl::StatusCode::kInvalidArgument, what, path, "is larger than 1 MiB");
  }
  text.resize(size);
  return text;
}

}  // namespace spectrumkv
