// The first pass of encoding: which tokens escape to RAW, and how many values are not finite.
#pragma once

#include "kernels/codec/escapes.h"
#include "kernels/cuda/planes.cuh"

namespace spectrumkv::gpu {

struct PlaneClass {
  uint32_t magnitude;  // the largest
  uint32_t nonfinite;  // values
};

// By a whole warp: each lane reads every 32nd group of eight values.
template <DType kType>
SPECTRUMKV_DEVICE PlaneClass ClassifyPlane(const ChunkArgs& args, const DevicePlane& plane, uint32_t token,
                                           uint32_t lane) {
  const uint32_t head_units = args.head_dim / kLaneValues, units = args.heads * head_units;
  const uint32_t first_nonfinite = EscapeLimitsOf(kType).nonfinite;
  const uint8_t* row = TokenAt(plane, token);
  PlaneClass found{0, 0};
  for (uint32_t begin = 0; begin < units; begin += kWarpLanes) {
    const uint32_t unit = begin + lane;
    uint32_t largest = 0, odd = 0;
    if (unit < units) {
      const uint32_t head = unit / head_units, dim = (unit - head * head_units) * kLaneValues;
      const Words<kType> words =
          LoadWords<kType>(row + head * plane.head_stride_bytes + dim * plane.dim_stride_bytes, plane.dim_stride_bytes);
      SPECTRUMKV_UNROLL
      for (int i = 0; i < static_cast<int>(kLaneValues); ++i) {
        const uint32_t magnitude = MagnitudeAt(words, i);
        largest = MaxOf(largest, magnitude);
        odd += magnitude >= first_nonfinite ? 1 : 0;
      }
    }
    found.magnitude = MaxOf(found.magnitude, largest);
    if (__ballot_sync(kAllLanes, odd != 0) != 0) found.nonfinite += odd;
  }
  for (uint32_t step = kWarpLanes / 2; step != 0; step /= 2) {
    found.magnitude = MaxOf(found.magnitude, __shfl_xor_sync(kAllLanes, found.magnitude, static_cast<int>(step)));
    found.nonfinite += __shfl_xor_sync(kAllLanes, found.nonfinite, static_cast<int>(step));
  }
  return found;
}

// A warp for each token: work.tiers, work.escaped, work.nonfinite.
template <DType kType>
SPECTRUMKV_KERNEL(kClassifyThreads)
Classify(const BatchArgs batch) {
  const ChunkArgs& args = ChunkOf(batch);
  const uint32_t token = (blockIdx.x * blockDim.x + threadIdx.x) / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  if (token >= args.tokens) return;  // the whole warp
  const EscapeLimits limits = EscapeLimitsOf(kType);
  const uint32_t asked = args.requested[token];
  uint32_t tiers = 0, escaped = 0, nonfinite = 0;
  for (uint32_t p = 0; p < args.planes; ++p) {
    const PlaneClass found = ClassifyPlane<kType>(args, PlaneOf(args, p), token, lane);
    const uint32_t tier = asked >> (4 * p) & 15;
    const bool escapes = Escapes(static_cast<Tier>(tier), ClassOf(found.magnitude, limits));
    if (!escapes) tiers |= tier << (4 * p);
    escaped += escapes ? 1 : 0;
    nonfinite += found.nonfinite;
  }
  if (lane != 0) return;
  args.work.tiers[token] = static_cast<uint8_t>(tiers);
  args.work.escaped[token] = static_cast<uint8_t>(escaped);
  args.work.nonfinite[token] = nonfinite;
}

}  // namespace spectrumkv::gpu
