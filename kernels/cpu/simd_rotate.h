// Loads, stores and the rotation of one cell, over a vector-traits struct V that an instruction set's file defines.
//
// Included only by files compiled for an instruction set; all in an unnamed namespace (see simd_bytes.h). No standard
// library templates: their copies would be shared with code for other machines.
//
// V has: kLanes floats in F, 4 * kLanes bytes in B; kMaxBlock, the most registers one rotation keeps at once; the
// operations used here and in the files that include this one.
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

// Calls each.template operator()<kDim>() with the head size where it has code of its own, else with 0. Those sizes are
// their own rotation.
template <typename Each>
SPECTRUMKV_SIMD_INLINE auto WithDim(uint32_t head_dim, const Each& each) {
  switch (head_dim) {
    case 64: return each.template operator()<64>();
    case 128: return each.template operator()<128>();
    case 256: return each.template operator()<256>();
    default: return each.template operator()<0>();
  }
}

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

// --- Rotation. source(d) gives the V::kLanes values from d on; sink(d, x) takes the rotated ones.

// Differences are multiply-adds by 1, so that sums and differences use all four arithmetic pipes of a Zen core; the
// result is the same, rounded once.
template <typename V>
SPECTRUMKV_SIMD_INLINE void Butterfly(typename V::F* a, typename V::F* b) {
  const typename V::F sum = V::Add(*a, *b);
  *b = V::SubByFma(*a, *b);
  *a = sum;
}

// The stage of partners that lie kStep registers apart.
template <typename V, int kRegs, int kStep>
SPECTRUMKV_SIMD_INLINE void RegisterStage(typename V::F* x) {
#pragma GCC unroll 16
  for (int i = 0; i < kRegs; ++i) {
    if ((i & kStep) == 0) Butterfly<V>(&x[i], &x[i + kStep]);
  }
}

// Stages kStep, 2 * kStep, ... of a block of kRegs registers.
template <typename V, int kRegs, int kStep>
SPECTRUMKV_SIMD_INLINE void RegisterStages(typename V::F* x) {
  if constexpr (kStep < kRegs) {
    RegisterStage<V, kRegs, kStep>(x);
    RegisterStages<V, kRegs, 2 * kStep>(x);
  }
}

// All stages of kRegs registers of consecutive values. Stage by stage: independent work stands side by side.
template <typename V, int kRegs>
SPECTRUMKV_SIMD_INLINE void RotateRegisters(typename V::F* x) {
#pragma GCC unroll 4
  for (int h = 1; h < V::kLanes; h *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < kRegs; ++i) x[i] = V::LaneStage(x[i], h);
  }
  RegisterStages<V, kRegs, 1>(x);
}

template <typename V, int kRegs, typename Source, typename Sink>
SPECTRUMKV_SIMD_INLINE void RotateBlocks(uint32_t head_dim, const Source& source, const Sink& sink) {
  for (uint32_t base = 0; base < head_dim; base += kRegs * V::kLanes) {
    typename V::F x[kRegs];
#pragma GCC unroll 16
    for (int i = 0; i < kRegs; ++i) x[i] = source(base + static_cast<uint32_t>(i * V::kLanes));
    RotateRegisters<V, kRegs>(x);
#pragma GCC unroll 16
    for (int i = 0; i < kRegs; ++i) sink(base + static_cast<uint32_t>(i * V::kLanes), x[i]);
  }
}

// The last stage, or the last two, of a rotation larger than a block; `partial` holds the blocks.
template <typename V, uint32_t kBlock, typename Sink>
SPECTRUMKV_SIMD_INLINE void FinishRotation(uint32_t head_dim, uint32_t rotation, const float* partial,
                                           const Sink& sink) {
  for (uint32_t base = 0; base < head_dim; base += rotation) {
    for (uint32_t d = base; d < base + kBlock; d += V::kLanes) {
      typename V::F x[4] = {V::Load(partial + d), V::Load(partial + d + kBlock)};
      if (rotation == 2 * kBlock) {
        Butterfly<V>(&x[0], &x[1]);
        sink(d, x[0]);
        sink(d + kBlock, x[1]);
        continue;
      }
      x[2] = V::Load(partial + d + 2 * kBlock);
      x[3] = V::Load(partial + d + 3 * kBlock);
      RegisterStages<V, 4, 1>(x);
#pragma GCC unroll 4
      for (uint32_t i = 0; i < 4; ++i) sink(d + i * kBlock, x[i]);
    }
  }
}

// `partial`: head_dim floats of scratch. kDim: head_dim where it is known to be its own rotation, or 0.
template <typename V, uint32_t kDim, typename Source, typename Sink>
SPECTRUMKV_SIMD_INLINE void RotateCell(uint32_t head_dim, float* partial, const Source& source, const Sink& sink) {
  constexpr int kMax = V::kMaxBlock;
  const auto by_parts = [&](uint32_t rotation) {
    RotateBlocks<V, kMax>(head_dim, source, [=](uint32_t d, typename V::F x) { V::Store(partial + d, x); });
    FinishRotation<V, kMax * V::kLanes>(head_dim, rotation, partial, sink);
  };
  if constexpr (kDim != 0) {
    constexpr int kRegs = static_cast<int>(kDim) / V::kLanes;
    if constexpr (kRegs > kMax) {
      by_parts(kDim);
    } else {
      RotateBlocks<V, kRegs>(kDim, source, sink);
    }
    return;
  }
  const uint32_t rotation = Rotation(head_dim);
  switch (static_cast<int>(rotation) / V::kLanes) {
    case 1: return RotateBlocks<V, 1>(head_dim, source, sink);
    case 2: return RotateBlocks<V, 2>(head_dim, source, sink);
    case 4: return RotateBlocks<V, 4>(head_dim, source, sink);
    case 8: return RotateBlocks<V, 8>(head_dim, source, sink);
    default:
      if constexpr (kMax >= 16) {
        RotateBlocks<V, 16>(head_dim, source, sink);
      } else {
        by_parts(rotation);
      }
  }
}

}  // namespace
}  // namespace spectrumkv
