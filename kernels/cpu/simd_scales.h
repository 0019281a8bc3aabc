// Scales of up to kGroupCells cells at once: a division takes as long for eight cells as for one. The formulas are
// those of codec_math.h; the conversions to float16 are the machine's, which round the same way.
// See simd_bytes.h for why all is in an unnamed namespace.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/codec/cell_ops.h"

namespace spectrumkv {
namespace {

constexpr uint32_t kGroupCells = 8;
constexpr uint32_t kGroupFloats = 4096;  // rotated values kept at once

struct GroupScales {
  alignas(32) float absmax[kGroupCells] = {};
  alignas(32) float reciprocal[kGroupCells];  // 0 where all codes are those of zero
};

inline uint32_t GroupSize(uint32_t head_dim, uint32_t heads_left) {
  const uint32_t most = head_dim * kGroupCells <= kGroupFloats ? kGroupCells : kGroupFloats / head_dim;
  return heads_left < most ? heads_left : most;
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

// The values of magnitude words.
template <DType kType>
inline void LoadAbsmax(const uint32_t* magnitudes, uint32_t cells, GroupScales* group) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i present = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(cells)), lanes);
  const __m256i bits = _mm256_maskload_epi32(reinterpret_cast<const int*>(magnitudes), present);
  __m256 values = _mm256_castsi256_ps(bits);
  if constexpr (kType == DType::kBFloat16) values = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  if constexpr (kType == DType::kFloat16) {
    values = _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1)));
  }
  _mm256_store_ps(group->absmax, values);
}

inline void PlainScales(float top, uint32_t cells, GroupScales* group, uint8_t* out) {
  const __m128i half = ToHalf(_mm256_div_ps(_mm256_load_ps(group->absmax), _mm256_set1_ps(top)));
  _mm256_store_ps(group->reciprocal, ReciprocalOrZero(_mm256_cvtph_ps(half)));
  StoreFront(half, cells * 2, out);
}

inline void Rotated8Scales(float rotation, uint32_t cells, GroupScales* group, uint8_t* out) {
  const __m256 share = _mm256_div_ps(_mm256_load_ps(group->absmax), _mm256_set1_ps(127.0f));
  const __m256 unit = _mm256_mul_ps(share, _mm256_set1_ps(1.0f / rotation));
  const __m128i half = ToHalf(_mm256_mul_ps(unit, _mm256_set1_ps(64.0f)));
  const __m256 scale = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(0.015625f));
  _mm256_store_ps(group->reciprocal, ReciprocalOrZero(_mm256_mul_ps(scale, _mm256_set1_ps(rotation))));
  StoreFront(half, cells * 2, out);
}

inline void SteppedScales(float share, float rotation, uint32_t cells, GroupScales* group, uint8_t* out) {
  const __m256 t = _mm256_mul_ps(_mm256_load_ps(group->absmax), _mm256_set1_ps(share));
  const __m256 unit = _mm256_mul_ps(t, _mm256_set1_ps(1.0f / rotation));
  const __m128i half = ToHalf(_mm256_mul_ps(unit, _mm256_set1_ps(64.0f)));
  const __m128i byte = _mm_srli_epi16(_mm_add_epi16(half, _mm_set1_epi16(64)), 7);
  const __m256 scale = _mm256_mul_ps(_mm256_cvtph_ps(_mm_slli_epi16(byte, 7)), _mm256_set1_ps(0.015625f));
  _mm256_store_ps(group->reciprocal, ReciprocalOrZero(_mm256_mul_ps(scale, _mm256_set1_ps(rotation))));
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
