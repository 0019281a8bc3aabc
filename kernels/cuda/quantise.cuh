// From the values of a cell to its scale and its codes, lane by lane.
#pragma once

#include "kernels/cuda/cells.cuh"

namespace spectrumkv::gpu {

// Scale of a cell from its largest magnitude. REQUIRES: tier is not RAW.
SPECTRUMKV_DEVICE Scale ScaleOf(Tier tier, float absmax, uint32_t head_dim, uint32_t rotation) {
  const float turns = static_cast<float>(rotation);
  const float inverse = BitsFloat((127u << 24) - FloatBits(turns));  // of a power of two: exponents add up to 2 * 127
  switch (tier) {
    case Tier::kP8: return PlainScale(absmax, 127.0f);
    case Tier::kP4: return PlainScale(absmax, 7.0f);
    case Tier::kQ8: return Rotated8Scale(absmax, turns, inverse);
    default: return SteppedScale(absmax, StepShare(BitsOf(tier), head_dim), turns, inverse);
  }
}

// One code a byte. Branches on the tier stand outside of the loops.
SPECTRUMKV_DEVICE uint2 RoundedCodes(const float (&x)[kLaneValues], float reciprocal, int32_t top, int32_t zero) {
  uint32_t codes[2] = {0, 0};
  SPECTRUMKV_UNROLL
  for (int i = 0; i < static_cast<int>(kLaneValues); ++i) {
    const int32_t code = ClampInt(RoundToInt(x[i] * reciprocal), -top, top) + zero;
    codes[i / 4] |= (static_cast<uint32_t>(code) & 0xFF) << (8 * (i & 3));
  }
  return make_uint2(codes[0], codes[1]);
}

SPECTRUMKV_DEVICE uint2 FlooredCodes(const float (&x)[kLaneValues], float reciprocal, int32_t middle) {
  uint32_t codes[2] = {0, 0};
  SPECTRUMKV_UNROLL
  for (int i = 0; i < static_cast<int>(kLaneValues); ++i) {
    const int32_t code = ClampInt(FloorToInt(x[i] * reciprocal) + middle, 0, 2 * middle - 1);
    codes[i / 4] |= static_cast<uint32_t>(code) << (8 * (i & 3));
  }
  return make_uint2(codes[0], codes[1]);
}

SPECTRUMKV_DEVICE uint2 CodesOfEight(Tier tier, const float (&x)[kLaneValues], float reciprocal) {
  if (HasScale8(tier)) return FlooredCodes(x, reciprocal, 1 << (BitsOf(tier) - 1));
  return RoundedCodes(x, reciprocal, tier == Tier::kP4 ? 7 : 127, tier == Tier::kP4 ? 8 : 0);
}

// --- Packing. `cell`: the cell's codes in shared memory, one a byte. Every unit of eight values yields 4 bytes (Q4, P4),
// 2 (Q2) or 2 and 1 (Q3), put together from places that lie head_dim / 2, / 4 or / 8 apart.

SPECTRUMKV_DEVICE void StorePair(uint8_t* to, uint32_t pair) {
  if (AddressOf(to) % 2 == 0) return StoreAs<uint16_t>(to, static_cast<uint16_t>(pair));
  StoreAs<uint8_t>(to, static_cast<uint8_t>(pair));
  StoreAs<uint8_t>(to + 1, static_cast<uint8_t>(pair >> 8));
}

SPECTRUMKV_DEVICE void PackUnit(Tier tier, const uint8_t* cell, uint32_t head_dim, uint32_t unit, uint8_t* out) {
  if (tier == Tier::kQ4 || tier == Tier::kP4) {
    const uint32_t low = LoadShared<uint32_t>(cell + 4 * unit);
    const uint32_t high = LoadShared<uint32_t>(cell + 4 * unit + head_dim / 2);
    return StoreAs<uint32_t>(out + 4 * unit, low | high << 4);
  }
  uint32_t pair = 0;
  for (int j = 3; j >= 0; --j) {
    pair = pair << 2 | (LoadShared<uint16_t>(cell + 2 * unit + j * (head_dim / 4)) & 0x0303u);
  }
  StorePair(out + 2 * unit, pair);
  if (tier != Tier::kQ3) return;
  uint32_t high = 0;
  for (int j = 7; j >= 0; --j) {
    high = high << 1 | static_cast<uint32_t>(LoadShared<uint8_t>(cell + unit + j * (head_dim / 8)) >> 2);
  }
  StoreAs<uint8_t>(out + head_dim / 4 + unit, static_cast<uint8_t>(high));
}

}  // namespace spectrumkv::gpu
