// Unpacking of codes into registers, the inverse of simd_fold.h, for Q4, Q3 and Q2 of head sizes that have code of
// their own: code d of a cell comes to byte d, by shifts that differ from lane to lane. See simd_bytes.h for why all is
// in an unnamed namespace.
#pragma once

#include <cstdint>

#include "kernels/cpu/simd_rotate.h"

namespace spectrumkv {
namespace {

// A section of a packed cell with kBits of each code: code d has bits of byte d mod (kDim * kBits / 8), and its place
// in that byte is d divided by the same.
template <typename V, uint32_t kDim, uint32_t kBits>
struct Packed {
  static constexpr uint32_t kBytes = kDim * kBits / 8;
  static constexpr uint32_t kVecBytes = 4 * V::kLanes;

  struct alignas(64) Counts {
    int32_t shift[V::kLanes];
  };
  // How far the dwords of register `vec` are shifted down.
  static constexpr Counts CountsOf(uint32_t vec) {
    Counts counts{};
    for (uint32_t lane = 0; lane < V::kLanes; ++lane) {
      counts.shift[lane] = static_cast<int32_t>((vec * kVecBytes + 4 * lane) / kBytes * kBits);
    }
    return counts;
  }
  static constexpr Counts kCounts[] = {CountsOf(0), CountsOf(1), CountsOf(2), CountsOf(3),
                                       CountsOf(4), CountsOf(5), CountsOf(6), CountsOf(7)};

  // The codes of register kVec in the low kBits of their bytes; the bits above are of no meaning.
  template <uint32_t kVec>
  static SPECTRUMKV_SIMD_INLINE typename V::B Unfold(const uint8_t* in) {
    constexpr int32_t kFirst = kCounts[kVec].shift[0], kLast = kCounts[kVec].shift[V::kLanes - 1];
    if constexpr (kBytes >= kVecBytes) {
      static_assert(kFirst == kLast);
      const typename V::B bytes = V::LoadBytes(in + kVec * kVecBytes % kBytes);
      return kFirst == 0 ? bytes : V::ShiftDwords(bytes, kFirst);
    } else {
      return V::ShiftDwords(V::template LoadRepeated<kBytes>(in), kCounts[kVec].shift);
    }
  }
};

// Register kVec of a cell's codes, for V::Expand.
template <typename V, Tier kTier, uint32_t kDim, uint32_t kVec>
SPECTRUMKV_SIMD_INLINE typename V::B CodesAt(const uint8_t* packed) {
  if constexpr (kTier == Tier::kQ4) {
    return V::template Isolate<4>(Packed<V, kDim, 4>::template Unfold<kVec>(packed));
  } else if constexpr (kTier == Tier::kQ2) {
    return V::template Isolate<2>(Packed<V, kDim, 2>::template Unfold<kVec>(packed));
  } else {
    return V::Join3(Packed<V, kDim, 2>::template Unfold<kVec>(packed),
                    Packed<V, kDim, 1>::template Unfold<kVec>(packed + kDim / 4));
  }
}

// Rotates the values of kVecs registers of codes, 4 * V::kLanes * kVecs of them, and leaves them in natural order but
// for V::NaturalRegister.
template <typename V, Tier kTier, uint32_t kDim, uint32_t kFirst, uint32_t kVecs>
SPECTRUMKV_SIMD_INLINE void RotateCodes(const uint8_t* packed, const typename V::Levels& levels, typename V::F* x) {
  const auto expand = [&]<uint32_t kVec>() {
    if constexpr (kVec < kVecs) V::Expand(CodesAt<V, kTier, kDim, kFirst + kVec>(packed), levels, x + 4 * kVec);
  };
  static_assert(kVecs <= 4);
  expand.template operator()<0>();
  expand.template operator()<1>();
  expand.template operator()<2>();
  expand.template operator()<3>();
  V::template RotateExpanded<4 * kVecs>(x);
}

// Decodes and rotates one cell; sink(d, x) takes V::kLanes values from d on. `partial`: kDim floats of scratch.
template <typename V, Tier kTier, uint32_t kDim, typename Sink>
SPECTRUMKV_SIMD_INLINE void RotatePackedCell(const uint8_t* packed, float scale, float* partial, const Sink& sink) {
  constexpr uint32_t kAll = kDim / (4 * V::kLanes), kVecs = kAll < V::kMaxCodeVecs ? kAll : V::kMaxCodeVecs;
  constexpr uint32_t kBlock = kVecs * 4 * V::kLanes;
  constexpr int kBits = kTier == Tier::kQ4 ? 4 : kTier == Tier::kQ3 ? 3 : 2;
  const typename V::Levels levels = V::template LevelsOf<kBits>(scale);
  const auto rotate = [&]<uint32_t kPart>(const auto& take) {
    if constexpr (kPart * kVecs < kAll) {
      typename V::F x[4 * kVecs];
      RotateCodes<V, kTier, kDim, kPart * kVecs, kVecs>(packed, levels, x);
#pragma GCC unroll 16
      for (uint32_t i = 0; i < 4 * kVecs; ++i) take(kPart * kBlock + V::NaturalRegister(i) * V::kLanes, x[i]);
    }
  };
  if constexpr (kVecs == kAll) return rotate.template operator()<0>(sink);
  const auto keep = [=](uint32_t d, typename V::F x) { V::Store(partial + d, x); };
  static_assert(kAll <= 4 * kVecs);
  rotate.template operator()<0>(keep);
  rotate.template operator()<1>(keep);
  rotate.template operator()<2>(keep);
  rotate.template operator()<3>(keep);
  if constexpr (kVecs != kAll) FinishRotation<V, kBlock>(kDim, kDim, partial, sink);
}

}  // namespace
}  // namespace spectrumkv
