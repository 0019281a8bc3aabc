// Compiled with AVX-512 F, VL and VPCLMULQDQ; reached only after VpclmulSupported().
#include "kernels/format/crc32c_impl.h"

#if defined(__x86_64__)

#include <immintrin.h>

namespace spectrumkv::crc32c_internal {
namespace {

constexpr size_t kBlock = 256;  // four 64-byte accumulators
constexpr uint64_t kFirst = FoldFirstHalf(kBlock * 8), kSecond = FoldSecondHalf(kBlock * 8);

__m512i Fold(__m512i acc, __m512i multipliers, __m512i next) {
  const __m512i first = _mm512_clmulepi64_epi128(acc, multipliers, 0x00);
  const __m512i second = _mm512_clmulepi64_epi128(acc, multipliers, 0x11);
  return _mm512_ternarylogic_epi64(first, second, next, 0x96);
}

}  // namespace

bool VpclmulSupported() {
  return Sse42Supported() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("vpclmulqdq");
}

uint32_t ExtendVpclmul(uint32_t reg, const uint8_t* data, size_t size) {
  if (size < 8 * kBlock) return ExtendSse42(reg, data, size);
  const __m512i multipliers =
      _mm512_broadcast_i32x4(_mm_set_epi64x(static_cast<long long>(kSecond), static_cast<long long>(kFirst)));
  __m512i acc[4];
  for (int i = 0; i < 4; ++i) acc[i] = _mm512_loadu_si512(data + 64 * i);
  acc[0] = _mm512_xor_si512(acc[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(reg))));
  data += kBlock;
  size -= kBlock;
  for (; size >= kBlock; data += kBlock, size -= kBlock) {
    for (int i = 0; i < 4; ++i) acc[i] = Fold(acc[i], multipliers, _mm512_loadu_si512(data + 64 * i));
  }
  alignas(64) uint8_t rest[kBlock];
  for (int i = 0; i < 4; ++i) _mm512_store_si512(rest + 64 * i, acc[i]);
  return ExtendSse42(ExtendSse42(0, rest, kBlock), data, size);
}

}  // namespace spectrumkv::crc32c_internal

#else

namespace spectrumkv::crc32c_internal {
bool VpclmulSupported() { return false; }
uint32_t ExtendVpclmul(uint32_t reg, const uint8_t*, size_t) { return reg; }
}  // namespace spectrumkv::crc32c_internal

#endif
