// What recent queries attend to, as all backends compute it bit for bit. A *query* here is one query head at one
// position, its values multiplied by the softmax scale; it sees keys at its own position and before, where it has a
// window the last `window` of those alone.
//
// Keys are taken in blocks of 64 tokens, counted from the first. For one query and one block, all in float32, fma(a, b, c)
// being a * b + c rounded once and every other operation rounded as it stands:
//   logit     dot = fma(query[d], key[d], dot) for d = 0, 1, ... from dot = +0; where there is a soft cap,
//             SoftCap(dot, cap, 1 / cap). A key that is not seen, or whose dot is not in [-kMaxLogit, kMaxLogit], is
//             hidden
//   top       the largest logit of the block's keys that are not hidden; kHiddenLogit where all are
//   weight    ExpOf(logit - top); +0 for hidden keys and for tokens beyond the block's end
//   sum       of the 64 weights, folded as scan_math.h folds its accumulators
// Then, for each query: T = the largest top, S = sum of fma(sum, ExpOf(top - T), S) over the blocks in order from +0, and
// the factor of a block is ExpOf(top - T) / S, or 0 where all of it is hidden. The score of a token is
// fma(weight, factor, score) for the queries in order from +0, those whose factor is 0 left out.
//
// Queries are independent up to the last line and its chain goes over them in order, so they may be taken in groups.
#pragma once

#include "kernels/codec/codec_math.h"

namespace spectrumkv {

constexpr uint32_t kAttendTokens = 64;     // of a block
constexpr float kMaxLogit = 1e6f;          // larger ones come from no model
constexpr float kHiddenLogit = -3e38f;
constexpr float kLeastExponent = -87.0f;   // below it ExpOf is 0

// Rounds to an integer in the low bits of a sum: 1.5 * 2^23.
constexpr float kExpShifter = 12582912.0f;
constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
// exp(r) = 1 + r + r^2 * polynomial(r), by Horner; |r| <= ln 2 / 2, within 2 units of the last place (Cephes, expf).
constexpr float kExpTerm0 = 1.9875691500e-4f, kExpTerm1 = 1.3981999507e-3f, kExpTerm2 = 8.3334519073e-3f,
                kExpTerm3 = 4.1665795894e-2f, kExpTerm4 = 1.6666665459e-1f, kExpTerm5 = 5.0000001201e-1f;
constexpr float kExpTerms[6] = {kExpTerm0, kExpTerm1, kExpTerm2, kExpTerm3, kExpTerm4, kExpTerm5};

// a * b + c, rounded once.
SPECTRUMKV_MATH float FusedMultiplyAdd(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

// REQUIRES: x <= 0.
SPECTRUMKV_MATH float ExpOf(float x) {
  if (!(x >= kLeastExponent)) return 0.0f;
  const float shifted = FusedMultiplyAdd(x, kLog2E, kExpShifter);
  const float n = shifted - kExpShifter;
  const float r = FusedMultiplyAdd(n, -kLn2Low, FusedMultiplyAdd(n, -kLn2High, x));
  float p = FusedMultiplyAdd(kExpTerm0, r, kExpTerm1);
  p = FusedMultiplyAdd(p, r, kExpTerm2);
  p = FusedMultiplyAdd(p, r, kExpTerm3);
  p = FusedMultiplyAdd(p, r, kExpTerm4);
  p = FusedMultiplyAdd(p, r, kExpTerm5);
  p = FusedMultiplyAdd(p, r * r, r) + 1.0f;
  return BitsFloat(FloatBits(p) + (FloatBits(shifted) << 23));  // times 2^n: the shifter's own low bits are 0
}

// cap * tanh(logit / cap), tanh by ExpOf.
SPECTRUMKV_MATH float SoftCap(float logit, float cap, float inverse_cap) {
  const float magnitude = BitsFloat(FloatBits(logit) & 0x7FFFFFFF) * inverse_cap;
  const float e = ExpOf(magnitude * -2.0f);
  const float capped = cap * ((1.0f - e) / (1.0f + e));
  return BitsFloat(FloatBits(capped) | (FloatBits(logit) & 0x80000000));
}

// The tokens that a query sees of a block: [first, last) of its 64, of `tokens` that exist.
struct SeenTokens {
  uint32_t first, last;
};
SPECTRUMKV_MATH SeenTokens SeenOf(uint32_t position, uint32_t window, uint32_t block_first, uint32_t tokens) {
  // One past the last key seen, and the first one.
  const uint64_t end = uint64_t{position} + 1, begin = window != 0 && end > window ? end - window : 0;
  const uint64_t first = begin > block_first ? begin - block_first : 0;
  const uint64_t last = end > block_first ? end - block_first : 0;
  SeenTokens seen{0, 0};
  seen.last = last > tokens ? tokens : static_cast<uint32_t>(last);
  seen.first = first > seen.last ? seen.last : static_cast<uint32_t>(first);
  return seen;
}

}  // namespace spectrumkv
