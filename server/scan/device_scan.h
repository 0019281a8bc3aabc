// The scan stage on the GPU that a source's blocks are on.
#pragma once

#include "absl/status/status.h"
#include "server/memory/lane_memory.h"
#include "server/scan/scan.h"

namespace spectrumkv {

// Rows of both planes of a range of tokens of one layer. v.rows null where there is no V.
struct DeviceRange {
  ChunkDims dims;
  DeviceRows k, v;
};

// As ScanLayer, for dims.tokens tokens from `first` on. Errors: those of the device.
absl::Status ScanOnDevice(Device* device, const DeviceRange& range, uint32_t first, LayerScan* out);

// What queries attend to in the keys of a layer: as Backend::Attend for each of its heads.
struct DeviceQueries {
  const std::vector<float>& values;        // [heads, positions.size(), head_dim], softmax scale applied
  const std::vector<uint32_t>& positions;  // of the queries that read one head
  uint32_t window = 0;
  float soft_cap = 0;
};
// scores: [heads, dims.tokens]. Errors: those of the device.
absl::Status AttendOnDevice(Device* device, const ChunkDims& dims, const DeviceRows& k, const DeviceQueries& queries,
                            float* scores);

// As SpreadChunk. REQUIRES: a chunk's tokens at most. Errors: those of the device.
absl::Status SpreadOnDevice(Device* device, const DeviceRange& range, uint32_t first, uint32_t pinned, LayerScan* out);

}  // namespace spectrumkv
