// The CellOps table of a vector-traits struct (simd_rotate.h). Head sizes that are no multiple of 16 go to the scalar
// code. Included only by files compiled for an instruction set.
#pragma once

#include "kernels/codec/cell_ops.h"
#include "kernels/cpu/simd_attend.h"
#include "kernels/cpu/simd_decode.h"
#include "kernels/cpu/simd_encode.h"
#include "kernels/cpu/simd_passes.h"

namespace spectrumkv {
namespace {

template <typename V>
struct SimdOps {
  // Calls each.template operator()<kType>().
  template <typename Each>
  static SPECTRUMKV_SIMD_INLINE auto WithType(DType dtype, const Each& each) {
    switch (dtype) {
      case DType::kFloat16: return each.template operator()<DType::kFloat16>();
      case DType::kBFloat16: return each.template operator()<DType::kBFloat16>();
      default: return each.template operator()<DType::kFloat32>();
    }
  }

  static uint32_t Magnitude(const CellsIn& cells) {
    if (!HasFastPath(cells.head_dim)) return ScalarCellOps().magnitude(cells);
    return WithType(cells.dtype, [&]<DType kType>() { return CellsMagnitude<kType>(cells); });
  }

  static uint32_t Energy(const CellsIn& cells, float* lanes, float* sum) {
    if (!HasFastPath(cells.head_dim)) return ScalarCellOps().energy(cells, lanes, sum);
    return WithType(cells.dtype, [&]<DType kType>() { return CellsEnergy<V, kType>(cells, lanes, sum); });
  }

  static uint32_t Accumulate(const CellsIn& cells, float* sums) {
    if (!HasFastPath(cells.head_dim)) return ScalarCellOps().accumulate(cells, sums);
    return WithType(cells.dtype, [&]<DType kType>() {
      if (cells.head_dim == kSamplePiece) return AccumulatePieces<V, kType>(cells, sums);
      return AccumulateCells<V, kType>(cells, sums);
    });
  }

  static void Spread(const CellsIn& cells, const float* means, float* sums) {
    if (!HasFastPath(cells.head_dim)) return ScalarCellOps().spread(cells, means, sums);
    WithType(cells.dtype, [&]<DType kType>() {
      if (cells.head_dim == kSamplePiece) {
        if (means == nullptr) return PiecesSpread<V, kType, false>(cells, means, sums);
        return PiecesSpread<V, kType, true>(cells, means, sums);
      }
      if (means == nullptr) return CellsSpread<V, kType, false>(cells, means, sums);
      return CellsSpread<V, kType, true>(cells, means, sums);
    });
  }

  static void Attend(const CellsIn& keys, uint32_t first_position, const AttendQueries& queries, float* panel,
                     float* weights, float* tops, float* sums) {
    WithType(keys.dtype, [&]<DType kType>() {
      AttendBlock<V, kType>(keys, first_position, queries, panel, weights, tops, sums);
    });
  }

  static uint32_t Copy(const CellsIn& cells, uint8_t* words) {
    if (!HasFastPath(cells.head_dim)) return ScalarCellOps().copy(cells, words);
    return WithType(cells.dtype, [&]<DType kType>() { return CopyCells<kType>(cells, words); });
  }

  static uint32_t Encode(const CellsIn& cells, Tier tier, const Centres& centres, uint8_t* scales, uint8_t* codes) {
    if (!HasFastPath(cells.head_dim)) return ScalarCellOps().encode(cells, tier, centres, scales, codes);
    return WithType(cells.dtype, [&]<DType kType>() {
      if (IsPlain(tier)) {
        return WithDim(cells.head_dim, [&]<uint32_t kDim>() {
          if (tier == Tier::kP8) return EncodePlain<V, kType, Tier::kP8, kDim>(cells, scales, codes);
          return EncodePlain<V, kType, Tier::kP4, kDim>(cells, scales, codes);
        });
      }
      if (centres.means == nullptr) return EncodeRotated<V, kType, false>(cells, tier, nullptr, scales, codes);
      return EncodeRotated<V, kType, true>(cells, tier, centres.means, scales, codes);
    });
  }

  static void Decode(const CellsOut& cells, Tier tier, const Centres& centres, const uint8_t* scales,
                     const uint8_t* codes) {
    if (!HasFastPath(cells.head_dim)) return ScalarCellOps().decode(cells, tier, centres, scales, codes);
    WithType(cells.dtype, [&]<DType kType>() {
      if (tier == Tier::kP8) return DecodePlain<V, kType, Tier::kP8>(cells, scales, codes);
      if (tier == Tier::kP4) return DecodePlain<V, kType, Tier::kP4>(cells, scales, codes);
      DecodeRotated<V, kType>(cells, tier, centres, scales, codes);
    });
  }

  static void StoreWords(uint8_t* to, const uint8_t* words, size_t bytes) { StreamBytes(to, words, bytes); }

  static constexpr CellOps Table(const char* name) {
    return CellOps{name, Magnitude, Energy, Accumulate, Spread, Attend, FoldWeights<V>, Copy, Encode, Decode, StoreWords};
  }
};

}  // namespace
}  // namespace spectrumkv
