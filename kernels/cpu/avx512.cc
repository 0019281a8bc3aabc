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
  static constexpr uint32_t kMaxCodeVecs = 4;

  static F Zero() { return _mm512_setzero_ps(); }
  static F Set(float x) { return _mm512_set1_ps(x); }
  static F Load(const float* from) { return _mm512_loadu_ps(from); }
  static void Store(float* to, F x) { _mm512_storeu_ps(to, x); }
  static F Add(F a, F b) { return _mm512_add_ps(a, b); }
  static F Sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F SubByFma(F a, F b) { return _mm512_fnmadd_ps(b, Set(1.0f), a); }
  static F Mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F Div(F a, F b) { return _mm512_div_ps(a, b); }
  static F Fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F Max(F a, F b) { return _mm512_max_ps(a, b); }
  static F Abs(F x) { return _mm512_andnot_ps(Set(-0.0f), x); }
  static F WithSignOf(F magnitude, F x) { return _mm512_or_ps(magnitude, _mm512_and_ps(x, Set(-0.0f))); }
  // a <= b, which no NaN is.
  static F SelectLe(F a, F b, F yes, F no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LE_OQ), no, yes);
  }
  // x times two to the power that the low bits of `shifted` hold.
  static F AddExponent(F x, F shifted) {
    const __m512i power = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), power));
  }

  static __m256i Load256(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  static void Store256(uint8_t* to, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x); }
  static F LoadHalf(const uint8_t* from) { return _mm512_cvtph_ps(Load256(from)); }
  static F LoadBfloat(const uint8_t* from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(Load256(from)), 16));
  }
  // The smaller magnitude, with the sign of x: nothing between 65504 and 65520 rounds elsewhere.
  static F ClampToHalf(F x) { return _mm512_range_ps(x, Set(65504.0f), 0x02); }
  static void StoreHalf(uint8_t* to, F x) {
    __m256i half = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    asm("" : "+v"(half));  // with memory as its target the conversion is slower than with a store after it
    Store256(to, half);
  }
  // No decoded value comes near bfloat16's limit: scales are float16.
  static void StoreBfloat(uint8_t* to, F x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    Store256(to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }

  static F MaxAbs(F largest, F x) { return _mm512_range_ps(largest, x, 0x0B); }  // of magnitudes, sign cleared
  static __m256 HalfSum(F x) { return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)); }
  static __m256 HalfMax(F x) { return _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)); }

  // signs * x + swapped: the sum where the partner comes later, the difference where it came before.
  static F AddSigned(F x, F swapped, int negative_lanes) {
    const F one = Set(1.0f);
    return _mm512_fmadd_ps(x, _mm512_mask_sub_ps(one, static_cast<__mmask16>(negative_lanes), Zero(), one), swapped);
  }
  // The rotation's stage of partners h lanes apart; h is a constant after inlining.
  static inline __attribute__((always_inline)) F LaneStage(F x, int h) {
    switch (h) {
      case 1: return AddSigned(x, _mm512_permute_ps(x, 0xB1), 0xAAAA);
      case 2: return AddSigned(x, _mm512_permute_ps(x, 0x4E), 0xCCCC);
      case 4: return AddSigned(x, _mm512_shuffle_f32x4(x, x, 0xB1), 0xF0F0);
      default: return AddSigned(x, _mm512_shuffle_f32x4(x, x, 0x4E), 0xFF00);
    }
  }

  static B SetBytes(int x) { return _mm512_set1_epi8(static_cast<char>(x)); }
  static B AddBytes(B a, B b) { return _mm512_add_epi8(a, b); }
  static B AndBytes(B a, B b) { return _mm512_and_si512(a, b); }
  static B MinBytes(B a, B b) { return _mm512_min_epi8(a, b); }
  static B MaxBytes(B a, B b) { return _mm512_max_epi8(a, b); }
  static B ShiftRight(B x, int bits) { return _mm512_srli_epi16(x, static_cast<unsigned>(bits)); }
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

  // --- Codes to rotated values

  static B LoadBytes(const uint8_t* from) { return _mm512_loadu_si512(from); }
  template <uint32_t kBytes>
  static B LoadRepeated(const uint8_t* from) {
    if constexpr (kBytes == 32) return _mm512_broadcast_i64x4(Load256(from));
    if constexpr (kBytes == 16) return _mm512_broadcast_i32x4(Load128(from));
    return _mm512_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  }
  static B ShiftDwords(B x, int bits) { return _mm512_srli_epi32(x, static_cast<unsigned>(bits)); }
  static B ShiftDwords(B x, const int32_t* bits) { return _mm512_srlv_epi32(x, _mm512_load_si512(bits)); }
  // A lookup reads four bits, and the levels repeat: bits of no meaning may stay.
  template <int kBits>
  static B Isolate(B codes) {
    return codes;
  }
  static B Join3(B low, B high) {  // two bits of one, the third of the other
    return _mm512_ternarylogic_epi32(_mm512_set1_epi8(3), low, _mm512_slli_epi32(high, 2), 0xCA);
  }

  struct Levels {
    F table;
  };
  template <int kBits>
  static Levels LevelsOf(float scale) {
    constexpr float kMiddle = static_cast<float>(1 << (kBits - 1)) - 0.5f;
    const __m512i code = _mm512_and_si512(_mm512_cvtps_epi32(LaneIndex()), _mm512_set1_epi32((1 << kBits) - 1));
    return Levels{Mul(Sub(_mm512_cvtepi32_ps(code), Set(kMiddle)), Set(scale))};
  }
  // Register j gets the values whose number has j in its two low bits; the four above are the lane.
  static inline __attribute__((always_inline)) void Expand(B codes, const Levels& levels, F* x) {
    x[0] = _mm512_permutexvar_ps(codes, levels.table);
    x[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 8), levels.table);
    x[2] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 16), levels.table);
    x[3] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 24), levels.table);
  }
  static constexpr int NaturalRegister(int i) { return i; }

  // A stage whose partners lie in neighbouring lanes (or quarters): a pair of registers is taken apart into even and
  // odd ones and added and subtracted. The bit of the value's number that told the registers apart moves into the lane.
  template <int kRegs, int kStep, bool kQuarters>
  static inline __attribute__((always_inline)) void ExchangeStage(F* x) {
#pragma GCC unroll 16
    for (int i = 0; i < kRegs; ++i) {
      if (i & kStep) continue;
      const F a = x[i], b = x[i + kStep];
      x[i] = kQuarters ? _mm512_shuffle_f32x4(a, b, 0x88) : _mm512_shuffle_ps(a, b, 0x88);
      x[i + kStep] = kQuarters ? _mm512_shuffle_f32x4(a, b, 0xDD) : _mm512_shuffle_ps(a, b, 0xDD);
      Butterfly<Avx512>(&x[i], &x[i + kStep]);
    }
  }
  template <int kRegs>
  static inline __attribute__((always_inline)) void RotateExpanded(F* x) {
    RegisterStage<Avx512, kRegs, 1>(x);
    RegisterStage<Avx512, kRegs, 2>(x);
    ExchangeStage<kRegs, 1, false>(x);
    ExchangeStage<kRegs, 2, false>(x);
    ExchangeStage<kRegs, 1, true>(x);
    ExchangeStage<kRegs, 2, true>(x);
    RegisterStages<Avx512, kRegs, 4>(x);
  }
};

}  // namespace

constexpr CellOps kAvx512CellOps = SimdOps<Avx512>::Table("avx512");

}  // namespace spectrumkv

#else  // never called: the backend is not supported

namespace spectrumkv {
const CellOps kAvx512CellOps = {"avx512", nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                              nullptr, nullptr};
}  // namespace spectrumkv

#endif
