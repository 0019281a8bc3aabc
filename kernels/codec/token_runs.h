// Tokens whose values lie one after another in memory. Internal to TableBackend.
#pragma once

#include <cstddef>
#include <cstdint>

namespace spectrumkv {

// How many of `tokens` rows, from the first, follow each other at token_bytes. REQUIRES: tokens > 0.
inline uint32_t ContiguousTokens(const uint8_t* const* rows, uint32_t tokens, size_t token_bytes) {
  uint32_t run = 1;
  while (run < tokens && rows[run] == rows[run - 1] + token_bytes) ++run;
  return run;
}

}  // namespace spectrumkv
