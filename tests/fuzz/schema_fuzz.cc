// CheckSchema over any bytes: never crashes, and what it accepts has every element inside its segment.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "server/base/status.h"
#include "server/pool/schema.h"

namespace spectrumkv {
namespace {

// Zeros after the end. Values are mostly small, sometimes any: a small one is one byte.
class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  uint8_t Byte() {
    if (size_ == 0) return 0;
    --size_;
    return *data_++;
  }
  uint64_t Value() {
    const uint8_t kind = Byte();
    if (kind < 128) return uint64_t{Byte()} << (kind % 16);
    uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value = value << 8 | Byte();
    return value;
  }
  uint32_t Value32() { return static_cast<uint32_t>(Value()); }

 private:
  const uint8_t* data_;
  size_t size_;
};

TensorSchema ReadTensor(Bytes* in) {
  TensorSchema t;
  t.segment = in->Byte() % 3;
  t.offset_bytes = in->Value();
  t.block_stride_bytes = in->Value();
  t.token_stride_bytes = in->Value();
  t.head_stride_bytes = in->Value();
  t.dim_stride_bytes = in->Value();
  return t;
}

GroupSchema ReadGroup(Bytes* in) {
  GroupSchema g;
  g.kind = static_cast<GroupKind>(in->Byte() % 4);
  g.dtype = static_cast<DType>(in->Byte() % 5);
  g.heads_total = in->Value32();
  g.head_first = in->Value32();
  g.head_count = in->Value32();
  g.head_dim = in->Value32();
  g.block_tokens = in->Value32();
  g.num_blocks = in->Value();
  g.sliding_window_tokens = in->Byte();
  for (int layers = in->Byte() % 6; layers > 0; --layers) {
    LayerSchema layer;
    layer.layer = in->Value32();
    layer.k = ReadTensor(in);
    if (in->Byte() % 4 != 0) layer.v = ReadTensor(in);
    g.layers.push_back(layer);
  }
  return g;
}

PoolSchema ReadSchema(Bytes* in) {
  PoolSchema schema;
  schema.tensor_parallel_size = in->Value32();
  schema.tensor_parallel_rank = in->Value32();
  for (int n = in->Byte() % 3; n >= 0; --n) {
    SegmentSpec segment;
    segment.kind = static_cast<SegmentSpec::Kind>(in->Byte() % 3);
    segment.name = std::string(in->Byte() % 3, 'x');
    segment.size_bytes = in->Value();
    schema.segments.push_back(segment);
  }
  for (int n = in->Byte() % 3; n >= 0; --n) schema.groups.push_back(ReadGroup(in));
  if (in->Byte() % 2 != 0) schema.generations = PoolSchema::Generations{in->Byte() % 3u, in->Value()};
  return schema;
}

void Require(bool good) {
  if (!good) std::abort();
}

void CheckLastByte(const PoolSchema& schema, const GroupSchema& g, const TensorSchema& t) {
  using Wide = unsigned __int128;
  const Wide last = Wide{t.offset_bytes} + Wide{t.block_stride_bytes} * (g.num_blocks - 1) +
                    Wide{t.token_stride_bytes} * (g.block_tokens - 1) + Wide{t.head_stride_bytes} * (g.head_count - 1) +
                    Wide{t.dim_stride_bytes} * (g.head_dim - 1) + SizeOf(g.dtype) - 1;
  Require(t.segment < schema.segments.size() && last < schema.segments[t.segment].size_bytes);
}

}  // namespace
}  // namespace spectrumkv

// 1: the schema was accepted.
int CheckOneSchema(const uint8_t* data, size_t size) {
  using namespace spectrumkv;
  Bytes in(data, size);
  const PoolSchema schema = ReadSchema(&in);
  const absl::Status status = CheckSchema(schema, 2 << 20);
  Require(CheckSchema(schema, 2 << 20) == status);
  if (!status.ok()) {
    Require(status.code() == absl::StatusCode::kInvalidArgument);
    const std::string reason = ReasonOf(status);
    Require(reason == "INVALID_SCHEMA" || reason == "OUT_OF_RANGE" || reason == "OVERLAP" ||
            reason == "CHUNK_TOO_LARGE");
    return 0;
  }
  for (const GroupSchema& group : schema.groups) {
    for (const LayerSchema& layer : group.layers) {
      CheckLastByte(schema, group, layer.k);
      if (layer.v) CheckLastByte(schema, group, *layer.v);
    }
  }
  return 1;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  CheckOneSchema(data, size);
  return 0;
}
