// Encoding of cells.
// See simd_bytes.h for why all is in an unnamed namespace.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/codec/codec_math.h"
#include "kernels/cpu/simd_bytes.h"
#include "kernels/cpu/simd_fold.h"
#include "kernels/cpu/simd_passes.h"
#include "kernels/cpu/simd_scales.h"
#include "kernels/format/chunk.h"

namespace spectrumkv {
namespace {

// --- Codes: one per byte, of 4 * V::kLanes values.

// The values are already divided by the scale.
template <typename V, Tier kTier>
SPECTRUMKV_SIMD_INLINE typename V::B CodesOf(typename V::F a, typename V::F b, typename V::F c, typename V::F d) {
  using B = typename V::B;
  if constexpr (kTier == Tier::kP8 || kTier == Tier::kQ8) {
    return V::MaxBytes(V::RoundToBytes(a, b, c, d), V::SetBytes(-127));  // saturated at 127 already
  } else if constexpr (kTier == Tier::kP4) {
    const B codes = V::MinBytes(V::MaxBytes(V::RoundToBytes(a, b, c, d), V::SetBytes(-7)), V::SetBytes(7));
    return V::AddBytes(codes, V::SetBytes(8));
  } else {
    // Clamped before the offset is added: the same, and no byte overflows.
    constexpr int kMiddle = kTier == Tier::kQ4 ? 8 : kTier == Tier::kQ3 ? 4 : 2;
    const B codes =
        V::MinBytes(V::MaxBytes(V::FloorToBytes(a, b, c, d), V::SetBytes(-kMiddle)), V::SetBytes(kMiddle - 1));
    return V::AddBytes(codes, V::SetBytes(kMiddle));
  }
}

template <Tier kTier>
inline void PackBuffer(const uint8_t* codes, uint32_t head_dim, uint8_t* out) {
  if constexpr (kTier == Tier::kP8 || kTier == Tier::kQ8) return CopyCodes(codes, head_dim, out);
  if constexpr (kTier == Tier::kP4 || kTier == Tier::kQ4) return PackNibbles(codes, head_dim, out);
  PackPairs(codes, head_dim, out);
  if constexpr (kTier == Tier::kQ3) PackHighBits(codes, head_dim, out + head_dim / 4);
}

// source(d) gives V::kLanes values from d on.
template <typename V, Tier kTier, uint32_t kDim, typename Source>
SPECTRUMKV_SIMD_INLINE void QuantiseCell(uint32_t head_dim, float reciprocal, const Source& source, uint8_t* buffer,
                                         uint8_t* out) {
  constexpr uint32_t kLanes = V::kLanes;
  const typename V::F r = V::Set(reciprocal);
  const auto scaled = [&](uint32_t d) { return V::Mul(source(d), r); };
  if constexpr (kDim != 0) {
    constexpr int kVecs = static_cast<int>(kDim / (4 * kLanes));
    typename V::B codes[kVecs];
#pragma GCC unroll 8
    for (uint32_t i = 0; i < kVecs; ++i) {
      const uint32_t d = i * 4 * kLanes;
      codes[i] = CodesOf<V, kTier>(scaled(d), scaled(d + kLanes), scaled(d + 2 * kLanes), scaled(d + 3 * kLanes));
    }
    PackRegisters<V, kTier, kVecs>(codes, out);
    return;
  }
  uint32_t d = 0;
  for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes) {
    StoreWhole(buffer + d,
               CodesOf<V, kTier>(scaled(d), scaled(d + kLanes), scaled(d + 2 * kLanes), scaled(d + 3 * kLanes)));
  }
  if (d < head_dim) {
    const auto or_zero = [&](uint32_t at) { return at < head_dim ? scaled(at) : V::Zero(); };
    StoreWhole(buffer + d,
               CodesOf<V, kTier>(or_zero(d), or_zero(d + kLanes), or_zero(d + 2 * kLanes), or_zero(d + 3 * kLanes)));
  }
  PackBuffer<kTier>(buffer, head_dim, out);
}

// --- Plain tiers

// The largest magnitude words of the cells of a group.
template <DType kType>
struct GroupMagnitudes {
  using Lanes = MagnitudeLanes<kType>;
  // Those of cells that are not there stay zero.
  __m128i of[kGroupCells] = {};

  SPECTRUMKV_SIMD_INLINE void Set(uint32_t i, const uint8_t* from, uint32_t head_dim) {
    Lanes cell;
    cell.Add(from, head_dim);
    of[i] = cell.Half();
  }

