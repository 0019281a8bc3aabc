// Encoding on the GPU that a source's blocks are on.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "server/encode/encode.h"
#include "server/memory/lane_memory.h"

namespace spectrumkv {

// The source's rows of a chunk; their addresses lie in `rows`, which grows to the chunk's tokens.
DeviceRows DeviceRowsOf(const EncodeSource& source, const ChunkCut& cut, PlaneId plane, std::vector<uint8_t*>* rows);

// One chunk of a batch.
struct DeviceChunk {
  const PlannedChunk* chunk = nullptr;
  ChunkIdentity identity;
  uint8_t* out = nullptr;
  EncodeResult result;
};

// As Backend::Encode with the chunks' tiers, byte for byte, each in its out[0, capacity): one copy there, as few launches as
// their kinds allow, and one wait for all of them. The chunks are whole when this returns: kernels and copies have run. Where
// one came out with other than the planned bytes, its result says so and `out` holds no chunk. REQUIRES: 1 to gpu::kMaxBatch.
// Errors: those of the device (DeviceError).
absl::Status EncodeOnDevice(const EncodeSource& source, uint64_t capacity, EncodeScratch* scratch,
                            std::vector<DeviceChunk>* chunks);

// A coded chunk that is compared with its source.
struct ReadBack {
  const ChunkCut* cut = nullptr;
  ChunkDims dims;                 // of data[0, size), which was parsed
  const uint8_t* data = nullptr;
  size_t size = 0;
  // The tokens that MeasureReconstruction compares, as they are in the source and as the chunk's decoding has them:
  // [original, decoded][planes, tokens compared, heads, head_dim].
  std::vector<uint8_t> dense;
};
// Fills `dense`. Both halves are made by the kernels of the data path, the originals as RAW: one copy there, as few launches
// as their kinds allow, one wait for all of them. REQUIRES: 1 to gpu::kMaxBatch. Errors: those of the device.
absl::Status ReadBackOnDevice(const EncodeSource& source, EncodeScratch* scratch, std::vector<ReadBack>* chunks);

}  // namespace spectrumkv
