// CRC32C (Castagnoli), RFC 3720: Crc32c("123456789") == 0xE3069283. Uses the CPU's instruction where there is one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace spectrumkv {

// Continues `crc` (0 to begin) over `data`.
uint32_t Crc32c(uint32_t crc, const void* data, size_t size);

// The table method, for tests and for CPUs without the instruction.
uint32_t Crc32cPortable(uint32_t crc, const void* data, size_t size);

}  // namespace spectrumkv
