#include "server/pool/schema.h"

#include <algorithm>
#include <set>
#include <utility>

#include "kernels/format/chunk.h"
#include "server/base/status.h"
#include "server/pool/overlap.h"

namespace spectrumkv {
namespace {

constexpr uint64_t kGenerationBytes = 8;

absl::Status Bad(const std::string& reason, const std::string& field, const std::string& value,
                 const std::string& limit) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason, field + " is " + value + ": " + limit,
                   {{"field", field}, {"value", value}, {"limit", limit}});
}

absl::Status CheckRange(const std::string& field, uint64_t value, uint64_t least, uint64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return Bad("INVALID_SCHEMA", field, std::to_string(value),
             "must be " + std::to_string(least) + " to " + std::to_string(most));
}

std::string At(const std::string& list, size_t index) { return list + "[" + std::to_string(index) + "]"; }

// The first error stays.
class Checker {
 public:
  bool Range(const std::string& field, uint64_t value, uint64_t least, uint64_t most) {
    return Take(CheckRange(field, value, least, most));
  }
  bool Require(bool good, const char* reason, const std::string& field, const std::string& value,
               const std::string& limit) {
    return good || Take(Bad(reason, field, value, limit));
  }
  bool Take(absl::Status status) {
    if (status.ok()) return true;
    if (status_.ok()) status_ = std::move(status);
    return false;
  }
  bool ok() const { return status_.ok(); }
  absl::Status status() const { return status_; }

 private:
  absl::Status status_;
};

void CheckHead(const PoolSchema& schema, Checker* check) {
  using namespace schema_limits;
  check->Range("model (bytes)", schema.model.size(), 0, kNameBytes) &&
      check->Range("revision (bytes)", schema.revision.size(), 0, kNameBytes) &&
      check->Range("tensor_parallel_size", schema.tensor_parallel_size, 1, kTensorParallel) &&
      check->Range("tensor_parallel_rank", schema.tensor_parallel_rank, 0, schema.tensor_parallel_size - 1) &&
      check->Range("groups (count)", schema.groups.size(), 1, kGroups) &&
      check->Range("segments (count)", schema.segments.size(), 1, kSegments);
}

// Parts of one allocation may be segments of their own, but must not overlap.
void CheckParts(const PoolSchema& schema, size_t index, Checker* check) {
  const SegmentSpec& segment = schema.segments[index];
  const std::string path = At("segments", index);
  if (!check->Range(path + ".offset_bytes", segment.offset_bytes, 0, schema_limits::kSegmentBytes)) return;
  for (size_t i = 0; i < index; ++i) {
    const SegmentSpec& other = schema.segments[i];
    if (other.kind != segment.kind || other.name != segment.name) continue;
    const bool apart = other.offset_bytes + other.size_bytes <= segment.offset_bytes ||
                       segment.offset_bytes + segment.size_bytes <= other.offset_bytes;
    if (!check->Require(apart, "OVERLAP", path, std::to_string(segment.offset_bytes),
                        "it shares bytes of one GPU allocation with " + At("segments", i))) {
      return;
    }
  }
}

void CheckSegments(const PoolSchema& schema, Checker* check) {
  std::set<std::pair<SegmentSpec::Kind, std::string>> names;
  for (size_t i = 0; i < schema.segments.size() && check->ok(); ++i) {
    const SegmentSpec& segment = schema.segments[i];
    const std::string path = At("segments", i);
    const bool owned = segment.kind == SegmentSpec::Kind::kDaemonOwned;
    check->Range(path + ".size_bytes", segment.size_bytes, 1, schema_limits::kSegmentBytes);
    check->Range(path + ".name (bytes)", segment.name.size(), owned ? 0 : 1, schema_limits::kNameBytes);
    if (owned || !check->ok()) continue;
    if (segment.kind == SegmentSpec::Kind::kCudaIpc) {
      CheckParts(schema, i, check);
      continue;
    }
    check->Require(names.emplace(segment.kind, segment.name).second, "INVALID_SCHEMA", path + ".name", segment.name,
                   "must be unique in the schema");
  }
}

