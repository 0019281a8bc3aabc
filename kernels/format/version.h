// The version of the chunk format, proto/WIRE_FORMAT.md.
#pragma once

#include <cstdint>

namespace spectrumkv {

inline constexpr uint16_t kFormatVersion = 1;

}  // namespace spectrumkv
