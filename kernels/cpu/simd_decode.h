// Decoding of the cells of one token. A source of levels gives (code - middle) * scale of kLanes values.
// See simd_bytes.h for why all is in an unnamed namespace.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/codec/codec_math.h"
#include "kernels/cpu/simd_bytes.h"
#include "kernels/cpu/simd_rotate.h"
#include "kernels/cpu/simd_scales.h"

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

template <typename V, DType kType, typename Levels>
SPECTRUMKV_SIMD_INLINE void StoreLevels(const Levels& levels, uint32_t head_dim, uint8_t* to) {
  for (uint32_t d = 0; d < head_dim; d += V::kLanes) StoreValues<V, kType>(to + d * WordBytes(kType), levels(d));
}

template <typename V, DType kType>
void DecodePlain(const CellsOut& cells, Tier tier, const uint8_t* scales, const uint8_t* codes) {
  const uint32_t head_dim = cells.head_dim;
  alignas(64) uint8_t buffer[kGroupFloats + kBytePadding];
  alignas(32) float scale[kGroupCells];
  for (uint32_t first = 0, count = 0; first < cells.heads; first += count) {
    count = GroupSize(head_dim, cells.heads - first);
    LoadScales16(scales + size_t{first} * 2, count, 1.0f, scale);
    for (uint32_t i = 0; tier == Tier::kP4 && i < count; ++i) {
      UnpackNibblesFor<V>(codes + size_t{first + i} * (head_dim / 2), head_dim, 8.0f, buffer + i * head_dim);
    }
    for (uint32_t i = 0; i < count; ++i) {
      uint8_t* to = cells.data + (first + i) * cells.head_stride_bytes;
      if (tier == Tier::kP8) {
        const SignedLevels<V> levels(codes + size_t{first + i} * head_dim, 0.0f, scale[i]);
        StoreLevels<V, kType>(levels, head_dim, to);
      } else {
        using Nibbles = NibbleLevels<V>;
        const typename Nibbles::Type levels(buffer + i * head_dim, 8.0f, Nibbles::Scale(scale[i], 8.0f));
        StoreLevels<V, kType>(levels, head_dim, to);
      }
    }
  }
}

template <typename V, DType kType, typename Levels>
__attribute__((noinline)) void DecodeRotatedCell(const uint8_t* codes, float middle, float scale, uint32_t head_dim,
                                                 const float* mean, uint8_t* to) {
  alignas(64) float partial[V::kMaxBlock * V::kLanes >= 256 ? 1 : kMaxDim];
  const Levels levels(codes, middle, scale);
  RotateCell<V>(head_dim, Rotation(head_dim), partial, levels, [=](uint32_t d, typename V::F x) {
    StoreValues<V, kType>(to + d * WordBytes(kType), mean == nullptr ? x : V::Add(x, V::Load(mean + d)));
  });
}

// The codes of one cell of a stepped tier, one per byte.
template <typename V>
inline void UnpackStepped(const uint8_t* packed, Tier tier, uint32_t head_dim, uint8_t* buffer) {
  if (tier == Tier::kQ4) return UnpackNibblesFor<V>(packed, head_dim, 7.5f, buffer);
  if (tier == Tier::kQ3 && head_dim == 64) return UnpackTriples64(packed, buffer);
  UnpackPairs(packed, head_dim, buffer);
  if (tier == Tier::kQ3) UnpackHighBits(packed + head_dim / 4, head_dim, buffer);
}

// Unpacks a cell before it rotates the one before: the rotation need not wait for bytes just stored.
template <typename V, DType kType>
void DecodeRotated(const CellsOut& cells, Tier tier, const float* means, const uint8_t* scales, const uint8_t* codes) {
  const uint32_t head_dim = cells.head_dim, cell_bytes = RotatedCellBytes(tier, head_dim);
  alignas(64) uint8_t buffer[kGroupFloats + kBytePadding];
  alignas(32) float scale[kGroupCells];
  for (uint32_t first = 0, count = 0; first < cells.heads; first += count) {
    count = GroupSize(head_dim, cells.heads - first);
    const uint8_t* packed = codes + size_t{first} * cell_bytes;
    if (tier == Tier::kQ8) {
      LoadScales16(scales + size_t{first} * 2, count, 0.015625f, scale);
    } else {
      LoadScales8(scales + first, count, scale);
      UnpackStepped<V>(packed, tier, head_dim, buffer);
    }
    for (uint32_t i = 0; i < count; ++i) {
      if (tier != Tier::kQ8 && i + 1 < count) {
        UnpackStepped<V>(packed + (i + 1) * cell_bytes, tier, head_dim, buffer + (i + 1) * head_dim);
      }
      const float* mean = means == nullptr ? nullptr : means + size_t{first + i} * head_dim;
      uint8_t* to = cells.data + (first + i) * cells.head_stride_bytes;
      const uint8_t* unpacked = buffer + i * head_dim;
      if (tier == Tier::kQ8) {
        DecodeRotatedCell<V, kType, SignedLevels<V>>(packed + i * cell_bytes, 0.0f, scale[i], head_dim, mean, to);
      } else if (tier == Tier::kQ4) {
        using Nibbles = NibbleLevels<V>;
        DecodeRotatedCell<V, kType, typename Nibbles::Type>(unpacked, 7.5f, Nibbles::Scale(scale[i], 7.5f), head_dim,
                                                            mean, to);
      } else {
        const float middle = tier == Tier::kQ3 ? 3.5f : 1.5f;
        DecodeRotatedCell<V, kType, TableLevels<V>>(unpacked, middle, scale[i], head_dim, mean, to);
      }
    }
  }
}

}  // namespace
}  // namespace spectrumkv
