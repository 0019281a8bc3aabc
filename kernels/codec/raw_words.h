// RAW words on their way into a pool of another dtype.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/types.h"

namespace spectrumkv {

// Converts `count` words; returns how many changed their value. Finite values are rounded to nearest even and saturate
// at the largest finite one; infinities stay infinite; a NaN becomes the quiet NaN of its sign, which is no change.
// Same dtype: copies bit for bit.
uint64_t ConvertWords(const uint8_t* source, DType from, uint8_t* target, DType to, size_t count);

// Words that are not finite.
uint64_t CountNonFinite(const uint8_t* source, DType dtype, size_t count);

}  // namespace spectrumkv
