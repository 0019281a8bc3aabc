// Magnitudes, energies and sums of the cells of one token.
// See simd_bytes.h for why all is in an unnamed namespace.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/codec/scan_math.h"
#include "kernels/cpu/simd_rotate.h"

namespace spectrumkv {
namespace {

// Largest magnitude word of `count` values, count a multiple of 16.
template <DType kType>
inline uint32_t MaxMagnitude(const uint8_t* from, uint32_t count) {
  const auto load = [&](uint32_t byte) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + byte)); };
  if constexpr (kType == DType::kFloat32) {
    const __m256i mask = _mm256_set1_epi32(0x7FFFFFFF);
    __m256i a = _mm256_setzero_si256(), b = a;
    for (uint32_t i = 0; i < count; i += 16) {
      a = _mm256_max_epu32(a, _mm256_and_si256(load(4 * i), mask));
      b = _mm256_max_epu32(b, _mm256_and_si256(load(4 * i + 32), mask));
    }
    a = _mm256_max_epu32(a, b);
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4E));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xB1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(m));
  } else {
    const __m256i mask = _mm256_set1_epi16(0x7FFF);
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    uint32_t i = 0;
    for (; i + 64 <= count; i += 64) {
      a = _mm256_max_epu16(a, _mm256_and_si256(load(2 * i), mask));
      b = _mm256_max_epu16(b, _mm256_and_si256(load(2 * i + 32), mask));
      c = _mm256_max_epu16(c, _mm256_and_si256(load(2 * i + 64), mask));
      d = _mm256_max_epu16(d, _mm256_and_si256(load(2 * i + 96), mask));
    }
    for (; i < count; i += 16) a = _mm256_max_epu16(a, _mm256_and_si256(load(2 * i), mask));
    a = _mm256_max_epu16(_mm256_max_epu16(a, b), _mm256_max_epu16(c, d));
    const __m128i m = _mm_max_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    // The horizontal minimum is one instruction; of the complement it is the maximum.
    const __m128i least = _mm_minpos_epu16(_mm_xor_si128(m, _mm_set1_epi16(-1)));
    return ~static_cast<uint32_t>(_mm_cvtsi128_si32(least)) & 0xFFFF;
  }
}

template <DType kType>
uint32_t TokenMagnitude(const CellsIn& cells, uint32_t* per_head) {
  uint32_t largest = 0;
  for (uint32_t h = 0; h < cells.heads; ++h) {
    const uint32_t head = MaxMagnitude<kType>(cells.data + h * cells.head_stride_bytes, cells.head_dim);
    per_head[h] = head;
    largest = head > largest ? head : largest;
  }
  return largest;
}

template <typename V, DType kType>
void TokenEnergy(const CellsIn& cells, float* lanes) {
  constexpr int kAccs = static_cast<int>(kEnergyLanes) / V::kLanes;
  typename V::F acc[kAccs];
#pragma GCC unroll 8
  for (int i = 0; i < kAccs; ++i) acc[i] = V::Load(lanes + i * V::kLanes);
  for (uint32_t h = 0; h < cells.heads; ++h) {
    const uint8_t* from = cells.data + h * cells.head_stride_bytes;
    for (uint32_t d = 0; d < cells.head_dim; d += kEnergyLanes) {
#pragma GCC unroll 8
      for (int i = 0; i < kAccs; ++i) {
        const uint32_t at = d + static_cast<uint32_t>(i * V::kLanes);
        if (at >= cells.head_dim) break;
        const typename V::F x = LoadValues<V, kType>(from + at * WordBytes(kType));
        acc[i] = V::Add(acc[i], V::Mul(x, x));
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kAccs; ++i) V::Store(lanes + i * V::kLanes, acc[i]);
}

template <typename V, DType kType>
void TokenAccumulate(const CellsIn& cells, float* sums) {
  for (uint32_t h = 0; h < cells.heads; ++h) {
    const uint8_t* from = cells.data + h * cells.head_stride_bytes;
    float* sum = sums + size_t{h} * cells.head_dim;
    for (uint32_t d = 0; d < cells.head_dim; d += V::kLanes) {
      V::Store(sum + d, V::Add(V::Load(sum + d), LoadValues<V, kType>(from + d * WordBytes(kType))));
    }
  }
}

}  // namespace
}  // namespace spectrumkv
