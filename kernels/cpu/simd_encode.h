// Encoding of the cells of one token.
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

// Codes of a cell, one per byte: convert(a, b, c, d) makes the bytes of 4 * kLanes values. `codes` has kBytePadding.
template <typename V, typename Source, typename Convert>
SPECTRUMKV_SIMD_INLINE void QuantiseCell(uint32_t head_dim, const Source& source, const Convert& convert,
                                         uint8_t* codes) {
  constexpr uint32_t kGroup = 4 * V::kLanes;
  uint32_t d = 0;
  for (; d + kGroup <= head_dim; d += kGroup) {
    V::StoreBytes(codes + d, convert(source(d), source(d + V::kLanes), source(d + 2 * V::kLanes),
                                     source(d + 3 * V::kLanes)));
  }
  if (d == head_dim) return;
  const auto or_zero = [&](uint32_t at) { return at < head_dim ? source(at) : V::Zero(); };
  V::StoreBytes(codes + d, convert(or_zero(d), or_zero(d + V::kLanes), or_zero(d + 2 * V::kLanes),
                                   or_zero(d + 3 * V::kLanes)));
}

// Rounded codes within [-top, top], of P8, P4, Q8 and centres.
template <typename V, typename Source>
SPECTRUMKV_SIMD_INLINE void RoundCell(uint32_t head_dim, float reciprocal, int top, const Source& source,
                                      uint8_t* codes) {
  const typename V::F r = V::Set(reciprocal);
  const typename V::B low = V::SetBytes(-top), high = V::SetBytes(top);
  QuantiseCell<V>(
      head_dim, [&](uint32_t d) { return V::Mul(source(d), r); },
      [&](typename V::F a, typename V::F b, typename V::F c, typename V::F d) {
        return V::MinBytes(V::MaxBytes(V::RoundToBytes(a, b, c, d), low), high);
      },
      codes);
}

template <typename V, typename Source>
SPECTRUMKV_SIMD_INLINE void QuantisePlainCell(uint32_t head_dim, Tier tier, float reciprocal, const Source& source,
                                              uint8_t* buffer, uint8_t* out) {
  if (tier == Tier::kP8) {
    const bool direct = head_dim % (4 * V::kLanes) == 0;
    RoundCell<V>(head_dim, reciprocal, 127, source, direct ? out : buffer);
    if (!direct) CopyCodes(buffer, head_dim, out);
    return;
  }
  const typename V::F r = V::Set(reciprocal);
  const typename V::B low = V::SetBytes(-7), high = V::SetBytes(7), offset = V::SetBytes(8);
  QuantiseCell<V>(
      head_dim, [&](uint32_t d) { return V::Mul(source(d), r); },
      [&](typename V::F a, typename V::F b, typename V::F c, typename V::F d) {
        return V::AddBytes(V::MinBytes(V::MaxBytes(V::RoundToBytes(a, b, c, d), low), high), offset);
      },
      buffer);
  PackNibbles(buffer, head_dim, out);
}

template <typename V, DType kType>
void EncodePlain(const CellsIn& cells, Tier tier, const uint32_t* magnitudes, uint8_t* scales, uint8_t* codes) {
  const uint32_t head_dim = cells.head_dim, cell_bytes = tier == Tier::kP8 ? head_dim : head_dim / 2;
  alignas(64) uint8_t buffer[kMaxDim + kBytePadding];
  GroupScales group;
  for (uint32_t first = 0; first < cells.heads; first += kGroupCells) {
    const uint32_t left = cells.heads - first, count = left < kGroupCells ? left : kGroupCells;
    LoadAbsmax<kType>(magnitudes + first, count, &group);
    PlainScales(tier == Tier::kP8 ? 127.0f : 7.0f, count, &group, scales + size_t{first} * 2);
    for (uint32_t i = 0; i < count; ++i) {
      const uint8_t* from = cells.data + (first + i) * cells.head_stride_bytes;
      const auto source = [=](uint32_t d) { return LoadValues<V, kType>(from + d * WordBytes(kType)); };
      QuantisePlainCell<V>(head_dim, tier, group.reciprocal[i], source, buffer,
                           codes + size_t{first + i} * cell_bytes);
    }
  }
}

