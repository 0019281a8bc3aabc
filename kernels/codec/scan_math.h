// How the energy of one (token, plane) is summed and quantised, so that all backends agree.
//
// Order: 64 float32 accumulators, all +0. For each head in order and each dim d in order, with x = widen(value):
// square = x * x (rounded), then accumulator[d mod 64] += square (rounded). Nothing is contracted. At the end, for
// width = 32, 16, 8, 4, 2, 1: accumulator[i] += accumulator[i + width] for i < width. The sum is accumulator[0].
// (Adding a square of +0 changes no accumulator, so a vector may cover dims that do not exist with zeros.)
#pragma once

#include "kernels/codec/codec_math.h"

namespace spectrumkv {

constexpr uint32_t kEnergyLanes = 64;

// The fold of that order; overwrites the lanes.
SPECTRUMKV_MATH float FoldEnergy(float* lanes) {
  for (uint32_t width = kEnergyLanes / 2; width != 0; width /= 2) {
    for (uint32_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// clamp(128 + round(4 * log2(sum)), 1, 255) from the bits alone; 0 for a sum of 0, 255 for infinity and NaN.
// 4 * log2 of a float32 never lies half-way between integers: 2^(odd / 8) is irrational.
SPECTRUMKV_MATH uint8_t EnergyLog2(float sum) {
  const uint32_t bits = FloatBits(sum);
  if (bits == 0) return 0;
  if (bits >= kFloatInf) return 255;
  const int32_t exponent = static_cast<int32_t>(bits >> 23) - 127;  // a subnormal sum is clamped anyway
  const uint32_t fraction = bits & 0x7FFFFF;
  // The first fractions above 2^(1/8), 2^(3/8), 2^(5/8) and 2^(7/8).
  const int32_t quarters =
      (fraction >= 0x0B95C2) + (fraction >= 0x25FED7) + (fraction >= 0x45672B) + (fraction >= 0x6AC0C7);
  return static_cast<uint8_t>(ClampInt(128 + 4 * exponent + quarters, 1, 255));
}

// --- Spread: the energy of a token around the mean of its run, from a sample of its values.
//
// Sample of a plane [tokens, heads, head_dim]: of every head_step-th head, one piece of `dims` values. Piece i (of the
// i-th such head) begins at value (i mod (head_dim / dims)) * dims, so that all parts of a head are seen, and the same
// values of every token. A piece is mostly one cache line, and most lines of the plane are never read.
//
// In runs of 64 tokens, counted from the first: mean of each sampled value over the run's tokens that are neither
// skipped nor hold a sampled magnitude above 1024: float32 sum in token order from 0, divided by their number (0 where
// there are none). For each token: difference = value - mean (rounded), or the value itself where nothing is centred;
// then as the energy above, with the sampled heads for heads and the pieces for their values, quantised by EnergyLog2.
struct SpreadSample {
  uint32_t heads;  // that are sampled
  uint32_t head_step;
  uint32_t dims;  // of each
};

constexpr uint32_t kSpreadTokens = 64;

// centred: of K. Values of V are less sensitive, so half as many of a large token do.
SPECTRUMKV_MATH SpreadSample SpreadSampleOf(uint32_t heads, uint32_t head_dim, bool centred) {
  constexpr uint32_t kPiece = 32, kEnough = 64;  // values: of a piece at least, of a token at least, if it has them
  const uint32_t values = heads * head_dim, parts = values >= 4 * kEnough ? 4 : values > 2 * kEnough ? 2 : 1;
  const uint32_t enough = centred || values < 8 * kEnough ? kEnough : kEnough / 2;
  uint32_t dims = (head_dim / parts + 15) / 16 * 16;
  dims = dims < kPiece ? kPiece : dims;
  if (dims > head_dim) dims = head_dim;
  uint32_t step = heads * dims / enough;
  if (step == 0) step = 1;
  return SpreadSample{(heads + step - 1) / step, step, dims};
}

}  // namespace spectrumkv
