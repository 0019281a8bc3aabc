// Decoding: a checked chunk into paged memory of any dtype.
#pragma once

#include "kernels/codec/word_math.h"
#include "kernels/cuda/cells.cuh"
#include "kernels/cuda/layout.cuh"

namespace spectrumkv::gpu {

// Two neighbouring bytes at any address.
SPECTRUMKV_DEVICE uint32_t LoadPair(const uint8_t* from) {
  if (AddressOf(from) % 2 == 0) return LoadAs<uint16_t>(from);
  return LoadAs<uint8_t>(from) | static_cast<uint32_t>(LoadAs<uint8_t>(from + 1)) << 8;
}

// --- Unpacking: the eight codes from value 8 * unit on, one a byte.

SPECTRUMKV_DEVICE uint2 UnpackNibbles(const uint8_t* codes, uint32_t head_dim, uint32_t unit) {
  const uint32_t half = head_dim / 2;  // a multiple of 4, so four codes never lie on both sides of it
  uint32_t four[2];
  SPECTRUMKV_UNROLL
  for (uint32_t n = 0; n < 2; ++n) {
    const uint32_t value = kLaneValues * unit + 4 * n;
    const bool upper = value >= half;
    four[n] = LoadAs<uint32_t>(codes + (upper ? value - half : value)) >> (upper ? 4 : 0) & 0x0F0F0F0F;
  }
  return make_uint2(four[0], four[1]);
}

SPECTRUMKV_DEVICE uint2 UnpackPairs(const uint8_t* codes, uint32_t head_dim, uint32_t unit) {
  const uint32_t quarter = head_dim / 4, first = kLaneValues * unit;
  if (head_dim % 32 == 0) {  // eight codes lie in one quarter, at a multiple of 4
    const uint32_t at = first / quarter;
    const uint8_t* from = codes + (first - at * quarter);
    return make_uint2(LoadAs<uint32_t>(from) >> (2 * at) & 0x03030303,
                      LoadAs<uint32_t>(from + 4) >> (2 * at) & 0x03030303);
  }
  uint32_t two[4];
  SPECTRUMKV_UNROLL
  for (uint32_t n = 0; n < 4; ++n) {  // a quarter is a multiple of 2
    const uint32_t value = first + 2 * n, at = value / quarter;
    two[n] = LoadPair(codes + (value - at * quarter)) >> (2 * at) & 0x0303;
  }
  return make_uint2(two[0] | two[1] << 16, two[2] | two[3] << 16);
}

// Bit 2 of each code, in the bytes behind the pairs of a Q3 cell.
SPECTRUMKV_DEVICE uint2 UnpackHighBits(const uint8_t* bits, uint32_t head_dim, uint32_t unit) {
  const uint32_t eighth = head_dim / 8;
  uint32_t at = kLaneValues * unit / eighth, place = kLaneValues * unit - at * eighth;
  if (head_dim % 64 == 0) {  // eight codes lie in one eighth, at a multiple of 8
    const uint2 eight = LoadAs<uint2>(bits + place);
    return make_uint2((eight.x >> at & 0x01010101) << 2, (eight.y >> at & 0x01010101) << 2);
  }
  uint2 high = make_uint2(0, 0);
  SPECTRUMKV_UNROLL
  for (int i = 0; i < static_cast<int>(kLaneValues); ++i) {
    const uint32_t bit = LoadAs<uint8_t>(bits + place) >> at & 1u;
    if (i < 4) {
      high.x |= bit << (8 * i + 2);
    } else {
      high.y |= bit << (8 * i - 30);
    }
    if (++place == eighth) {
      place = 0;
      ++at;
    }
  }
  return high;
}

// w of the specification (Q8, Q4, Q3, Q2) or the value (P8, P4), for eight values.
SPECTRUMKV_DEVICE void LevelsOf(Tier tier, const uint8_t* codes, uint32_t head_dim, uint32_t unit, float scale,
                                float (&x)[kLaneValues]) {
  if (tier == Tier::kP8 || tier == Tier::kQ8) {
    const uint2 eight = LoadAs<uint2>(codes + kLaneValues * unit);
    SPECTRUMKV_UNROLL
    for (int i = 0; i < static_cast<int>(kLaneValues); ++i) x[i] = SignedByteAt(eight, i) * scale;
    return;
  }
  uint2 eight;
  float middle = 8.0f;
  if (tier == Tier::kP4 || tier == Tier::kQ4) {
    eight = UnpackNibbles(codes, head_dim, unit);
  } else {
    eight = UnpackPairs(codes, head_dim, unit);
  }
  if (tier == Tier::kQ3) {
    const uint2 high = UnpackHighBits(codes + head_dim / 4, head_dim, unit);
    eight = make_uint2(eight.x | high.x, eight.y | high.y);
  }
  if (tier != Tier::kP4) middle = static_cast<float>(1 << (BitsOf(tier) - 1)) - 0.5f;
  SPECTRUMKV_UNROLL
  for (int i = 0; i < static_cast<int>(kLaneValues); ++i) {
    const uint32_t code = (i < 4 ? eight.x : eight.y) >> (8 * (i & 3)) & 0xFF;
    x[i] = (static_cast<float>(code) - middle) * scale;
  }
}

SPECTRUMKV_DEVICE float ScaleValueOf(Tier tier, const uint8_t* scales, uint32_t head) {
  if (HasScale8(tier)) return SteppedScaleValue(LoadAs<uint8_t>(scales + head));
  const uint32_t bits = LoadAs<uint16_t>(scales + 2 * head);
  return tier == Tier::kQ8 ? Rotated8ScaleValue(bits) : HalfToFloat(bits);
}

// Eight words of dtype `from` as words of kTo; adds to *changed those whose value is another.
template <DType kTo, DType kFrom>
SPECTRUMKV_DEVICE Words<kTo> ConvertUnit(const uint8_t* from, uint32_t* changed) {
  const Words<kFrom> words = LoadWhole<kFrom>(from);
  Words<kTo> converted;
  SPECTRUMKV_UNROLL
  for (int i = 0; i < static_cast<int>(kLaneValues); ++i) {
    const ConvertedWord one = ConvertWord(WordAt(words, i), kFrom, kTo);
    SetWord(&converted, i, one.word);
    *changed += one.changed ? 1 : 0;
  }
  return converted;
}

template <DType kTo>
SPECTRUMKV_DEVICE Words<kTo> ReadRaw(const uint8_t* codes, DType from, uint32_t unit, uint32_t* changed) {
  codes += static_cast<uint64_t>(unit) * kLaneValues * WordBytes(from);
  if (from == kTo) return LoadWhole<kTo>(codes);
  if (from == DType::kFloat16) return ConvertUnit<kTo, DType::kFloat16>(codes, changed);
  if (from == DType::kBFloat16) return ConvertUnit<kTo, DType::kBFloat16>(codes, changed);
  return ConvertUnit<kTo, DType::kFloat32>(codes, changed);
}

// Where a lane's values go.
SPECTRUMKV_DEVICE uint8_t* TargetOf(const DevicePlane& plane, const CellOfLane& mine, uint32_t unit) {
  return TokenAt(plane, mine.token) + mine.head * plane.head_stride_bytes +
         unit * kLaneValues * plane.dim_stride_bytes;
}

// A RAW cell, from the chunk to its place.
template <DType kTo, int kSets>
SPECTRUMKV_DEVICE void CopyCell(const ChunkArgs& args, const CellOfLane& mine, const uint8_t* codes) {
  const DevicePlane plane = PlaneOf(args, mine.plane);
  uint32_t changed = 0;
  for (int s = 0; s < kSets; ++s) {
    uint32_t unit;
    if (!UnitOf(args, mine.lane, s, &unit)) continue;
    const Words<kTo> words = ReadRaw<kTo>(codes, args.dtype, unit, &changed);
    StoreWords<kTo>(TargetOf(plane, mine, unit), plane.dim_stride_bytes, words);
  }
  if (changed != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&args.report->rounded_words),
              static_cast<unsigned long long>(changed));
  }
}

