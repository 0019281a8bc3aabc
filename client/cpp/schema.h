// Schemas of the usual layouts. Any other layout is a v1::PoolSchema written by hand: strides say it all.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "spectrumkv/v1/schema.pb.h"

namespace spectrumkv::client {

// A cache with one geometry for all layers, in one segment: [layers, 2 (K, V), num_blocks, block_tokens, heads,
// head_dim] (NHD), or with heads and block_tokens exchanged (HND).
struct DenseLayout {
  std::string model;
  std::string revision;
  uint32_t layers = 0;
  uint32_t heads = 0;
  uint32_t head_dim = 0;
  uint32_t block_tokens = 16;
  uint64_t num_blocks = 0;
  v1::DataType data_type = v1::DATA_TYPE_FLOAT16;
  bool heads_first = false;  // HND
};

// Bytes of one element; 0 for types that have none here.
uint64_t ElementBytes(v1::DataType type);

// Bytes of the whole cache, or INVALID_ARGUMENT (INVALID_SCHEMA) where a size is 0 or the product overflows.
absl::StatusOr<uint64_t> BytesOf(const DenseLayout& layout);

// Offset of element 0 of a token, K (plane 0) or V (plane 1), head 0. REQUIRES: a valid layout, indices in range.
uint64_t OffsetOf(const DenseLayout& layout, uint32_t layer, uint32_t plane, uint64_t block, uint32_t token_in_block);

// `segment` must hold BytesOf(layout) bytes: SharedMemory::ToProto(), or DaemonOwned below.
absl::StatusOr<v1::PoolSchema> DenseSchema(const DenseLayout& layout, const v1::MemorySegment& segment);

// Memory that the daemon allocates; reached by PutBlocks and GetBlocks alone.
v1::MemorySegment DaemonOwned(uint64_t size_bytes);

}  // namespace spectrumkv::client
