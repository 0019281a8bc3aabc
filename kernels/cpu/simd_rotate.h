// Loads, stores and the rotation of one cell, over a vector-traits struct V that an instruction set's file defines.
//
// Included only by files compiled for an instruction set; all in an unnamed namespace (see simd_bytes.h). No standard
// library templates: their copies would be shared with code for other machines.
//
// V has: kLanes floats in F; kMaxBlock, the most registers one rotation keeps at once; the operations used below.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/codec/cell_ops.h"

// Registers passed through memory cost more than the arithmetic: whatever takes a functor is inlined.
#define SPECTRUMKV_SIMD_INLINE inline __attribute__((always_inline))

namespace spectrumkv {
namespace {

constexpr uint32_t kMaxDim = 1024;
constexpr uint32_t kBytePadding = 64;  // code buffers are written in whole vectors

inline bool HasFastPath(uint32_t head_dim) { return head_dim % 16 == 0; }

constexpr uint32_t WordBytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

inline uint32_t Rotation(uint32_t head_dim) {
  const uint32_t lowest_bit = head_dim & (~head_dim + 1);
  return lowest_bit < 256 ? lowest_bit : 256;
}

inline uint32_t RotatedCellBytes(Tier tier, uint32_t head_dim) {
  if (tier == Tier::kQ8) return head_dim;
  if (tier == Tier::kQ4) return head_dim / 2;
  return tier == Tier::kQ3 ? head_dim / 4 + head_dim / 8 : head_dim / 4;
}

template <typename V, DType kType>
SPECTRUMKV_SIMD_INLINE typename V::F LoadValues(const uint8_t* from) {
  if constexpr (kType == DType::kFloat16) {
    return V::LoadHalf(from);
  } else if constexpr (kType == DType::kBFloat16) {
    return V::LoadBfloat(from);
  } else {
    return V::Load(reinterpret_cast<const float*>(from));
  }
}

template <typename V, DType kType>
SPECTRUMKV_SIMD_INLINE void StoreValues(uint8_t* to, typename V::F x) {
  if constexpr (kType == DType::kFloat16) {
    V::StoreHalf(to, x);
  } else if constexpr (kType == DType::kBFloat16) {
    V::StoreBfloat(to, x);
  } else {
    V::Store(reinterpret_cast<float*>(to), x);
  }
}

// --- Rotation. source(d) gives the V::kLanes values from d on; sink(d, x) takes the rotated ones.

template <typename V, int kRegs, typename Source, typename Sink>
SPECTRUMKV_SIMD_INLINE void RotateBlock(uint32_t base, const Source& source, const Sink& sink) {
  typename V::F x[kRegs];
#pragma GCC unroll 16
  for (int i = 0; i < kRegs; ++i) x[i] = source(base + static_cast<uint32_t>(i * V::kLanes));
  // Stage by stage over all registers: independent work stands side by side.
#pragma GCC unroll 4
  for (int h = 1; h < V::kLanes; h *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < kRegs; ++i) x[i] = V::LaneStage(x[i], h);
  }
#pragma GCC unroll 4
  for (int h = 1; h < kRegs; h *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < kRegs; ++i) {
      if (i & h) continue;
      const typename V::F a = x[i], b = x[i + h];
      x[i] = V::Add(a, b);
      x[i + h] = V::Sub(a, b);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRegs; ++i) sink(base + static_cast<uint32_t>(i * V::kLanes), x[i]);
}

template <typename V, int kRegs, typename Source, typename Sink>
SPECTRUMKV_SIMD_INLINE void RotateBlocks(uint32_t head_dim, const Source& source, const Sink& sink) {
  for (uint32_t base = 0; base < head_dim; base += kRegs * V::kLanes) {
    RotateBlock<V, kRegs>(base, source, sink);
  }
}

// The last stage, or the last two, of a rotation larger than a block; `partial` holds the blocks.
template <typename V, typename Sink>
SPECTRUMKV_SIMD_INLINE void FinishRotation(uint32_t head_dim, uint32_t rotation, const float* partial,
                                           const Sink& sink) {
  constexpr uint32_t kBlock = V::kMaxBlock * V::kLanes;
  for (uint32_t base = 0; base < head_dim; base += rotation) {
    for (uint32_t d = base; d < base + kBlock; d += V::kLanes) {
      const typename V::F a = V::Load(partial + d), b = V::Load(partial + d + kBlock);
      const typename V::F sum = V::Add(a, b), difference = V::Sub(a, b);
      if (rotation == 2 * kBlock) {
        sink(d, sum);
        sink(d + kBlock, difference);
        continue;
      }
      const typename V::F c = V::Load(partial + d + 2 * kBlock), e = V::Load(partial + d + 3 * kBlock);
      const typename V::F sum2 = V::Add(c, e), difference2 = V::Sub(c, e);
      sink(d, V::Add(sum, sum2));
      sink(d + kBlock, V::Add(difference, difference2));
      sink(d + 2 * kBlock, V::Sub(sum, sum2));
      sink(d + 3 * kBlock, V::Sub(difference, difference2));
    }
  }
}

// `partial`: head_dim floats of scratch.
template <typename V, typename Source, typename Sink>
SPECTRUMKV_SIMD_INLINE void RotateCell(uint32_t head_dim, uint32_t rotation, float* partial, const Source& source,
                                       const Sink& sink) {
  constexpr int kMax = V::kMaxBlock;
  const int regs = static_cast<int>(rotation) / V::kLanes;
  if (regs > kMax) {
    RotateBlocks<V, kMax>(head_dim, source, [=](uint32_t d, typename V::F x) { V::Store(partial + d, x); });
    FinishRotation<V>(head_dim, rotation, partial, sink);
    return;
  }
  switch (regs) {
    case 1: return RotateBlocks<V, 1>(head_dim, source, sink);
    case 2: return RotateBlocks<V, 2>(head_dim, source, sink);
    case 4: return RotateBlocks<V, 4>(head_dim, source, sink);
    case 8: return RotateBlocks<V, 8>(head_dim, source, sink);
    default:
      if constexpr (kMax >= 16) RotateBlocks<V, 16>(head_dim, source, sink);
  }
}

}  // namespace
}  // namespace spectrumkv