void CheckGroup(const GroupSchema& group, const GroupSchema& first, const std::string& path, uint64_t max_chunk_bytes,
                Checker* check) {
  using namespace schema_limits;
  const auto dtype = static_cast<unsigned>(group.dtype);
  const auto kind = static_cast<unsigned>(group.kind);
  const bool good =
      check->Range(path + ".dtype", dtype, 1, 3) && check->Range(path + ".kind", kind, 0, 3) &&
      check->Range(path + ".heads_total", group.heads_total, 1, kHeads) &&
      check->Range(path + ".head_count", group.head_count, 1, group.heads_total) &&
      check->Range(path + ".head_first", group.head_first, 0, group.heads_total - group.head_count) &&
      check->Range(path + ".head_dim", group.head_dim, 8, kHeadDim) &&
      check->Require(group.head_dim % 8 == 0, "INVALID_SCHEMA", path + ".head_dim", std::to_string(group.head_dim),
                     "must be a multiple of 8") &&
      check->Range(path + ".block_tokens", group.block_tokens, 1, kBlockTokens) &&
      check->Range(path + ".num_blocks", group.num_blocks, 1, kNumBlocks) &&
      check->Range(path + ".layers (count)", group.layers.size(), 1, kLayers) &&
      check->Require(group.kind != GroupKind::kSlidingWindow || group.sliding_window_tokens > 0, "INVALID_SCHEMA",
                     path + ".sliding_window_tokens", "0", "must be positive for this kind") &&
      check->Require((group.kind == GroupKind::kOpaqueState) == (first.kind == GroupKind::kOpaqueState), "INVALID_SCHEMA",
                     path + ".kind", "state beside KV",
                     "must be the kind of all groups of a pool, or of none: its rows are not tokens");
  if (!good || max_chunk_bytes == 0) return;
  const ChunkDims dims{1, group.head_count, group.head_dim, group.dtype, HasKv(group.kind)};
  const uint64_t bytes = MaxChunkBytes(dims);
  check->Require(bytes <= max_chunk_bytes, "CHUNK_TOO_LARGE", path, std::to_string(bytes) + " bytes per token",
                 "a chunk of one token must fit " + std::to_string(max_chunk_bytes) + " bytes");
}

// Checks one tensor alone and appends it to `lattices`.
void CheckTensor(const PoolSchema& schema, const GroupSchema& group, const TensorSchema& tensor,
                 const std::string& path, Checker* check, std::vector<Lattice>* lattices) {
  static constexpr const char* kNames[] = {".block_stride_bytes", ".token_stride_bytes", ".head_stride_bytes",
                                           ".dim_stride_bytes"};
  if (!check->Range(path + ".segment", tensor.segment, 0, schema.segments.size() - 1)) return;
  const uint64_t size = schema.segments[tensor.segment].size_bytes;
  const uint64_t element = SizeOf(group.dtype);
  const Lattice lattice{tensor.segment, tensor.offset_bytes, element,
                        {{{tensor.block_stride_bytes, group.num_blocks},
                          {tensor.token_stride_bytes, group.block_tokens},
                          {tensor.head_stride_bytes, group.head_count},
                          {tensor.dim_stride_bytes, group.head_dim}}}};
  const std::string aligned = "must be a multiple of the element size, " + std::to_string(element);
  for (size_t i = 0; i < 4; ++i) {
    const uint64_t stride = lattice.dims[i].stride;
    const std::string text = std::to_string(stride);
    if (!check->Require(stride > 0, "INVALID_SCHEMA", path + kNames[i], text, "must be positive") ||
        !check->Require(stride <= size, "OUT_OF_RANGE", path + kNames[i], text,
                        "segment " + std::to_string(tensor.segment) + " has " + std::to_string(size) + " bytes") ||
        !check->Require(stride % element == 0, "INVALID_SCHEMA", path + kNames[i], text, aligned)) {
      return;
    }
  }
  const std::string offset = std::to_string(tensor.offset_bytes);
  if (!check->Require(tensor.offset_bytes % element == 0, "INVALID_SCHEMA", path + ".offset_bytes", offset, aligned)) {
    return;
  }
  const auto span = SpanOf(lattice);
  if (!check->Require(span && tensor.offset_bytes <= size && *span <= size - tensor.offset_bytes, "OUT_OF_RANGE", path,
                      span ? std::to_string(*span) + " bytes from offset " + offset
                           : "more than 2^62 bytes long",
                      "segment " + std::to_string(tensor.segment) + " has " + std::to_string(size) + " bytes")) {
    return;
  }
  const int bad_dim = FindSelfOverlap(lattice);
  if (bad_dim >= 0) {
    check->Require(false, "OVERLAP", path + kNames[bad_dim], std::to_string(lattice.dims[bad_dim].stride),
                   "elements of the tensor would share bytes");
    return;
  }
  lattices->push_back(lattice);
}

// A chunk is coded where its values lie, in one place.
void CheckDevice(const PoolSchema& schema, const TensorSchema& tensor, const std::string& path, Checker* check) {
  const std::string& first = schema.segments[schema.groups[0].layers[0].k.segment].device;
  const std::string& device = schema.segments[tensor.segment].device;
  check->Require(device == first, "INVALID_SCHEMA", path + ".segment", std::to_string(tensor.segment),
                 "all tensors of a pool must be in host memory or on one GPU, and the first is " +
                     (first.empty() ? "in host memory" : "on " + first));
}

