// One plane of the source as cells whose values are contiguous. Internal to TableBackend.
#pragma once

#include <cstdint>

#include "kernels/codec/backend.h"
#include "kernels/codec/cell_ops.h"

namespace spectrumkv {

// Copies the values of one head to `to`, one after another. word_bytes is 2 or 4.
void GatherHead(const uint8_t* from, int64_t stride_bytes, uint32_t head_dim, size_t word_bytes, uint8_t* to);

class TokenReader {
 public:
  // `scratch`: bytes of one token, used where dims are strided. Keeps references to dims and plane.
  TokenReader(const ChunkDims& dims, const SourcePlane& plane, uint8_t* scratch)
      : dims_(dims), plane_(plane), scratch_(scratch), word_bytes_(static_cast<int64_t>(SizeOf(dims.dtype))) {}

  // Tokens that one call of Cells may ask for.
  uint32_t max_run() const { return strided() ? 1 : dims_.tokens; }

  // Good until the next call. REQUIRES: count <= max_run().
  CellsIn Cells(uint32_t first, uint32_t count) {
    if (!strided()) {
      return CellsIn{
          plane_.rows + first, count,      dims_.tokens - first - count, plane_.head_stride_bytes, dims_.heads,
          dims_.head_dim,      dims_.dtype};
    }
    const int64_t head_bytes = word_bytes_ * dims_.head_dim;
    for (uint32_t h = 0; h < dims_.heads; ++h) {
      GatherHead(plane_.rows[first] + h * plane_.head_stride_bytes, plane_.dim_stride_bytes, dims_.head_dim,
                 static_cast<size_t>(word_bytes_), scratch_ + h * head_bytes);
    }
    return CellsIn{&gathered_row_, 1, 0, head_bytes, dims_.heads, dims_.head_dim, dims_.dtype};
  }

 private:
  bool strided() const { return plane_.dim_stride_bytes != word_bytes_; }

  const ChunkDims& dims_;
  const SourcePlane& plane_;
  uint8_t* scratch_;
  const uint8_t* gathered_row_ = scratch_;
  int64_t word_bytes_;
};

}  // namespace spectrumkv
