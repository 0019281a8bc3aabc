// A paged KV cache as engines lay it out, in one piece of memory: for the scalar backend as addresses of tokens, for
// the kernels as runs and strides.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "kernels/codec/backend.h"
#include "kernels/cuda/codec.h"

namespace spectrumkv::testing {

enum class PageOrder {
  kNhd,        // [token][head][dim] in a page
  kHnd,        // [head][token][dim]
  kDimStrided  // [head][dim][token]
};

struct PoolShape {
  PageOrder order = PageOrder::kNhd;
  bool fused = false;    // K and V of a page side by side; else all of K, then all of V
  bool shuffled = true;  // pages lie in random order
  uint32_t page_tokens = 16;
  uint32_t skip = 0;          // tokens of the first page before the chunk's first
  uint32_t pad_bytes = 0;     // after each head and each token
  uint32_t misalignment = 0;  // of the first page, from a multiple of 64
};

class PagedPool {
 public:
  // Holds dims.tokens tokens and the rest of the last page; every byte is `fill` at first. `seed` shuffles the pages.
  PagedPool(const ChunkDims& dims, DType dtype, const PoolShape& shape, uint8_t fill, uint64_t seed);

  SourcePlane source(int plane) const;
  TargetPlane target(int plane);
  // runs: [tokens of the pool] at first, then as many as there are.
  gpu::DevicePlane device(int plane, std::vector<gpu::TokenRun>* runs);

  uint8_t* At(int plane, uint32_t token, uint32_t head, uint32_t dim);
  void SetWord(int plane, uint32_t token, uint32_t head, uint32_t dim, uint32_t word);
  // Tokens up to the end of the last page.
  uint32_t page_end() const { return static_cast<uint32_t>(rows_[0].size()); }
  const std::vector<uint8_t>& memory() const { return memory_; }
  std::vector<uint8_t>& memory() { return memory_; }
  // Fills with what FillRandom (tests/differential/planes.h) makes.
  void FillRandomly(std::mt19937_64* rng);

 private:
  const ChunkDims dims_;
  const DType dtype_;
  std::vector<uint8_t> memory_;
  std::vector<uint8_t*> rows_[2];
  std::vector<const uint8_t*> const_rows_[2];
  int64_t token_stride_ = 0, head_stride_ = 0, dim_stride_ = 0;
};

}  // namespace spectrumkv::testing
