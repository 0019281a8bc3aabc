// Decoding of the cells of one token. A source of levels gives (code - middle) * scale of kLanes values.
// See simd_bytes.h for why all is in an unnamed namespace.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/codec/codec_math.h"
#include "kernels/cpu/simd_bytes.h"
#include "kernels/cpu/simd_rotate.h"
#include "kernels/cpu/simd_scales.h"
#include "kernels/cpu/simd_unfold.h"

namespace spectrumkv {
namespace {

template <typename V>
struct SignedLevels {
  const uint8_t* codes;
  typename V::F scale;

  SignedLevels(const uint8_t* signed_codes, float /*middle*/, float scale_value)
      : codes(signed_codes), scale(V::Set(scale_value)) {}
  typename V::F operator()(uint32_t d) const { return V::Mul(V::LoadSignedBytes(codes + d), scale); }
};

// Codes one per byte, below 2^V::kTableBits: the levels lie in a register.
template <typename V>
struct TableLevels {
  const uint8_t* codes;
  typename V::F table;

  TableLevels(const uint8_t* unpacked, float middle, float scale)
      : codes(unpacked), table(V::Mul(V::Sub(V::LaneIndex(), V::Set(middle)), V::Set(scale))) {}
  typename V::F operator()(uint32_t d) const { return V::Lookup(table, codes + d); }
};

// Nibbles as the bytes that NibbleLevels reads; middle is 7.5 or 8.
template <typename V>
inline void UnpackNibblesFor(const uint8_t* packed, uint32_t head_dim, float middle, uint8_t* buffer) {
  if constexpr (V::kTableBits >= 4) {
    UnpackNibbles(packed, head_dim, buffer);
  } else if (middle == 8.0f) {
    UnpackNibbles(packed, head_dim, _mm_setr_epi8(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7), buffer);
  } else {  // odd numbers of half scales: both products are exact
    const __m128i odd = _mm_setr_epi8(-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15);
    UnpackNibbles(packed, head_dim, odd, buffer);
  }
}

// Levels of those bytes, and their scale.
template <typename V, bool kTable = V::kTableBits >= 4>
struct NibbleLevels {
  using Type = TableLevels<V>;
  static float Scale(float scale, float /*middle*/) { return scale; }
};
template <typename V>
struct NibbleLevels<V, false> {
  using Type = SignedLevels<V>;
  static float Scale(float scale, float middle) { return middle == 8.0f ? scale : scale * 0.5f; }
};

// The largest float16, with room for the roundings of a rotation below it.
constexpr float kSurelyHalf = 65000.0f;

// Values are clamped only where one can be beyond float16: nobody's codes of ordinary values are.
template <typename V, DType kType>
SPECTRUMKV_SIMD_INLINE void StoreNarrow(uint8_t* to, typename V::F x, bool clamp) {
  if constexpr (kType == DType::kFloat16) {
    V::StoreHalf(to, clamp ? V::ClampToHalf(x) : x);
  } else if constexpr (kType == DType::kBFloat16) {
    V::StoreBfloat(to, x);
  } else {
    V::Store(reinterpret_cast<float*>(to), x);
  }
}

inline float LargestScale(const GroupOut& group) {
  float largest = 0.0f;
  for (uint32_t i = 0; i < group.count; ++i) {
    const float scale = group.scale[i] < 0.0f ? -group.scale[i] : group.scale[i];
    largest = scale > largest ? scale : largest;
  }
  return largest;
}

// --- Plain tiers

template <typename V, DType kType, typename Levels>
SPECTRUMKV_SIMD_INLINE void StoreLevels(const Levels& levels, uint32_t head_dim, uint8_t* to, bool clamp) {
  for (uint32_t d = 0; d < head_dim; d += V::kLanes) {
    StoreNarrow<V, kType>(to + d * WordBytes(kType), levels(d), clamp);
  }
}

template <typename V, DType kType, Tier kTier>
void DecodePlain(const CellsOut& cells, const uint8_t* scales, const uint8_t* codes) {
  constexpr float kLargestLevel = kTier == Tier::kP8 ? 128.0f : 8.0f;
  const uint32_t head_dim = cells.head_dim, cell_bytes = kTier == Tier::kP8 ? head_dim : head_dim / 2;
  const uint32_t most = GroupCells(head_dim);
  alignas(64) uint8_t buffer[kGroupFloats + kBytePadding];
  GroupOut group;
  CellWriter writer(cells);
  while (writer.left() != 0) {
    writer.Next(most, nullptr, &group);
    LoadScales16(scales, group.count, 1.0f, group.scale);
    group.clamp = LargestScale(group) * kLargestLevel > kSurelyHalf;
    for (uint32_t i = 0; kTier == Tier::kP4 && i < group.count; ++i) {
      UnpackNibblesFor<V>(codes + i * cell_bytes, head_dim, 8.0f, buffer + i * head_dim);
    }
    for (uint32_t i = 0; i < group.count; ++i) {
      if constexpr (kTier == Tier::kP8) {
        const SignedLevels<V> levels(codes + i * cell_bytes, 0.0f, group.scale[i]);
        StoreLevels<V, kType>(levels, head_dim, group.to[i], group.clamp);
      } else {
        using Nibbles = NibbleLevels<V>;
        const typename Nibbles::Type levels(buffer + i * head_dim, 8.0f, Nibbles::Scale(group.scale[i], 8.0f));
        StoreLevels<V, kType>(levels, head_dim, group.to[i], group.clamp);
      }
    }
    scales += group.count * 2;
    codes += group.count * cell_bytes;
  }
}

// --- Rotated tiers

// Codes one per byte, for head sizes that have no code of their own.
template <typename V, Tier kTier>
inline void UnpackStepped(const uint8_t* packed, uint32_t head_dim, uint8_t* buffer) {
  if constexpr (kTier == Tier::kQ4) return UnpackNibblesFor<V>(packed, head_dim, 7.5f, buffer);
  UnpackPairs(packed, head_dim, buffer);
  if constexpr (kTier == Tier::kQ3) UnpackHighBits(packed + head_dim / 4, head_dim, buffer);
}

template <typename V, Tier kTier>
struct SteppedLevels {
  using Type = TableLevels<V>;
  static constexpr float kMiddle = kTier == Tier::kQ3 ? 3.5f : 1.5f;
  static float Scale(float scale) { return scale; }
};
template <typename V>
struct SteppedLevels<V, Tier::kQ4> {
  using Type = typename NibbleLevels<V>::Type;
  static constexpr float kMiddle = 7.5f;
  static float Scale(float scale) { return NibbleLevels<V>::Scale(scale, 7.5f); }
};

template <typename V, DType kType, Tier kTier, uint32_t kDim>
__attribute__((noinline)) void DecodeRotatedGroup(const GroupOut& group, const uint8_t* codes) {
  alignas(64) float partial[kDim != 0 ? kDim : kMaxDim];
  alignas(64) uint8_t buffer[kDim != 0 ? 1 : kGroupFloats + kBytePadding];
  const uint32_t head_dim = kDim != 0 ? kDim : group.head_dim, cell_bytes = RotatedCellBytes(kTier, head_dim);
  const bool clamp = group.clamp;
  if constexpr (kTier != Tier::kQ8 && kDim == 0) {
    // All cells first: none needs to wait for bytes just stored.
    for (uint32_t i = 0; i < group.count; ++i) {
      UnpackStepped<V, kTier>(codes + i * cell_bytes, head_dim, buffer + i * head_dim);
    }
  }
  for (uint32_t i = 0; i < group.count; ++i, codes += cell_bytes) {
    const float* mean = group.mean[i];
    uint8_t* to = group.to[i];
    // A predictable branch per register is cheaper than twice the code.
    const auto sink = [=](uint32_t d, typename V::F x) {
      StoreNarrow<V, kType>(to + d * WordBytes(kType), mean == nullptr ? x : V::Add(x, V::Load(mean + d)), clamp);
    };
    if constexpr (kTier == Tier::kQ8) {
      RotateCell<V, kDim>(head_dim, partial, SignedLevels<V>(codes, 0.0f, group.scale[i]), sink);
    } else if constexpr (kDim != 0) {
      RotatePackedCell<V, kTier, kDim>(codes, group.scale[i], partial, sink);
    } else {
      using Stepped = SteppedLevels<V, kTier>;
      const typename Stepped::Type levels(buffer + i * head_dim, Stepped::kMiddle, Stepped::Scale(group.scale[i]));
      RotateCell<V, 0>(head_dim, partial, levels, sink);
    }
  }
}

template <typename V, DType kType>
void DecodeRotated(const CellsOut& cells, Tier tier, const Centres& centres, const uint8_t* scales,
                   const uint8_t* codes) {
  const uint32_t head_dim = cells.head_dim, cell_bytes = RotatedCellBytes(tier, head_dim);
  const auto decode = WithDim(head_dim, [=]<uint32_t kDim>() {
    switch (tier) {
      case Tier::kQ8: return &DecodeRotatedGroup<V, kType, Tier::kQ8, kDim>;
      case Tier::kQ4: return &DecodeRotatedGroup<V, kType, Tier::kQ4, kDim>;
      case Tier::kQ3: return &DecodeRotatedGroup<V, kType, Tier::kQ3, kDim>;
      default: return &DecodeRotatedGroup<V, kType, Tier::kQ2, kDim>;
    }
  });
  const float largest_level = tier == Tier::kQ8 ? 128.0f : tier == Tier::kQ4 ? 7.5f : tier == Tier::kQ3 ? 3.5f : 1.5f;
  const float reach = largest_level * static_cast<float>(Rotation(head_dim));
  const float bound = centres.means == nullptr ? 0.0f : centres.bound;
  const uint32_t most = GroupCells(head_dim);
  GroupOut group;
  CellWriter writer(cells);
  while (writer.left() != 0) {
    writer.Next(most, centres.means, &group);
    if (tier == Tier::kQ8) {
      LoadScales16(scales, group.count, 0.015625f, group.scale);
      scales += group.count * 2;
    } else {
      LoadScales8(scales, group.count, group.scale);
      scales += group.count;
    }
    group.clamp = LargestScale(group) * reach + bound > kSurelyHalf;
    decode(group, codes);
    codes += group.count * cell_bytes;
  }
}

}  // namespace
}  // namespace spectrumkv
