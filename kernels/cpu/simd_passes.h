// Magnitudes, energies and sums of the cells of one token.
// See simd_bytes.h for why all is in an unnamed namespace.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/codec/scan_math.h"
#include "kernels/cpu/simd_groups.h"

namespace spectrumkv {
namespace {

// The largest magnitude words seen, lane by lane: of 16-bit words or, for float32, of 32-bit ones.
template <DType kType>
struct MagnitudeLanes {
  __m256i a = _mm256_setzero_si256(), b = a;

  static __m256i Max(__m256i x, __m256i y) {
    return kType == DType::kFloat32 ? _mm256_max_epu32(x, y) : _mm256_max_epu16(x, y);
  }
  static __m256i Load(const uint8_t* from) {
    const __m256i mask = kType == DType::kFloat32 ? _mm256_set1_epi32(0x7FFFFFFF) : _mm256_set1_epi16(0x7FFF);
    return _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), mask);
  }

  // REQUIRES: count is a multiple of 16.
  SPECTRUMKV_SIMD_INLINE void Add(const uint8_t* from, uint32_t count) {
    const uint8_t* const end = from + count * WordBytes(kType);
    for (; from + 128 <= end; from += 128) {
      a = Max(a, Max(Load(from), Load(from + 32)));
      b = Max(b, Max(Load(from + 64), Load(from + 96)));
    }
    for (; from < end; from += 32) a = Max(a, Load(from));
  }

  __m128i Half() const {
    const __m256i m = Max(a, b);
    const __m128i low = _mm256_castsi256_si128(m), high = _mm256_extracti128_si256(m, 1);
    return kType == DType::kFloat32 ? _mm_max_epu32(low, high) : _mm_max_epu16(low, high);
  }

  uint32_t Largest() const {
    __m128i m = Half();
    if constexpr (kType == DType::kFloat32) {
      m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4E));
      m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xB1));
      return static_cast<uint32_t>(_mm_cvtsi128_si32(m));
    }
    // The horizontal minimum is one instruction; of the complement it is the maximum.
    const __m128i least = _mm_minpos_epu16(_mm_xor_si128(m, _mm_set1_epi16(-1)));
    return ~static_cast<uint32_t>(_mm_cvtsi128_si32(least)) & 0xFFFF;
  }
};

// Calls each(from, head) for all cells.
template <typename Each>
SPECTRUMKV_SIMD_INLINE void ForEachCell(const CellsIn& cells, const Each& each) {
  for (uint32_t t = 0; t < cells.tokens; ++t) {
    const uint8_t* from = cells.rows[t];
    for (uint32_t h = 0; h < cells.heads; ++h, from += cells.head_stride_bytes) each(from, h);
  }
}

template <DType kType>
uint32_t CellsMagnitude(const CellsIn& cells) {
  MagnitudeLanes<kType> lanes;
  ForEachCell(cells, [&](const uint8_t* from, uint32_t) { lanes.Add(from, cells.head_dim); });
  return lanes.Largest();
}

template <DType kType>
uint32_t CopyCells(const CellsIn& cells, uint8_t* words) {
  MagnitudeLanes<kType> lanes;
  const uint32_t cell_bytes = cells.head_dim * WordBytes(kType);
  ForEachCell(cells, [&](const uint8_t* from, uint32_t) {
    lanes.Add(from, cells.head_dim);
    for (uint32_t i = 0; i < cell_bytes; i += 32) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + i), bytes);
    }
    words += cell_bytes;
  });
  return lanes.Largest();
}

// Whole cache lines go past the caches, which saves reading them before they are overwritten. Short runs are not worth
// the fence.
inline void StreamBytes(uint8_t* to, const uint8_t* from, size_t bytes) {
  constexpr size_t kWorthAFence = 2048;
  if (bytes < kWorthAFence) {
    __builtin_memcpy(to, from, bytes);
    return;
  }
  const size_t to_line = (64 - reinterpret_cast<uintptr_t>(to) % 64) % 64;
  const size_t head = to_line < bytes ? to_line : bytes;
  __builtin_memcpy(to, from, head);
  size_t at = head;
  for (; at + 64 <= bytes; at += 64) {
    const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at));
    const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at), first);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at + 32), second);
  }
  __builtin_memcpy(to + at, from + at, bytes - at);
  _mm_sfence();
}

