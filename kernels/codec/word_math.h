// Words of a pool from one dtype to another, one at a time. Compiled by g++ and nvcc (kernels/codec/codec_math.h).
#pragma once

#include "kernels/codec/codec_math.h"

namespace spectrumkv {

SPECTRUMKV_MATH float WidenWord(uint32_t word, DType dtype) {
  if (dtype == DType::kFloat16) return HalfToFloat(word);
  if (dtype == DType::kBFloat16) return BfloatToFloat(word);
  return BitsFloat(word);
}

// To nearest even, saturating. REQUIRES: x is finite.
SPECTRUMKV_MATH uint32_t NarrowWord(float x, DType dtype) {
  if (dtype == DType::kFloat16) return NarrowHalf(x);
  if (dtype == DType::kBFloat16) return NarrowBfloat(x);
  return FloatBits(x);
}

// An infinity stays one, a NaN becomes the quiet NaN of its sign.
SPECTRUMKV_MATH uint32_t NonFiniteWord(float x, DType dtype) {
  const bool nan = (FloatBits(x) & 0x7FFFFFFF) > kFloatInf;
  const uint32_t sign = FloatBits(x) >> 31;
  if (dtype == DType::kFloat16) return sign << 15 | (nan ? 0x7E00 : kHalfInf);
  if (dtype == DType::kBFloat16) return sign << 15 | (nan ? 0x7FC0 : kBfloatInf);
  return sign << 31 | (nan ? 0x7FC00000 : kFloatInf);
}

struct ConvertedWord {
  uint32_t word;
  bool changed;  // its value; not so where it is not finite
};

SPECTRUMKV_MATH ConvertedWord ConvertWord(uint32_t word, DType from, DType to) {
  const float x = WidenWord(word, from);
  if ((FloatBits(x) & 0x7FFFFFFF) >= kFloatInf) return ConvertedWord{NonFiniteWord(x, to), false};
  const uint32_t narrow = NarrowWord(x, to);
  return ConvertedWord{narrow, WidenWord(narrow, to) != x};
}

}  // namespace spectrumkv
