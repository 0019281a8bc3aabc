// The arithmetic of the chunk format, one value at a time: the definition every backend must equal bit for bit.
// Source: proto/WIRE_FORMAT.md, section Arithmetic. Compiled by g++ and nvcc, into files with different instruction
// sets: every function is static and forced inline, so that no copy of one file's code can be linked into another.
// REQUIRES: no contraction (-ffp-contract=off, --fmad=false), round to nearest, no flush to zero.
#pragma once

#include <cstdint>

#include "kernels/format/types.h"

#if defined(__CUDACC__)
#define SPECTRUMKV_MATH static __host__ __device__ __forceinline__
#else
#define SPECTRUMKV_MATH [[maybe_unused]] static inline __attribute__((always_inline))
#endif

namespace spectrumkv {

// float16 and bfloat16 words, sign removed.
constexpr uint32_t kHalfInf = 0x7C00, kHalfMax = 0x7BFF;
constexpr uint32_t kBfloatInf = 0x7F80, kBfloatMax = 0x7F7F;
constexpr uint32_t kFloatInf = 0x7F800000;

SPECTRUMKV_MATH uint32_t FloatBits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits;
#endif
}

SPECTRUMKV_MATH float BitsFloat(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
#endif
}

// widen for float16: exact. (`half(bits)` of the specification.)
SPECTRUMKV_MATH float HalfToFloat(uint32_t half) {
  const uint32_t sign = (half & 0x8000) << 16;
  const uint32_t magnitude = (half & 0x7FFF) << 13;
  // The exponent's bias is put right by 2^112, which also normalises subnormals.
  const float finite = BitsFloat(magnitude) * BitsFloat(0x77800000);
  return BitsFloat(sign | ((half & 0x7FFF) < kHalfInf ? FloatBits(finite) : magnitude | kFloatInf));
}

// To nearest, ties to even; infinite from 65520 on; a NaN becomes the quiet NaN of its sign.
SPECTRUMKV_MATH uint32_t FloatToHalf(float x) {
  const uint32_t sign = FloatBits(x) >> 16 & 0x8000;
  const uint32_t magnitude = FloatBits(x) & 0x7FFFFFFF;
  if (magnitude >= 0x47800000) return sign | (magnitude > kFloatInf ? 0x7E00 : kHalfInf);
  if (magnitude < 0x38800000) {  // subnormal: 0.5 has the spacing of float16's subnormals
    return sign | (FloatBits(BitsFloat(magnitude) + 0.5f) - 0x3F000000);
  }
  return sign | ((magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13);
}

SPECTRUMKV_MATH float BfloatToFloat(uint32_t word) { return BitsFloat(word << 16); }

// narrow: to nearest even, saturating to the largest finite value. REQUIRES: x is not NaN.
SPECTRUMKV_MATH uint32_t NarrowHalf(float x) {
  const uint32_t half = FloatToHalf(x);
  return (half & 0x7FFF) >= kHalfInf ? (half & 0x8000) | kHalfMax : half;
}

SPECTRUMKV_MATH uint32_t NarrowBfloat(float x) {
  const uint32_t bits = FloatBits(x);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  const uint32_t rounded = (magnitude + 0x7FFF + (magnitude >> 16 & 1)) >> 16;
  return sign | (rounded >= kBfloatInf ? kBfloatMax : rounded);
}

// rint for |x| < 2^22, as an integer.
SPECTRUMKV_MATH int32_t RoundToInt(float x) {
  const float shifter = 12582912.0f;  // 1.5 * 2^23: its last place is 1
  return static_cast<int32_t>(FloatBits(x + shifter) - FloatBits(shifter));
}

// floor for |x| < 2^22, as an integer.
SPECTRUMKV_MATH int32_t FloorToInt(float x) {
  const int32_t truncated = static_cast<int32_t>(x);
  return truncated - (static_cast<float>(truncated) > x ? 1 : 0);
}

SPECTRUMKV_MATH int32_t ClampInt(int32_t x, int32_t low, int32_t high) { return x < low ? low : x > high ? high : x; }

// --- Escapes: compared on magnitude words (the sign bit cleared), which order like the values, NaN highest.

struct EscapeLimits {
  uint32_t above_rotated;  // first magnitude above 1024
  uint32_t above_plain;    // first magnitude above 65504
  uint32_t nonfinite;      // first magnitude that is not finite
};

SPECTRUMKV_MATH EscapeLimits EscapeLimitsOf(DType dtype) {
  if (dtype == DType::kFloat16) return EscapeLimits{0x6401, kHalfInf, kHalfInf};
  if (dtype == DType::kBFloat16) return EscapeLimits{0x4481, 0x4780, kBfloatInf};
  return EscapeLimits{0x44800001, 0x477FE001, kFloatInf};
}

// --- Scales

// What a plain or rotated cell is quantised by: the stored bits, and the factor of its values. reciprocal == 0: all
// codes are those of zero.
struct Scale {
  uint32_t bits;
  float reciprocal;
};

// P8 (top 127), P4 (top 7) and centres, from the cell's largest magnitude.
SPECTRUMKV_MATH Scale PlainScale(float absmax, float top) {
  const uint32_t bits = FloatToHalf(absmax / top);
  return Scale{bits, bits == 0 ? 0.0f : 1.0f / HalfToFloat(bits)};
}

// C_b of the specification; bits is 4, 3 or 2.
SPECTRUMKV_MATH float StepShare(int bits, uint32_t head_dim) {
  if (head_dim <= 64) return bits == 4 ? 17.0f / 128 : bits == 3 ? 1.0f / 4 : 15.0f / 32;
  if (head_dim <= 128) return bits == 4 ? 1.0f / 8 : bits == 3 ? 15.0f / 64 : 13.0f / 32;
  return bits == 4 ? 1.0f / 8 : bits == 3 ? 29.0f / 128 : 3.0f / 8;
}

// Value of a Q4, Q3 or Q2 scale byte.
SPECTRUMKV_MATH float SteppedScaleValue(uint32_t byte) { return HalfToFloat(byte << 7) * 0.015625f; }
// Value of a Q8 scale.
SPECTRUMKV_MATH float Rotated8ScaleValue(uint32_t half) { return HalfToFloat(half) * 0.015625f; }

// inverse_rotation is 1/R, exact.
SPECTRUMKV_MATH Scale SteppedScale(float absmax, float share, float rotation, float inverse_rotation) {
  const float t = absmax * share;
  const uint32_t byte = (FloatToHalf((t * inverse_rotation) * 64.0f) + 64) >> 7;
  return Scale{byte, byte == 0 ? 0.0f : 1.0f / (SteppedScaleValue(byte) * rotation)};
}

SPECTRUMKV_MATH Scale Rotated8Scale(float absmax, float rotation, float inverse_rotation) {
  const uint32_t bits = FloatToHalf(((absmax / 127.0f) * inverse_rotation) * 64.0f);
  return Scale{bits, bits == 0 ? 0.0f : 1.0f / (Rotated8ScaleValue(bits) * rotation)};
}

SPECTRUMKV_MATH int BitsOf(Tier tier) { return tier == Tier::kQ4 ? 4 : tier == Tier::kQ3 ? 3 : 2; }

}  // namespace spectrumkv
