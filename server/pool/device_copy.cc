#include "server/pool/device_copy.h"

#include <algorithm>

namespace spectrumkv {
namespace {

// Calls fn(strided, dense offset, width, rows) for as few rectangles as hold tokens [first, block_tokens): `strided` has
// its own pitch, dense rows follow each other.
template <typename Fn>
void ForEachRectangle(const TensorPlace& p, uint64_t block, uint32_t first_token, Fn fn) {
  const uint64_t head_bytes = uint64_t{p.head_dim} * p.element_bytes;
  const bool dense_dim = p.dim_stride == p.element_bytes;
  const uint32_t tokens = p.block_tokens - first_token;
  uint8_t* const begin = p.Block(block) + first_token * p.token_stride;
  // The pitch of a single row means nothing, and may be less than its width.
  const auto pitch = [](uint64_t stride, uint64_t width, uint64_t rows) { return rows == 1 ? width : stride; };
  if (dense_dim && (p.heads == 1 || p.head_stride == head_bytes)) {
    const uint64_t width = head_bytes * p.heads;
    return fn(gpu::Pitched{begin, pitch(p.token_stride, width, tokens)}, uint64_t{0}, width, uint64_t{tokens});
  }
  uint64_t dense = 0;
  for (uint32_t t = 0; t < tokens; ++t) {
    uint8_t* const token = begin + t * p.token_stride;
    if (dense_dim) {
      fn(gpu::Pitched{token, pitch(p.head_stride, head_bytes, p.heads)}, dense, head_bytes, uint64_t{p.heads});
      dense += head_bytes * p.heads;
      continue;
    }
    for (uint32_t h = 0; h < p.heads; ++h, dense += head_bytes) {
      fn(gpu::Pitched{token + h * p.head_stride, p.dim_stride}, dense, uint64_t{p.element_bytes}, uint64_t{p.head_dim});
    }
  }
}

}  // namespace

void QueueGather(const TensorPlace& place, uint64_t block, uint8_t* dense, DeviceLane* lane) {
  ForEachRectangle(place, block, 0, [&](gpu::Pitched strided, uint64_t at, uint64_t width, uint64_t rows) {
    lane->CopyRows({dense + at, width}, strided, width, rows);
  });
}

void QueueScatter(const TensorPlace& place, uint64_t block, uint8_t* dense, DeviceLane* lane) {
  ForEachRectangle(place, block, 0, [&](gpu::Pitched strided, uint64_t at, uint64_t width, uint64_t rows) {
    lane->CopyRows(strided, {dense + at, width}, width, rows);
  });
}

void QueueZero(const TensorPlace& place, uint64_t block, uint32_t first_token, DeviceLane* lane) {
  ForEachRectangle(place, block, first_token, [&](gpu::Pitched strided, uint64_t, uint64_t width, uint64_t rows) {
    lane->ZeroRows(strided, width, rows);
  });
}

}  // namespace spectrumkv
