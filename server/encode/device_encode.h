// Encoding on the GPU that a source's blocks are on.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "server/encode/encode.h"
#include "server/memory/lane_memory.h"

namespace spectrumkv {

// The source's rows of a chunk; their addresses lie in `rows`, which grows to the chunk's tokens.
DeviceRows DeviceRowsOf(const EncodeSource& source, const ChunkCut& cut, PlaneId plane, std::vector<uint8_t*>* rows);

// As Backend::Encode with the chunk's tiers, byte for byte, in out[0, capacity). The chunk is whole when this returns:
// kernels and copies have run. Where it came out with other than the planned bytes, the result says so and `out` holds no
// chunk. Errors: those of the device (DeviceError).
absl::StatusOr<EncodeResult> EncodeOnDevice(const EncodeSource& source, const PlannedChunk& chunk,
                                            const ChunkIdentity& identity, EncodeScratch* scratch, uint8_t* out,
                                            uint64_t capacity);

}  // namespace spectrumkv
