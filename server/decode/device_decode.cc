#include "server/decode/device_decode.h"

#include "server/memory/lane_memory.h"

namespace spectrumkv {
namespace {

DeviceRows RowsOf(const DecodeTarget& target, const ChunkCut& cut, PlaneId plane, std::vector<uint8_t*>* rows) {
  const DecodeTarget::Place& place = target.places[cut.layer_index];
  if (rows->size() < cut.token_count) rows->resize(cut.token_count);
  target.hold->FillRows(place.group, place.layer_slot, plane, cut.token_first, cut.token_count, rows->data());
  const LayerSchema& layer = target.hold->schema().groups[place.group].layers[place.layer_slot];
  const TensorSchema& tensor = plane == PlaneId::kK ? layer.k : *layer.v;
  return DeviceRows{rows->data(), static_cast<int64_t>(tensor.token_stride_bytes),
                    static_cast<int64_t>(tensor.head_stride_bytes), static_cast<int64_t>(tensor.dim_stride_bytes)};
}

}  // namespace

absl::StatusOr<DecodeResult> DecodeOnDevice(const Pieces& pieces, const ChunkView& chunk, const DecodeTarget& target,
                                            DecodeScratch* scratch) {
  const ChunkCut& cut = (*target.cuts)[chunk.header.chunk_index];
  auto lane = target.hold->device()->TakeLane();
  if (!lane.ok()) return lane.status();
  LaneMemory memory;
  const auto k_runs = memory.Take(RunsBytes(cut.token_count));
  const auto v_runs = memory.Take(chunk.dims.has_v ? RunsBytes(cut.token_count) : 0);
  const auto coded = memory.Take(pieces.TotalBytes());
  const auto report = memory.Take(sizeof(gpu::ChunkReport));
  const auto workspace = memory.TakeOnDevice(gpu::WorkspaceBytes(chunk.dims));
  if (!memory.Map(&*lane)) return lane->Finish();
  gpu::DecodeJob job;
  job.dims = chunk.dims;
  job.k = PlaneOf(RowsOf(target, cut, PlaneId::kK, &scratch->k_rows), cut.token_count, memory, k_runs);
  if (chunk.dims.has_v) {
    job.v = PlaneOf(RowsOf(target, cut, PlaneId::kV, &scratch->v_rows), cut.token_count, memory, v_runs);
  }
  // The network's buffers are not pinned: a copy of the coded bytes, a fraction of what they become.
  PieceCursor(pieces, 0).CopyTo(memory.host(coded), coded.bytes);
  job.chunk = memory.device(coded);
  job.target = target.hold->schema().groups[target.places[cut.layer_index].group].dtype;
  job.report = memory.device<gpu::ChunkReport>(report);
  memory.Upload(k_runs, coded);
  lane->Decode(job, memory.device(workspace), workspace.bytes);
  memory.Download(report, report);
  if (absl::Status done = lane->Finish(); !done.ok()) return done;
  return DecodeResult{memory.host<gpu::ChunkReport>(report)->rounded_words};
}

}  // namespace spectrumkv
