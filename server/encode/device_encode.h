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

// The tokens of a coded chunk that MeasureReconstruction compares, as they are in the source and as the chunk's decoding has
// them: `dense` becomes [original, decoded][planes, tokens compared, heads, head_dim]. Both are made by the kernels of the data
// path: the originals as RAW. `dims`: of the chunk data[0, size), which was parsed. Errors: those of the device.
absl::Status ReadBackOnDevice(const EncodeSource& source, const ChunkCut& cut, const ChunkDims& dims, const uint8_t* data,
                              size_t size, EncodeScratch* scratch, std::vector<uint8_t>* dense);

}  // namespace spectrumkv
