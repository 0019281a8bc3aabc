#include "server/scan/device_scan.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace spectrumkv {

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

absl::Status AttendOnDevice(Device* device, const ChunkDims& dims, const DeviceRows& k, const DeviceQueries& queries,
                            float* scores) {
  auto lane = device->TakeLane();
  if (!lane.ok()) return lane.status();
  const uint32_t count = static_cast<uint32_t>(queries.positions.size());
  LaneMemory memory;
  const auto runs = memory.Take(RunsBytes(dims.tokens));
  const auto positions = memory.Take(count * sizeof(uint32_t));
  const auto values = memory.Take(queries.values.size() * sizeof(float));
  const auto found = memory.Take(size_t{dims.heads} * dims.tokens * sizeof(float));
  const auto workspace = memory.TakeOnDevice(gpu::AttendWorkspaceBytes(dims, count));
  if (!memory.Map(&*lane)) return lane->Finish();
  std::memcpy(memory.host(positions), queries.positions.data(), positions.bytes);
  std::memcpy(memory.host(values), queries.values.data(), values.bytes);
  gpu::AttendJob job;
  job.dims = dims;
  job.k = PlaneOf(k, dims.tokens, memory, runs);
  job.values = memory.device<float>(values);
  job.positions = memory.device<uint32_t>(positions);
  job.queries = count;
  job.window = queries.window;
  job.soft_cap = queries.soft_cap;
  job.scores = memory.device<float>(found);
  memory.Upload(runs, values);
  lane->Attend(job, memory.device(workspace), workspace.bytes);
  memory.Download(found, found);
  if (absl::Status status = lane->Finish(); !status.ok()) return status;
  std::memcpy(scores, memory.host(found), found.bytes);
  return absl::OkStatus();
}

absl::Status SpreadOnDevice(Device* device, const DeviceRange& range, uint32_t first, uint32_t pinned, LayerScan* out) {
  auto lane = device->TakeLane();
  if (!lane.ok()) return lane.status();
  const uint32_t tokens = range.dims.tokens;
  const bool has_v = range.v.rows != nullptr;
  LaneMemory memory;
  const auto k_runs = memory.Take(RunsBytes(tokens));
  const auto v_runs = memory.Take(has_v ? RunsBytes(tokens) : 0);
  const auto k_spreads = memory.Take(tokens);
  const auto v_spreads = memory.Take(has_v ? tokens : 0);
  if (!memory.Map(&*lane)) return lane->Finish();
  gpu::SpreadJob k{range.dims, PlaneOf(range.k, tokens, memory, k_runs), true,
                   pinned > first ? std::min(pinned - first, tokens) : 0, memory.device(k_spreads)};
  gpu::SpreadJob v;
  if (has_v) v = {range.dims, PlaneOf(range.v, tokens, memory, v_runs), false, 0, memory.device(v_spreads)};
  memory.Upload(k_runs, v_runs);
  lane->Spread(k);
  if (has_v) lane->Spread(v);
  memory.Download(k_spreads, v_spreads);
  if (absl::Status status = lane->Finish(); !status.ok()) return status;
  std::memcpy(out->k_spread.data() + first, memory.host(k_spreads), tokens);
  if (has_v) std::memcpy(out->v_spread.data() + first, memory.host(v_spreads), tokens);
  return absl::OkStatus();
}

}  // namespace spectrumkv
