// The CellOps table of a vector-traits struct (simd_rotate.h). Head sizes that are no multiple of 16 go to the scalar
// code. Included only by files compiled for an instruction set.
#pragma once

#include "kernels/codec/cell_ops.h"
#include "kernels/cpu/simd_decode.h"
#include "kernels/cpu/simd_encode.h"
#include "kernels/cpu/simd_passes.h"

namespace spectrumkv {
namespace {

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
