#include "server/transfer/shape.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/base/status.h"
#include "server/base/text.h"

namespace spectrumkv {
namespace {

constexpr size_t kMaxNameBytes = 256;

// The numbers of schema.proto.
int32_t KindNumber(GroupKind kind) {
  switch (kind) {
    case GroupKind::kAttention: return 1;
    case GroupKind::kMla: return 2;
    case GroupKind::kSlidingWindow: return 3;
    case GroupKind::kOpaqueState: return 4;
  }
  return 0;
}

bool ConvertsExactly(int32_t source, int32_t target) {
  constexpr int32_t kFloat32 = 3;
  return source == target || target == kFloat32;
}

// Either value may be the peer's own text.
absl::Status Differs(const std::string& field, const std::string& source_text, const std::string& target_text) {
  const std::string source = CleanText(source_text, kMaxNameBytes), target = CleanText(target_text, kMaxNameBytes);
  return MakeError(absl::StatusCode::kFailedPrecondition, "SCHEMA_MISMATCH",
                   absl::StrCat("source and destination differ in ", field, ": ", source, " and ", target),
                   {{"field", field}, {"source", source}, {"destination", target}});
}

std::string LayersText(const std::vector<uint32_t>& layers) {
  std::string text = absl::StrCat(layers.size(), " layers");
  if (!layers.empty()) absl::StrAppend(&text, " ", layers.front(), "..", layers.back());
  return text;
}

absl::Status BadManifest(const std::string& what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_MANIFEST", absl::StrCat("the peer's manifest ", what));
}

}  // namespace

PoolShapeFrame ShapeOf(const PoolSchema& schema) {
  PoolShapeFrame shape;
  shape.model = schema.model;
  shape.revision = schema.revision;
  for (const GroupSchema& group : schema.groups) {
    GroupShapeFrame frame;
    frame.kind = KindNumber(group.kind);
    frame.data_type = static_cast<int32_t>(group.dtype);
    frame.heads_total = group.heads_total;
    frame.head_first = group.head_first;
    frame.head_count = group.head_count;
    frame.head_dim = group.head_dim;
    for (const LayerSchema& layer : group.layers) frame.layers.push_back(layer.layer);
    std::sort(frame.layers.begin(), frame.layers.end());
    frame.has_v = !group.layers.empty() && group.layers.front().v.has_value();
    shape.groups.push_back(std::move(frame));
  }
  return shape;
}

std::vector<PlanLayer> PlanLayersOf(const PoolSchema& schema, std::vector<LayerPlace>* places) {
  struct Entry {
    PlanLayer layer;
    LayerPlace place;
  };
  std::vector<Entry> entries;
  for (uint32_t g = 0; g < schema.groups.size(); ++g) {
    const GroupSchema& group = schema.groups[g];
    for (uint32_t slot = 0; slot < group.layers.size(); ++slot) {
      PlanLayer layer;
      layer.group = static_cast<uint16_t>(g);
      layer.layer = static_cast<uint16_t>(group.layers[slot].layer);
      layer.heads = group.head_count;
      layer.head_dim = group.head_dim;
      layer.dtype = group.dtype;
      layer.has_v = group.layers[slot].v.has_value();
      layer.raw_only = !HasKv(group.kind);
      if (group.kind == GroupKind::kSlidingWindow) layer.window_tokens = group.sliding_window_tokens;
      entries.push_back({layer, {g, slot}});
    }
  }
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return a.layer.layer < b.layer.layer; });
  std::vector<PlanLayer> layers;
  places->clear();
  for (const Entry& entry : entries) {
    layers.push_back(entry.layer);
    places->push_back(entry.place);
  }
  return layers;
}

absl::Status CompareShapes(const PoolShapeFrame& source, const PoolShapeFrame& target, bool exact_conversion) {
  if (source.model != target.model) return Differs("model", source.model, target.model);
  if (source.revision != target.revision) return Differs("revision", source.revision, target.revision);
  if (source.groups.size() != target.groups.size()) {
    return Differs("groups", absl::StrCat(source.groups.size()), absl::StrCat(target.groups.size()));
  }
  for (size_t g = 0; g < source.groups.size(); ++g) {
    const GroupShapeFrame& a = source.groups[g];
    const GroupShapeFrame& b = target.groups[g];
    const std::string at = absl::StrCat("groups[", g, "].");
    struct Field {
      const char* name;
      int64_t a, b;
    };
    const Field fields[] = {{"kind", a.kind, b.kind},
                            {"heads_total", a.heads_total, b.heads_total},
                            {"head_first", a.head_first, b.head_first},
                            {"head_count", a.head_count, b.head_count},
                            {"head_dim", a.head_dim, b.head_dim},
                            {"has_v", a.has_v, b.has_v}};
    for (const Field& field : fields) {
      if (field.a != field.b) return Differs(at + field.name, absl::StrCat(field.a), absl::StrCat(field.b));
    }
    if (a.layers != b.layers) return Differs(at + "layers", LayersText(a.layers), LayersText(b.layers));
    const bool opaque = a.kind == KindNumber(GroupKind::kOpaqueState) && a.data_type != b.data_type;
    if (opaque || (exact_conversion && !ConvertsExactly(a.data_type, b.data_type))) {
      return Differs(at + "data_type", DTypeName(static_cast<DType>(a.data_type)),
                     DTypeName(static_cast<DType>(b.data_type)));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<TransferShape> ShapeOfManifest(const ManifestFrame& manifest, const PoolSchema& target) {
  TransferShape shape;
  shape.token_count = manifest.token_count;
  uint64_t end = 0;
  uint64_t kept = 0;
  for (const FrameRun& run : manifest.kept_tokens) {
    if (run.count == 0 || run.first < end || uint64_t{run.first} + run.count > manifest.token_count) {
      return BadManifest(absl::StrCat("has the token run ", run.first, "+", run.count, " of ", manifest.token_count));
    }
    end = uint64_t{run.first} + run.count;
    kept += run.count;
    shape.kept.push_back({run.first, run.count});
  }
  if (kept == 0) return BadManifest("keeps no token");
  std::vector<LayerPlace> places;
  shape.layers = PlanLayersOf(target, &places);
  for (PlanLayer& layer : shape.layers) {
    if (layer.group >= manifest.shape.groups.size()) return BadManifest("has too few groups");
    const int32_t dtype = manifest.shape.groups[layer.group].data_type;
    if (dtype < 1 || dtype > 3) return BadManifest(absl::StrCat("has data_type ", dtype));
    layer.dtype = static_cast<DType>(dtype);
  }
  return shape;
}

ManifestFrame ManifestOf(const TransferShape& shape, const PoolSchema& source, uint64_t chunk_count,
                         uint32_t streams) {
  ManifestFrame manifest;
  manifest.token_count = shape.token_count;
  for (const TokenRange& run : shape.kept) manifest.kept_tokens.push_back({run.first, run.count});
  manifest.shape = ShapeOf(source);
  manifest.chunk_count = chunk_count;
  manifest.streams = streams;
  return manifest;
}

}  // namespace spectrumkv
