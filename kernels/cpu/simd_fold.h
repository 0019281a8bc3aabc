// Packing of codes that lie in registers, one per byte, for head sizes that are a power of two of registers.
//
// Every packing of the format is made of folds: byte i and byte i + n/2 of n become one, the second shifted up. A fold
// by 4 bits gives nibbles (Q4, P4); one by 2 more gives pairs of bits (Q2); one by 1 more single bits (the third bits
// of Q3). See simd_bytes.h for why all is in an unnamed namespace.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/simd_rotate.h"

namespace spectrumkv {
namespace {

// Codes and shifts are such that no bit leaves its byte.
template <int kShift>
SPECTRUMKV_SIMD_INLINE __m128i Merge(__m128i low, __m128i high) {
  return _mm_or_si128(low, _mm_slli_epi16(high, kShift));
}
template <int kShift>
SPECTRUMKV_SIMD_INLINE __m256i Merge(__m256i low, __m256i high) {
  return _mm256_or_si256(low, _mm256_slli_epi16(high, kShift));
}

SPECTRUMKV_SIMD_INLINE __m128i LowHalf(__m256i x) { return _mm256_castsi256_si128(x); }
SPECTRUMKV_SIMD_INLINE __m128i HighHalf(__m256i x) { return _mm256_extracti128_si256(x, 1); }
// Of 16 bytes: the other eight are of no use then.
SPECTRUMKV_SIMD_INLINE __m128i LowHalf(__m128i x) { return x; }
SPECTRUMKV_SIMD_INLINE __m128i HighHalf(__m128i x) { return _mm_unpackhi_epi64(x, x); }

SPECTRUMKV_SIMD_INLINE void StoreWhole(uint8_t* to, __m128i x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), x); }
SPECTRUMKV_SIMD_INLINE void StoreWhole(uint8_t* to, __m256i x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x);
}

#if defined(__AVX512F__)
template <int kShift>
SPECTRUMKV_SIMD_INLINE __m512i Merge(__m512i low, __m512i high) {
  return _mm512_or_si512(low, _mm512_slli_epi16(high, kShift));
}
SPECTRUMKV_SIMD_INLINE __m256i LowHalf(__m512i x) { return _mm512_castsi512_si256(x); }
SPECTRUMKV_SIMD_INLINE __m256i HighHalf(__m512i x) { return _mm512_extracti64x4_epi64(x, 1); }
SPECTRUMKV_SIMD_INLINE void StoreWhole(uint8_t* to, __m512i x) { _mm512_storeu_si512(to, x); }
#endif

template <int kVecs, typename R>
SPECTRUMKV_SIMD_INLINE void StoreBytes(const R* bytes, uint32_t width, uint8_t* out) {
  if constexpr (sizeof(R) == 16) {
    if (width == 8) return _mm_storel_epi64(reinterpret_cast<__m128i*>(out), bytes[0]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kVecs; ++i) StoreWhole(out + i * static_cast<int>(sizeof(R)), bytes[i]);
}

// Folds by kShift, then by half of it and so on down to kLast, and stores. `width`: bytes of each register in use.
template <int kShift, int kLast, int kVecs, typename R>
SPECTRUMKV_SIMD_INLINE void FoldAndStore(const R* codes, uint32_t width, uint8_t* out) {
  constexpr int kLeft = kVecs > 1 ? kVecs / 2 : 1;
  const auto next = [&](const auto* folded, uint32_t folded_width) {
    if constexpr (kShift == kLast) {
      StoreBytes<kLeft>(folded, folded_width, out);
    } else {
      FoldAndStore<kShift / 2, kLast, kLeft>(folded, folded_width, out);
    }
  };
  if constexpr (kVecs > 1) {
    R folded[kLeft];
#pragma GCC unroll 8
    for (int i = 0; i < kLeft; ++i) folded[i] = Merge<kShift>(codes[i], codes[i + kLeft]);
    next(folded, width);
  } else {
    const auto folded = Merge<kShift>(LowHalf(codes[0]), HighHalf(codes[0]));
    next(&folded, width / 2);
  }
}

// The codes of one cell, in kVecs registers, as kTier packs them.
template <typename V, Tier kTier, int kVecs>
SPECTRUMKV_SIMD_INLINE void PackRegisters(const typename V::B* codes, uint8_t* out) {
  constexpr uint32_t kWidth = sizeof(typename V::B);
  if constexpr (kTier == Tier::kP8 || kTier == Tier::kQ8) {
    StoreBytes<kVecs>(codes, kWidth, out);
  } else if constexpr (kTier == Tier::kP4 || kTier == Tier::kQ4) {
    FoldAndStore<4, 4, kVecs>(codes, kWidth, out);
  } else if constexpr (kTier == Tier::kQ2) {
    FoldAndStore<4, 2, kVecs>(codes, kWidth, out);
  } else {
    typename V::B low[kVecs], high[kVecs];
#pragma GCC unroll 8
    for (int i = 0; i < kVecs; ++i) {
      low[i] = V::AndBytes(codes[i], V::SetBytes(3));
      high[i] = V::AndBytes(V::ShiftRight(codes[i], 2), V::SetBytes(1));
    }
    FoldAndStore<4, 2, kVecs>(low, kWidth, out);
    FoldAndStore<4, 1, kVecs>(high, kWidth, out + kVecs * kWidth / 4);
  }
}

}  // namespace
}  // namespace spectrumkv
