#include "server/encode/encode.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/base/status.h"
#include "server/encode/device_encode.h"

namespace spectrumkv {
namespace {

const GroupSchema& GroupOf(const EncodeSource& source, uint32_t layer_index) {
  return source.hold->schema().groups[(*source.places)[layer_index].group];
}

const TensorSchema& TensorOf(const EncodeSource& source, uint32_t layer_index, PlaneId plane) {
  const LayerPlace& place = (*source.places)[layer_index];
  const LayerSchema& layer = GroupOf(source, layer_index).layers[place.layer_slot];
  return place.plane_of(plane) == PlaneId::kK ? layer.k : *layer.v;
}

void ReadGenerations(const EncodeSource& source, const ChunkCut& cut, std::vector<uint64_t>* out) {
  out->clear();
  const uint32_t group = (*source.places)[cut.layer_index].group;
  ForEachRun(source.shape->ranges_of(cut.layer_index), cut.token_first, cut.token_count, [&](uint32_t position, uint32_t n, uint32_t) {
    source.hold->ReadGenerations(group, position, n, out);
  });
}

bool IsRawThroughout(const PlannedChunk& chunk) {
  return std::all_of(chunk.tier_map.begin(), chunk.tier_map.end(), [](uint8_t tiers) { return tiers == 0; });
}

EncodeResult EncodeOnHost(const Backend& backend, const EncodeSource& source, const PlannedChunk& chunk,
                          const ChunkIdentity& identity, EncodeScratch* scratch, uint8_t* out, uint64_t capacity,
                          std::vector<Piece>* lent) {
  const SourcePlanes planes = PlanesOf(source, chunk.cut, scratch);
  if (!source.hold->has_generations() && IsRawThroughout(chunk)) {
    const EncodeResult framed = backend.FrameRaw(planes.dims, identity, planes.k, planes.values(), out, lent);
    if (framed.chunk_bytes != 0) return framed;
  }
  lent->clear();
  return backend.Encode(planes.dims, identity, planes.k, planes.values(), chunk.tier_map.data(), &scratch->workspace,
                        out, capacity);
}

absl::Status SourceChanged(const ChunkCut& cut, const char* how) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "SOURCE_CHANGED",
                   absl::StrCat("source blocks of chunk ", cut.chunk_index, " ", how, " while they were being sent"),
                   {{"chunk", absl::StrCat(cut.chunk_index)}});
}

}  // namespace

EncodeScratch& ThreadEncodeScratch() {
  static thread_local EncodeScratch scratch;
  return scratch;
}

SourcePlane SourcePlaneOf(const EncodeSource& source, const ChunkCut& cut, PlaneId plane, std::vector<uint8_t*>* rows) {
  if (rows->size() < cut.token_count) rows->resize(cut.token_count);
  FillKeptRows(source, cut.layer_index, plane, cut.token_first, cut.token_count, rows->data());
  const TensorSchema& tensor = TensorOf(source, cut.layer_index, plane);
  return SourcePlane{rows->data(), static_cast<int64_t>(tensor.head_stride_bytes),
                     static_cast<int64_t>(tensor.dim_stride_bytes)};
}

SourcePlanes PlanesOf(const EncodeSource& source, const ChunkCut& cut, EncodeScratch* scratch) {
  const PlanLayer& layer = source.shape->layers[cut.layer_index];
  SourcePlanes planes;
  planes.dims = DimsOf(layer, cut.token_count);
  planes.k = SourcePlaneOf(source, cut, PlaneId::kK, &scratch->k_rows);
  if (layer.has_v) planes.v = SourcePlaneOf(source, cut, PlaneId::kV, &scratch->v_rows);
  return planes;
}

void FillKeptRows(const EncodeSource& source, uint32_t layer_index, PlaneId plane, uint32_t first, uint32_t count,
                  uint8_t** rows) {
  const LayerPlace& place = (*source.places)[layer_index];
  ForEachRun(source.shape->ranges_of(layer_index), first, count, [&](uint32_t position, uint32_t n, uint32_t offset) {
    source.hold->FillRows(place.group, place.layer_slot, place.plane_of(plane), position, n, rows + offset);
  });
}

