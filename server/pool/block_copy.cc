#include "server/pool/block_copy.h"

#include <cstring>

namespace spectrumkv {
namespace {

// Calls fn(strided, dense_offset, bytes) for every run of contiguous bytes of tokens [first, block_tokens).
template <typename Fn>
void ForEachRun(const TensorPlace& p, uint64_t block, uint32_t first_token, Fn fn) {
  const uint64_t head_bytes = uint64_t{p.head_dim} * p.element_bytes;
  const bool dense_dim = p.dim_stride == p.element_bytes;
  const bool dense_token = dense_dim && (p.heads == 1 || p.head_stride == head_bytes);
  uint64_t dense = 0;
  for (uint32_t t = first_token; t < p.block_tokens; ++t) {
    uint8_t* token = p.Block(block) + t * p.token_stride;
    if (dense_token) {
      fn(token, dense, head_bytes * p.heads);
      dense += head_bytes * p.heads;
      continue;
    }
    for (uint32_t h = 0; h < p.heads; ++h) {
      uint8_t* head = token + h * p.head_stride;
      if (dense_dim) {
        fn(head, dense, head_bytes);
        dense += head_bytes;
        continue;
      }
      for (uint32_t d = 0; d < p.head_dim; ++d, dense += p.element_bytes) {
        fn(head + d * p.dim_stride, dense, uint64_t{p.element_bytes});
      }
    }
  }
}

}  // namespace

void GatherBlock(const TensorPlace& place, uint64_t block, uint8_t* dense) {
  ForEachRun(place, block, 0,
             [dense](const uint8_t* strided, uint64_t at, uint64_t bytes) { std::memcpy(dense + at, strided, bytes); });
}

void ScatterBlock(const TensorPlace& place, uint64_t block, const uint8_t* dense) {
  ForEachRun(place, block, 0,
             [dense](uint8_t* strided, uint64_t at, uint64_t bytes) { std::memcpy(strided, dense + at, bytes); });
}

void ZeroTokens(const TensorPlace& place, uint64_t block, uint32_t first_token) {
  ForEachRun(place, block, first_token,
             [](uint8_t* strided, uint64_t, uint64_t bytes) { std::memset(strided, 0, bytes); });
}

}  // namespace spectrumkv