  // As float32 values; keeps the largest words in `all` too.
  SPECTRUMKV_SIMD_INLINE __m256 Absmax(Lanes* all) const {
    if constexpr (kType == DType::kFloat32) {
      __m256 wide[kGroupCells];
      for (uint32_t i = 0; i < kGroupCells; ++i) {
        wide[i] = _mm256_castsi256_ps(_mm256_zextsi128_si256(of[i]));
        all->a = Lanes::Max(all->a, _mm256_castps_si256(wide[i]));
      }
      return MaxOfEach(wide);
    }
    const __m128i words = MaxOfEach(of);
    all->a = Lanes::Max(all->a, _mm256_zextsi128_si256(words));
    if constexpr (kType == DType::kFloat16) return _mm256_cvtph_ps(words);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
  }
};

// Source bytes whose magnitudes are found before their codes are made: a burst of loads keeps more of them on their way
// from memory than loads between arithmetic do, and all is still in the first-level cache when it is read again.
constexpr uint32_t kBurstBytes = 4096;
constexpr uint32_t kBurstCells = 64;  // at most

template <typename V, DType kType, Tier kTier, uint32_t kDim>
uint32_t EncodePlain(const CellsIn& cells, uint8_t* scales, uint8_t* codes) {
  alignas(64) uint8_t buffer[kMaxDim + kBytePadding];
  alignas(32) float reciprocals[kBurstCells];
  const uint32_t head_dim = kDim != 0 ? kDim : cells.head_dim;
  const uint32_t cell_bytes = kTier == Tier::kP8 ? head_dim : head_dim / 2;
  const uint32_t fit = kBurstBytes / (head_dim * WordBytes(kType)) / kGroupCells * kGroupCells;
  const uint32_t most = fit == 0 ? kGroupCells : fit < kBurstCells ? fit : kBurstCells;
  MagnitudeLanes<kType> all;
  CellCursor measured(cells), coded(cells);
  const uint32_t token_bytes = cells.heads * head_dim * WordBytes(kType);
  Prefetcher<Rows::kScattered> prefetcher(cells, 2 * kBurstBytes <= token_bytes ? 1 : 2 * kBurstBytes / token_bytes);
  for (uint32_t left = cells.tokens * cells.heads, burst = 0; left != 0; left -= burst) {
    burst = left < most ? left : most;
    for (uint32_t first = 0; first < burst; first += kGroupCells) {
      const uint32_t count = burst - first < kGroupCells ? burst - first : kGroupCells;
      GroupMagnitudes<kType> magnitudes;
      for (uint32_t i = 0; i < count; ++i) magnitudes.Set(i, measured.Next(), head_dim);
      PlainScales(magnitudes.Absmax(&all), kTier == Tier::kP8 ? 127.0f : 7.0f, count, reciprocals + first, scales);
      scales += count * 2;
    }
    for (uint32_t i = 0; i < burst; ++i, codes += cell_bytes) {
      prefetcher.At(coded.token(), coded.head());
      const uint8_t* from = coded.Next();
      QuantiseCell<V, kTier, kDim>(
          head_dim, reciprocals[i], [=](uint32_t d) { return LoadValues<V, kType>(from + d * WordBytes(kType)); },
          buffer, codes);
    }
  }
  return all.Largest();
}

// --- Rotated tiers

// Writes the rotated cells to z; returns the largest magnitude of each.
template <typename V, DType kType, uint32_t kDim, bool kCentred>
__attribute__((noinline)) __m256 RotateGroup(const GroupIn& group, float* z, MagnitudeLanes<kType>* magnitudes) {
  const uint32_t head_dim = kDim != 0 ? kDim : group.head_dim;
  MagnitudeLanes<kType> words = *magnitudes;
  __m256 largest[kGroupCells];
  for (uint32_t i = group.count; i < kGroupCells; ++i) largest[i] = _mm256_setzero_ps();
  for (uint32_t i = 0; i < group.count; ++i, z += head_dim) {
    const uint8_t* from = group.from[i];
    const float* mean = group.mean[i];
    if (!kCentred) words.Add(from, head_dim);
    typename V::F most = V::Zero();
    RotateCell<V, kDim>(
        head_dim, z,
        [=](uint32_t d) {
          const typename V::F x = LoadValues<V, kType>(from + d * WordBytes(kType));
          return kCentred ? V::Sub(x, V::Load(mean + d)) : x;
        },
        [&](uint32_t d, typename V::F x) {
          V::Store(z + d, x);
          most = V::MaxAbs(most, x);
        });
    largest[i] = V::HalfMax(most);
  }
  *magnitudes = words;
  return MaxOfEach(largest);
}

template <typename V, Tier kTier, uint32_t kDim>
__attribute__((noinline)) void QuantiseRotated(const float* z, const float* reciprocals, uint32_t count,
                                               uint32_t any_dim, uint8_t* codes) {
  alignas(64) uint8_t buffer[kMaxDim + kBytePadding];
  const uint32_t head_dim = kDim != 0 ? kDim : any_dim;
  const uint32_t cell_bytes = RotatedCellBytes(kTier, head_dim);
  for (uint32_t i = 0; i < count; ++i, z += head_dim) {
    QuantiseCell<V, kTier, kDim>(
        head_dim, reciprocals[i], [=](uint32_t d) { return V::Load(z + d); }, buffer, codes + i * cell_bytes);
  }
}

// Tokens behind whose centre is subtracted are asked for while these are worked on: the next centre is a sum over them,
// which would wait for memory, and while arithmetic goes on memory is idle. Larger runs would not stay in the cache.
constexpr uint32_t kMaxAheadBytes = 256 << 10;

inline uint32_t TokensAhead(const CellsIn& cells) {
  const uint64_t run_bytes = uint64_t{cells.heads} * cells.head_dim * WordBytes(cells.dtype) * kCentreTokens;
  return run_bytes <= kMaxAheadBytes ? kCentreTokens : UINT32_MAX / 2;  // beyond the last: none
}

// A group's scales are computed while the codes of the group before are made.
template <typename V, DType kType, bool kCentred>
uint32_t EncodeRotated(const CellsIn& cells, Tier tier, const float* means, uint8_t* scales, uint8_t* codes) {
  const uint32_t head_dim = cells.head_dim, cell_bytes = RotatedCellBytes(tier, head_dim);
  const auto rotate = WithDim(head_dim, []<uint32_t kDim>() { return &RotateGroup<V, kType, kDim, kCentred>; });
  const auto quantise = WithDim(head_dim, [=]<uint32_t kDim>() {
    switch (tier) {
      case Tier::kQ8: return &QuantiseRotated<V, Tier::kQ8, kDim>;
      case Tier::kQ4: return &QuantiseRotated<V, Tier::kQ4, kDim>;
      case Tier::kQ3: return &QuantiseRotated<V, Tier::kQ3, kDim>;
      default: return &QuantiseRotated<V, Tier::kQ2, kDim>;
    }
  });
  const uint32_t most = GroupCells(head_dim);
  const float rotation = static_cast<float>(Rotation(head_dim));
  const float share = tier == Tier::kQ8 ? 0.0f : StepShare(BitsOf(tier), head_dim);
  alignas(64) float z[2][kGroupFloats];
  MagnitudeLanes<kType> magnitudes;
  alignas(32) float reciprocals[2][kGroupCells];
  GroupIn group;
  CellReader reader(cells);
  CellCursor prefetched(cells);
  Prefetcher<Rows::kAll> prefetcher(cells, TokensAhead(cells));
  for (uint32_t g = 0, before = 0; reader.left() != 0 || before != 0; ++g) {
    const uint32_t count = reader.left() < most ? reader.left() : most;
    if (count != 0) {
      if constexpr (kCentred) {
        for (uint32_t i = 0; i < count; ++i, prefetched.Next()) prefetcher.At(prefetched.token(), prefetched.head());
      }
      reader.Next(most, means, &group);
      const __m256 absmax = rotate(group, z[g & 1], &magnitudes);
      if (tier == Tier::kQ8) {
        Rotated8Scales(absmax, rotation, count, reciprocals[g & 1], scales);
      } else {
        SteppedScales(absmax, share, rotation, count, reciprocals[g & 1], scales);
      }
      scales += tier == Tier::kQ8 ? count * 2 : count;
    }
    if (before != 0) {
      quantise(z[~g & 1], reciprocals[~g & 1], before, head_dim, codes);
      codes += before * cell_bytes;
    }
    before = count;
  }
  return kCentred ? 0 : magnitudes.Largest();
}

}  // namespace
}  // namespace spectrumkv
