#include "server/decode/decode.h"

#include "absl/strings/str_cat.h"
#include "server/base/status.h"

namespace spectrumkv {
namespace {

absl::Status Refused(Refusal refusal, size_t size) {
  const absl::StatusCode code = refusal == Refusal::kUnsupportedVersion ? absl::StatusCode::kUnimplemented
                                                                        : absl::StatusCode::kDataLoss;
  return MakeError(code, RefusalName(refusal),
                   absl::StrCat("a received chunk of ", size, " bytes was refused: ", RefusalName(refusal)));
}

absl::Status Mismatch(const char* field, uint64_t got, uint64_t want) {
  return MakeError(absl::StatusCode::kDataLoss, "MANIFEST_MISMATCH",
                   absl::StrCat("chunk field ", field, " is ", got, ", the manifest says ", want),
                   {{"field", field}, {"value", absl::StrCat(got)}, {"expected", absl::StrCat(want)}});
}

TargetPlane PlaneOf(const DecodeTarget& target, uint32_t layer_index, PlaneId plane, uint32_t token_first,
                    uint32_t tokens, std::vector<uint8_t*>* rows) {
  const DecodeTarget::Place& place = target.places[layer_index];
  if (rows->size() < tokens) rows->resize(tokens);
  FillTargetRows(target, layer_index, plane, token_first, tokens, rows->data());
  const LayerSchema& layer = target.hold->schema().groups[place.group].layers[place.layer_slot];
  const TensorSchema& tensor = place.plane_of(plane) == PlaneId::kK ? layer.k : *layer.v;
  return TargetPlane{rows->data(), static_cast<int64_t>(tensor.head_stride_bytes),
                     static_cast<int64_t>(tensor.dim_stride_bytes)};
}

}  // namespace

void FillTargetRows(const DecodeTarget& target, uint32_t layer_index, PlaneId plane, uint32_t first, uint32_t count,
                    uint8_t** rows) {
  const DecodeTarget::Place& place = target.places[layer_index];
  const PlaneId at = place.plane_of(plane);
  if (target.rows == nullptr) return target.hold->FillRows(place.group, place.layer_slot, at, first, count, rows);
  ForEachRun((*target.rows)[layer_index], first, count, [&](uint32_t position, uint32_t n, uint32_t offset) {
    target.hold->FillRows(place.group, place.layer_slot, at, position, n, rows + offset);
  });
}

absl::StatusOr<ChunkView> VerifyChunk(const Pieces& pieces, uint8_t* room, const DecodeTarget& target) {
  ChunkView view;
  if (const Refusal refusal = ParseChunk(pieces, room, &view); refusal != Refusal::kNone) {
    return Refused(refusal, pieces.TotalBytes());
  }
  const ChunkHeader& header = view.header;
  if (header.fence != target.fence) {
    return MakeError(absl::StatusCode::kAborted, "FENCE_MISMATCH",
                     "a chunk carries the fence of another reservation");
  }
  if (header.chunk_index >= target.cuts->size()) {
    return Mismatch("chunk_index", header.chunk_index, target.cuts->size());
  }
  const ChunkCut& cut = (*target.cuts)[header.chunk_index];
  const PlanLayer& layer = target.shape->layers[cut.layer_index];
  struct Field {
    const char* name;
    uint64_t got, want;
  };
  const Field fields[] = {
      {"group", header.group, layer.group},
      {"layer", header.layer, layer.layer},
      {"token_first", header.token_first, cut.token_first},
      {"token_count", header.token_count, cut.token_count},
      {"dtype", header.dtype, static_cast<uint64_t>(layer.dtype)},
      {"flags", header.flags, layer.has_v ? 1u : 0u},
      {"head_count", header.head_count, layer.heads},
      {"head_dim", header.head_dim, layer.head_dim},
      {"head_first", header.head_first, target.group_head_first[layer.group]},
  };
  for (const Field& field : fields) {
    if (field.got != field.want) return Mismatch(field.name, field.got, field.want);
  }
  return view;
}

DecodeResult DecodeChunk(const Backend& backend, const ChunkView& chunk, const DecodeTarget& target,
                         DecodeScratch* scratch) {
  const ChunkCut& cut = (*target.cuts)[chunk.header.chunk_index];
  const DType dtype = target.hold->schema().groups[target.places[cut.layer_index].group].dtype;
  const TargetPlane k =
      PlaneOf(target, cut.layer_index, PlaneId::kK, cut.token_first, cut.token_count, &scratch->k_rows);
  TargetPlane v;
  if (chunk.dims.has_v) {
    v = PlaneOf(target, cut.layer_index, PlaneId::kV, cut.token_first, cut.token_count, &scratch->v_rows);
  }
  return backend.Decode(chunk, dtype, k, chunk.dims.has_v ? &v : nullptr, &scratch->workspace);
}

}  // namespace spectrumkv
