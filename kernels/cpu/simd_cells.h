// The cell functions of CellOps (kernels/codec/cell_ops.h), written once over a vector-traits struct V that an
// instruction set's file defines. Head sizes that are no multiple of 16 go to the scalar code.
//
// Included only by files compiled for an instruction set; all in an unnamed namespace (see simd_bytes.h). No standard
// library templates: their copies would be shared with code for other machines.
//
// V has: kLanes floats in F; kMaxBlock, the most registers one rotation keeps at once; the operations used below.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/codec/cell_ops.h"
#include "kernels/codec/codec_math.h"
#include "kernels/codec/scan_math.h"
#include "kernels/cpu/simd_bytes.h"

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
SPECTRUMKV_SIMD_INLINE void FinishRotation(uint32_t head_dim, uint32_t rotation, const float* partial, const Sink& sink) {
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
SPECTRUMKV_SIMD_INLINE void RotateCell(uint32_t head_dim, uint32_t rotation, float* partial, const Source& source, const Sink& sink) {
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

// --- Passes over words

// Largest magnitude word of `count` values, count a multiple of 16.
template <DType kType>
inline uint32_t MaxMagnitude(const uint8_t* from, uint32_t count) {
  const auto load = [&](uint32_t byte) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + byte)); };
  if constexpr (kType == DType::kFloat32) {
    const __m256i mask = _mm256_set1_epi32(0x7FFFFFFF);
    __m256i a = _mm256_setzero_si256(), b = a;
    for (uint32_t i = 0; i < count; i += 16) {
      a = _mm256_max_epu32(a, _mm256_and_si256(load(4 * i), mask));
      b = _mm256_max_epu32(b, _mm256_and_si256(load(4 * i + 32), mask));
    }
    a = _mm256_max_epu32(a, b);
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4E));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xB1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(m));
  } else {
    const __m256i mask = _mm256_set1_epi16(0x7FFF);
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    uint32_t i = 0;
    for (; i + 64 <= count; i += 64) {
      a = _mm256_max_epu16(a, _mm256_and_si256(load(2 * i), mask));
      b = _mm256_max_epu16(b, _mm256_and_si256(load(2 * i + 32), mask));
      c = _mm256_max_epu16(c, _mm256_and_si256(load(2 * i + 64), mask));
      d = _mm256_max_epu16(d, _mm256_and_si256(load(2 * i + 96), mask));
    }
    for (; i < count; i += 16) a = _mm256_max_epu16(a, _mm256_and_si256(load(2 * i), mask));
    a = _mm256_max_epu16(_mm256_max_epu16(a, b), _mm256_max_epu16(c, d));
    const __m128i m = _mm_max_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    // The horizontal minimum is one instruction; of the complement it is the maximum.
    const __m128i least = _mm_minpos_epu16(_mm_xor_si128(m, _mm_set1_epi16(-1)));
    return ~static_cast<uint32_t>(_mm_cvtsi128_si32(least)) & 0xFFFF;
  }
}

template <DType kType>
uint32_t TokenMagnitude(const CellsIn& cells, uint32_t* per_head) {
  uint32_t largest = 0;
  for (uint32_t h = 0; h < cells.heads; ++h) {
    const uint32_t head = MaxMagnitude<kType>(cells.data + h * cells.head_stride_bytes, cells.head_dim);
    per_head[h] = head;
    largest = head > largest ? head : largest;
  }
  return largest;
}

