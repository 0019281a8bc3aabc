// What the configuration says to the daemon's parts, in their own words. Pure, but for CheckStaging and the number of cores.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "server/config/config.h"
#include "server/pool/pool.h"
#include "server/stream/peer_security.h"
#include "server/transfer/transfer_manager.h"

namespace spectrumkv {

PeerSecurity SecurityOf(const Config& config);
PoolLimits PoolLimitsOf(const Config& config);
TransferOptions TransferOptionsOf(const Config& config, uint64_t epoch);

// codec.threads, or the cores of the machine.
size_t CodecThreads(const Config& config);
// All of them: the codec's, our own and the HTTP server's, and those gRPC starts by number of cores, some of them
// later.
size_t ThreadsNeeded(const Config& config);
// Of connections: less than the patience of a transfer that has dialled on such a connection, so that it can dial anew.
int64_t UndeliveredTimeoutMs(const Config& config);

// Whether the machine has the memory of all staging slots. Errors: those of CheckMemory (memory/available.h), with the keys.
absl::Status CheckStaging(const Config::Memory& memory);

}  // namespace spectrumkv
