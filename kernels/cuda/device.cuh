// The few things that differ between nvcc and a C++ compiler: memory accesses, half conversions, counting bits. Kernels
// use these and the collectives by their CUDA names (__shfl_xor_sync, __ballot_sync, __syncwarp, __syncthreads,
// atomicAdd), so that the same files also run as C++ where the tests bring all that (tests/cuda/shim/cuda_shim.h).
#pragma once

#include "kernels/codec/codec_math.h"
#include "kernels/cuda/tuning.h"

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#elif !defined(SPECTRUMKV_CUDA_SHIM)
#error "compile with nvcc, or include tests/cuda/shim/cuda_shim.h first"
#endif

#define SPECTRUMKV_DEVICE static __device__ __forceinline__
#if defined(__CUDACC__)
#define SPECTRUMKV_UNROLL _Pragma("unroll")
#else
#define SPECTRUMKV_UNROLL
#endif
#define SPECTRUMKV_KERNEL(threads) __global__ void __launch_bounds__(threads, kBlocksPerMultiprocessor)

namespace spectrumkv::gpu {

constexpr uint32_t kAllLanes = 0xFFFFFFFF;

#if defined(__CUDACC__)

// Tells the compiler that a pointer it did not get from the kernel's arguments alone is global memory: a generic access
// costs more.
SPECTRUMKV_DEVICE void AssumeGlobal(const void* pointer) { __builtin_assume(__isGlobal(pointer)); }

// Global memory. REQUIRES: the alignment of T.
template <typename T>
SPECTRUMKV_DEVICE T LoadAs(const uint8_t* from) {
  AssumeGlobal(from);
  return *reinterpret_cast<const T*>(from);
}
template <typename T>
SPECTRUMKV_DEVICE void StoreAs(uint8_t* to, const T& value) {
  AssumeGlobal(to);
  // An assignment of 16 bytes may be split into four stores; this one stays whole.
  if constexpr (sizeof(T) == 16) {
    __stcs(reinterpret_cast<T*>(to), value);
  } else {
    *reinterpret_cast<T*>(to) = value;
  }
}

// Shared memory, likewise.
template <typename T>
SPECTRUMKV_DEVICE T LoadShared(const uint8_t* from) {
  return *reinterpret_cast<const T*>(from);
}
template <typename T>
SPECTRUMKV_DEVICE void StoreShared(uint8_t* to, const T& value) {
  *reinterpret_cast<T*>(to) = value;
}

// As HalfToFloat, NarrowHalf and FloatToHalf for what is not NaN, in one instruction each.
SPECTRUMKV_DEVICE float WidenHalf(uint32_t half) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(half)));
}
SPECTRUMKV_DEVICE uint32_t RoundToHalf(float x) { return __half_as_ushort(__float2half_rn(x)); }

SPECTRUMKV_DEVICE uint64_t AddressOf(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

#endif

SPECTRUMKV_DEVICE uint32_t MaxOf(uint32_t a, uint32_t b) { return a > b ? a : b; }

}  // namespace spectrumkv::gpu
