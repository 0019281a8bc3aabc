// Random identifiers and tokens from the kernel, and their comparison.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace spectrumkv {

// Unpredictable, never 0 (0 means "none" for fences, epochs and reservations). Thread-safe.
uint64_t RandomU64();

// `bytes` random bytes as 2 * bytes lower-case hex digits. Thread-safe.
std::string RandomHex(size_t bytes);

// Its time depends on the lengths alone, not on where the first difference is.
bool ConstantTimeEqual(const std::string& a, const std::string& b);

}  // namespace spectrumkv
