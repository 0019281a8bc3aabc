// The scales of a group of cells, all at once. The formulas are those of codec_math.h; the conversions to float16 are
// the machine's, which round the same way. A reciprocal is 0 where all codes are those of zero. See simd_bytes.h for
// why all is in an unnamed namespace.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/simd_groups.h"

namespace spectrumkv {
namespace {

// The largest of each of eight vectors.
inline __m256 MaxOfEach(const __m256 (&v)[kGroupCells]) {
  // After each step a vector holds the candidates of twice as many cells.
  const auto halves = [&](int i) {  // cells i and i + 4
    return _mm256_max_ps(_mm256_permute2f128_ps(v[i], v[i + 4], 0x20), _mm256_permute2f128_ps(v[i], v[i + 4], 0x31));
  };
  const auto pair = [](__m256 a, __m256 b) {
    return _mm256_max_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  };
  const __m256 p = pair(halves(0), halves(1)), q = pair(halves(2), halves(3));
  return _mm256_max_ps(_mm256_shuffle_ps(p, q, 0x44), _mm256_shuffle_ps(p, q, 0xEE));
}

// The same of unsigned words.
inline __m128i MaxOfEach(const __m128i (&v)[kGroupCells]) {
  const auto words = [](__m128i a, __m128i b) {
    return _mm_max_epu16(_mm_unpacklo_epi16(a, b), _mm_unpackhi_epi16(a, b));
  };
  const auto twos = [](__m128i a, __m128i b) {
    return _mm_max_epu16(_mm_unpacklo_epi32(a, b), _mm_unpackhi_epi32(a, b));
  };
  const __m128i low = twos(words(v[0], v[1]), words(v[2], v[3]));
  const __m128i high = twos(words(v[4], v[5]), words(v[6], v[7]));
  return _mm_max_epu16(_mm_unpacklo_epi64(low, high), _mm_unpackhi_epi64(low, high));
}

inline __m128i ToHalf(__m256 x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// 1 / x, and 0 where x is 0.
inline __m256 ReciprocalOrZero(__m256 x) {
  const __m256 nonzero = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_NEQ_OQ);
  return _mm256_and_ps(_mm256_div_ps(_mm256_set1_ps(1.0f), x), nonzero);
}

inline void StoreFront(__m128i bytes, uint32_t count, uint8_t* out) {
  alignas(16) uint8_t whole[16];
  if (count == 16) return _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
  if (count == 8) return _mm_storel_epi64(reinterpret_cast<__m128i*>(out), bytes);
  _mm_store_si128(reinterpret_cast<__m128i*>(whole), bytes);
  for (uint32_t i = 0; i < count; ++i) out[i] = whole[i];
}

inline void PlainScales(__m256 absmax, float top, uint32_t cells, float* reciprocals, uint8_t* out) {
  const __m128i half = ToHalf(_mm256_div_ps(absmax, _mm256_set1_ps(top)));
  _mm256_store_ps(reciprocals, ReciprocalOrZero(_mm256_cvtph_ps(half)));
  StoreFront(half, cells * 2, out);
}

inline void Rotated8Scales(__m256 absmax, float rotation, uint32_t cells, float* reciprocals, uint8_t* out) {
  const __m256 share = _mm256_div_ps(absmax, _mm256_set1_ps(127.0f));
  const __m256 unit = _mm256_mul_ps(share, _mm256_set1_ps(1.0f / rotation));
  const __m128i half = ToHalf(_mm256_mul_ps(unit, _mm256_set1_ps(64.0f)));
  const __m256 scale = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(0.015625f));
  _mm256_store_ps(reciprocals, ReciprocalOrZero(_mm256_mul_ps(scale, _mm256_set1_ps(rotation))));
  StoreFront(half, cells * 2, out);
}

inline void SteppedScales(__m256 absmax, float share, float rotation, uint32_t cells, float* reciprocals,
                          uint8_t* out) {
  const __m256 t = _mm256_mul_ps(absmax, _mm256_set1_ps(share));
  const __m256 unit = _mm256_mul_ps(t, _mm256_set1_ps(1.0f / rotation));
  const __m128i half = ToHalf(_mm256_mul_ps(unit, _mm256_set1_ps(64.0f)));
  const __m128i byte = _mm_srli_epi16(_mm_add_epi16(half, _mm_set1_epi16(64)), 7);
  const __m256 scale = _mm256_mul_ps(_mm256_cvtph_ps(_mm_slli_epi16(byte, 7)), _mm256_set1_ps(0.015625f));
  _mm256_store_ps(reciprocals, ReciprocalOrZero(_mm256_mul_ps(scale, _mm256_set1_ps(rotation))));
  StoreFront(_mm_packus_epi16(byte, byte), cells, out);
}

// The first `count` bytes, up to 16. Whole loads where they are allowed: vectors put together from bytes just stored
// wait for memory.
inline __m128i LoadFront(const uint8_t* in, uint32_t count) {
  if (count == 16) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(in));
  if (count == 8) return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(in));
  alignas(16) uint8_t whole[16] = {};
  for (uint32_t i = 0; i < count; ++i) whole[i] = in[i];
  return _mm_load_si128(reinterpret_cast<const __m128i*>(whole));
}

// The values of up to kGroupCells stored scales.
inline void LoadScales16(const uint8_t* in, uint32_t cells, float unit, float* scales) {
  const __m256 values = _mm256_cvtph_ps(LoadFront(in, cells * 2));
  _mm256_store_ps(scales, _mm256_mul_ps(values, _mm256_set1_ps(unit)));
}

inline void LoadScales8(const uint8_t* in, uint32_t cells, float* scales) {
  const __m128i half = _mm_slli_epi16(_mm_cvtepu8_epi16(LoadFront(in, cells)), 7);
  _mm256_store_ps(scales, _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(0.015625f)));
}

}  // namespace
}  // namespace spectrumkv
