// What a look at a peer has found (GrpcTransport::Probe).
#pragma once

#include <cstdint>
#include <string>

namespace spectrumkv {

struct ProbeResult {
  std::string version;
  uint64_t epoch = 0;
  // From the dial to the first answer, TLS included.
  double connect_seconds = 0;
  // The least of several.
  double round_trip_seconds = 0;
  // Of messages one after another on one connection, less the round trip.
  double link_bytes_per_second = 0;
  // The peer's clock less ours, and how wrong that may be.
  double clock_offset_seconds = 0, clock_error_seconds = 0;
};

}  // namespace spectrumkv
