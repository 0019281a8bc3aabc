#include "server/scan/device_scan.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace spectrumkv {

namespace {

constexpr PlaneId kPlanes[] = {PlaneId::kK, PlaneId::kV};

// Where the parts of one chunk lie in the lane's memory, by plane; of no bytes where there is nothing of the kind.
struct ScanParts {
  LaneMemory::Part runs[2];                // up
  LaneMemory::Part scans[2], spreads[2];  // down
};

std::vector<ScanParts> TakeParts(const std::vector<DeviceScan>& chunks, LaneMemory* memory) {
  std::vector<ScanParts> parts(chunks.size());
  const auto take_both = [memory](const ChunkDims& dims, size_t bytes, LaneMemory::Part* of) {
    for (size_t p = 0; p < 2; ++p) of[p] = memory->Take(p == 0 || dims.has_v ? bytes : 0);
  };
  for (size_t i = 0; i < chunks.size(); ++i) {
    take_both(chunks[i].dims, RunsBytes(chunks[i].dims.tokens), parts[i].runs);
  }
  for (size_t i = 0; i < chunks.size(); ++i) {
    const DeviceScan& chunk = chunks[i];
    take_both(chunk.dims, chunk.scans ? chunk.dims.tokens * sizeof(TokenScan) : 0, parts[i].scans);
    take_both(chunk.dims, chunk.samples ? chunk.dims.tokens : 0, parts[i].spreads);
  }
  return parts;
}

void TakeFound(const DeviceScan& chunk, const ScanParts& parts, const LaneMemory& memory) {
  std::vector<TokenScan>* const scans[] = {&chunk.out->k, &chunk.out->v};
  std::vector<uint8_t>* const spreads[] = {&chunk.out->k_spread, &chunk.out->v_spread};
  for (size_t p = 0; p < (chunk.dims.has_v ? 2u : 1u); ++p) {
    if (chunk.scans) std::memcpy(scans[p]->data() + chunk.first, memory.host(parts.scans[p]), parts.scans[p].bytes);
    if (chunk.samples) {
      std::memcpy(spreads[p]->data() + chunk.first, memory.host(parts.spreads[p]), parts.spreads[p].bytes);
    }
  }
}

}  // namespace

absl::Status ScanOnDevice(Device* device, const std::vector<DeviceScan>& chunks, DeviceRowsOfScan rows_of) {
  auto lane = device->TakeLane();
  if (!lane.ok()) return lane.status();
  LaneMemory memory;
  const std::vector<ScanParts> parts = TakeParts(chunks, &memory);
  if (!memory.Map(&*lane)) return lane->Finish();
  std::vector<gpu::ScanJob> scans;
  std::vector<gpu::SpreadJob> spreads;
  for (size_t i = 0; i < chunks.size(); ++i) {
    const DeviceScan& chunk = chunks[i];
    const ChunkDims& dims = chunk.dims;
    const uint32_t skip = chunk.pinned > chunk.first ? std::min(chunk.pinned - chunk.first, dims.tokens) : 0;
    for (size_t p = 0; p < (dims.has_v ? 2u : 1u); ++p) {
      const gpu::DevicePlane plane = PlaneOf(rows_of(i, kPlanes[p]), dims.tokens, memory, parts[i].runs[p]);
      if (chunk.scans) scans.push_back({dims, plane, memory.device<TokenScan>(parts[i].scans[p])});
      if (chunk.samples) {
        spreads.push_back({dims, plane, /*centred=*/p == 0, p == 0 ? skip : 0, memory.device(parts[i].spreads[p])});
      }
    }
  }
  memory.Upload(parts.front().runs[0], parts.back().runs[1]);
  ForEachKind(scans, [&](const gpu::ScanJob* first, uint32_t count) { lane->Scan(first, count); });
  ForEachKind(spreads, [&](const gpu::SpreadJob* first, uint32_t count) { lane->Spread(first, count); });
  memory.Download(parts.front().scans[0], parts.back().spreads[1]);
  if (absl::Status status = lane->Finish(); !status.ok()) return status;
  for (size_t i = 0; i < chunks.size(); ++i) TakeFound(chunks[i], parts[i], memory);
  return absl::OkStatus();
}

absl::Status AttendOnDevice(Device* device, const ChunkDims& dims, const DeviceRows& k, const DeviceQueries& queries,
                            float* scores) {
  if (dims.tokens == 0) return absl::OkStatus();
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

}  // namespace spectrumkv
