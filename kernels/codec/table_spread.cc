// The sampling half of TableBackend's scans: what scan_math.h calls spread.
#include <algorithm>
#include <cstring>

#include "kernels/codec/escapes.h"
#include "kernels/codec/scan_math.h"
#include "kernels/codec/table_backend.h"
#include "kernels/codec/token_reader.h"

namespace spectrumkv {
namespace {

// The sampled words of the tokens of a run: where they lie if pieces are equally far apart, else packed:
// [tokens, sample.heads, sample.dims].
class SampledRun {
 public:
  SampledRun(const ChunkDims& dims, const SourcePlane& plane, const SpreadSample& sample, uint8_t* words)
      : dims_(dims),
        plane_(plane),
        sample_(sample),
        piece_bytes_(sample_.dims * SizeOf(dims.dtype)),
        words_(words) {}

  // The tokens that Cells counts from now on.
  void Take(uint32_t first, uint32_t count) {
    first_ = first;
    if (!Apart()) Gather(first, count);
  }

  CellsIn Cells(uint32_t first, uint32_t count) const {
    if (!Apart()) {
      return CellsIn{rows_ + first, count,        0,          static_cast<int64_t>(piece_bytes_),
                     sample_.heads, sample_.dims, dims_.dtype};
    }
    const int64_t step = sample_.head_step * plane_.head_stride_bytes + static_cast<int64_t>(piece_bytes_);
    const uint32_t at = first_ + first;
    return CellsIn{plane_.rows + at, count,        dims_.tokens - at - count, step,
                   sample_.heads,    sample_.dims, dims_.dtype};
  }

  size_t token_bytes() const { return sample_.heads * piece_bytes_; }
  size_t values() const { return size_t{sample_.heads} * sample_.dims; }

 private:
  static constexpr uint32_t kAhead = 16;  // tokens

  bool Apart() const { return !strided() && sample_.heads <= dims_.head_dim / sample_.dims; }

  void Gather(uint32_t first, uint32_t count) {
    for (uint32_t t = 0; t < count; ++t) {
      if (first + t + kAhead < dims_.tokens) Prefetch(plane_.rows[first + t + kAhead]);
      uint8_t* to = words_ + t * token_bytes();
      rows_[t] = to;
      if (strided()) {
        GatherStrided(plane_.rows[first + t], to);
      } else if (piece_bytes_ == 64) {
        GatherPieces<64>(plane_.rows[first + t], to);
      } else {
        GatherPieces<0>(plane_.rows[first + t], to);
      }
    }
  }

  bool strided() const { return plane_.dim_stride_bytes != static_cast<int64_t>(SizeOf(dims_.dtype)); }

  // Pieces lie too far apart for the hardware to see where they go.
  void Prefetch(const uint8_t* row) const {
    const uint32_t places = dims_.head_dim / sample_.dims;
    const int64_t piece = static_cast<int64_t>(sample_.dims) * plane_.dim_stride_bytes;
    uint32_t place = 0;
    for (uint32_t i = 0; i < sample_.heads; ++i, row += sample_.head_step * plane_.head_stride_bytes) {
      __builtin_prefetch(row + place * piece, 0, 2);
      if (++place == places) place = 0;
    }
  }

  template <size_t kBytes>
  void GatherPieces(const uint8_t* row, uint8_t* to) const {
    const size_t bytes = kBytes == 0 ? piece_bytes_ : kBytes;
    const uint32_t places = dims_.head_dim / sample_.dims;
    uint32_t place = 0;
    for (uint32_t i = 0; i < sample_.heads; ++i, to += bytes) {
      std::memcpy(to, row + place * bytes, bytes);
      row += sample_.head_step * plane_.head_stride_bytes;
      if (++place == places) place = 0;
    }
  }

  void GatherStrided(const uint8_t* row, uint8_t* to) const {
    const uint32_t places = dims_.head_dim / sample_.dims;
    for (uint32_t i = 0; i < sample_.heads; ++i, to += piece_bytes_) {
      const uint8_t* from = row + i * sample_.head_step * plane_.head_stride_bytes +
                            (i % places) * sample_.dims * plane_.dim_stride_bytes;
      GatherHead(from, plane_.dim_stride_bytes, sample_.dims, SizeOf(dims_.dtype), to);
    }
  }

  const ChunkDims& dims_;
  const SourcePlane& plane_;
  const SpreadSample sample_;
  const size_t piece_bytes_;
  uint8_t* const words_;
  uint32_t first_ = 0;
  const uint8_t* rows_[kSpreadTokens];
};

// Means of tokens [skip, count) of the run, those with large values left out.
void MeansOf(const CellOps& ops, const SampledRun& run, const EscapeLimits& limits, uint32_t skip, uint32_t count,
             float* means) {
  const size_t values = run.values();
  std::fill_n(means, values, 0.0f);
  if (skip >= count) return;
  uint32_t used = count - skip;
  if (ops.accumulate(run.Cells(skip, used), means) >= limits.above_rotated) {
    std::fill_n(means, values, 0.0f);
    used = 0;
    for (uint32_t t = skip; t < count; ++t) {
      if (ops.magnitude(run.Cells(t, 1)) >= limits.above_rotated) continue;
      ops.accumulate(run.Cells(t, 1), means);
      ++used;
    }
  }
  for (size_t i = 0; used != 0 && i < values; ++i) means[i] /= static_cast<float>(used);
}

}  // namespace

void TableBackend::Spread(const ChunkDims& dims, const SourcePlane& plane, bool centred, uint32_t skip,
                          Workspace* workspace, uint8_t* out) const {
  const EscapeLimits limits = EscapeLimitsOf(dims.dtype);
  const SpreadSample sample = SpreadSampleOf(dims.heads, dims.head_dim, centred);
  const size_t values = size_t{sample.heads} * sample.dims;
  uint8_t* const memory = workspace->Reserve(values * (sizeof(float) + kSpreadTokens * SizeOf(dims.dtype)));
  float* const means = reinterpret_cast<float*>(memory);
  SampledRun run(dims, plane, sample, memory + values * sizeof(float));
  float sums[kSpreadTokens];
  for (uint32_t first = 0; first < dims.tokens; first += kSpreadTokens) {
    const uint32_t count = std::min(kSpreadTokens, dims.tokens - first);
    run.Take(first, count);
    if (centred) MeansOf(ops_, run, limits, skip > first ? skip - first : 0, count, means);
    ops_.spread(run.Cells(0, count), centred ? means : nullptr, sums);
    for (uint32_t t = 0; t < count; ++t) out[first + t] = EnergyLog2(sums[t]);
  }
}

}  // namespace spectrumkv
