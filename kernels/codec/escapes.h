// Which tokens must travel as RAW, from magnitude words (kernels/codec/cell_ops.h). Compiled by g++ and nvcc.
#pragma once

#include "kernels/codec/backend.h"
#include "kernels/codec/codec_math.h"

namespace spectrumkv {

SPECTRUMKV_MATH EscapeClass ClassOf(uint32_t magnitude, const EscapeLimits& limits) {
  if (magnitude >= limits.nonfinite) return kEscapeNonFinite;
  if (magnitude >= limits.above_plain) return kEscapeAll;
  return magnitude >= limits.above_rotated ? kEscapeRotated : kEscapeNone;
}

SPECTRUMKV_MATH bool Escapes(Tier tier, EscapeClass escape) {
  if (tier == Tier::kRaw) return false;
  return escape >= kEscapeAll || (escape == kEscapeRotated && IsRotated(tier));
}

// The first magnitude word that a cell of `tier` cannot hold; for RAW the first that is not finite.
SPECTRUMKV_MATH uint32_t FirstEscaping(Tier tier, const EscapeLimits& limits) {
  if (tier == Tier::kRaw) return limits.nonfinite;
  return IsRotated(tier) ? limits.above_rotated : limits.above_plain;
}

}  // namespace spectrumkv
