#include "tests/cuda/paged_pool.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "tests/differential/planes.h"

namespace spectrumkv::testing {

PagedPool::PagedPool(const ChunkDims& dims, DType dtype, const PoolShape& shape, uint8_t fill, uint64_t seed)
    : dims_(dims), dtype_(dtype) {
  const int64_t word = static_cast<int64_t>(SizeOf(dtype)), heads = dims.heads, dim = dims.head_dim;
  const int64_t page_tokens = shape.page_tokens, pad = shape.pad_bytes;
  int64_t plane_page = 0;  // bytes of one plane of one page
  switch (shape.order) {
    case PageOrder::kNhd:
      dim_stride_ = word, head_stride_ = dim * word + pad, token_stride_ = heads * head_stride_ + pad;
      plane_page = page_tokens * token_stride_;
      break;
    case PageOrder::kHnd:
      dim_stride_ = word, token_stride_ = dim * word + pad, head_stride_ = page_tokens * token_stride_ + pad;
      plane_page = heads * head_stride_;
      break;
    case PageOrder::kDimStrided:
      token_stride_ = word, dim_stride_ = page_tokens * word, head_stride_ = dim * dim_stride_ + pad;
      plane_page = heads * head_stride_;
      break;
  }
  const uint32_t pages = (shape.skip + dims.tokens + shape.page_tokens - 1) / shape.page_tokens;
  const int64_t planes = dims.has_v ? 2 : 1;
  memory_.assign(static_cast<size_t>(pages * planes * plane_page + 64) + shape.misalignment, fill);
  const size_t start = reinterpret_cast<uintptr_t>(memory_.data());
  uint8_t* first = memory_.data() + (64 - start % 64) % 64 + shape.misalignment;
  std::vector<uint32_t> table(pages);
  std::iota(table.begin(), table.end(), 0);
  std::mt19937_64 rng(seed);
  if (shape.shuffled) std::shuffle(table.begin(), table.end(), rng);
  for (int p = 0; p < planes; ++p) {
    for (uint32_t at = shape.skip; at < pages * shape.page_tokens; ++at) {
      const int64_t page = table[at / shape.page_tokens];
      const int64_t place = shape.fused ? page * planes + p : p * pages + page;
      rows_[p].push_back(first + place * plane_page + at % shape.page_tokens * token_stride_);
    }
    const_rows_[p].assign(rows_[p].begin(), rows_[p].end());
  }
}

SourcePlane PagedPool::source(int plane) const {
  return SourcePlane{const_rows_[plane].data(), head_stride_, dim_stride_};
}

TargetPlane PagedPool::target(int plane) { return TargetPlane{rows_[plane].data(), head_stride_, dim_stride_}; }

gpu::DevicePlane PagedPool::device(int plane, std::vector<gpu::TokenRun>* runs) {
  const auto& rows = const_rows_[plane];
  runs->resize(rows.size());
  runs->resize(gpu::RunsOf(rows.data(), page_end(), memory_.data(), token_stride_, runs->data()));
  runs->shrink_to_fit();
  return gpu::DevicePlane{memory_.data(), runs->data(), static_cast<uint32_t>(runs->size()),
                          token_stride_,  head_stride_, dim_stride_};
}

uint8_t* PagedPool::At(int plane, uint32_t token, uint32_t head, uint32_t dim) {
  return rows_[plane][token] + head * head_stride_ + dim * dim_stride_;
}

void PagedPool::SetWord(int plane, uint32_t token, uint32_t head, uint32_t dim, uint32_t word) {
  std::memcpy(At(plane, token, head, dim), &word, SizeOf(dtype_));
}

void PagedPool::FillRandomly(std::mt19937_64* rng) {
  for (int p = 0; p < (dims_.has_v ? 2 : 1); ++p) {
    Plane plane(dims_, dtype_, Layout::kTokenMajor, 0, 0);
    FillRandom(&plane, dims_, rng);
    for (uint32_t t = 0; t < dims_.tokens; ++t) {
      for (uint32_t h = 0; h < dims_.heads; ++h) {
        for (uint32_t d = 0; d < dims_.head_dim; ++d) SetWord(p, t, h, d, plane.GetWord(t, h, d));
      }
    }
  }
}

}  // namespace spectrumkv::testing