// Lanes 4, 2 and 1 apart, as FoldEnergy does.
inline float SumLanes(__m256 x) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// The fold of one token's lanes.
template <typename V>
SPECTRUMKV_SIMD_INLINE float FoldLanes(typename V::F* acc) {
  constexpr int kAccs = static_cast<int>(kEnergyLanes) / V::kLanes;
#pragma GCC unroll 4
  for (int width = kAccs / 2; width != 0; width /= 2) {
#pragma GCC unroll 4
    for (int i = 0; i < width; ++i) acc[i] = V::Add(acc[i], acc[i + width]);
  }
  return SumLanes(V::HalfSum(acc[0]));
}

template <typename V, DType kType>
uint32_t CellsEnergy(const CellsIn& cells, float* lanes, float* sum) {
  constexpr int kAccs = static_cast<int>(kEnergyLanes) / V::kLanes;
  MagnitudeLanes<kType> magnitudes;
  typename V::F acc[kAccs];
#pragma GCC unroll 8
  for (int i = 0; i < kAccs; ++i) acc[i] = lanes == nullptr ? V::Zero() : V::Load(lanes + i * V::kLanes);
  ForEachCell(cells, [&](const uint8_t* from, uint32_t) {
    magnitudes.Add(from, cells.head_dim);
    for (uint32_t d = 0; d < cells.head_dim; d += kEnergyLanes) {
#pragma GCC unroll 8
      for (int i = 0; i < kAccs; ++i) {
        const uint32_t at = d + static_cast<uint32_t>(i * V::kLanes);
        if (at >= cells.head_dim) break;
        const typename V::F x = LoadValues<V, kType>(from + at * WordBytes(kType));
        acc[i] = V::Add(acc[i], V::Mul(x, x));
      }
    }
  });
#pragma GCC unroll 8
  for (int i = 0; lanes != nullptr && i < kAccs; ++i) V::Store(lanes + i * V::kLanes, acc[i]);
  *sum = FoldLanes<V>(acc);
  return magnitudes.Largest();
}

template <typename V, DType kType, bool kCentred>
void CellsSpread(const CellsIn& cells, const float* means, float* sums) {
  constexpr int kAccs = static_cast<int>(kEnergyLanes) / V::kLanes;
  for (uint32_t t = 0; t < cells.tokens; ++t) {
    typename V::F acc[kAccs];
#pragma GCC unroll 8
    for (int i = 0; i < kAccs; ++i) acc[i] = V::Zero();
    const uint8_t* from = cells.rows[t];
    const float* mean = means;
    for (uint32_t h = 0; h < cells.heads; ++h, from += cells.head_stride_bytes, mean += kCentred ? cells.head_dim : 0) {
      for (uint32_t d = 0; d < cells.head_dim; d += kEnergyLanes) {
#pragma GCC unroll 8
        for (int i = 0; i < kAccs; ++i) {
          const uint32_t at = d + static_cast<uint32_t>(i * V::kLanes);
          if (at >= cells.head_dim) break;
          typename V::F x = LoadValues<V, kType>(from + at * WordBytes(kType));
          if constexpr (kCentred) x = V::Sub(x, V::Load(mean + at));
          acc[i] = V::Add(acc[i], V::Mul(x, x));
        }
      }
    }
    sums[t] = FoldLanes<V>(acc);
  }
}

// Pieces of this many values are what Backend::Spread samples mostly: they have loops of their own.
constexpr uint32_t kSamplePiece = 32;

// Asks for piece `h` of the token some way ahead of `t`: pieces lie too far apart for the hardware to see where they go.
SPECTRUMKV_SIMD_INLINE void PrefetchPiece(const CellsIn& cells, uint32_t t, uint32_t h) {
  constexpr uint32_t kAhead = 16;  // tokens
  if (t + kAhead >= cells.tokens + cells.ahead) return;
  const uint8_t* piece = cells.rows[t + kAhead] + h * cells.head_stride_bytes;
  _mm_prefetch(reinterpret_cast<const char*>(piece), _MM_HINT_T1);
}

