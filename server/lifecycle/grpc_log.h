// gRPC's own words, as events of our log: one format, one stream, one level.
#pragma once

#include "server/metrics/metrics.h"

namespace spectrumkv {

// Before anything of gRPC's is used.
void InstallGrpcLog();

// TLS handshakes that fail are known from gRPC's log alone. Counted there from now on; null: no more. Returns when
// nobody uses the former one. Thread-safe.
void CountHandshakeFailuresIn(Metrics* metrics);

}  // namespace spectrumkv