namespace {

// Before the chunk's blocks are read.
absl::Status BeforeReading(const EncodeSource& source, const ChunkCut& cut, EncodeScratch* scratch) {
  if (!source.hold->has_generations()) return absl::OkStatus();
  ReadGenerations(source, cut, &scratch->generations_before);
  const auto& seen = scratch->generations_before;
  const bool odd = std::any_of(seen.begin(), seen.end(), [](uint64_t g) { return (g & 1) != 0; });
  return odd ? SourceChanged(cut, "were being written") : absl::OkStatus();
}

ChunkIdentity IdentityOf(const EncodeSource& source, const ChunkCut& cut, uint64_t fence) {
  const PlanLayer& layer = source.shape->layers[cut.layer_index];
  ChunkIdentity identity;
  identity.fence = fence;
  identity.chunk_index = cut.chunk_index;
  identity.group = layer.group;
  identity.layer = layer.layer;
  identity.token_first = cut.token_first;
  identity.head_first = static_cast<uint16_t>(GroupOf(source, cut.layer_index).head_first);
  return identity;
}

// What became of a chunk, once its blocks have been read.
absl::StatusOr<EncodeResult> AfterReading(const EncodeSource& source, const PlannedChunk& chunk, const EncodeResult& result,
                                          uint64_t capacity, EncodeScratch* scratch) {
  const ChunkCut& cut = chunk.cut;
  if (SourceWasWritten(source, cut, scratch)) return SourceChanged(cut, "changed");
  if (absl::Status health = source.hold->Health(); !health.ok()) return health;
  if (result.chunk_bytes == 0) {
    return MakeError(absl::StatusCode::kInternal, "ENCODE_OVERFLOW",
                     absl::StrCat("chunk ", cut.chunk_index, " did not fit into ", capacity, " bytes"));
  }
  // A plan from a scan knows every escape; other sizes mean that the values are not those that were scanned.
  const bool explained = !source.escapes_known && result.escaped > 0;
  if (result.chunk_bytes != chunk.chunk_bytes && !explained) return SourceChanged(cut, "changed");
  return result;
}

}  // namespace

absl::StatusOr<EncodeResult> EncodeChunk(const Backend& backend, const EncodeSource& source, const PlannedChunk& chunk,
                                         uint64_t fence, EncodeScratch* scratch, uint8_t* out, uint64_t capacity,
                                         std::vector<Piece>* lent) {
  if (absl::Status still = BeforeReading(source, chunk.cut, scratch); !still.ok()) return still;
  const EncodeResult result = EncodeOnHost(backend, source, chunk, IdentityOf(source, chunk.cut, fence), scratch, out,
                                           capacity, lent);
  return AfterReading(source, chunk, result, capacity, scratch);
}

void EncodeChunksOnDevice(const EncodeSource& source, uint64_t fence, uint64_t capacity, EncodeScratch* scratch,
                          std::vector<BatchedChunk>* chunks) {
  std::vector<DeviceChunk> coded;
  std::vector<size_t> of;  // chunks, by index in `coded`
  for (size_t i = 0; i < chunks->size(); ++i) {
    BatchedChunk& chunk = (*chunks)[i];
    const ChunkCut& cut = chunk.chunk->cut;
    absl::Status still = BeforeReading(source, cut, scratch);
    chunk.generations_before = scratch->generations_before;
    if (!still.ok()) {
      chunk.result = std::move(still);
      continue;
    }
    coded.push_back({chunk.chunk, IdentityOf(source, cut, fence), chunk.out, {}});
    of.push_back(i);
  }
  if (coded.empty()) return;
  const absl::Status done = EncodeOnDevice(source, capacity, scratch, &coded);
  for (size_t i = 0; i < coded.size(); ++i) {
    BatchedChunk& chunk = (*chunks)[of[i]];
    scratch->generations_before = chunk.generations_before;
    chunk.result = done.ok() ? AfterReading(source, *chunk.chunk, coded[i].result, capacity, scratch)
                             : absl::StatusOr<EncodeResult>(done);
  }
}

bool SourceWasWritten(const EncodeSource& source, const ChunkCut& cut, EncodeScratch* scratch) {
  if (!source.hold->has_generations()) return false;
  ReadGenerations(source, cut, &scratch->generations_after);
  return scratch->generations_after != scratch->generations_before;
}

}  // namespace spectrumkv
