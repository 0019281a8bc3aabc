// The scan stage on the GPU that a source's blocks are on.
#pragma once

#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "server/memory/lane_memory.h"
#include "server/pool/pool.h"
#include "server/scan/scan.h"

namespace spectrumkv {

// Tokens of a layer that are read before they are planned: a chunk at most.
struct DeviceScan {
  ChunkDims dims;            // of the chunk
  uint32_t first = 0;        // its first token, of the layer's
  LayerScan* out = nullptr;  // sized beyond its last, as ScanLayer and SpreadChunk require
  bool scans = false;        // as ScanLayer
  bool samples = false;      // as SpreadChunk,
  uint32_t pinned = 0;       // with this many
};
// Rows of one plane of chunks[index]; they are used up before the next call.
using DeviceRowsOfScan = absl::FunctionRef<DeviceRows(size_t index, PlaneId plane)>;

// All of them with one copy there, one launch for each data type to scan and one to sample, one copy back and one wait.
// REQUIRES: 1 to gpu::kMaxBatch. Errors: those of the device.
absl::Status ScanOnDevice(Device* device, const std::vector<DeviceScan>& chunks, DeviceRowsOfScan rows_of);

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

}  // namespace spectrumkv
