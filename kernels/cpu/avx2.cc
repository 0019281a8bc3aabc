// Compiled with AVX2, FMA and F16C; reached only through kAvx2CellOps.
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
  static constexpr uint32_t kMaxCodeVecs = 2;

  static F Zero() { return _mm256_setzero_ps(); }
  static F Set(float x) { return _mm256_set1_ps(x); }
  static F Load(const float* from) { return _mm256_loadu_ps(from); }
  static void Store(float* to, F x) { _mm256_storeu_ps(to, x); }
  static F Add(F a, F b) { return _mm256_add_ps(a, b); }
  static F Sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F SubByFma(F a, F b) { return _mm256_fnmadd_ps(b, Set(1.0f), a); }
  static F Mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F Div(F a, F b) { return _mm256_div_ps(a, b); }
  static F Fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F Max(F a, F b) { return _mm256_max_ps(a, b); }
  static F Abs(F x) { return _mm256_andnot_ps(Set(-0.0f), x); }
  static F WithSignOf(F magnitude, F x) { return _mm256_or_ps(magnitude, _mm256_and_ps(x, Set(-0.0f))); }
  // a <= b, which no NaN is.
  static F SelectLe(F a, F b, F yes, F no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LE_OQ)); }
  // x times two to the power that the low bits of `shifted` hold.
  static F AddExponent(F x, F shifted) {
    const __m256i power = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), power));
  }

  static __m128i Load128(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
  static void Store128(uint8_t* to, __m128i x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), x); }
  static F LoadHalf(const uint8_t* from) { return _mm256_cvtph_ps(Load128(from)); }
  static F LoadBfloat(const uint8_t* from) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(Load128(from)), 16));
  }
  // Nothing between 65504 and 65520 rounds elsewhere.
  static F ClampToHalf(F x) { return _mm256_min_ps(_mm256_max_ps(x, Set(-65504.0f)), Set(65504.0f)); }
  static void StoreHalf(uint8_t* to, F x) {
    __m128i half = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    asm("" : "+x"(half));  // with memory as its target the conversion is slower than with a store after it
    Store128(to, half);
  }
  // No decoded value comes near bfloat16's limit: scales are float16.
  static void StoreBfloat(uint8_t* to, F x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    const __m256i words = _mm256_srli_epi32(rounded, 16);
    Store128(to, _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
  }

  static F MaxAbs(F largest, F x) {  // magnitudes order like their bits
    const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7FFFFFFF));
    return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(largest), magnitude));
  }
  static __m256 HalfSum(F x) { return x; }
  static __m256 HalfMax(F x) { return x; }

  // The rotation's stage of partners h lanes apart: signs * x + swapped, the sum where the partner comes later, the
  // difference where it came before. h is a constant after inlining.
  static inline __attribute__((always_inline)) F LaneStage(F x, int h) {
    switch (h) {
      case 1: return _mm256_fmadd_ps(x, _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1), _mm256_permute_ps(x, 0xB1));
      case 2: return _mm256_fmadd_ps(x, _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1), _mm256_permute_ps(x, 0x4E));
      default:
        return _mm256_fmadd_ps(x, _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1), _mm256_permute2f128_ps(x, x, 0x01));
    }
  }

  static B SetBytes(int x) { return _mm256_set1_epi8(static_cast<char>(x)); }
  static B AddBytes(B a, B b) { return _mm256_add_epi8(a, b); }
  static B AndBytes(B a, B b) { return _mm256_and_si256(a, b); }
  static B MinBytes(B a, B b) { return _mm256_min_epi8(a, b); }
  static B MaxBytes(B a, B b) { return _mm256_max_epi8(a, b); }
  static B ShiftRight(B x, int bits) { return _mm256_srli_epi16(x, bits); }
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

  // --- Codes to rotated values

  static B LoadBytes(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  template <uint32_t kBytes>
  static B LoadRepeated(const uint8_t* from) {
    if constexpr (kBytes == 16) return _mm256_broadcastsi128_si256(Load128(from));
    return _mm256_broadcastq_epi64(Load64(from));
  }
  static B ShiftDwords(B x, int bits) { return _mm256_srli_epi32(x, bits); }
  static B ShiftDwords(B x, const int32_t* bits) {
    return _mm256_srlv_epi32(x, _mm256_load_si256(reinterpret_cast<const __m256i*>(bits)));
  }
  template <int kBits>
  static B Isolate(B codes) {
    return AndBytes(codes, SetBytes((1 << kBits) - 1));
  }
  static B Join3(B low, B high) {  // two bits of one, the third of the other
    return _mm256_or_si256(AndBytes(low, SetBytes(3)), AndBytes(_mm256_slli_epi32(high, 2), SetBytes(4)));
  }

  // A scale of these tiers has four significant bits and so has a level: the product fits in the upper half of its
  // word, and two byte tables give it.
  struct Levels {
    B low, high;
  };
  template <int kBits>
  static Levels LevelsOf(float scale) {
    constexpr float kMiddle = static_cast<float>(1 << (kBits - 1)) - 0.5f;
    const auto words = [&](float first) {
      const F level = Mul(Sub(LaneIndex(), Set(kMiddle - first)), Set(scale));
      return _mm256_srli_epi32(_mm256_castps_si256(level), 16);
    };
    // 16 words, in the order of codes; a table of eight levels is there twice.
    const __m256i all =
        _mm256_permute4x64_epi64(_mm256_packus_epi32(words(0.0f), words(kBits == 4 ? 8.0f : 0.0f)), 0xD8);
    const __m256i bytes =
        _mm256_packus_epi16(_mm256_and_si256(all, _mm256_set1_epi16(0xFF)), _mm256_srli_epi16(all, 8));
    return Levels{_mm256_permute4x64_epi64(bytes, 0x88), _mm256_permute4x64_epi64(bytes, 0xDD)};
  }
  // Registers by bits 0 and 3 of a value's number, lanes by 1, 2 and 4.
  static inline __attribute__((always_inline)) void Expand(B codes, const Levels& levels, F* x) {
    const B low = _mm256_shuffle_epi8(levels.low, codes), high = _mm256_shuffle_epi8(levels.high, codes);
    const B upper_half = _mm256_set1_epi32(static_cast<int>(0xFFFF0000));
    const B first = _mm256_unpacklo_epi8(low, high), second = _mm256_unpackhi_epi8(low, high);
    x[0] = _mm256_castsi256_ps(_mm256_slli_epi32(first, 16));
    x[1] = _mm256_castsi256_ps(_mm256_and_si256(first, upper_half));
    x[2] = _mm256_castsi256_ps(_mm256_slli_epi32(second, 16));
    x[3] = _mm256_castsi256_ps(_mm256_and_si256(second, upper_half));
  }
  // After RotateExpanded bit 0 of the register is bit 4 of the number, and bit 1 its bit 3.
  static constexpr int NaturalRegister(int i) { return (i & ~3) | (i & 1) << 1 | (i >> 1 & 1); }

  // A stage whose partners lie in neighbouring lanes (or in the two halves): a pair of registers is taken apart into
  // even and odd ones and added and subtracted. The bit of the number that told the registers apart moves into the
  // lane.
  template <int kRegs, bool kHalves>
  static inline __attribute__((always_inline)) void ExchangeStage(F* x) {
#pragma GCC unroll 16
    for (int i = 0; i < kRegs; i += 2) {
      const F a = x[i], b = x[i + 1];
      x[i] = kHalves ? _mm256_permute2f128_ps(a, b, 0x20) : _mm256_shuffle_ps(a, b, 0x88);
      x[i + 1] = kHalves ? _mm256_permute2f128_ps(a, b, 0x31) : _mm256_shuffle_ps(a, b, 0xDD);
      Butterfly<Avx2>(&x[i], &x[i + 1]);
    }
  }
  template <int kRegs>
  static inline __attribute__((always_inline)) void RotateExpanded(F* x) {
    RegisterStage<Avx2, kRegs, 1>(x);
    ExchangeStage<kRegs, false>(x);
    ExchangeStage<kRegs, false>(x);
    RegisterStage<Avx2, kRegs, 2>(x);
    ExchangeStage<kRegs, true>(x);
    RegisterStages<Avx2, kRegs, 4>(x);
  }
};

}  // namespace

constexpr CellOps kAvx2CellOps = SimdOps<Avx2>::Table("avx2");

}  // namespace spectrumkv

#else  // never called: the backend is not supported

namespace spectrumkv {
const CellOps kAvx2CellOps = {"avx2", nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                              nullptr, nullptr};
}  // namespace spectrumkv

#endif
