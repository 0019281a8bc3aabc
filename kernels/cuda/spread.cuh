// A sample of one plane: how far each token lies from the mean of its run, for the planner that weighs errors. The sample
// and the order of every sum are those of kernels/codec/scan_math.h.
#pragma once

#include "kernels/cuda/scan.cuh"

namespace spectrumkv::gpu {

// Where values [8 * unit, 8 * unit + 8) of the sample of a token lie.
SPECTRUMKV_DEVICE const uint8_t* SampledAt(const SpreadArgs& args, uint32_t token, uint32_t unit) {
  const uint32_t units = args.sample_dims / kLaneValues;
  const uint32_t piece = unit / units, places = args.head_dim / args.sample_dims;
  const uint32_t dim = piece % places * args.sample_dims + (unit - piece * units) * kLaneValues;
  return TokenAt(args.plane, token) + static_cast<int64_t>(piece * args.head_step) * args.plane.head_stride_bytes +
         dim * args.plane.dim_stride_bytes;
}

// One block for a run of kSpreadTokens tokens.
template <DType kType>
SPECTRUMKV_KERNEL(kSpreadThreads)
Spread(const PlanesArgs<SpreadArgs> batch) {
  const SpreadArgs& args = batch.planes[blockIdx.y];
  __shared__ float means[kSpreadValues];
  __shared__ uint32_t left_out[kSpreadTokens];
  const uint32_t first = blockIdx.x * kSpreadTokens;
  if (first >= args.tokens) return;  // the whole block
  const uint32_t count = args.tokens - first < kSpreadTokens ? args.tokens - first : kSpreadTokens;
  const uint32_t units = args.sample_heads * args.sample_dims / kLaneValues;
  const uint32_t lane = threadIdx.x % kScanLanes;
  const uint32_t limit = EscapeLimitsOf(kType).above_rotated;

  // Tokens that are no part of the mean.
  for (uint32_t t = threadIdx.x / kScanLanes; t < kSpreadTokens; t += kSpreadThreads / kScanLanes) {
    uint32_t largest = 0;
    for (uint32_t unit = lane; args.centred != 0 && t < count && unit < units; unit += kScanLanes) {
      const Words<kType> words = LoadWords<kType>(SampledAt(args, first + t, unit), args.plane.dim_stride_bytes);
      SPECTRUMKV_UNROLL
      for (int i = 0; i < static_cast<int>(kLaneValues); ++i) largest = MaxOf(largest, MagnitudeAt(words, i));
    }
    for (uint32_t step = kScanLanes / 2; step != 0; step /= 2) {
      largest = MaxOf(largest, __shfl_xor_sync(kAllLanes, largest, static_cast<int>(step)));
    }
    if (lane == 0) left_out[t] = t >= count || first + t < args.skip || largest >= limit ? 1 : 0;
  }
  __syncthreads();

  // Means, eight values a thread, in the order of tokens.
  for (uint32_t unit = threadIdx.x; unit < units; unit += kSpreadThreads) {
    float sums[kLaneValues] = {};
    uint32_t used = 0;
    for (uint32_t t = 0; args.centred != 0 && t < count; ++t) {
      if (left_out[t] != 0) continue;
      ++used;
      const Words<kType> words = LoadWords<kType>(SampledAt(args, first + t, unit), args.plane.dim_stride_bytes);
      SPECTRUMKV_UNROLL
      for (int i = 0; i < static_cast<int>(kLaneValues); ++i) sums[i] += ValueAt(words, i);
    }
    SPECTRUMKV_UNROLL
    for (int i = 0; i < static_cast<int>(kLaneValues); ++i) {
      means[unit * kLaneValues + i] = used != 0 ? sums[i] / static_cast<float>(used) : 0.0f;
    }
  }
  __syncthreads();

  // Energies around them: lane l holds the sums of dims of a piece with (d mod 64) / 8 == l.
  for (uint32_t t = threadIdx.x / kScanLanes; t < kSpreadTokens; t += kSpreadThreads / kScanLanes) {
    float sums[kLaneValues] = {};
    for (uint32_t head = 0; t < count && head < args.sample_heads; ++head) {
      for (uint32_t dim = lane * kLaneValues; dim < args.sample_dims; dim += kEnergyLanes) {
        const uint32_t unit = (head * args.sample_dims + dim) / kLaneValues;
        const Words<kType> words = LoadWords<kType>(SampledAt(args, first + t, unit), args.plane.dim_stride_bytes);
        SPECTRUMKV_UNROLL
        for (int i = 0; i < static_cast<int>(kLaneValues); ++i) {
          const float value = ValueAt(words, i);
          const float x = args.centred != 0 ? value - means[unit * kLaneValues + i] : value;
          sums[i] += x * x;
        }
      }
    }
    const float energy = FoldLanes(sums);
    if (lane == 0 && t < count) StoreAs<uint8_t>(args.spreads + first + t, EnergyLog2(energy));
  }
}

}  // namespace spectrumkv::gpu
