#include "spectrumkv/cache.h"

#include <utility>

#include "client/cpp/blocks.h"
#include "client/cpp/schema.h"
#include "client/cpp/shared_memory.h"
#include "client/sdk/convert.h"

namespace spectrumkv {
namespace {

client::DenseLayout ToClient(const DenseLayout& layout) {
  client::DenseLayout out;
  out.model = layout.model;
  out.revision = layout.revision;
  out.layers = layout.layers;
  out.heads = layout.heads;
  out.head_dim = layout.head_dim;
  out.block_tokens = layout.block_tokens;
  out.num_blocks = layout.num_blocks;
  out.data_type = static_cast<v1::DataType>(layout.data_type);
  out.heads_first = layout.heads_first;
  return out;
}

Tensor FromProto(const v1::TensorView& view) {
  return {view.segment(),           view.offset_bytes(),      view.block_stride_bytes(), view.token_stride_bytes(),
          view.head_stride_bytes(), view.dim_stride_bytes()};
}

}  // namespace

Result<uint64_t> BytesOf(const DenseLayout& layout) {
  const absl::StatusOr<uint64_t> bytes = client::BytesOf(ToClient(layout));
  if (!bytes.ok()) return FromAbsl(bytes.status());
  return *bytes;
}

uint64_t OffsetOf(const DenseLayout& layout, uint32_t layer, uint32_t plane, uint64_t block, uint32_t token_in_block) {
  return client::OffsetOf(ToClient(layout), layer, plane, block, token_in_block);
}

Result<Cache> DenseCache(const DenseLayout& layout, const Segment& segment) {
  const absl::StatusOr<v1::PoolSchema> schema = client::DenseSchema(ToClient(layout), {});
  if (!schema.ok()) return FromAbsl(schema.status());
  Group group;
  group.data_type = layout.data_type;
  group.heads_total = group.head_count = layout.heads;
  group.head_dim = layout.head_dim;
  group.block_tokens = layout.block_tokens;
  group.num_blocks = layout.num_blocks;
  for (const v1::LayerTensors& tensors : schema->groups(0).layers()) {
    group.layers.push_back({tensors.layer(), FromProto(tensors.k()), FromProto(tensors.v())});
  }
  Cache cache;
  cache.model = layout.model;
  cache.revision = layout.revision;
  cache.groups.push_back(std::move(group));
  cache.segments.push_back(segment);
  return cache;
}

Result<Cache> DaemonOwnedCache(const DenseLayout& layout) {
  const Result<uint64_t> bytes = BytesOf(layout);
  if (!bytes.ok()) return bytes.status();
  return DenseCache(layout, {Segment::Kind::kDaemonOwned, "", *bytes});
}

uint64_t BlocksFor(uint64_t tokens, uint32_t block_tokens) { return client::BlocksFor(tokens, block_tokens); }

struct SharedMemory::Impl {
  client::SharedMemory memory;
};

Result<SharedMemory> SharedMemory::Create(const std::string& name, size_t size_bytes) {
  absl::StatusOr<client::SharedMemory> memory = client::SharedMemory::Create(name, size_bytes);
  if (!memory.ok()) return FromAbsl(memory.status());
  return SharedMemory(std::unique_ptr<Impl>(new Impl{*std::move(memory)}));
}

SharedMemory::SharedMemory(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SharedMemory::SharedMemory(SharedMemory&&) noexcept = default;
SharedMemory& SharedMemory::operator=(SharedMemory&&) noexcept = default;
SharedMemory::~SharedMemory() = default;

uint8_t* SharedMemory::data() const { return impl_->memory.data(); }
size_t SharedMemory::size_bytes() const { return impl_->memory.size_bytes(); }
Segment SharedMemory::segment() const {
  return {Segment::Kind::kPosixShm, impl_->memory.name(), impl_->memory.size_bytes()};
}

}  // namespace spectrumkv
