// Where a daemon that has started can be reached.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace spectrumkv {

struct DaemonAddresses {
  std::string worker_socket, admin_socket;  // paths
  std::string worker_tcp;                   // "" where off
  std::string peer, health, metrics;        // host:port, the port being the real one
};

// Writes one JSON object (the members above, epoch as text, pid) so that a reader sees all of it or nothing.
// Unavailable, reason READY_FILE.
absl::Status WriteReadyFile(const std::string& path, const DaemonAddresses& addresses, uint64_t epoch);

// Where a daemon that listens on `address` reaches itself: "0.0.0.0:7" is "127.0.0.1:7", "[::]:7" is "[::1]:7", others
// are what they are.
std::string SelfAddress(const std::string& address);

// "host:0" and 7 -> "host:7".
std::string WithPort(const std::string& address, int port);

}  // namespace spectrumkv
