// Internal to server/transfer.
#pragma once

#include <cstdint>

namespace spectrumkv {

// The clock counts nanoseconds, options are in milliseconds.
inline constexpr int64_t kMsToNs = 1'000'000;

}  // namespace spectrumkv
