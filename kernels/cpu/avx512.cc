// Compiled with AVX-512 F, BW, DQ and VL; reached only through kAvx512CellOps.
#include "kernels/cpu/simd_tables.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/simd_cells.h"

namespace spectrumkv {
namespace {

struct Avx512 {
  using F = __m512;
  using B = __m512i;
  static constexpr int kLanes = 16;
  static constexpr int kMaxBlock = 16;
  static constexpr int kTableBits = 4;

  static F Zero() { return _mm512_setzero_ps(); }
  static F Set(float x) { return _mm512_set1_ps(x); }
  static F Load(const float* from) { return _mm512_loadu_ps(from); }
  static void Store(float* to, F x) { _mm512_storeu_ps(to, x); }
  static F Add(F a, F b) { return _mm512_add_ps(a, b); }
  static F Sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F Mul(F a, F b) { return _mm512_mul_ps(a, b); }

  static __m256i Load256(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  static F LoadHalf(const uint8_t* from) { return _mm512_cvtph_ps(Load256(from)); }
  static F LoadBfloat(const uint8_t* from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(Load256(from)), 16));
  }
  // Saturates: nothing between 65504 and 65520 rounds elsewhere.
  static void StoreHalf(uint8_t* to, F x) {
    // The smaller magnitude, with the sign of x.
    const F bounded = _mm512_range_ps(x, Set(65504.0f), 0x02);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm512_cvtps_ph(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  // No decoded value comes near bfloat16's limit: scales are float16.
  static void StoreBfloat(uint8_t* to, F x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }

  static F Abs(F x) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7FFFFFFF)));
  }
  static F MaxAbs(F largest, F x) { return _mm512_max_ps(largest, Abs(x)); }
  static float ReduceMax(F x) {
    __m256 m = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 n = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    n = _mm_max_ps(n, _mm_movehl_ps(n, n));
    return _mm_cvtss_f32(_mm_max_ss(n, _mm_movehdup_ps(n)));
  }

  // swapped + x where the partner comes later, swapped - x where it came before.
  static F Butterfly(F x, F swapped, int sign_lanes) {
    const __m512i sign = _mm512_maskz_set1_epi32(static_cast<__mmask16>(sign_lanes), INT32_MIN);
    return _mm512_add_ps(swapped, _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x), sign)));
  }
  // The rotation's stage of partners h lanes apart; h is a constant after inlining.
  static inline __attribute__((always_inline)) F LaneStage(F x, int h) {
    switch (h) {
      case 1: return Butterfly(x, _mm512_permute_ps(x, 0xB1), 0xAAAA);
      case 2: return Butterfly(x, _mm512_permute_ps(x, 0x4E), 0xCCCC);
      case 4: return Butterfly(x, _mm512_shuffle_f32x4(x, x, 0xB1), 0xF0F0);
      default: return Butterfly(x, _mm512_shuffle_f32x4(x, x, 0x4E), 0xFF00);
    }
  }

  static B SetBytes(int x) { return _mm512_set1_epi8(static_cast<char>(x)); }
  static B AddBytes(B a, B b) { return _mm512_add_epi8(a, b); }
  static B MinBytes(B a, B b) { return _mm512_min_epi8(a, b); }
  static B MaxBytes(B a, B b) { return _mm512_max_epi8(a, b); }
  static void StoreBytes(uint8_t* to, B bytes) { _mm512_storeu_si512(to, bytes); }
  static B ToBytes(__m512i a, __m512i b, __m512i c, __m512i d) {
    const __m512i packed = _mm512_packs_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, packed);
  }
  static B RoundToBytes(F a, F b, F c, F d) {
    return ToBytes(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b), _mm512_cvtps_epi32(c), _mm512_cvtps_epi32(d));
  }
  static __m512i Floor(F x) { return _mm512_cvt_roundps_epi32(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
  static B FloorToBytes(F a, F b, F c, F d) { return ToBytes(Floor(a), Floor(b), Floor(c), Floor(d)); }

  static __m128i Load128(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
  static F LoadSignedBytes(const uint8_t* from) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(Load128(from))); }
  static F LaneIndex() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
  static F Lookup(F table, const uint8_t* codes) {
    return _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(Load128(codes)), table);
  }
};

}  // namespace

constexpr CellOps kAvx512CellOps = SimdOps<Avx512>::Table("avx512");

}  // namespace spectrumkv

#else  // never called: the backend is not supported

namespace spectrumkv {
const CellOps kAvx512CellOps = {"avx512", nullptr, nullptr, nullptr, nullptr, nullptr};
}  // namespace spectrumkv

#endif
