// Packing and unpacking of codes, one per byte on one side, with 256-bit integer instructions.
//
// Included only by files compiled for an instruction set (avx2.cc, avx512.cc). Everything is in an unnamed namespace,
// so that each file has its own copy and none can be linked into code for another machine.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace spectrumkv {
namespace {

// The first W bytes, the rest zero or undefined. W is 32, 16, 8, 4 or 2; exactly W bytes are touched.
template <int W>
inline __m256i LoadPart(const uint8_t* from) {
  if constexpr (W == 32) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  } else if constexpr (W == 16) {
    return _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  } else {
    uint64_t word = 0;
    __builtin_memcpy(&word, from, W);
    return _mm256_zextsi128_si256(_mm_cvtsi64_si128(static_cast<long long>(word)));
  }
}

template <int W>
inline void StorePart(uint8_t* to, __m256i bytes) {
  if constexpr (W == 32) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes);
  } else if constexpr (W == 16) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(bytes));
  } else {
    const uint64_t word = static_cast<uint64_t>(_mm_cvtsi128_si64(_mm256_castsi256_si128(bytes)));
    __builtin_memcpy(to, &word, W);
  }
}

// Calls part<W>(i) so that [0, count) is covered once. REQUIRES: count even.
template <typename Part>
inline void ForParts(uint32_t count, const Part& part) {
  uint32_t i = 0;
  for (; i + 32 <= count; i += 32) part.template operator()<32>(i);
  if (count & 16) part.template operator()<16>(i), i += 16;
  if (count & 8) part.template operator()<8>(i), i += 8;
  if (count & 4) part.template operator()<4>(i), i += 4;
  if (count & 2) part.template operator()<2>(i);
}

// Layouts: proto/WIRE_FORMAT.md, "Packing". REQUIRES: head_dim a multiple of 16.

inline void CopyCodes(const uint8_t* codes, uint32_t count, uint8_t* out) {
  ForParts(count, [=]<int W>(uint32_t i) { StorePart<W>(out + i, LoadPart<W>(codes + i)); });
}

inline void PackNibbles(const uint8_t* codes, uint32_t head_dim, uint8_t* out) {
  const uint32_t half = head_dim / 2;
  ForParts(half, [=]<int W>(uint32_t i) {
    // Codes are below 16, so no bit crosses a byte.
    const __m256i high = _mm256_slli_epi16(LoadPart<W>(codes + half + i), 4);
    StorePart<W>(out + i, _mm256_or_si256(LoadPart<W>(codes + i), high));
  });
}

inline void PackPairs(const uint8_t* codes, uint32_t head_dim, uint8_t* out) {
  const uint32_t quarter = head_dim / 4;
  ForParts(quarter, [=]<int W>(uint32_t i) {
    const __m256i low = _mm256_set1_epi8(3);
    const auto two_bits = [&](uint32_t j) { return _mm256_and_si256(LoadPart<W>(codes + j * quarter + i), low); };
    const __m256i first = _mm256_or_si256(two_bits(0), _mm256_slli_epi16(two_bits(1), 2));
    const __m256i second = _mm256_or_si256(two_bits(2), _mm256_slli_epi16(two_bits(3), 2));
    StorePart<W>(out + i, _mm256_or_si256(first, _mm256_slli_epi16(second, 4)));
  });
}

inline void PackHighBits(const uint8_t* codes, uint32_t head_dim, uint8_t* out) {
  const uint32_t eighth = head_dim / 8;
  ForParts(eighth, [=]<int W>(uint32_t i) {
    const __m256i bit = _mm256_set1_epi8(4);
    const auto high = [&](uint32_t j) { return _mm256_and_si256(LoadPart<W>(codes + j * eighth + i), bit); };
    // Each stands at bit 2 of its byte, so a 16-bit shift moves no bit across bytes.
    const __m256i b01 = _mm256_or_si256(_mm256_srli_epi16(high(0), 2), _mm256_srli_epi16(high(1), 1));
    const __m256i b23 = _mm256_or_si256(high(2), _mm256_slli_epi16(high(3), 1));
    const __m256i b45 = _mm256_or_si256(_mm256_slli_epi16(high(4), 2), _mm256_slli_epi16(high(5), 3));
    const __m256i b67 = _mm256_or_si256(_mm256_slli_epi16(high(6), 4), _mm256_slli_epi16(high(7), 5));
    StorePart<W>(out + i, _mm256_or_si256(_mm256_or_si256(b01, b23), _mm256_or_si256(b45, b67)));
  });
}