// CellsSpread where head_dim is kSamplePiece: the accumulators beyond it stay +0, which adds nothing to the fold.
template <typename V, DType kType, bool kCentred>
void PiecesSpread(const CellsIn& cells, const float* means, float* sums) {
  constexpr int kAccs = static_cast<int>(kSamplePiece) / V::kLanes;
  for (uint32_t t = 0; t < cells.tokens; ++t) {
    typename V::F acc[kAccs];
#pragma GCC unroll 4
    for (int i = 0; i < kAccs; ++i) acc[i] = V::Zero();
    const uint8_t* from = cells.rows[t];
    const float* mean = means;
    for (uint32_t h = 0; h < cells.heads; ++h, from += cells.head_stride_bytes, mean += kCentred ? kSamplePiece : 0) {
      if constexpr (!kCentred) PrefetchPiece(cells, t, h);
#pragma GCC unroll 4
      for (int i = 0; i < kAccs; ++i) {
        typename V::F x = LoadValues<V, kType>(from + i * V::kLanes * WordBytes(kType));
        if constexpr (kCentred) x = V::Sub(x, V::Load(mean + i * V::kLanes));
        acc[i] = V::Add(acc[i], V::Mul(x, x));
      }
    }
#pragma GCC unroll 2
    for (int width = kAccs / 2; width != 0; width /= 2) {
#pragma GCC unroll 2
      for (int i = 0; i < width; ++i) acc[i] = V::Add(acc[i], acc[i + width]);
    }
    sums[t] = SumLanes(V::HalfSum(acc[0]));
  }
}

// AccumulateCells where head_dim is kSamplePiece: the sums of a head stay in registers.
template <typename V, DType kType>
uint32_t AccumulatePieces(const CellsIn& cells, float* sums) {
  constexpr int kAccs = static_cast<int>(kSamplePiece) / V::kLanes;
  MagnitudeLanes<kType> magnitudes;
  for (uint32_t h = 0; h < cells.heads; ++h, sums += kSamplePiece) {
    typename V::F acc[kAccs];
#pragma GCC unroll 4
    for (int i = 0; i < kAccs; ++i) acc[i] = V::Load(sums + i * V::kLanes);
    for (uint32_t t = 0; t < cells.tokens; ++t) {
      const uint8_t* from = cells.rows[t] + h * cells.head_stride_bytes;
      PrefetchPiece(cells, t, h);
      magnitudes.Add(from, kSamplePiece);
#pragma GCC unroll 4
      for (int i = 0; i < kAccs; ++i) {
        acc[i] = V::Add(acc[i], LoadValues<V, kType>(from + i * V::kLanes * WordBytes(kType)));
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kAccs; ++i) V::Store(sums + i * V::kLanes, acc[i]);
  }
  return magnitudes.Largest();
}

// Eight tokens at a time, so that a sum is loaded and stored once for them.
template <typename V, DType kType>
uint32_t AccumulateCells(const CellsIn& cells, float* sums) {
  constexpr uint32_t kTokens = 8;
  MagnitudeLanes<kType> magnitudes;
  for (uint32_t first = 0; first < cells.tokens; first += kTokens) {
    const uint32_t count = cells.tokens - first < kTokens ? cells.tokens - first : kTokens;
    for (uint32_t h = 0; h < cells.heads; ++h) {
      const uint8_t* from[kTokens];
      for (uint32_t t = 0; t < count; ++t) {
        from[t] = cells.rows[first + t] + h * cells.head_stride_bytes;
        magnitudes.Add(from[t], cells.head_dim);
      }
      float* sum = sums + size_t{h} * cells.head_dim;
      for (uint32_t d = 0; d < cells.head_dim; d += V::kLanes) {
        typename V::F x = V::Load(sum + d);
        for (uint32_t t = 0; t < count; ++t) {
          x = V::Add(x, LoadValues<V, kType>(from[t] + d * WordBytes(kType)));
        }
        V::Store(sum + d, x);
      }
    }
  }
  return magnitudes.Largest();
}

}  // namespace
}  // namespace spectrumkv
