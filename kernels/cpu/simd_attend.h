// What queries attend to in a block of keys: a matrix product with the tokens in the lanes, so that every logit is one
// chain of multiply-adds over head_dim whatever the width of a vector; then the block's softmax.
// See simd_bytes.h for why all is in an unnamed namespace.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/codec/attend_math.h"
#include "kernels/codec/attend_queries.h"
#include "kernels/cpu/simd_passes.h"

namespace spectrumkv {
namespace {

template <DType kType>
SPECTRUMKV_SIMD_INLINE __m256 LoadEight(const uint8_t* from) {
  if constexpr (kType == DType::kFloat32) return _mm256_loadu_ps(reinterpret_cast<const float*>(from));
  const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  if constexpr (kType == DType::kFloat16) return _mm256_cvtph_ps(words);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}

SPECTRUMKV_SIMD_INLINE void TransposeEight(__m256* row) {
  __m256 pair[8], quad[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    pair[i] = _mm256_unpacklo_ps(row[i], row[i + 1]);
    pair[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    quad[i] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0x44);
    quad[i + 1] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0xEE);
    quad[i + 2] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0x44);
    quad[i + 3] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0xEE);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    row[i] = _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x20);
    row[i + 4] = _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x31);
  }
}

// panel[d * kWidth + t] = value d of token first + t, 0 where there is no such token.
template <DType kType, uint32_t kWidth>
void FillPanel(const CellsIn& keys, uint32_t first, float* panel) {
  for (uint32_t t = 0; t < kWidth; t += 8) {
    for (uint32_t d = 0; d < keys.head_dim; d += 8) {
      __m256 row[8];
#pragma GCC unroll 8
      for (uint32_t i = 0; i < 8; ++i) {
        const uint32_t token = first + t + i;
        row[i] = token < keys.tokens ? LoadEight<kType>(keys.rows[token] + d * WordBytes(kType)) : _mm256_setzero_ps();
      }
      TransposeEight(row);
#pragma GCC unroll 8
      for (uint32_t i = 0; i < 8; ++i) _mm256_storeu_ps(panel + (d + i) * kWidth + t, row[i]);
    }
  }
}

// dots[q * kAttendTokens + t] of kQueries queries and the tokens of a panel, two vectors of them.
template <typename V, int kQueries>
SPECTRUMKV_SIMD_INLINE void PanelDots(const float* query, uint32_t head_dim, const float* panel, float* dots) {
  typename V::F low[kQueries], high[kQueries];
#pragma GCC unroll 8
  for (int q = 0; q < kQueries; ++q) low[q] = high[q] = V::Zero();
  for (uint32_t d = 0; d < head_dim; ++d, panel += 2 * V::kLanes) {
    const typename V::F k0 = V::Load(panel), k1 = V::Load(panel + V::kLanes);
#pragma GCC unroll 8
    for (int q = 0; q < kQueries; ++q) {
      const typename V::F value = V::Set(query[static_cast<size_t>(q) * head_dim + d]);
      low[q] = V::Fma(value, k0, low[q]);
      high[q] = V::Fma(value, k1, high[q]);
    }
  }
#pragma GCC unroll 8
  for (int q = 0; q < kQueries; ++q) {
    V::Store(dots + q * static_cast<int>(kAttendTokens), low[q]);
    V::Store(dots + q * static_cast<int>(kAttendTokens) + V::kLanes, high[q]);
  }
}

// ExpOf of attend_math.h.
template <typename V>
SPECTRUMKV_SIMD_INLINE typename V::F ExpOfLanes(typename V::F x) {
  using F = typename V::F;
  const F shifted = V::Fma(x, V::Set(kLog2E), V::Set(kExpShifter));
  const F n = V::Sub(shifted, V::Set(kExpShifter));
  const F r = V::Fma(n, V::Set(-kLn2Low), V::Fma(n, V::Set(-kLn2High), x));
  F p = V::Set(kExpTerms[0]);
#pragma GCC unroll 5
  for (int i = 1; i < 6; ++i) p = V::Fma(p, r, V::Set(kExpTerms[i]));
  p = V::Add(V::Fma(p, V::Mul(r, r), r), V::Set(1.0f));
  return V::SelectLe(V::Set(kLeastExponent), x, V::AddExponent(p, shifted), V::Zero());
}

// SoftCap of attend_math.h.
template <typename V>
SPECTRUMKV_SIMD_INLINE typename V::F SoftCapLanes(typename V::F logit, float cap, float inverse_cap) {
  using F = typename V::F;
  const F one = V::Set(1.0f);
  const F e = ExpOfLanes<V>(V::Mul(V::Mul(V::Abs(logit), V::Set(inverse_cap)), V::Set(-2.0f)));
  return V::WithSignOf(V::Mul(V::Set(cap), V::Div(V::Sub(one, e), V::Add(one, e))), logit);
}

