// Kernels with the faults that the shim and the interpreter must catch, each beside its right form. Include the shim
// first where there is no nvcc.
#pragma once

#include "kernels/cuda/device.cuh"

namespace spectrumkv::gpu {

struct FaultArgs {
  uint8_t* memory;
  uint32_t bytes;
};

constexpr uint32_t kFaultThreads = 64;

// Reverses 64 bytes through shared memory, with the barrier or without.
template <bool kFaulty>
SPECTRUMKV_KERNEL(kFaultThreads)
MissingBarrier(const FaultArgs args) {
  __shared__ uint8_t bytes[kFaultThreads];
  bytes[threadIdx.x] = static_cast<uint8_t>(LoadAs<uint8_t>(args.memory + threadIdx.x) + 1);
  if (!kFaulty) __syncthreads();
  StoreAs<uint8_t>(args.memory + threadIdx.x, bytes[kFaultThreads - 1 - threadIdx.x]);
}

// 128-bit loads: at multiples of 16, or 2 bytes beside.
template <bool kFaulty>
SPECTRUMKV_KERNEL(kFaultThreads)
Misaligned(const FaultArgs args) {
  const uint4 four = LoadAs<uint4>(args.memory + 16 * (threadIdx.x % 2) + (kFaulty ? 2 : 0));
  StoreAs<uint32_t>(args.memory + 64 + 4 * threadIdx.x, four.x + four.y + four.z + four.w);
}

// Writes up to the end, or one byte further.
template <bool kFaulty>
SPECTRUMKV_KERNEL(kFaultThreads)
OutOfBounds(const FaultArgs args) {
  if (threadIdx.x == 0) StoreAs<uint8_t>(args.memory + args.bytes - (kFaulty ? 0 : 1), 7);
}

// A shuffle in one branch of a warp: with the mask of its lanes, or of all.
template <bool kFaulty>
SPECTRUMKV_KERNEL(kFaultThreads)
DivergentMask(const FaultArgs args) {
  uint32_t value = threadIdx.x;
  if (threadIdx.x % 32 < 16) value = __shfl_xor_sync(kFaulty ? kAllLanes : 0xFFFFu, value, 1);
  StoreAs<uint8_t>(args.memory + threadIdx.x, static_cast<uint8_t>(value));
}

// The same with a partner that is in the mask, or not.
template <bool kFaulty>
SPECTRUMKV_KERNEL(kFaultThreads)
OutsideOfMask(const FaultArgs args) {
  uint32_t value = threadIdx.x;
  if (threadIdx.x % 32 < 16) value = __shfl_xor_sync(0xFFFFu, value, kFaulty ? 16 : 8);
  StoreAs<uint8_t>(args.memory + threadIdx.x, static_cast<uint8_t>(value));
}

}  // namespace spectrumkv::gpu
