// What a KV cache looks like and where its bytes are. proto/spectrumkv/v1/schema.proto has the whole contract; names and
// meanings here are those of its messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "spectrumkv/status.h"

namespace spectrumkv {

enum class DataType { kFloat16 = 1, kBFloat16 = 2, kFloat32 = 3, kFloat8E4M3 = 4, kFloat8E5M2 = 5, kOpaqueBytes = 6 };

enum class GroupKind { kAttention = 1, kMla = 2, kSlidingWindow = 3, kOpaqueState = 4 };

// Memory that tensors lie in: a POSIX shared memory object (name as for shm_open), a file under the daemon's
// memory.shared_dir (name is its path there), or memory that the daemon allocates (no name; reached by Put and Get alone).
struct Segment {
  enum class Kind { kPosixShm, kFile, kDaemonOwned };
  Kind kind = Kind::kDaemonOwned;
  std::string name;
  uint64_t size_bytes = 0;
};

// Element (block, token, head, dim) lies at offset + block * block_stride + token * token_stride + head * head_stride +
// dim * dim_stride of its segment; all in bytes, strides positive.
struct Tensor {
  uint32_t segment = 0;  // index into Cache::segments
  uint64_t offset_bytes = 0;
  uint64_t block_stride_bytes = 0;
  uint64_t token_stride_bytes = 0;
  uint64_t head_stride_bytes = 0;
  uint64_t dim_stride_bytes = 0;
};

struct Layer {
  uint32_t layer = 0;  // index in the model
  Tensor k;
  std::optional<Tensor> v;  // absent for kMla
};

// Layers that share one geometry.
struct Group {
  GroupKind kind = GroupKind::kAttention;
  DataType data_type = DataType::kFloat16;
  uint32_t heads_total = 0;  // KV heads of the whole model; this worker holds head_first .. head_first + head_count - 1
  uint32_t head_first = 0;
  uint32_t head_count = 0;
  uint32_t head_dim = 0;
  uint32_t block_tokens = 0;
  uint64_t num_blocks = 0;
  uint32_t sliding_window_tokens = 0;
  std::vector<Layer> layers;
};

// One uint64 per block, odd while the block is being written.
struct Generations {
  uint32_t segment = 0;
  uint64_t offset_bytes = 0;
};

struct Cache {
  std::string model;
  std::string revision;
  uint32_t tensor_parallel_rank = 0;
  uint32_t tensor_parallel_size = 1;
  std::vector<Group> groups;
  std::vector<Segment> segments;
  std::optional<Generations> generations;
};

// The usual case: one geometry for all layers, in one segment, [layers, 2 (K, V), num_blocks, block_tokens, heads,
// head_dim] (NHD), or with heads and block_tokens exchanged (HND).
struct DenseLayout {
  std::string model;
  std::string revision;
  uint32_t layers = 0;
  uint32_t heads = 0;
  uint32_t head_dim = 0;
  uint32_t block_tokens = 16;
  uint64_t num_blocks = 0;
  DataType data_type = DataType::kFloat16;
  bool heads_first = false;  // HND
};

// Bytes of the whole cache; INVALID_ARGUMENT INVALID_SCHEMA where a size is 0 or the product too large.
SPECTRUMKV_EXPORT Result<uint64_t> BytesOf(const DenseLayout& layout);
// Offset of a token's first value: K (plane 0) or V (plane 1), head 0. REQUIRES: a valid layout, indices in range.
SPECTRUMKV_EXPORT uint64_t OffsetOf(const DenseLayout& layout, uint32_t layer, uint32_t plane, uint64_t block,
                                    uint32_t token_in_block);
// `segment` must hold BytesOf(layout) bytes. Errors as BytesOf.
SPECTRUMKV_EXPORT Result<Cache> DenseCache(const DenseLayout& layout, const Segment& segment);
// Memory of the daemon, of BytesOf(layout) bytes.
SPECTRUMKV_EXPORT Result<Cache> DaemonOwnedCache(const DenseLayout& layout);

// Blocks that `tokens` tokens need.
SPECTRUMKV_EXPORT uint64_t BlocksFor(uint64_t tokens, uint32_t block_tokens);

// A POSIX shared memory object that a daemon may map: mode 0660, the group of /dev/shm, every page populated. Owns the
// name and one mapping. Movable; the bytes are the caller's to guard.
class SPECTRUMKV_EXPORT SharedMemory {
 public:
  // "": a free name, and what dead processes of this user left is removed first. ALREADY_EXISTS for a name in use,
  // RESOURCE_EXHAUSTED where /dev/shm has no room. Bytes start as zeros.
  static Result<SharedMemory> Create(const std::string& name, size_t size_bytes);
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  // Unmaps, and removes the name. A daemon that has it mapped keeps the memory until it lets go of the pool.
  ~SharedMemory();

  uint8_t* data() const;
  size_t size_bytes() const;
  Segment segment() const;

 private:
  struct Impl;
  explicit SharedMemory(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;  // null once moved from
};

}  // namespace spectrumkv