template <typename V>
SPECTRUMKV_SIMD_INLINE float LargestLane(typename V::F x) {
  const __m256 eight = V::HalfMax(x);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

// The softmax of one query's block: dots become weights.
template <typename V>
void WeighDots(SeenTokens seen, float cap, float inverse_cap, float* weights, float* top, float* sum) {
  using F = typename V::F;
  constexpr int kAccs = static_cast<int>(kAttendTokens) / V::kLanes;
  const F hidden = V::Set(kHiddenLogit), most = V::Set(kMaxLogit);
  const F first = V::Set(static_cast<float>(seen.first)), last = V::Set(static_cast<float>(seen.last) - 1.0f);
  F logits[kAccs], largest = hidden;
#pragma GCC unroll 8
  for (int i = 0; i < kAccs; ++i) {
    const F dot = V::Load(weights + i * V::kLanes);
    const F at = V::Add(V::LaneIndex(), V::Set(static_cast<float>(i * V::kLanes)));
    F logit = cap == 0.0f ? dot : SoftCapLanes<V>(dot, cap, inverse_cap);
    logit = V::SelectLe(V::Abs(dot), most, logit, hidden);
    logit = V::SelectLe(first, at, logit, hidden);
    logits[i] = V::SelectLe(at, last, logit, hidden);
    largest = V::Max(largest, logits[i]);
  }
  *top = LargestLane<V>(largest);
  const F shift = V::Set(*top);
#pragma GCC unroll 8
  for (int i = 0; i < kAccs; ++i) {
    logits[i] = *top == kHiddenLogit ? V::Zero() : ExpOfLanes<V>(V::Sub(logits[i], shift));
    V::Store(weights + i * V::kLanes, logits[i]);
  }
  *sum = FoldLanes<V>(logits);
}

template <typename V, DType kType>
void AttendBlock(const CellsIn& keys, uint32_t first_position, const AttendQueries& queries, float* panel,
                 float* weights, float* tops, float* sums) {
  constexpr uint32_t kWidth = 2 * V::kLanes;
  constexpr int kQueries = V::kLanes == 8 ? 6 : 8;  // with the keys and a query they fill the registers
  const uint32_t head_dim = keys.head_dim;
  for (uint32_t first = 0; first < kAttendTokens; first += kWidth) {
    if (first < keys.tokens) FillPanel<kType, kWidth>(keys, first, panel);
    float* const dots = weights + first;
    uint32_t q = 0;
    const auto next = [&]<int kCount>() {
      PanelDots<V, kCount>(queries.values + size_t{q} * head_dim, head_dim, panel, dots + size_t{q} * kAttendTokens);
      q += kCount;
    };
    while (first < keys.tokens && q + kQueries <= queries.count) next.template operator()<kQueries>();
    while (first < keys.tokens && q + 2 <= queries.count) next.template operator()<2>();
    while (first < keys.tokens && q < queries.count) next.template operator()<1>();
    for (; q < queries.count; ++q) {  // no such tokens
      V::Store(dots + size_t{q} * kAttendTokens, V::Zero());
      V::Store(dots + size_t{q} * kAttendTokens + V::kLanes, V::Zero());
    }
  }
  const float cap = queries.soft_cap, inverse_cap = cap == 0.0f ? 0.0f : 1.0f / cap;
  for (uint32_t q = 0; q < queries.count; ++q) {
    const SeenTokens seen = SeenOf(queries.positions[q], queries.window, first_position, keys.tokens);
    WeighDots<V>(seen, cap, inverse_cap, weights + size_t{q} * kAttendTokens, &tops[q], &sums[q]);
  }
}

template <typename V>
void FoldWeights(const float* weights, const float* factors, uint32_t count, float* scores) {
  constexpr int kAccs = static_cast<int>(kAttendTokens) / V::kLanes;
  typename V::F acc[kAccs];
#pragma GCC unroll 8
  for (int i = 0; i < kAccs; ++i) acc[i] = V::Load(scores + i * V::kLanes);
  for (uint32_t q = 0; q < count; ++q, weights += kAttendTokens) {
    if (factors[q] == 0.0f) continue;
    const typename V::F factor = V::Set(factors[q]);
#pragma GCC unroll 8
    for (int i = 0; i < kAccs; ++i) acc[i] = V::Fma(V::Load(weights + i * V::kLanes), factor, acc[i]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kAccs; ++i) V::Store(scores + i * V::kLanes, acc[i]);
}

}  // namespace
}  // namespace spectrumkv
