// Strided blocks to and from dense memory.
#pragma once

#include <cstdint>

namespace spectrumkv {

// One tensor [num_blocks, block_tokens, heads, head_dim] in mapped memory. Borrows it.
struct TensorPlace {
  uint8_t* origin = nullptr;
  uint64_t block_stride = 0, token_stride = 0, head_stride = 0, dim_stride = 0;  // bytes
  uint32_t block_tokens = 0, heads = 0, head_dim = 0;
  uint32_t element_bytes = 0;
  uint32_t segment = 0;  // of the schema

  uint8_t* Block(uint64_t block) const { return origin + block * block_stride; }
  uint64_t DenseBytes() const { return uint64_t{block_tokens} * heads * head_dim * element_bytes; }
};

// dense: [block_tokens, heads, head_dim], DenseBytes().
void GatherBlock(const TensorPlace& place, uint64_t block, uint8_t* dense);
void ScatterBlock(const TensorPlace& place, uint64_t block, const uint8_t* dense);

// Zero-fills tokens [first_token, block_tokens) of the block, and no other byte.
void ZeroTokens(const TensorPlace& place, uint64_t block, uint32_t first_token);

}  // namespace spectrumkv