inline void PackStepped(const uint8_t* codes, int bits, uint32_t head_dim, uint8_t* out) {
  if (bits == 4) return PackNibbles(codes, head_dim, out);
  PackPairs(codes, head_dim, out);
  if (bits == 3) PackHighBits(codes, head_dim, out + head_dim / 4);
}

template <typename V>
SPECTRUMKV_SIMD_INLINE void QuantiseRotatedCell(const float* z, float reciprocal, Tier tier, uint32_t head_dim,
                                                uint8_t* buffer, uint8_t* out) {
  const auto source = [=](uint32_t d) { return V::Load(z + d); };
  if (tier == Tier::kQ8) {
    const bool direct = head_dim % (4 * V::kLanes) == 0;
    RoundCell<V>(head_dim, reciprocal, 127, source, direct ? out : buffer);
    if (!direct) CopyCodes(buffer, head_dim, out);
    return;
  }
  const int bits = BitsOf(tier), middle = 1 << (bits - 1);
  const typename V::F r = V::Set(reciprocal);
  // Clamped before the offset is added: the same, and no byte overflows.
  const typename V::B low = V::SetBytes(-middle), high = V::SetBytes(middle - 1), offset = V::SetBytes(middle);
  QuantiseCell<V>(
      head_dim, [&](uint32_t d) { return V::Mul(source(d), r); },
      [&](typename V::F a, typename V::F b, typename V::F c, typename V::F d) {
        return V::AddBytes(V::MinBytes(V::MaxBytes(V::FloorToBytes(a, b, c, d), low), high), offset);
      },
      buffer);
  PackStepped(buffer, bits, head_dim, out);
}

// Writes the rotated cell to z; returns its largest magnitude.
template <typename V, DType kType>
SPECTRUMKV_SIMD_INLINE float RotateInput(const uint8_t* from, const float* mean, uint32_t head_dim, float* z) {
  const uint32_t rotation = Rotation(head_dim);
  typename V::F largest = V::Zero();
  const auto sink = [&](uint32_t d, typename V::F x) {
    V::Store(z + d, x);
    largest = V::MaxAbs(largest, x);
  };
  // A predictable branch per register is cheaper than twice the code.
  const auto source = [=](uint32_t d) {
    const typename V::F x = LoadValues<V, kType>(from + d * WordBytes(kType));
    return mean == nullptr ? x : V::Sub(x, V::Load(mean + d));
  };
  RotateCell<V>(head_dim, rotation, z, source, sink);
  return V::ReduceMax(largest);
}

template <typename V, DType kType>
void EncodeRotated(const CellsIn& cells, Tier tier, const float* means, uint8_t* scales, uint8_t* codes) {
  const uint32_t head_dim = cells.head_dim, cell_bytes = RotatedCellBytes(tier, head_dim);
  const float rotation = static_cast<float>(Rotation(head_dim));
  alignas(64) float z[kGroupFloats];
  alignas(64) uint8_t buffer[kMaxDim + kBytePadding];
  GroupScales group;
  for (uint32_t first = 0, count = 0; first < cells.heads; first += count) {
    count = GroupSize(head_dim, cells.heads - first);
    for (uint32_t i = 0; i < count; ++i) {
      const float* mean = means == nullptr ? nullptr : means + size_t{first + i} * head_dim;
      group.absmax[i] = RotateInput<V, kType>(cells.data + (first + i) * cells.head_stride_bytes, mean, head_dim,
                                              z + i * head_dim);
    }
    if (tier == Tier::kQ8) {
      Rotated8Scales(rotation, count, &group, scales + size_t{first} * 2);
    } else {
      SteppedScales(StepShare(BitsOf(tier), head_dim), rotation, count, &group, scales + first);
    }
    for (uint32_t i = 0; i < count; ++i) {
      QuantiseRotatedCell<V>(z + i * head_dim, group.reciprocal[i], tier, head_dim, buffer,
                             codes + size_t{first + i} * cell_bytes);
    }
  }
}

}  // namespace
}  // namespace spectrumkv
