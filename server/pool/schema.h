// A pool's schema as plain data; meaning and limits as in proto/spectrumkv/v1/schema.proto.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/format/types.h"

namespace spectrumkv {

enum class GroupKind { kAttention, kMla, kSlidingWindow, kOpaqueState };
// K and V, which lossy tiers may code; the other kinds have one tensor, which travels as it is.
constexpr bool HasKv(GroupKind kind) { return kind == GroupKind::kAttention || kind == GroupKind::kSlidingWindow; }

struct SegmentSpec {
  enum class Kind { kPosixShm, kFile, kDaemonOwned, kCudaIpc } kind = Kind::kDaemonOwned;
  std::string name;  // shm name or path relative to memory.shared_dir; of kCudaIpc the handle, 64 bytes of any value
  uint64_t size_bytes = 0;
  std::string device;         // uuid of the GPU it is on; "": host memory
  uint64_t offset_bytes = 0;  // kCudaIpc: from the beginning of the allocation
  friend bool operator==(const SegmentSpec&, const SegmentSpec&) = default;
};

// Element (b, t, h, d) of [num_blocks, block_tokens, heads, head_dim] is at
// offset + b * block_stride + t * token_stride + h * head_stride + d * dim_stride of the segment.
struct TensorSchema {
  uint32_t segment = 0;
  uint64_t offset_bytes = 0;
  uint64_t block_stride_bytes = 0;
  uint64_t token_stride_bytes = 0;
  uint64_t head_stride_bytes = 0;
  uint64_t dim_stride_bytes = 0;
  friend bool operator==(const TensorSchema&, const TensorSchema&) = default;
};

struct LayerSchema {
  uint32_t layer = 0;
  TensorSchema k;
  std::optional<TensorSchema> v;
  friend bool operator==(const LayerSchema&, const LayerSchema&) = default;
};

struct GroupSchema {
  GroupKind kind = GroupKind::kAttention;
  DType dtype = DType::kFloat16;
  uint32_t heads_total = 0;
  uint32_t head_first = 0;
  uint32_t head_count = 0;
  uint32_t head_dim = 0;
  uint32_t block_tokens = 0;
  uint64_t num_blocks = 0;
  uint32_t sliding_window_tokens = 0;
  std::vector<LayerSchema> layers;
  friend bool operator==(const GroupSchema&, const GroupSchema&) = default;
};

struct PoolSchema {
  std::string model;
  std::string revision;
  uint32_t tensor_parallel_rank = 0;
  uint32_t tensor_parallel_size = 1;
  std::vector<GroupSchema> groups;
  std::vector<SegmentSpec> segments;
  struct Generations {
    uint32_t segment = 0;
    uint64_t offset_bytes = 0;
    friend bool operator==(const Generations&, const Generations&) = default;
  };
  std::optional<Generations> generations;
  friend bool operator==(const PoolSchema&, const PoolSchema&) = default;
};

// Most of each that a schema may have; messages name them.
namespace schema_limits {
constexpr uint64_t kSegments = 4096;
constexpr uint64_t kGroups = 64;
constexpr uint64_t kLayers = 4096;       // over all groups
constexpr uint64_t kLayerIndex = 65535;  // 16 bits on the wire
constexpr uint64_t kHeads = 1024;
constexpr uint64_t kHeadDim = 1024;
constexpr uint64_t kBlockTokens = 256;
constexpr uint64_t kNumBlocks = uint64_t{1} << 31;
constexpr uint64_t kSegmentBytes = uint64_t{1} << 46;
constexpr uint64_t kNameBytes = 1024;
constexpr uint64_t kTensorParallel = 65536;
}  // namespace schema_limits

// Everything that can be checked without the memory: counts and sizes in range, offsets and strides multiples of the
// element size, every element inside its segment (overflow-safe), elements of one tensor not overlapping each other,
// tensors not overlapping each other or the generation table (method and its limits: overlap.h), layers unique, a chunk
// of one token fits max_chunk_bytes (0: no such limit), all tensors in host memory or on one GPU, generations in host
// memory. InvalidArgument with reasons INVALID_SCHEMA, OUT_OF_RANGE,
// OVERLAP, CHUNK_TOO_LARGE; the message names the path (groups[0].layers[3].k.token_stride_bytes), the value and the
// limit, the metadata has them as field, value, limit.
absl::Status CheckSchema(const PoolSchema& schema, uint64_t max_chunk_bytes);

}  // namespace spectrumkv
