// Compiled with -msse4.2 -mpclmul; reached only after Sse42Supported().
#include "kernels/format/crc32c_impl.h"

#if defined(__x86_64__)

#include <immintrin.h>

namespace spectrumkv::crc32c_internal {
namespace {

constexpr size_t kBlock = 64;  // four 16-byte accumulators
constexpr uint64_t kFirst = FoldFirstHalf(kBlock * 8), kSecond = FoldSecondHalf(kBlock * 8);

uint32_t ExtendByInstruction(uint32_t reg, const uint8_t* data, size_t size) {
  uint64_t wide = reg;
  for (; size >= 8; data += 8, size -= 8) {
    uint64_t word;
    __builtin_memcpy(&word, data, 8);
    wide = _mm_crc32_u64(wide, word);
  }
  reg = static_cast<uint32_t>(wide);
  for (; size != 0; ++data, --size) reg = _mm_crc32_u8(reg, *data);
  return reg;
}

__m128i Load(const uint8_t* data) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data)); }

__m128i Fold(__m128i acc, __m128i multipliers, __m128i next) {
  const __m128i first = _mm_clmulepi64_si128(acc, multipliers, 0x00);
  const __m128i second = _mm_clmulepi64_si128(acc, multipliers, 0x11);
  return _mm_xor_si128(_mm_xor_si128(first, second), next);
}

}  // namespace

bool Sse42Supported() { return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul"); }

uint32_t ExtendSse42(uint32_t reg, const uint8_t* data, size_t size) {
  if (size < 4 * kBlock) return ExtendByInstruction(reg, data, size);
  const __m128i multipliers = _mm_set_epi64x(static_cast<long long>(kSecond), static_cast<long long>(kFirst));
  __m128i acc[4] = {Load(data), Load(data + 16), Load(data + 32), Load(data + 48)};
  acc[0] = _mm_xor_si128(acc[0], _mm_cvtsi32_si128(static_cast<int>(reg)));
  data += kBlock;
  size -= kBlock;
  for (; size >= kBlock; data += kBlock, size -= kBlock) {
    for (int i = 0; i < 4; ++i) acc[i] = Fold(acc[i], multipliers, Load(data + 16 * i));
  }
  // The accumulators are congruent to all the message before `data`: run them through an empty register.
  alignas(16) uint8_t rest[kBlock];
  for (int i = 0; i < 4; ++i) _mm_store_si128(reinterpret_cast<__m128i*>(rest + 16 * i), acc[i]);
  return ExtendByInstruction(ExtendByInstruction(0, rest, kBlock), data, size);
}

}  // namespace spectrumkv::crc32c_internal

#else

namespace spectrumkv::crc32c_internal {
bool Sse42Supported() { return false; }
uint32_t ExtendSse42(uint32_t reg, const uint8_t*, size_t) { return reg; }
}  // namespace spectrumkv::crc32c_internal

#endif
