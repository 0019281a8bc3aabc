// Compiled with AVX2 and F16C; reached only through kAvx2CellOps.
#include "kernels/cpu/simd_tables.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/simd_cells.h"

namespace spectrumkv {
namespace {

struct Avx2 {
  using F = __m256;
  using B = __m256i;
  static constexpr int kLanes = 8;
  static constexpr int kMaxBlock = 8;  // of 16 registers
  static constexpr int kTableBits = 3;

  static F Zero() { return _mm256_setzero_ps(); }
  static F Set(float x) { return _mm256_set1_ps(x); }
  static F Load(const float* from) { return _mm256_loadu_ps(from); }
  static void Store(float* to, F x) { _mm256_storeu_ps(to, x); }
  static F Add(F a, F b) { return _mm256_add_ps(a, b); }
  static F Sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F Mul(F a, F b) { return _mm256_mul_ps(a, b); }

  static __m128i Load128(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
  static void Store128(uint8_t* to, __m128i x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), x); }
  static F LoadHalf(const uint8_t* from) { return _mm256_cvtph_ps(Load128(from)); }
  static F LoadBfloat(const uint8_t* from) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(Load128(from)), 16));
  }
  // Saturates: nothing between 65504 and 65520 rounds elsewhere.
  static void StoreHalf(uint8_t* to, F x) {
    const F bounded = _mm256_min_ps(_mm256_max_ps(x, Set(-65504.0f)), Set(65504.0f));
    Store128(to, _mm256_cvtps_ph(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  // No decoded value comes near bfloat16's limit: scales are float16.
  static void StoreBfloat(uint8_t* to, F x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    const __m256i words = _mm256_srli_epi32(rounded, 16);
    Store128(to, _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
  }

  static F MaxAbs(F largest, F x) {
    const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7FFFFFFF));
    return _mm256_max_ps(largest, _mm256_castsi256_ps(magnitude));
  }
  static float ReduceMax(F x) {
    __m128 n = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    n = _mm_max_ps(n, _mm_movehl_ps(n, n));
    return _mm_cvtss_f32(_mm_max_ss(n, _mm_movehdup_ps(n)));
  }

  // swapped + x where the partner comes later, swapped - x where it came before.
  static F Butterfly(F x, F swapped, __m256i sign) {
    return _mm256_add_ps(swapped, _mm256_castsi256_ps(_mm256_xor_si256(_mm256_castps_si256(x), sign)));
  }
  // The rotation's stage of partners h lanes apart; h is a constant after inlining.
  static inline __attribute__((always_inline)) F LaneStage(F x, int h) {
    constexpr int kSign = INT32_MIN;
    switch (h) {
      case 1:
        return Butterfly(x, _mm256_permute_ps(x, 0xB1), _mm256_setr_epi32(0, kSign, 0, kSign, 0, kSign, 0, kSign));
      case 2:
        return Butterfly(x, _mm256_permute_ps(x, 0x4E), _mm256_setr_epi32(0, 0, kSign, kSign, 0, 0, kSign, kSign));
      default:
        return Butterfly(x, _mm256_permute2f128_ps(x, x, 0x01),
                         _mm256_setr_epi32(0, 0, 0, 0, kSign, kSign, kSign, kSign));
    }
  }

  static B SetBytes(int x) { return _mm256_set1_epi8(static_cast<char>(x)); }
  static B AddBytes(B a, B b) { return _mm256_add_epi8(a, b); }
  static B MinBytes(B a, B b) { return _mm256_min_epi8(a, b); }
  static B MaxBytes(B a, B b) { return _mm256_max_epi8(a, b); }
  static void StoreBytes(uint8_t* to, B bytes) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes); }
  static B ToBytes(__m256i a, __m256i b, __m256i c, __m256i d) {
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  static B RoundToBytes(F a, F b, F c, F d) {
    return ToBytes(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b), _mm256_cvtps_epi32(c), _mm256_cvtps_epi32(d));
  }
  static __m256i Floor(F x) { return _mm256_cvtps_epi32(_mm256_floor_ps(x)); }
  static B FloorToBytes(F a, F b, F c, F d) { return ToBytes(Floor(a), Floor(b), Floor(c), Floor(d)); }

  static __m128i Load64(const uint8_t* from) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)); }
  static F LoadSignedBytes(const uint8_t* from) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(Load64(from))); }
  static F LaneIndex() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }
  static F Lookup(F table, const uint8_t* codes) {
    return _mm256_permutevar8x32_ps(table, _mm256_cvtepu8_epi32(Load64(codes)));
  }
};

}  // namespace

constexpr CellOps kAvx2CellOps = SimdOps<Avx2>::Table("avx2");

}  // namespace spectrumkv

#else  // never called: the backend is not supported

namespace spectrumkv {
const CellOps kAvx2CellOps = {"avx2", nullptr, nullptr, nullptr, nullptr, nullptr};
}  // namespace spectrumkv

#endif
