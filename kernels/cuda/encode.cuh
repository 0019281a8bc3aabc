// The last passes of encoding: centres of keys, then all cells.
#pragma once

#include "kernels/cuda/layout.cuh"
#include "kernels/cuda/quantise.cuh"

namespace spectrumkv::gpu {

// A group of lanes for each (run of 64 tokens, head): the mean of the keys of rotated tiers, coded as a P8 cell.
template <DType kType, int kSets>
SPECTRUMKV_KERNEL(kCellThreads)
Centre(const BatchArgs batch) {
  const ChunkArgs& args = ChunkOf(batch);
  const ChunkPlaces places = *args.work.chunk;
  if (places.fits == 0 || places.centred == 0) return;  // all of the chunk
  const uint32_t runs = (args.tokens + kCentreTokens - 1) / kCentreTokens;
  const CellOfLane mine = CellOf(args, 1, runs);
  const uint32_t first = mine.token * kCentreTokens;
  const uint32_t end = mine.live ? (first + kCentreTokens < args.tokens ? first + kCentreTokens : args.tokens) : first;

  float x[kSets][kLaneValues] = {};
  uint32_t rotated = 0;
  for (uint32_t t = first; t < end; ++t) {
    if (!IsRotated(TierAt(args, t, 0))) continue;
    ++rotated;
    const uint8_t* cell = TokenAt(args.k, t) + mine.head * args.k.head_stride_bytes;
    SPECTRUMKV_UNROLL
    for (int s = 0; s < kSets; ++s) {
      uint32_t unit;
      if (!UnitOf(args, mine.lane, s, &unit)) continue;
      const Words<kType> words =
          LoadWords<kType>(cell + unit * kLaneValues * args.k.dim_stride_bytes, args.k.dim_stride_bytes);
      SPECTRUMKV_UNROLL
      for (int i = 0; i < static_cast<int>(kLaneValues); ++i) x[s][i] += ValueAt(words, i);
    }
  }
  uint32_t largest = 0;
  const float count = static_cast<float>(rotated == 0 ? 1 : rotated);
  SPECTRUMKV_UNROLL
  for (int s = 0; s < kSets; ++s) {
    SPECTRUMKV_UNROLL
    for (int i = 0; i < static_cast<int>(kLaneValues); ++i) {
      x[s][i] = x[s][i] / count;
      largest = MaxOf(largest, FloatBits(x[s][i]) & 0x7FFFFFFF);
    }
  }
  largest = CellMax(largest, args.cell_lanes);
  if (!mine.live) return;
  const Scale scale = PlainScale(BitsFloat(largest), 127.0f);
  const uint64_t centre = static_cast<uint64_t>(mine.token) * args.heads + mine.head;
  if (mine.lane == 0) {
    StoreAs<uint16_t>(args.chunk + places.centre_scales + centre * 2, static_cast<uint16_t>(scale.bits));
  }
  SPECTRUMKV_UNROLL
  for (int s = 0; s < kSets; ++s) {
    uint32_t unit;
    if (!UnitOf(args, mine.lane, s, &unit)) continue;
    StoreAs<uint2>(args.chunk + places.centre_codes + centre * args.head_dim + unit * kLaneValues,
                   CodesOfEight(Tier::kP8, x[s], scale.reciprocal));
  }
}

// Codes of one lane, from its values, to the chunk or, where they have to be packed, to shared memory.
template <int kSets>
SPECTRUMKV_DEVICE void PlaceCodes(const ChunkArgs& args, Tier tier, uint32_t lane, const float (&x)[kSets][kLaneValues],
                                  float reciprocal, uint8_t* codes, uint8_t* staged) {
  SPECTRUMKV_UNROLL
  for (int s = 0; s < kSets; ++s) {
    uint32_t unit;
    if (!UnitOf(args, lane, s, &unit)) continue;
    const uint2 eight = CodesOfEight(tier, x[s], reciprocal);
    if (tier == Tier::kP8 || tier == Tier::kQ8) {
      StoreAs<uint2>(codes + unit * kLaneValues, eight);
    } else {
      StoreShared<uint2>(staged + unit * kLaneValues, eight);
    }
  }
}

SPECTRUMKV_DEVICE void StoreScale(Tier tier, uint8_t* scales, uint32_t head, uint32_t bits) {
  if (HasScale8(tier)) {
    StoreAs<uint8_t>(scales + head, static_cast<uint8_t>(bits));
  } else {
    StoreAs<uint16_t>(scales + 2 * head, static_cast<uint16_t>(bits));
  }
}

// Values of one lane: zeros beyond the cell's end. RAW words go to the chunk at once.
template <DType kType, int kSets>
SPECTRUMKV_DEVICE void ReadCell(const ChunkArgs& args, const ChunkPlaces& places, const CellOfLane& mine, Tier tier,
                                uint8_t* codes, float (&x)[kSets][kLaneValues]) {
  const DevicePlane plane = PlaneOf(args, mine.plane);
  const uint8_t* cell = TokenAt(plane, mine.token) + mine.head * plane.head_stride_bytes;
  const bool centred = mine.plane == 0 && IsRotated(tier);
  SPECTRUMKV_UNROLL
  for (int s = 0; s < kSets; ++s) {
    uint32_t unit;
    if (!UnitOf(args, mine.lane, s, &unit)) continue;
    const Words<kType> words =
        LoadWords<kType>(cell + unit * kLaneValues * plane.dim_stride_bytes, plane.dim_stride_bytes);
    if (tier == Tier::kRaw) {
      StoreWhole<kType>(codes + unit * kLaneValues * SizeOf(kType), words);
      continue;
    }
    SPECTRUMKV_UNROLL
    for (int i = 0; i < static_cast<int>(kLaneValues); ++i) x[s][i] = ValueAt(words, i);
    if (!centred) continue;
    const CentreValues centre = LoadCentre(args, places, mine.token, mine.head, unit);
    SPECTRUMKV_UNROLL
    for (int i = 0; i < static_cast<int>(kLaneValues); ++i) x[s][i] -= CentreAt(centre, i);
  }
}

// A group of lanes for each cell of both planes. Cells of one warp may have different tiers, so what all lanes do
// together stands outside of every branch on the tier.
template <DType kType, int kSets>
SPECTRUMKV_KERNEL(kCellThreads)
Encode(const BatchArgs batch) {
  __shared__ __align__(16) uint8_t staged[kCellThreads * kLaneValues * kSets];
  const ChunkArgs& args = ChunkOf(batch);
  const ChunkPlaces places = *args.work.chunk;
  if (places.fits == 0) return;  // all of the chunk
  const CellOfLane mine = CellOf(args, args.planes, args.tokens);
  const Tier tier = mine.live ? TierAt(args, mine.token, mine.plane) : Tier::kRaw;
  uint8_t *codes = args.chunk, *scales = args.chunk;
  float x[kSets][kLaneValues] = {};
  if (mine.live) {
    const CellPlace place = args.work.cells[mine.plane * args.tokens + mine.token];
    codes += place.codes + static_cast<uint64_t>(mine.head) * CellCodeBytes(tier, args.head_dim, SizeOf(kType));
    scales += place.scales;
    ReadCell<kType, kSets>(args, places, mine, tier, codes, x);
  }
  RotateCell<kSets>(x, args.rotation, IsRotated(tier));
  uint32_t largest = 0;
  SPECTRUMKV_UNROLL
  for (int s = 0; s < kSets; ++s) {
    SPECTRUMKV_UNROLL
    for (int i = 0; i < static_cast<int>(kLaneValues); ++i) largest = MaxOf(largest, FloatBits(x[s][i]) & 0x7FFFFFFF);
  }
  largest = CellMax(largest, args.cell_lanes);
  uint8_t* const cell_codes =
      staged + (threadIdx.x / kWarpLanes * kWarpLanes * kSets + mine.group * args.cell_lanes) * kLaneValues;
  if (tier != Tier::kRaw) {
    const Scale scale = ScaleOf(tier, BitsFloat(largest), args.head_dim, args.rotation);
    if (mine.lane == 0) StoreScale(tier, scales, mine.head, scale.bits);
    PlaceCodes<kSets>(args, tier, mine.lane, x, scale.reciprocal, codes, cell_codes);
  }
  __syncwarp(kAllLanes);
  if (tier == Tier::kRaw || tier == Tier::kP8 || tier == Tier::kQ8) return;
  SPECTRUMKV_UNROLL
  for (int s = 0; s < kSets; ++s) {
    uint32_t unit;
    if (UnitOf(args, mine.lane, s, &unit)) PackUnit(tier, cell_codes, args.head_dim, unit, codes);
  }
}

}  // namespace spectrumkv::gpu
