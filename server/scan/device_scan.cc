#include "server/scan/device_scan.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace spectrumkv {
namespace {

// Queues the copy of one plane to [tokens, heads, head_dim] in pinned memory.
void GatherPlane(const ChunkDims& dims, const DeviceRows& plane, uint8_t* dense, DeviceLane* lane) {
  const auto word = static_cast<int64_t>(SizeOf(dims.dtype));
  const size_t cell = dims.head_dim * SizeOf(dims.dtype);
  const bool dense_dim = plane.dim_stride_bytes == word;
  const bool dense_token = dense_dim && (dims.heads == 1 || plane.head_stride_bytes == static_cast<int64_t>(cell));
  for (uint32_t t = 0; t < dims.tokens; ++t, dense += dims.heads * cell) {
    uint8_t* const row = plane.rows[t];
    if (dense_token) {
      lane->Copy(dense, row, dims.heads * cell);
    } else if (dense_dim) {
      lane->CopyRows({dense, cell}, {row, static_cast<size_t>(plane.head_stride_bytes)}, cell, dims.heads);
    } else {
      for (uint32_t h = 0; h < dims.heads; ++h) {
        lane->CopyRows({dense + h * cell, SizeOf(dims.dtype)},
                       {row + h * plane.head_stride_bytes, static_cast<size_t>(plane.dim_stride_bytes)},
                       SizeOf(dims.dtype), dims.head_dim);
      }
    }
  }
}

}  // namespace

absl::Status ScanOnDevice(Device* device, const DeviceRange& range, uint32_t first, LayerScan* out) {
  auto lane = device->TakeLane();
  if (!lane.ok()) return lane.status();
  for (const auto& [rows, scans] : {std::pair(&range.k, &out->k), std::pair(&range.v, &out->v)}) {
    if (rows->rows == nullptr) continue;
    for (uint32_t done = 0; done < range.dims.tokens;) {
      ChunkDims dims = range.dims;
      dims.tokens = std::min(range.dims.tokens - done, kMaxChunkTokens);
      LaneMemory memory;
      const auto runs = memory.Take(RunsBytes(dims.tokens));
      const auto found = memory.Take(dims.tokens * sizeof(TokenScan));
      if (!memory.Map(&*lane)) return lane->Finish();
      DeviceRows part = *rows;
      part.rows += done;
      gpu::ScanJob job{dims, PlaneOf(part, dims.tokens, memory, runs), memory.device<TokenScan>(found)};
      memory.Upload(runs, runs);
      lane->Scan(job);
      memory.Download(found, found);
      if (absl::Status status = lane->Finish(); !status.ok()) return status;
      std::memcpy(scans->data() + first + done, memory.host(found), found.bytes);
      done += dims.tokens;
    }
  }
  return absl::OkStatus();
}

absl::Status SpreadFromDevice(Device* device, const Backend& backend, const DeviceRange& range, uint32_t first,
                              uint32_t pinned, Workspace* workspace, LayerScan* out) {
  auto lane = device->TakeLane();
  if (!lane.ok()) return lane.status();
  const ChunkDims& dims = range.dims;
  const size_t token_bytes = dims.heads * dims.head_dim * SizeOf(dims.dtype);
  const DeviceRows* const planes[2] = {&range.k, &range.v};
  const size_t count = range.v.rows != nullptr ? 2 : 1;
  uint8_t* const dense = lane->Pinned(count * dims.tokens * token_bytes);
  std::vector<const uint8_t*> rows;
  rows.reserve(count * dims.tokens);
  for (size_t p = 0; dense != nullptr && p < count; ++p) {
    uint8_t* const begin = dense + p * dims.tokens * token_bytes;
    GatherPlane(dims, *planes[p], begin, &*lane);
    for (uint32_t t = 0; t < dims.tokens; ++t) rows.push_back(begin + t * token_bytes);
  }
  if (absl::Status status = lane->Finish(); !status.ok()) return status;
  const auto word = static_cast<int64_t>(SizeOf(dims.dtype));
  const SourcePlane k{rows.data(), dims.head_dim * word, word};
  const SourcePlane v{rows.data() + dims.tokens, dims.head_dim * word, word};
  SpreadChunk(backend, dims, k, count == 2 ? &v : nullptr, first, pinned, workspace, out);
  return absl::OkStatus();
}

}  // namespace spectrumkv
