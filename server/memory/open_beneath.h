// Opens a file below a directory without following symlinks or leaving it.
#pragma once

#include <string>

namespace spectrumkv {

enum class BeneathMethod {
  kAuto,  // openat2(2), or the walk where the kernel or a seccomp filter has no openat2
  kWalk   // component by component, O_NOFOLLOW each
};

// An O_RDWR | O_CLOEXEC | O_NONBLOCK descriptor, or -errno: ELOOP for a symlink, EXDEV for a path that leaves `dir`
// (absolute, or with ".."), EINVAL for an empty path, others as open(2).
int OpenBeneath(const std::string& dir, const std::string& path, BeneathMethod method = BeneathMethod::kAuto);

}  // namespace spectrumkv
