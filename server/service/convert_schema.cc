#include <utility>

#include "server/service/check.h"
#include "server/service/convert.h"

namespace spectrumkv {
namespace {

absl::Status CheckName(const std::string& name, const std::string& field, size_t limit) {
  if (name.size() <= limit) return absl::OkStatus();
  return Invalid("INVALID_SCHEMA", field,
                 "has " + std::to_string(name.size()) + " characters, the limit is " + std::to_string(limit));
}

absl::StatusOr<SegmentSpec> SegmentFromProto(const v1::MemorySegment& proto, const std::string& field) {
  SegmentSpec segment;
  switch (proto.kind_case()) {
    case v1::MemorySegment::kPosixShm:
      segment.kind = SegmentSpec::Kind::kPosixShm;
      segment.name = proto.posix_shm().name();
      segment.size_bytes = proto.posix_shm().size_bytes();
      break;
    case v1::MemorySegment::kFile:
      segment.kind = SegmentSpec::Kind::kFile;
      segment.name = proto.file().path();
      segment.size_bytes = proto.file().size_bytes();
      break;
    case v1::MemorySegment::kDaemonOwned:
      if (proto.daemon_owned().device() != "host") segment.device = proto.daemon_owned().device();
      segment.kind = SegmentSpec::Kind::kDaemonOwned;
      segment.size_bytes = proto.daemon_owned().size_bytes();
      break;
    case v1::MemorySegment::kCudaIpc:
      if (proto.cuda_ipc().device_uuid().empty()) {
        return Invalid("INVALID_SCHEMA", field + ".cuda_ipc.device_uuid", "is not set");
      }
      segment.kind = SegmentSpec::Kind::kCudaIpc;
      segment.name = proto.cuda_ipc().handle();
      segment.device = proto.cuda_ipc().device_uuid();
      segment.offset_bytes = proto.cuda_ipc().offset_bytes();
      segment.size_bytes = proto.cuda_ipc().size_bytes();
      break;
    case v1::MemorySegment::KIND_NOT_SET: return Invalid("INVALID_SCHEMA", field + ".kind", "is not set");
  }
  for (const std::string* name : {&segment.name, &segment.device}) {
    if (absl::Status status = CheckName(*name, field, kMaxPathLength); !status.ok()) return status;
  }
  return segment;
}

TensorSchema TensorFromProto(const v1::TensorView& proto) {
  TensorSchema tensor;
  tensor.segment = proto.segment();
  tensor.offset_bytes = proto.offset_bytes();
  tensor.block_stride_bytes = proto.block_stride_bytes();
  tensor.token_stride_bytes = proto.token_stride_bytes();
  tensor.head_stride_bytes = proto.head_stride_bytes();
  tensor.dim_stride_bytes = proto.dim_stride_bytes();
  return tensor;
}

absl::StatusOr<DType> DTypeFromProto(v1::DataType type, const std::string& field) {
  switch (type) {
    case v1::DATA_TYPE_FLOAT16: return DType::kFloat16;
    case v1::DATA_TYPE_BFLOAT16: return DType::kBFloat16;
    case v1::DATA_TYPE_FLOAT32: return DType::kFloat32;
    case v1::DATA_TYPE_FLOAT8_E4M3:
    case v1::DATA_TYPE_FLOAT8_E5M2:
    case v1::DATA_TYPE_OPAQUE_BYTES:
      return Unsupported("UNSUPPORTED_DTYPE", field,
                         "is " + v1::DataType_Name(type) + "; this version takes FLOAT16, BFLOAT16 and FLOAT32");
    default: return Invalid("INVALID_SCHEMA", field, "is " + std::to_string(static_cast<int>(type)) + ", no data type");
  }
}

absl::StatusOr<GroupKind> KindFromProto(v1::GroupKind kind, const std::string& field) {
  switch (kind) {
    case v1::GROUP_KIND_ATTENTION: return GroupKind::kAttention;
    case v1::GROUP_KIND_MLA: return GroupKind::kMla;
    case v1::GROUP_KIND_SLIDING_WINDOW: return GroupKind::kSlidingWindow;
    case v1::GROUP_KIND_OPAQUE_STATE: return GroupKind::kOpaqueState;
    default:
      return Invalid("INVALID_SCHEMA", field, "is " + std::to_string(static_cast<int>(kind)) + ", no group kind");
  }
}

absl::StatusOr<GroupSchema> GroupFromProto(const v1::LayerGroup& proto, const std::string& field) {
  GroupSchema group;
  const auto kind = KindFromProto(proto.kind(), field + ".kind");
  if (!kind.ok()) return kind.status();
  const auto dtype = DTypeFromProto(proto.data_type(), field + ".data_type");
  if (!dtype.ok()) return dtype.status();
  group.kind = *kind;
  group.dtype = *dtype;
  group.heads_total = proto.heads_total();
  group.head_first = proto.head_first();
  group.head_count = proto.head_count();
  group.head_dim = proto.head_dim();
  group.block_tokens = proto.block_tokens();
  group.num_blocks = proto.num_blocks();
  group.sliding_window_tokens = proto.sliding_window_tokens();
  if (proto.layers_size() > kMaxLayers) {
    return Invalid("OUT_OF_RANGE", field + ".layers",
                   "are " + std::to_string(proto.layers_size()) + ", the limit is " + std::to_string(kMaxLayers));
  }
  for (int i = 0; i < proto.layers_size(); ++i) {
    const v1::LayerTensors& from = proto.layers(i);
    const std::string layer_field = field + ".layers[" + std::to_string(i) + "]";
    if (!from.has_k()) return Invalid("INVALID_SCHEMA", layer_field + ".k", "is not set");
    if (from.has_v() != HasKv(group.kind)) {
      return Invalid("INVALID_SCHEMA", layer_field + ".v",
                     from.has_v() ? "is set; " + v1::GroupKind_Name(proto.kind()) + " has one tensor, k" : "is not set");
    }
    LayerSchema layer;
    layer.layer = from.layer();
    layer.k = TensorFromProto(from.k());
    if (from.has_v()) layer.v = TensorFromProto(from.v());
    group.layers.push_back(layer);
  }
  return group;
}

}  // namespace

absl::StatusOr<PoolSchema> SchemaFromProto(const v1::PoolSchema& proto) {
  PoolSchema schema;
  for (const auto& [name, field] :
       {std::pair(&proto.model(), "schema.model"), std::pair(&proto.revision(), "schema.revision")}) {
    const absl::Status status = CheckName(*name, field, kMaxNameLength);
    if (!status.ok()) return status;
  }
  if (proto.groups_size() < 1 || proto.groups_size() > kMaxGroups) {
    return Invalid("OUT_OF_RANGE", "schema.groups",
                   "are " + std::to_string(proto.groups_size()) + ", allowed are 1 to " + std::to_string(kMaxGroups));
  }
  if (proto.segments_size() < 1 || proto.segments_size() > kMaxSegments) {
    return Invalid(
        "OUT_OF_RANGE", "schema.segments",
        "are " + std::to_string(proto.segments_size()) + ", allowed are 1 to " + std::to_string(kMaxSegments));
  }
  schema.model = proto.model();
  schema.revision = proto.revision();
  schema.tensor_parallel_rank = proto.tensor_parallel_rank();
  // A worker that says nothing about its world is alone in it.
  schema.tensor_parallel_size = proto.tensor_parallel_size() == 0 ? 1 : proto.tensor_parallel_size();
  if (schema.tensor_parallel_rank >= schema.tensor_parallel_size) {
    return Invalid("INVALID_SCHEMA", "schema.tensor_parallel_rank",
                   "is " + std::to_string(schema.tensor_parallel_rank) + ", not below tensor_parallel_size " +
                       std::to_string(schema.tensor_parallel_size));
  }
  for (int i = 0; i < proto.groups_size(); ++i) {
    auto group = GroupFromProto(proto.groups(i), "schema.groups[" + std::to_string(i) + "]");
    if (!group.ok()) return group.status();
    schema.groups.push_back(*std::move(group));
  }
  for (int i = 0; i < proto.segments_size(); ++i) {
    auto segment = SegmentFromProto(proto.segments(i), "schema.segments[" + std::to_string(i) + "]");
    if (!segment.ok()) return segment.status();
    schema.segments.push_back(*std::move(segment));
  }
  if (proto.has_generations()) {
    schema.generations = PoolSchema::Generations{proto.generations().segment(), proto.generations().offset_bytes()};
  }
  return schema;
}

}  // namespace spectrumkv