void CheckTensors(const PoolSchema& schema, Checker* check, std::vector<Lattice>* lattices,
                  std::vector<std::string>* paths) {
  std::set<uint32_t> layers;
  for (size_t g = 0; g < schema.groups.size(); ++g) {
    const GroupSchema& group = schema.groups[g];
    for (size_t l = 0; l < group.layers.size(); ++l) {
      const LayerSchema& layer = group.layers[l];
      const std::string path = At(At("groups", g) + ".layers", l);
      check->Range(path + ".layer", layer.layer, 0, schema_limits::kLayerIndex) &&
          check->Require(layers.insert(layer.layer).second, "INVALID_SCHEMA", path + ".layer",
                         std::to_string(layer.layer), "must be unique in the pool") &&
          check->Require(layers.size() <= schema_limits::kLayers, "INVALID_SCHEMA", "layers (count)",
                         std::to_string(layers.size()), "must be at most " + std::to_string(schema_limits::kLayers)) &&
          check->Require(layer.v.has_value() == HasKv(group.kind), "INVALID_SCHEMA", path + ".v",
                         layer.v ? "given" : "missing", "belongs to every kind but MLA and OPAQUE_STATE");
      if (!check->ok()) return;
      CheckTensor(schema, group, layer.k, path + ".k", check, lattices);
      if (check->ok()) CheckDevice(schema, layer.k, path + ".k", check);
      paths->push_back(path + ".k");
      if (layer.v && check->ok()) {
        CheckTensor(schema, group, *layer.v, path + ".v", check, lattices);
        if (check->ok()) CheckDevice(schema, *layer.v, path + ".v", check);
        paths->push_back(path + ".v");
      }
      if (!check->ok()) return;
    }
  }
}

void CheckGenerations(const PoolSchema& schema, Checker* check, std::vector<Lattice>* lattices) {
  const PoolSchema::Generations& table = *schema.generations;
  if (!check->Range("generations.segment", table.segment, 0, schema.segments.size() - 1)) return;
  if (!check->Require(schema.segments[table.segment].device.empty(), "INVALID_SCHEMA", "generations.segment",
                      std::to_string(table.segment), "it must be in host memory, where the daemon reads it")) {
    return;
  }
  uint64_t blocks = 0;
  for (const GroupSchema& group : schema.groups) blocks = std::max(blocks, group.num_blocks);
  const uint64_t size = schema.segments[table.segment].size_bytes;
  const uint64_t bytes = blocks * kGenerationBytes;
  const std::string offset = std::to_string(table.offset_bytes);
  if (!check->Require(table.offset_bytes % kGenerationBytes == 0, "INVALID_SCHEMA", "generations.offset_bytes", offset,
                      "must be a multiple of 8") ||
      !check->Require(table.offset_bytes <= size && bytes <= size - table.offset_bytes, "OUT_OF_RANGE",
                      "generations.offset_bytes", offset,
                      std::to_string(bytes) + " bytes from there must fit segment " + std::to_string(table.segment) +
                          " of " + std::to_string(size) + " bytes")) {
    return;
  }
  lattices->push_back(Lattice{table.segment, table.offset_bytes, bytes, {}});
}

}  // namespace

absl::Status CheckSchema(const PoolSchema& schema, uint64_t max_chunk_bytes) {
  Checker check;
  CheckHead(schema, &check);
  if (check.ok()) CheckSegments(schema, &check);
  for (size_t g = 0; g < schema.groups.size() && check.ok(); ++g) {
    CheckGroup(schema.groups[g], schema.groups[0], At("groups", g), max_chunk_bytes, &check);
  }
  std::vector<Lattice> lattices;
  std::vector<std::string> paths;
  if (check.ok()) CheckTensors(schema, &check, &lattices, &paths);
  if (check.ok() && schema.generations) {
    CheckGenerations(schema, &check, &lattices);
    paths.push_back("generations");
  }
  if (!check.ok()) return check.status();
  if (const auto overlap = FindOverlap(lattices)) {
    const auto [a, b] = std::minmax(overlap->first, overlap->second);
    return MakeError(absl::StatusCode::kInvalidArgument, "OVERLAP",
                     paths[b] + " overlaps " + paths[a] + " in segment " + std::to_string(lattices[a].segment),
                     {{"field", paths[b]}, {"other", paths[a]}});
  }
  return absl::OkStatus();
}

}  // namespace spectrumkv
