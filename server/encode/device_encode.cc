#include "server/encode/device_encode.h"

#include <algorithm>
#include <cstring>

#include "kernels/codec/chunk_head.h"

namespace spectrumkv {

DeviceRows DeviceRowsOf(const EncodeSource& source, const ChunkCut& cut, PlaneId plane, std::vector<uint8_t*>* rows) {
  if (rows->size() < cut.token_count) rows->resize(cut.token_count);
  FillKeptRows(source, cut.layer_index, plane, cut.token_first, cut.token_count, rows->data());
  const LayerPlace& place = (*source.places)[cut.layer_index];
  const LayerSchema& layer = source.hold->schema().groups[place.group].layers[place.layer_slot];
  const TensorSchema& tensor = place.plane_of(plane) == PlaneId::kK ? layer.k : *layer.v;
  return DeviceRows{rows->data(), static_cast<int64_t>(tensor.token_stride_bytes),
                    static_cast<int64_t>(tensor.head_stride_bytes), static_cast<int64_t>(tensor.dim_stride_bytes)};
}

namespace {

// Where the parts of one chunk lie in the lane's memory.
struct ChunkParts {
  ChunkDims dims;
  LaneMemory::Part k_runs, v_runs, tiers;  // up
  LaneMemory::Part report;                 // down
  LaneMemory::Part coded;
};

std::vector<ChunkParts> TakeParts(const EncodeSource& source, uint64_t capacity, const std::vector<DeviceChunk>& chunks,
                                  LaneMemory* memory) {
  std::vector<ChunkParts> parts(chunks.size());
  for (size_t i = 0; i < chunks.size(); ++i) {
    const ChunkCut& cut = chunks[i].chunk->cut;
    ChunkParts& of = parts[i];
    of.dims = DimsOf(source.shape->layers[cut.layer_index], cut.token_count);
    of.k_runs = memory->Take(RunsBytes(of.dims.tokens));
    of.v_runs = memory->Take(of.dims.has_v ? RunsBytes(of.dims.tokens) : 0);
    of.tiers = memory->Take(of.dims.tokens);
  }
  for (ChunkParts& of : parts) of.report = memory->Take(sizeof(gpu::ChunkReport));
  for (ChunkParts& of : parts) of.coded = memory->Take(std::min(capacity, MaxChunkBytes(of.dims)));
  return parts;
}

gpu::EncodeJob JobOf(const EncodeSource& source, const PlannedChunk& chunk, const ChunkParts& parts,
                     const LaneMemory& memory, EncodeScratch* scratch) {
  gpu::EncodeJob job;
  job.dims = parts.dims;
  const auto plane = [&](PlaneId id, const LaneMemory::Part& runs, std::vector<uint8_t*>* rows) {
    return PlaneOf(DeviceRowsOf(source, chunk.cut, id, rows), parts.dims.tokens, memory, runs);
  };
  job.k = plane(PlaneId::kK, parts.k_runs, &scratch->k_rows);
  if (parts.dims.has_v) job.v = plane(PlaneId::kV, parts.v_runs, &scratch->v_rows);
  std::memcpy(memory.host(parts.tiers), chunk.tier_map.data(), parts.dims.tokens);
  job.tiers = memory.device(parts.tiers);
  job.chunk = memory.device(parts.coded);
  job.capacity = parts.coded.bytes;
  job.report = memory.device<gpu::ChunkReport>(parts.report);
  return job;
}

// As many bytes as were planned: what comes out longer or shorter is planned again.
uint64_t PlannedBytes(const PlannedChunk& chunk, const ChunkParts& parts) {
  return std::min<uint64_t>(chunk.chunk_bytes, parts.coded.bytes);
}

void TakeResult(const ChunkParts& parts, const LaneMemory& memory, bool direct, DeviceChunk* chunk) {
  const gpu::ChunkReport& told = *memory.host<gpu::ChunkReport>(parts.report);
  chunk->result = EncodeResult{};
  chunk->result.chunk_bytes = told.chunk_bytes;
  chunk->result.escaped = told.escaped;
  chunk->result.nonfinite_values = told.nonfinite_values;
  const uint64_t planned = PlannedBytes(*chunk->chunk, parts);
  if (told.chunk_bytes != planned) return;
  if (!direct) std::memcpy(chunk->out + kHeaderBytes, memory.host(parts.coded) + kHeaderBytes, planned - kHeaderBytes);
  SealChunk(parts.dims, chunk->identity, planned, chunk->out);
}

}  // namespace

absl::Status EncodeOnDevice(const EncodeSource& source, uint64_t capacity, EncodeScratch* scratch,
                            std::vector<DeviceChunk>* chunks) {
  auto lane = source.hold->device()->TakeLane();
  if (!lane.ok()) return lane.status();
  LaneMemory memory;
  const std::vector<ChunkParts> parts = TakeParts(source, capacity, *chunks, &memory);
  size_t workspace_bytes = 0;
  for (const ChunkParts& of : parts) workspace_bytes += gpu::WorkspaceBytes(of.dims);
  const auto workspace = memory.TakeOnDevice(workspace_bytes);
  if (!memory.Map(&*lane)) return lane->Finish();
  std::vector<gpu::EncodeJob> jobs;
  for (size_t i = 0; i < chunks->size(); ++i) jobs.push_back(JobOf(source, *(*chunks)[i].chunk, parts[i], memory, scratch));
  memory.Upload(parts.front().k_runs, parts.back().tiers);
  ForEachKindInWorkspace(jobs, [&](const gpu::EncodeJob* first, uint32_t count, size_t offset, size_t bytes) {
    lane->Encode(first, count, memory.device(workspace) + offset, bytes);
  });
  memory.Download(parts.front().report, parts.back().report);
  for (size_t i = 0; i < chunks->size(); ++i) {
    uint8_t* const out = (*chunks)[i].out;
    const uint64_t planned = PlannedBytes(*(*chunks)[i].chunk, parts[i]);
    uint8_t* const to = lane->IsPinned(out) ? out : memory.host(parts[i].coded);
    if (planned > kHeaderBytes) lane->Copy(to + kHeaderBytes, jobs[i].chunk + kHeaderBytes, planned - kHeaderBytes);
  }
  if (absl::Status done = lane->Finish(); !done.ok()) return done;
  for (size_t i = 0; i < chunks->size(); ++i) {
    TakeResult(parts[i], memory, lane->IsPinned((*chunks)[i].out), &(*chunks)[i]);
  }
  return absl::OkStatus();
}

}  // namespace spectrumkv
