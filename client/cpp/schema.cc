#include "client/cpp/schema.h"

#include "client/cpp/status.h"

namespace spectrumkv::client {
namespace {

uint64_t BlockBytes(const DenseLayout& layout) {
  return uint64_t{layout.block_tokens} * layout.heads * layout.head_dim * ElementBytes(layout.data_type);
}

}  // namespace

uint64_t ElementBytes(v1::DataType type) {
  switch (type) {
    case v1::DATA_TYPE_FLOAT16:
    case v1::DATA_TYPE_BFLOAT16: return 2;
    case v1::DATA_TYPE_FLOAT32: return 4;
    case v1::DATA_TYPE_FLOAT8_E4M3:
    case v1::DATA_TYPE_FLOAT8_E5M2:
    case v1::DATA_TYPE_OPAQUE_BYTES: return 1;
    default: return 0;
  }
}

absl::StatusOr<uint64_t> BytesOf(const DenseLayout& layout) {
  unsigned __int128 bytes = 2;
  for (const uint64_t factor : {uint64_t{layout.layers}, layout.num_blocks, uint64_t{layout.block_tokens},
                                uint64_t{layout.heads}, uint64_t{layout.head_dim}, ElementBytes(layout.data_type)}) {
    bytes *= factor;
    if (bytes == 0 || bytes > uint64_t{1} << 62) {
      return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_SCHEMA",
                       "layers, blocks, block_tokens, heads, head_dim and data type must not be 0, nor their product "
                       "above 2^62");
    }
  }
  return static_cast<uint64_t>(bytes);
}

uint64_t OffsetOf(const DenseLayout& layout, uint32_t layer, uint32_t plane, uint64_t block, uint32_t token_in_block) {
  const uint64_t head_bytes = layout.head_dim * ElementBytes(layout.data_type);
  const uint64_t token_stride = layout.heads_first ? head_bytes : head_bytes * layout.heads;
  return ((uint64_t{layer} * 2 + plane) * layout.num_blocks + block) * BlockBytes(layout) +
         token_in_block * token_stride;
}

absl::StatusOr<v1::PoolSchema> DenseSchema(const DenseLayout& layout, const v1::MemorySegment& segment) {
  const absl::StatusOr<uint64_t> bytes = BytesOf(layout);
  if (!bytes.ok()) return bytes.status();
  const uint64_t element_bytes = ElementBytes(layout.data_type);
  const uint64_t head_bytes = layout.head_dim * element_bytes;
  v1::PoolSchema schema;
  schema.set_model(layout.model);
  schema.set_revision(layout.revision);
  schema.set_tensor_parallel_size(1);
  *schema.add_segments() = segment;
  v1::LayerGroup* group = schema.add_groups();
  group->set_kind(v1::GROUP_KIND_ATTENTION);
  group->set_data_type(layout.data_type);
  group->set_heads_total(layout.heads);
  group->set_head_count(layout.heads);
  group->set_head_dim(layout.head_dim);
  group->set_block_tokens(layout.block_tokens);
  group->set_num_blocks(layout.num_blocks);
  for (uint32_t layer = 0; layer < layout.layers; ++layer) {
    v1::LayerTensors* tensors = group->add_layers();
    tensors->set_layer(layer);
    for (uint32_t plane = 0; plane < 2; ++plane) {
      v1::TensorView* view = plane == 0 ? tensors->mutable_k() : tensors->mutable_v();
      view->set_offset_bytes(OffsetOf(layout, layer, plane, 0, 0));
      view->set_block_stride_bytes(BlockBytes(layout));
      view->set_token_stride_bytes(layout.heads_first ? head_bytes : head_bytes * layout.heads);
      view->set_head_stride_bytes(layout.heads_first ? head_bytes * layout.block_tokens : head_bytes);
      view->set_dim_stride_bytes(element_bytes);
    }
  }
  return schema;
}

v1::MemorySegment DaemonOwned(uint64_t size_bytes) {
  v1::MemorySegment segment;
  segment.mutable_daemon_owned()->set_size_bytes(size_bytes);
  return segment;
}

}  // namespace spectrumkv::client
