// What encoding and decoding of a cell share: the rotation, and the centre of keys. A cell's values lie on cell_lanes
// lanes, in kSets sets of eight a lane: set s of lane l holds the values from (s * 32 + l) * 8 on.
#pragma once

#include "kernels/cuda/planes.cuh"

namespace spectrumkv::gpu {

// The group of eight values that a lane has in a set, or none (false) beyond the cell's end.
SPECTRUMKV_DEVICE bool UnitOf(const ChunkArgs& args, uint32_t lane, int set, uint32_t* unit) {
  *unit = static_cast<uint32_t>(set) * kWarpLanes + lane;
  return *unit < args.head_dim / kLaneValues;
}

// The rotation of the specification, of those lanes whose cell is rotated. Steps up to 4 stay in a lane, those from 8 to
// 128 pair lanes; a run of at most 256 values never leaves a set. Called by all lanes of the warp.
template <int kSets>
SPECTRUMKV_DEVICE void RotateCell(float (&x)[kSets][kLaneValues], uint32_t rotation, bool rotated) {
  if (rotated) {
    SPECTRUMKV_UNROLL
    for (int s = 0; s < kSets; ++s) {
      SPECTRUMKV_UNROLL
      for (int h = 1; h < static_cast<int>(kLaneValues); h *= 2) {
        SPECTRUMKV_UNROLL
        for (int i = 0; i < static_cast<int>(kLaneValues); ++i) {
          if ((i & h) != 0) continue;
          const float a = x[s][i], b = x[s][i + h];
          x[s][i] = a + b;
          x[s][i + h] = a - b;
        }
      }
    }
  }
  if (__ballot_sync(kAllLanes, rotated) == 0) return;  // the whole warp
  for (uint32_t pair = 1; pair * kLaneValues < rotation; pair *= 2) {
    // other - x in the upper lane of a pair is other + -x.
    const uint32_t sign = (threadIdx.x & pair) != 0 ? 0x80000000u : 0u;
    SPECTRUMKV_UNROLL
    for (int s = 0; s < kSets; ++s) {
      SPECTRUMKV_UNROLL
      for (int i = 0; i < static_cast<int>(kLaneValues); ++i) {
        const float other = __shfl_xor_sync(kAllLanes, x[s][i], static_cast<int>(pair));
        const float turned = other + BitsFloat(FloatBits(x[s][i]) ^ sign);
        x[s][i] = rotated ? turned : x[s][i];
      }
    }
  }
}

SPECTRUMKV_DEVICE float SignedByteAt(const uint2& eight, int i) {
  const uint32_t word = i < 4 ? eight.x : eight.y;
  return static_cast<float>(static_cast<int32_t>(word << (24 - 8 * (i & 3))) >> 24);
}

// The centre's eight values of one unit, as the chunk has them: code * scale.
struct CentreValues {
  uint2 codes;
  float scale;
};

SPECTRUMKV_DEVICE CentreValues LoadCentre(const ChunkArgs& args, const ChunkPlaces& places, uint32_t token,
                                          uint32_t head, uint32_t unit) {
  const uint64_t centre = static_cast<uint64_t>(token / kCentreTokens) * args.heads + head;
  const uint8_t* codes = args.chunk + places.centre_codes + centre * args.head_dim + unit * kLaneValues;
  return CentreValues{LoadAs<uint2>(codes), WidenHalf(LoadAs<uint16_t>(args.chunk + places.centre_scales + centre * 2))};
}

SPECTRUMKV_DEVICE float CentreAt(const CentreValues& centre, int i) {
  return SignedByteAt(centre.codes, i) * centre.scale;
}

}  // namespace spectrumkv::gpu
