// Passes over one plane that make no chunk: energies for importance by key norms, and zeroes for the tail of a page.
#pragma once

#include "kernels/codec/escapes.h"
#include "kernels/codec/scan_math.h"
#include "kernels/cuda/planes.cuh"

namespace spectrumkv::gpu {

// Eight lanes hold the 64 sums of a token, eight each: lane l those of dims with (d mod 64) / 8 == l, so that every lane
// adds its squares in the order of kernels/codec/scan_math.h, and reads 128 bytes with its seven neighbours.
constexpr uint32_t kScanLanes = kEnergyLanes / kLaneValues;

// The fold of scan_math.h over the lanes' sums: the token's energy, in lane 0. Called by all lanes of the warp.
SPECTRUMKV_DEVICE float FoldLanes(float (&sums)[kLaneValues]) {
  for (uint32_t step = kScanLanes / 2; step != 0; step /= 2) {
    SPECTRUMKV_UNROLL
    for (int i = 0; i < static_cast<int>(kLaneValues); ++i) {
      sums[i] += __shfl_xor_sync(kAllLanes, sums[i], static_cast<int>(step));
    }
  }
  SPECTRUMKV_UNROLL
  for (int step = kLaneValues / 2; step != 0; step /= 2) {
    SPECTRUMKV_UNROLL
    for (int i = 0; i < step; ++i) sums[i] += sums[i + step];
  }
  return sums[0];
}

template <DType kType>
SPECTRUMKV_KERNEL(kScanThreads)
Scan(const PlanesArgs<ScanArgs> batch) {
  const ScanArgs& args = batch.planes[blockIdx.y];
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t token = thread / kScanLanes, lane = thread % kScanLanes;
  float sums[kLaneValues] = {};
  uint32_t largest = 0;
  const bool live = token < args.tokens;
  const uint8_t* row = live ? TokenAt(args.plane, token) : nullptr;
  for (uint32_t head = 0; live && head < args.heads; ++head) {
    for (uint32_t dim = lane * kLaneValues; dim < args.head_dim; dim += kEnergyLanes) {
      const Words<kType> words =
          LoadWords<kType>(row + head * args.plane.head_stride_bytes + dim * args.plane.dim_stride_bytes,
                           args.plane.dim_stride_bytes);
      SPECTRUMKV_UNROLL
      for (int i = 0; i < static_cast<int>(kLaneValues); ++i) {
        largest = MaxOf(largest, MagnitudeAt(words, i));
        const float x = ValueAt(words, i);
        sums[i] += x * x;
      }
    }
  }
  const float energy = FoldLanes(sums);
  for (uint32_t step = kScanLanes / 2; step != 0; step /= 2) {
    largest = MaxOf(largest, __shfl_xor_sync(kAllLanes, largest, static_cast<int>(step)));
  }
  if (!live || lane != 0) return;
  const EscapeClass escape = ClassOf(largest, EscapeLimitsOf(kType));
  const uint32_t log2 = escape == kEscapeNonFinite ? 255 : EnergyLog2(energy);
  StoreAs<uint16_t>(args.scans + token * sizeof(TokenScan), static_cast<uint16_t>(escape | log2 << 8));
}

// A group of eight values for each thread.
template <DType kType>
SPECTRUMKV_KERNEL(kZeroThreads)
Zero(const ZeroArgs args) {
  const uint32_t unit = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t head_units = args.head_dim / kLaneValues, cell = unit / head_units;
  const uint32_t token = args.first_token + cell / args.heads, head = cell % args.heads;
  if (token >= args.tokens) return;
  const uint32_t dim = (unit - cell * head_units) * kLaneValues;
  StoreWords<kType>(TokenAt(args.plane, token) + head * args.plane.head_stride_bytes + dim * args.plane.dim_stride_bytes,
                    args.plane.dim_stride_bytes, Words<kType>{});
}

}  // namespace spectrumkv::gpu
