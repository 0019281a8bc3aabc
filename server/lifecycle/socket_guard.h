// The right to one path for a Unix socket. gRPC would silently take a path over from a daemon that is still running, so
// each path has a lock file beside it.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace spectrumkv {

// Not thread-safe.
class SocketGuard {
 public:
  // Creates the directory (0750) if it is missing, locks PATH.lock and removes what a dead daemon left at PATH.
  // UNAVAILABLE SOCKET_IN_USE where another process has the lock; INVALID_ARGUMENT INVALID_SOCKET_PATH where the path
  // is too long for a socket or holds something else; UNAVAILABLE SOCKET_PATH where the system refuses.
  static absl::StatusOr<std::unique_ptr<SocketGuard>> Take(const std::string& path);
  // Removes the socket and unlocks.
  ~SocketGuard();
  SocketGuard(const SocketGuard&) = delete;
  SocketGuard& operator=(const SocketGuard&) = delete;

  const std::string& path() const { return path_; }
  // Of the bound socket. UNAVAILABLE SOCKET_PATH.
  absl::Status SetMode(unsigned mode) const;

 private:
  SocketGuard(std::string path, int lock) : path_(std::move(path)), lock_(lock) {}
  const std::string path_;
  const int lock_;
};

// What is created while it lives has no permission beyond `mode`. Process-wide.
class PrivateUmask {
 public:
  explicit PrivateUmask(unsigned mode);
  ~PrivateUmask();
  PrivateUmask(const PrivateUmask&) = delete;
  PrivateUmask& operator=(const PrivateUmask&) = delete;

 private:
  const unsigned before_;
};

}  // namespace spectrumkv
