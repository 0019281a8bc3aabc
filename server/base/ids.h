// Ids that callers choose; random identifiers and tokens from the kernel, and their comparison.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace spectrumkv {

constexpr size_t kMaxIdBytes = 128;

// Whether workers and peers may name a transfer, request or pool so: 1 to kMaxIdBytes of A-Z a-z 0-9 . _ : - . Such an
// id can stand in logs, messages and file names as it is.
bool IsId(const std::string& id);
bool IsIdCharacter(char c);

// "1 to 128 of A-Z a-z 0-9 . _ : -": the rule in words, for errors.
std::string IdRule();

// Unpredictable, never 0 (0 means "none" for fences, epochs and reservations). Thread-safe.
uint64_t RandomU64();

// `bytes` random bytes as 2 * bytes lower-case hex digits. Thread-safe.
std::string RandomHex(size_t bytes);

// Its time depends on the lengths alone, not on where the first difference is.
bool ConstantTimeEqual(const std::string& a, const std::string& b);

}  // namespace spectrumkv
