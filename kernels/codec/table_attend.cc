// The attending half of TableBackend; arithmetic in attend_math.h.
#include <algorithm>
#include <cstring>

#include "kernels/codec/attend_math.h"
#include "kernels/codec/table_backend.h"
#include "kernels/codec/token_reader.h"

namespace spectrumkv {
namespace {

// Queries are taken in groups whose weights are not much more than this; a group smaller than kLeastGroup would spend
// its time on the keys.
constexpr size_t kWeightBytes = size_t{16} << 20;
constexpr uint32_t kLeastGroup = 24;

uint32_t GroupOf(uint32_t count, size_t blocks) {
  const size_t fits = kWeightBytes / (blocks * kAttendTokens * sizeof(float)) / kLeastGroup * kLeastGroup;
  return static_cast<uint32_t>(std::min<size_t>(count, std::max<size_t>(fits, kLeastGroup)));
}

// Cells of one head of a block of tokens, contiguous: where they lie, or gathered.
class KeyBlocks {
 public:
  KeyBlocks(const ChunkDims& dims, const SourcePlane& plane, uint32_t head, uint8_t* scratch)
      : dims_(dims), plane_(plane), head_(head), scratch_(scratch), word_(SizeOf(dims.dtype)) {}

  static size_t ScratchBytes(const ChunkDims& dims) { return size_t{kAttendTokens} * dims.head_dim * SizeOf(dims.dtype); }

  CellsIn At(uint32_t first) {
    const uint32_t count = std::min(kAttendTokens, dims_.tokens - first);
    const size_t cell_bytes = dims_.head_dim * word_;
    const bool strided = plane_.dim_stride_bytes != static_cast<int64_t>(word_);
    for (uint32_t t = 0; t < count; ++t) {
      const uint8_t* cell = plane_.rows[first + t] + head_ * plane_.head_stride_bytes;
      rows_[t] = cell;
      if (!strided) continue;
      rows_[t] = scratch_ + t * cell_bytes;
      GatherHead(cell, plane_.dim_stride_bytes, dims_.head_dim, word_, scratch_ + t * cell_bytes);
    }
    return CellsIn{rows_, count, 0, 0, 1, dims_.head_dim, dims_.dtype};
  }

 private:
  const ChunkDims& dims_;
  const SourcePlane& plane_;
  const uint32_t head_;
  uint8_t* const scratch_;
  const size_t word_;
  const uint8_t* rows_[kAttendTokens];
};

// Does any of the queries see any of a block's tokens?
bool AnySees(const AttendQueries& queries, uint32_t first, uint32_t tokens) {
  for (uint32_t q = 0; q < queries.count; ++q) {
    const SeenTokens seen = SeenOf(queries.positions[q], queries.window, first, tokens);
    if (seen.first < seen.last) return true;
  }
  return false;
}

// tops, sums: [blocks, count]. Replaces sums by factors.
void FactorsOf(uint32_t count, size_t blocks, const float* tops, float* sums) {
  for (uint32_t q = 0; q < count; ++q) {
    float top = kHiddenLogit, sum = 0.0f;
    for (size_t b = 0; b < blocks; ++b) top = std::max(top, tops[b * count + q]);
    for (size_t b = 0; b < blocks; ++b) {
      if (tops[b * count + q] == kHiddenLogit) continue;
      sum = __builtin_fmaf(sums[b * count + q], ExpOf(tops[b * count + q] - top), sum);
    }
    for (size_t b = 0; b < blocks; ++b) {
      float& factor = sums[b * count + q];
      factor = tops[b * count + q] == kHiddenLogit ? 0.0f : ExpOf(tops[b * count + q] - top) / sum;
    }
  }
}

}  // namespace

void TableBackend::Attend(const ChunkDims& dims, const SourcePlane& k, uint32_t head, const AttendQueries& queries,
                          Workspace* workspace, float* out) const {
  std::fill_n(out, dims.tokens, 0.0f);
  if (queries.count == 0 || dims.tokens == 0) return;
  const size_t blocks = (size_t{dims.tokens} + kAttendTokens - 1) / kAttendTokens;
  const uint32_t group = GroupOf(queries.count, blocks);
  const size_t panel_floats = size_t{kAttendTokens} * dims.head_dim, weight_floats = blocks * group * kAttendTokens;
  const size_t factor_floats = (blocks * group + 15) / 16 * 16;
  float* const panel = reinterpret_cast<float*>(workspace->Reserve(
      (panel_floats + weight_floats + 2 * factor_floats) * sizeof(float) + KeyBlocks::ScratchBytes(dims)));
  float* const weights = panel + panel_floats;
  float* const tops = weights + weight_floats;
  float* const sums = tops + factor_floats;
  KeyBlocks keys(dims, k, head, reinterpret_cast<uint8_t*>(sums + factor_floats));
  for (uint32_t q = 0; q < queries.count; q += group) {
    AttendQueries some = queries;
    some.values += size_t{q} * dims.head_dim;
    some.positions += q;
    some.count = std::min(group, queries.count - q);
    for (size_t b = 0; b < blocks; ++b) {
      const uint32_t first = static_cast<uint32_t>(b) * kAttendTokens;
      float* const top = tops + b * some.count;
      std::fill_n(top, some.count, kHiddenLogit);
      if (!AnySees(some, first, std::min(kAttendTokens, dims.tokens - first))) continue;
      ops_.attend(keys.At(first), first, some, panel, weights + b * some.count * kAttendTokens, top,
                  sums + b * some.count);
    }
    FactorsOf(some.count, blocks, tops, sums);
    for (size_t b = 0; b < blocks; ++b) {
      const uint32_t first = static_cast<uint32_t>(b) * kAttendTokens, last = std::min(kAttendTokens, dims.tokens - first);
      float scores[kAttendTokens] = {};
      std::copy_n(out + first, last, scores);
      ops_.fold(weights + b * some.count * kAttendTokens, sums + b * some.count, some.count, scores);
      std::copy_n(scores, last, out + first);
    }
  }
}

}  // namespace spectrumkv