template <typename V, DType kType>
void TokenEnergy(const CellsIn& cells, float* lanes) {
  constexpr int kAccs = static_cast<int>(kEnergyLanes) / V::kLanes;
  typename V::F acc[kAccs];
#pragma GCC unroll 8
  for (int i = 0; i < kAccs; ++i) acc[i] = V::Load(lanes + i * V::kLanes);
  for (uint32_t h = 0; h < cells.heads; ++h) {
    const uint8_t* from = cells.data + h * cells.head_stride_bytes;
    for (uint32_t d = 0; d < cells.head_dim; d += kEnergyLanes) {
#pragma GCC unroll 8
      for (int i = 0; i < kAccs; ++i) {
        const uint32_t at = d + static_cast<uint32_t>(i * V::kLanes);
        if (at >= cells.head_dim) break;
        const typename V::F x = LoadValues<V, kType>(from + at * WordBytes(kType));
        acc[i] = V::Add(acc[i], V::Mul(x, x));
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kAccs; ++i) V::Store(lanes + i * V::kLanes, acc[i]);
}

template <typename V, DType kType>
void TokenAccumulate(const CellsIn& cells, float* sums) {
  for (uint32_t h = 0; h < cells.heads; ++h) {
    const uint8_t* from = cells.data + h * cells.head_stride_bytes;
    float* sum = sums + size_t{h} * cells.head_dim;
    for (uint32_t d = 0; d < cells.head_dim; d += V::kLanes) {
      V::Store(sum + d, V::Add(V::Load(sum + d), LoadValues<V, kType>(from + d * WordBytes(kType))));
    }
  }
}

// --- Encoding

// Codes of a cell, one per byte: convert(a, b, c, d) makes the bytes of 4 * kLanes values. `codes` has kBytePadding.
template <typename V, typename Source, typename Convert>
SPECTRUMKV_SIMD_INLINE void QuantiseCell(uint32_t head_dim, const Source& source, const Convert& convert, uint8_t* codes) {
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

// --- Scales of up to kGroupCells cells at once: a division takes as long for eight cells as for one. The formulas are
// those of codec_math.h; the conversions to float16 are the machine's, which round the same way.

constexpr uint32_t kGroupCells = 8;
constexpr uint32_t kGroupFloats = 4096;  // rotated values kept at once

struct GroupScales {
  alignas(32) float absmax[kGroupCells] = {};
  alignas(32) float reciprocal[kGroupCells];  // 0 where all codes are those of zero
};

inline uint32_t GroupSize(uint32_t head_dim, uint32_t heads_left) {
  const uint32_t most = head_dim * kGroupCells <= kGroupFloats ? kGroupCells : kGroupFloats / head_dim;
  return heads_left < most ? heads_left : most;
}

inline __m128i ToHalf(__m256 x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// 1 / x, and 0 where x is 0.
inline __m256 ReciprocalOrZero(__m256 x) {
  const __m256 nonzero = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_NEQ_OQ);
  return _mm256_and_ps(_mm256_div_ps(_mm256_set1_ps(1.0f), x), nonzero);
}

inline void StoreFront(__m128i bytes, uint32_t count, uint8_t* out) {
  alignas(16) uint8_t whole[16];
  if (count == 16) return _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
  if (count == 8) return _mm_storel_epi64(reinterpret_cast<__m128i*>(out), bytes);
  _mm_store_si128(reinterpret_cast<__m128i*>(whole), bytes);
  for (uint32_t i = 0; i < count; ++i) out[i] = whole[i];
}

// The values of magnitude words.
template <DType kType>
inline void LoadAbsmax(const uint32_t* magnitudes, uint32_t cells, GroupScales* group) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i present = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(cells)), lanes);
  const __m256i bits = _mm256_maskload_epi32(reinterpret_cast<const int*>(magnitudes), present);
  __m256 values = _mm256_castsi256_ps(bits);
  if constexpr (kType == DType::kBFloat16) values = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  if constexpr (kType == DType::kFloat16) {
    values = _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1)));
  }
  _mm256_store_ps(group->absmax, values);
}

inline void PlainScales(float top, uint32_t cells, GroupScales* group, uint8_t* out) {
  const __m128i half = ToHalf(_mm256_div_ps(_mm256_load_ps(group->absmax), _mm256_set1_ps(top)));
  _mm256_store_ps(group->reciprocal, ReciprocalOrZero(_mm256_cvtph_ps(half)));
  StoreFront(half, cells * 2, out);
}

inline void Rotated8Scales(float rotation, uint32_t cells, GroupScales* group, uint8_t* out) {
  const __m256 share = _mm256_div_ps(_mm256_load_ps(group->absmax), _mm256_set1_ps(127.0f));
  const __m256 unit = _mm256_mul_ps(share, _mm256_set1_ps(1.0f / rotation));
  const __m128i half = ToHalf(_mm256_mul_ps(unit, _mm256_set1_ps(64.0f)));
  const __m256 scale = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(0.015625f));
  _mm256_store_ps(group->reciprocal, ReciprocalOrZero(_mm256_mul_ps(scale, _mm256_set1_ps(rotation))));
  StoreFront(half, cells * 2, out);
}

inline void SteppedScales(float share, float rotation, uint32_t cells, GroupScales* group, uint8_t* out) {
  const __m256 t = _mm256_mul_ps(_mm256_load_ps(group->absmax), _mm256_set1_ps(share));
  const __m256 unit = _mm256_mul_ps(t, _mm256_set1_ps(1.0f / rotation));
  const __m128i half = ToHalf(_mm256_mul_ps(unit, _mm256_set1_ps(64.0f)));
  const __m128i byte = _mm_srli_epi16(_mm_add_epi16(half, _mm_set1_epi16(64)), 7);
  const __m256 scale = _mm256_mul_ps(_mm256_cvtph_ps(_mm_slli_epi16(byte, 7)), _mm256_set1_ps(0.015625f));
  _mm256_store_ps(group->reciprocal, ReciprocalOrZero(_mm256_mul_ps(scale, _mm256_set1_ps(rotation))));
  StoreFront(_mm_packus_epi16(byte, byte), cells, out);
}

// --- Codes

// Rounded codes within [-top, top], of P8, P4, Q8 and centres.
template <typename V, typename Source>
SPECTRUMKV_SIMD_INLINE void RoundCell(uint32_t head_dim, float reciprocal, int top, const Source& source, uint8_t* codes) {
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

inline uint32_t RotatedCellBytes(Tier tier, uint32_t head_dim) {
  if (tier == Tier::kQ8) return head_dim;
  if (tier == Tier::kQ4) return head_dim / 2;
  return tier == Tier::kQ3 ? head_dim / 4 + head_dim / 8 : head_dim / 4;
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

// --- Decoding. A source of levels gives (code - middle) * scale of kLanes values.

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
    UnpackNibbles(packed, head_dim, _mm_setr_epi8(-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15), buffer);
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

// The first `count` bytes, up to 16. Whole loads where they are allowed: vectors put together from bytes just stored
// wait for memory.
inline __m128i LoadFront(const uint8_t* in, uint32_t count) {
  if (count == 16) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(in));
  if (count == 8) return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(in));
  alignas(16) uint8_t whole[16] = {};
  for (uint32_t i = 0; i < count; ++i) whole[i] = in[i];
  return _mm_load_si128(reinterpret_cast<const __m128i*>(whole));
}

