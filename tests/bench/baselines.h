// What the same bytes cost without any transfer system: a copy, and one plain TCP connection.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "tests/bench/cluster.h"

namespace spectrumkv::bench {

// Wall seconds, and CPU seconds of all threads that took part.
struct Cost {
  double seconds = 0, cpu_s = 0;
};

Cost MemcpyCost(const uint8_t* from, uint8_t* to, uint64_t bytes);

// From a listening socket in `to` and a connected one in `from`: 1 MiB writes of contiguous memory, 1 MiB reads into one
// buffer. Nothing is scattered, so it is a ceiling for whoever uses one connection.
absl::StatusOr<Cost> SocketCost(const Place& from, const Place& to, const uint8_t* data, uint64_t bytes);

}  // namespace spectrumkv::bench
