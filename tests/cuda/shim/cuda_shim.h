// CUDA's names, for kernels compiled as C++ (kernels/cuda/device.cuh): include it in front of them. shim/block.h runs
// them. Only what the kernels use; `__shared__` variables are static, as blocks run one after another.
#pragma once

#define SPECTRUMKV_CUDA_SHIM 1

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/codec/codec_math.h"
#include "tests/cuda/shim/block.h"

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline, unused))
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(threads, blocks)
#define threadIdx (::spectrumkv::shim::ThreadIndex())
#define blockIdx (::spectrumkv::shim::BlockIndex())
#define blockDim (::spectrumkv::shim::BlockSize())
#define gridDim (::spectrumkv::shim::GridSize())

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return uint2{x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return uint4{x, y, z, w}; }

inline void __syncthreads() { spectrumkv::shim::Collective(spectrumkv::shim::Op::kSyncBlock, 0, 0, 0); }
inline void __syncwarp(uint32_t mask = ~0u) {
  spectrumkv::shim::Collective(spectrumkv::shim::Op::kSyncWarp, mask, 0, 0);
}
inline uint32_t __ballot_sync(uint32_t mask, int predicate) {
  return static_cast<uint32_t>(
      spectrumkv::shim::Collective(spectrumkv::shim::Op::kBallot, mask, predicate != 0 ? 1 : 0, 0));
}

template <typename T>
T __shfl_sync(uint32_t mask, T value, int lane) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(value));
  bits = spectrumkv::shim::Collective(spectrumkv::shim::Op::kShuffle, mask, bits, static_cast<uint32_t>(lane) & 31);
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int bits) {
  return __shfl_sync(mask, value, static_cast<int>(threadIdx.x % 32) ^ bits);
}

inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long value) {
  spectrumkv::shim::CheckAccess(at, sizeof(*at), "atomic");
  return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}

namespace spectrumkv::gpu {

inline void AssumeGlobal(const void*) {}

template <typename T>
T LoadAs(const uint8_t* from) {
  shim::CheckAccess(from, sizeof(T), "load");
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}
template <typename T>
void StoreAs(uint8_t* to, const T& value) {
  shim::CheckAccess(to, sizeof(T), "store");
  std::memcpy(to, &value, sizeof(value));
}

inline void CheckShared(const uint8_t* at, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(at) % bytes != 0) shim::CheckAccess(at, bytes, "access to shared memory");
}
template <typename T>
T LoadShared(const uint8_t* from) {
  CheckShared(from, sizeof(T));
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}
template <typename T>
void StoreShared(uint8_t* to, const T& value) {
  CheckShared(to, sizeof(T));
  std::memcpy(to, &value, sizeof(value));
}

inline float WidenHalf(uint32_t half) { return HalfToFloat(half); }
inline uint32_t RoundToHalf(float x) { return FloatToHalf(x); }
inline uint64_t AddressOf(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

}  // namespace spectrumkv::gpu

namespace spectrumkv::shim {

// A Launcher of kernels/cuda/pipeline.cuh.
class Launcher {
 public:
  explicit Launcher(Options options) : options_(std::move(options)) {}

  template <typename Args>
  void operator()(void (*kernel)(const Args), uint32_t blocks, uint32_t threads, const Args& args,
                  uint32_t rows = 1) {
    RunGrid(options_, blocks, threads, [&] { kernel(args); }, rows);
  }

 private:
  Options options_;
};

}  // namespace spectrumkv::shim