inline void UnpackNibbles(const uint8_t* in, uint32_t head_dim, uint8_t* codes) {
  const uint32_t half = head_dim / 2;
  ForParts(half, [=]<int W>(uint32_t i) {
    const __m256i low = _mm256_set1_epi8(15);
    const __m256i bytes = LoadPart<W>(in + i);
    StorePart<W>(codes + i, _mm256_and_si256(bytes, low));
    StorePart<W>(codes + half + i, _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low));
  });
}

// The same, each nibble replaced by table's byte.
inline void UnpackNibbles(const uint8_t* in, uint32_t head_dim, __m128i table, uint8_t* bytes_out) {
  const uint32_t half = head_dim / 2;
  const __m256i both = _mm256_broadcastsi128_si256(table);
  ForParts(half, [=]<int W>(uint32_t i) {
    const __m256i low = _mm256_set1_epi8(15);
    const __m256i bytes = LoadPart<W>(in + i);
    StorePart<W>(bytes_out + i, _mm256_shuffle_epi8(both, _mm256_and_si256(bytes, low)));
    StorePart<W>(bytes_out + half + i,
                 _mm256_shuffle_epi8(both, _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low)));
  });
}

inline void UnpackPairs(const uint8_t* in, uint32_t head_dim, uint8_t* codes) {
  const uint32_t quarter = head_dim / 4;
  ForParts(quarter, [=]<int W>(uint32_t i) {
    const __m256i low = _mm256_set1_epi8(3);
    const __m256i bytes = LoadPart<W>(in + i);
    StorePart<W>(codes + i, _mm256_and_si256(bytes, low));
    StorePart<W>(codes + quarter + i, _mm256_and_si256(_mm256_srli_epi16(bytes, 2), low));
    StorePart<W>(codes + 2 * quarter + i, _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low));
    StorePart<W>(codes + 3 * quarter + i, _mm256_and_si256(_mm256_srli_epi16(bytes, 6), low));
  });
}

// Q3 of 64 values. The general way would load 16 bytes that were just stored as two eights, which waits for memory.
inline void UnpackTriples64(const uint8_t* in, uint8_t* codes) {
  const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in));
  const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(in + 16));
  const __m128i high = _mm_unpacklo_epi64(eight, eight);
  const __m128i low = _mm_set1_epi8(3), four = _mm_set1_epi8(4);
  const auto store = [=](int quarter, __m128i shifted) {
    // The bit of the quarter's first eight values, and that of its second eight.
    const uint64_t ones = 0x0101010101010101;
    const uint64_t first = ones * (1u << 2 * quarter), second = ones * (2u << 2 * quarter);
    const __m128i bit = _mm_set_epi64x(static_cast<long long>(second), static_cast<long long>(first));
    const __m128i set = _mm_and_si128(_mm_cmpeq_epi8(_mm_and_si128(high, bit), bit), four);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + 16 * quarter), _mm_or_si128(_mm_and_si128(shifted, low), set));
  };
  store(0, pairs);
  store(1, _mm_srli_epi16(pairs, 2));
  store(2, _mm_srli_epi16(pairs, 4));
  store(3, _mm_srli_epi16(pairs, 6));
}

// Adds the third bits of Q3 to codes that hold the low two.
inline void UnpackHighBits(const uint8_t* in, uint32_t head_dim, uint8_t* codes) {
  const uint32_t eighth = head_dim / 8;
  ForParts(eighth, [=]<int W>(uint32_t i) {
    const __m256i bit = _mm256_set1_epi8(4);
    const __m256i bytes = LoadPart<W>(in + i);
    const auto add = [&](uint32_t j, __m256i shifted) {
      uint8_t* at = codes + j * eighth + i;
      StorePart<W>(at, _mm256_or_si256(LoadPart<W>(at), _mm256_and_si256(shifted, bit)));
    };
    add(0, _mm256_slli_epi16(bytes, 2));
    add(1, _mm256_slli_epi16(bytes, 1));
    add(2, bytes);
    add(3, _mm256_srli_epi16(bytes, 1));
    add(4, _mm256_srli_epi16(bytes, 2));
    add(5, _mm256_srli_epi16(bytes, 3));
    add(6, _mm256_srli_epi16(bytes, 4));
    add(7, _mm256_srli_epi16(bytes, 5));
  });
}

}  // namespace
}  // namespace spectrumkv
