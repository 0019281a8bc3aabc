// The methods behind Crc32c, chosen once by crc32c.cc. Each continues the *inverted* CRC register.
#pragma once

#include <cstddef>
#include <cstdint>

namespace spectrumkv::crc32c_internal {

// x^n mod P, bit-reflected (bit i holds the coefficient of x^(31 - i)), P the Castagnoli polynomial.
constexpr uint32_t PowerOfX(unsigned n) {
  uint32_t value = 0x80000000u;  // x^0
  for (unsigned i = 0; i < n; ++i) value = (value >> 1) ^ (value & 1 ? 0x82F63B78u : 0u);
  return value;
}

// Multipliers that move 16 bytes of message `bits` further. A carry-less product of two reflected 64-bit halves comes
// out multiplied by x, hence the -1.
constexpr uint64_t FoldFirstHalf(unsigned bits) { return uint64_t{PowerOfX(bits + 64 - 1)} << 32; }
constexpr uint64_t FoldSecondHalf(unsigned bits) { return uint64_t{PowerOfX(bits - 1)} << 32; }

// The crc32 instruction, with carry-less multiplication for long input. REQUIRES SSE4.2 and PCLMUL.
bool Sse42Supported();
uint32_t ExtendSse42(uint32_t reg, const uint8_t* data, size_t size);

// 512-bit folding. REQUIRES AVX-512 F, VL, VPCLMULQDQ and all of the above.
bool VpclmulSupported();
uint32_t ExtendVpclmul(uint32_t reg, const uint8_t* data, size_t size);

}  // namespace spectrumkv::crc32c_internal