// The values of up to kGroupCells stored scales.
inline void LoadScales16(const uint8_t* in, uint32_t cells, float unit, float* scales) {
  const __m256 values = _mm256_cvtph_ps(LoadFront(in, cells * 2));
  _mm256_store_ps(scales, _mm256_mul_ps(values, _mm256_set1_ps(unit)));
}

inline void LoadScales8(const uint8_t* in, uint32_t cells, float* scales) {
  const __m128i half = _mm_slli_epi16(_mm_cvtepu8_epi16(LoadFront(in, cells)), 7);
  _mm256_store_ps(scales, _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(0.015625f)));
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

// --- The table

template <typename V>
struct SimdOps {
  static uint32_t Magnitude(const CellsIn& cells, uint32_t* per_head) {
    if (!HasFastPath(cells.head_dim)) return ScalarCellOps().magnitude(cells, per_head);
    if (cells.dtype == DType::kFloat32) return TokenMagnitude<DType::kFloat32>(cells, per_head);
    return TokenMagnitude<DType::kFloat16>(cells, per_head);  // bfloat16 words have the same sign bit
  }

  static void Energy(const CellsIn& cells, float* lanes) {
    if (!HasFastPath(cells.head_dim)) return ScalarCellOps().energy(cells, lanes);
    switch (cells.dtype) {
      case DType::kFloat16: return TokenEnergy<V, DType::kFloat16>(cells, lanes);
      case DType::kBFloat16: return TokenEnergy<V, DType::kBFloat16>(cells, lanes);
      case DType::kFloat32: return TokenEnergy<V, DType::kFloat32>(cells, lanes);
    }
  }

  static void Accumulate(const CellsIn& cells, float* sums) {
    if (!HasFastPath(cells.head_dim)) return ScalarCellOps().accumulate(cells, sums);
    switch (cells.dtype) {
      case DType::kFloat16: return TokenAccumulate<V, DType::kFloat16>(cells, sums);
      case DType::kBFloat16: return TokenAccumulate<V, DType::kBFloat16>(cells, sums);
      case DType::kFloat32: return TokenAccumulate<V, DType::kFloat32>(cells, sums);
    }
  }

  template <DType kType>
  static void EncodeAs(const CellsIn& cells, Tier tier, const float* means, const uint32_t* magnitudes,
                       uint8_t* scales, uint8_t* codes) {
    if (tier == Tier::kP8 || tier == Tier::kP4) return EncodePlain<V, kType>(cells, tier, magnitudes, scales, codes);
    EncodeRotated<V, kType>(cells, tier, means, scales, codes);
  }

  static void Encode(const CellsIn& cells, Tier tier, const float* means, const uint32_t* magnitudes, uint8_t* scales,
                     uint8_t* codes) {
    if (!HasFastPath(cells.head_dim)) return ScalarCellOps().encode(cells, tier, means, magnitudes, scales, codes);
    switch (cells.dtype) {
      case DType::kFloat16: return EncodeAs<DType::kFloat16>(cells, tier, means, magnitudes, scales, codes);
      case DType::kBFloat16: return EncodeAs<DType::kBFloat16>(cells, tier, means, magnitudes, scales, codes);
      case DType::kFloat32: return EncodeAs<DType::kFloat32>(cells, tier, means, magnitudes, scales, codes);
    }
  }

  template <DType kType>
  static void DecodeAs(const CellsOut& cells, Tier tier, const float* means, const uint8_t* scales,
                       const uint8_t* codes) {
    if (tier == Tier::kP8 || tier == Tier::kP4) return DecodePlain<V, kType>(cells, tier, scales, codes);
    DecodeRotated<V, kType>(cells, tier, means, scales, codes);
  }

  static void Decode(const CellsOut& cells, Tier tier, const float* means, const uint8_t* scales,
                     const uint8_t* codes) {
    if (!HasFastPath(cells.head_dim)) return ScalarCellOps().decode(cells, tier, means, scales, codes);
    switch (cells.dtype) {
      case DType::kFloat16: return DecodeAs<DType::kFloat16>(cells, tier, means, scales, codes);
      case DType::kBFloat16: return DecodeAs<DType::kBFloat16>(cells, tier, means, scales, codes);
      case DType::kFloat32: return DecodeAs<DType::kFloat32>(cells, tier, means, scales, codes);
    }
  }

  static constexpr CellOps Table(const char* name) {
    return CellOps{name, Magnitude, Energy, Accumulate, Encode, Decode};
  }
};

}  // namespace
}  // namespace spectrumkv
