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
  const TensorSchema& tensor = plane == PlaneId::kK ? layer.k : *layer.v;
  return DeviceRows{rows->data(), static_cast<int64_t>(tensor.token_stride_bytes),
                    static_cast<int64_t>(tensor.head_stride_bytes), static_cast<int64_t>(tensor.dim_stride_bytes)};
}

absl::StatusOr<EncodeResult> EncodeOnDevice(const EncodeSource& source, const PlannedChunk& chunk,
                                            const ChunkIdentity& identity, EncodeScratch* scratch, uint8_t* out,
                                            uint64_t capacity) {
  const ChunkCut& cut = chunk.cut;
  const ChunkDims dims = DimsOf(source.shape->layers[cut.layer_index], cut.token_count);
  auto lane = source.hold->device()->TakeLane();
  if (!lane.ok()) return lane.status();
  LaneMemory memory;
  const auto k_runs = memory.Take(RunsBytes(dims.tokens));
  const auto v_runs = memory.Take(dims.has_v ? RunsBytes(dims.tokens) : 0);
  const auto tiers = memory.Take(dims.tokens);
  const auto report = memory.Take(sizeof(gpu::ChunkReport));
  const auto coded = memory.Take(std::min(capacity, MaxChunkBytes(dims)));
  const auto workspace = memory.TakeOnDevice(gpu::WorkspaceBytes(dims));
  if (!memory.Map(&*lane)) return lane->Finish();
  gpu::EncodeJob job;
  job.dims = dims;
  job.k = PlaneOf(DeviceRowsOf(source, cut, PlaneId::kK, &scratch->k_rows), dims.tokens, memory, k_runs);
  if (dims.has_v) {
    job.v = PlaneOf(DeviceRowsOf(source, cut, PlaneId::kV, &scratch->v_rows), dims.tokens, memory, v_runs);
  }
  std::memcpy(memory.host(tiers), chunk.tier_map.data(), dims.tokens);
  job.tiers = memory.device(tiers);
  job.chunk = memory.device(coded);
  job.capacity = coded.bytes;
  job.report = memory.device<gpu::ChunkReport>(report);
  memory.Upload(k_runs, tiers);
  lane->Encode(job, memory.device(workspace), workspace.bytes);
  memory.Download(report, report);
  // As many bytes as were planned: what comes out longer or shorter is planned again.
  const uint64_t planned = std::min<uint64_t>(chunk.chunk_bytes, coded.bytes);
  const bool direct = lane->IsPinned(out);
  if (planned > kHeaderBytes) {
    lane->Copy((direct ? out : memory.host(coded)) + kHeaderBytes, job.chunk + kHeaderBytes, planned - kHeaderBytes);
  }
  if (absl::Status done = lane->Finish(); !done.ok()) return done;
  const gpu::ChunkReport& told = *memory.host<gpu::ChunkReport>(report);
  EncodeResult result;
  result.chunk_bytes = told.chunk_bytes;
  result.escaped = told.escaped;
  result.nonfinite_values = told.nonfinite_values;
  if (result.chunk_bytes != planned) return result;
  if (!direct) std::memcpy(out + kHeaderBytes, memory.host(coded) + kHeaderBytes, planned - kHeaderBytes);
  SealChunk(dims, identity, planned, out);
  return result;
}

}  // namespace spectrumkv
