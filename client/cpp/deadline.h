// Deadlines of calls.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace spectrumkv::client {

// From now on, both together; what is longer than a year counts as a year, which the clock can still add.
inline std::chrono::system_clock::time_point In(int64_t milliseconds, int64_t more_ms = 0) {
  constexpr int64_t kMostMs = int64_t{365} * 24 * 3600 * 1000;
  return std::chrono::system_clock::now() +
         std::chrono::milliseconds(std::min(milliseconds, kMostMs) + std::min(more_ms, kMostMs));
}

}  // namespace spectrumkv::client