// Adds the centre where there is one, and writes the lane's values.
template <DType kTo, int kSets>
SPECTRUMKV_DEVICE void WriteCell(const ChunkArgs& args, const CellOfLane& mine, Tier tier,
                                 const float (&x)[kSets][kLaneValues]) {
  const DevicePlane plane = PlaneOf(args, mine.plane);
  const bool centred = mine.plane == 0 && IsRotated(tier);
  const ChunkPlaces places = *args.work.chunk;
  SPECTRUMKV_UNROLL
  for (int s = 0; s < kSets; ++s) {
    uint32_t unit;
    if (!UnitOf(args, mine.lane, s, &unit)) continue;
    CentreValues centre{};
    if (centred) centre = LoadCentre(args, places, mine.token, mine.head, unit);
    Words<kTo> words;
    SPECTRUMKV_UNROLL
    for (int i = 0; i < static_cast<int>(kLaneValues); ++i) {
      const float y = centred ? x[s][i] + CentreAt(centre, i) : x[s][i];
      SetWord(&words, i, NarrowTo<kTo>(y));
    }
    StoreWords<kTo>(TargetOf(plane, mine, unit), plane.dim_stride_bytes, words);
  }
}

// A group of lanes for each cell of both planes, as Encode.
template <DType kTo, int kSets>
SPECTRUMKV_KERNEL(kCellThreads)
Decode(const BatchArgs batch) {
  const ChunkArgs& args = ChunkOf(batch);
  const CellOfLane mine = CellOf(args, args.planes, args.tokens);
  const Tier tier = mine.live ? TierAt(args, mine.token, mine.plane) : Tier::kRaw;
  float x[kSets][kLaneValues] = {};
  if (mine.live) {
    const CellPlace place = args.work.cells[mine.plane * args.tokens + mine.token];
    const uint8_t* codes = args.chunk + place.codes +
                           static_cast<uint64_t>(mine.head) * CellCodeBytes(tier, args.head_dim, WordBytes(args.dtype));
    if (tier == Tier::kRaw) {
      CopyCell<kTo, kSets>(args, mine, codes);
    } else {
      const float scale = ScaleValueOf(tier, args.chunk + place.scales, mine.head);
      SPECTRUMKV_UNROLL
      for (int s = 0; s < kSets; ++s) {
        uint32_t unit;
        if (UnitOf(args, mine.lane, s, &unit)) LevelsOf(tier, codes, args.head_dim, unit, scale, x[s]);
      }
    }
  }
  RotateCell<kSets>(x, args.rotation, IsRotated(tier));
  if (mine.live && tier != Tier::kRaw) WriteCell<kTo, kSets>(args, mine, tier, x);
}

}  // namespace spectrumkv::gpu
