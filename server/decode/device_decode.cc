#include "server/decode/device_decode.h"

#include "server/memory/lane_memory.h"

namespace spectrumkv {
namespace {

DeviceRows RowsOf(const DecodeTarget& target, const ChunkCut& cut, PlaneId plane, std::vector<uint8_t*>* rows) {
  const DecodeTarget::Place& place = target.places[cut.layer_index];
  if (rows->size() < cut.token_count) rows->resize(cut.token_count);
  FillTargetRows(target, cut.layer_index, plane, cut.token_first, cut.token_count, rows->data());
  const LayerSchema& layer = target.hold->schema().groups[place.group].layers[place.layer_slot];
  const TensorSchema& tensor = place.plane_of(plane) == PlaneId::kK ? layer.k : *layer.v;
  return DeviceRows{rows->data(), static_cast<int64_t>(tensor.token_stride_bytes),
                    static_cast<int64_t>(tensor.head_stride_bytes), static_cast<int64_t>(tensor.dim_stride_bytes)};
}

// Where the parts of one chunk lie in the lane's memory.
struct ChunkParts {
  LaneMemory::Part k_runs, v_runs, coded;  // up
  LaneMemory::Part report;                 // down
};

std::vector<ChunkParts> TakeParts(const std::vector<DeviceDecode>& chunks, LaneMemory* memory) {
  std::vector<ChunkParts> parts(chunks.size());
  for (size_t i = 0; i < chunks.size(); ++i) {
    const ChunkDims& dims = chunks[i].chunk->dims;
    parts[i].k_runs = memory->Take(RunsBytes(dims.tokens));
    parts[i].v_runs = memory->Take(dims.has_v ? RunsBytes(dims.tokens) : 0);
    parts[i].coded = memory->Take(chunks[i].pieces.TotalBytes());
  }
  for (ChunkParts& of : parts) of.report = memory->Take(sizeof(gpu::ChunkReport));
  return parts;
}

gpu::DecodeJob JobOf(const DecodeTarget& target, const DeviceDecode& decode, const ChunkParts& parts,
                     const LaneMemory& memory, DecodeScratch* scratch) {
  const ChunkView& chunk = *decode.chunk;
  const ChunkCut& cut = (*target.cuts)[chunk.header.chunk_index];
  gpu::DecodeJob job;
  job.dims = chunk.dims;
  job.k = PlaneOf(RowsOf(target, cut, PlaneId::kK, &scratch->k_rows), cut.token_count, memory, parts.k_runs);
  if (chunk.dims.has_v) {
    job.v = PlaneOf(RowsOf(target, cut, PlaneId::kV, &scratch->v_rows), cut.token_count, memory, parts.v_runs);
  }
  // The network's buffers are not pinned: a copy of the coded bytes, a fraction of what they become.
  PieceCursor(decode.pieces, 0).CopyTo(memory.host(parts.coded), parts.coded.bytes);
  job.chunk = memory.device(parts.coded);
  job.target = target.hold->schema().groups[target.places[cut.layer_index].group].dtype;
  job.report = memory.device<gpu::ChunkReport>(parts.report);
  return job;
}

}  // namespace

absl::Status DecodeOnDevice(const DecodeTarget& target, DecodeScratch* scratch, std::vector<DeviceDecode>* chunks) {
  auto lane = target.hold->device()->TakeLane();
  if (!lane.ok()) return lane.status();
  LaneMemory memory;
  const std::vector<ChunkParts> parts = TakeParts(*chunks, &memory);
  size_t workspace_bytes = 0;
  for (const DeviceDecode& decode : *chunks) workspace_bytes += gpu::WorkspaceBytes(decode.chunk->dims);
  const auto workspace = memory.TakeOnDevice(workspace_bytes);
  if (!memory.Map(&*lane)) return lane->Finish();
  std::vector<gpu::DecodeJob> jobs;
  for (size_t i = 0; i < chunks->size(); ++i) jobs.push_back(JobOf(target, (*chunks)[i], parts[i], memory, scratch));
  memory.Upload(parts.front().k_runs, parts.back().coded);
  ForEachKindInWorkspace(jobs, [&](const gpu::DecodeJob* first, uint32_t count, size_t offset, size_t bytes) {
    lane->Decode(first, count, memory.device(workspace) + offset, bytes);
  });
  memory.Download(parts.front().report, parts.back().report);
  if (absl::Status done = lane->Finish(); !done.ok()) return done;
  for (size_t i = 0; i < chunks->size(); ++i) {
    (*chunks)[i].result.rounded_words = memory.host<gpu::ChunkReport>(parts[i].report)->rounded_words;
  }
  return absl::OkStatus();
}

}  // namespace spectrumkv
