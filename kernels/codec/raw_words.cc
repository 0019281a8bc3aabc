#include "kernels/codec/raw_words.h"

#include <cstring>

#include "kernels/codec/codec_math.h"
#include "kernels/codec/word_math.h"

namespace spectrumkv {
namespace {

uint32_t LoadWord(const uint8_t* source, DType dtype, size_t i) {
  if (dtype == DType::kFloat32) {
    uint32_t word;
    std::memcpy(&word, source + 4 * i, sizeof(word));
    return word;
  }
  uint16_t word;
  std::memcpy(&word, source + 2 * i, sizeof(word));
  return word;
}

void StoreWord(uint8_t* target, DType dtype, size_t i, uint32_t word) {
  if (dtype == DType::kFloat32) {
    std::memcpy(target + 4 * i, &word, sizeof(word));
    return;
  }
  const uint16_t narrow = static_cast<uint16_t>(word);
  std::memcpy(target + 2 * i, &narrow, sizeof(narrow));
}

}  // namespace

uint64_t ConvertWords(const uint8_t* source, DType from, uint8_t* target, DType to, size_t count) {
  if (from == to) {
    std::memcpy(target, source, count * SizeOf(to));
    return 0;
  }
  uint64_t changed = 0;
  for (size_t i = 0; i < count; ++i) {
    const ConvertedWord converted = ConvertWord(LoadWord(source, from, i), from, to);
    changed += converted.changed;
    StoreWord(target, to, i, converted.word);
  }
  return changed;
}

uint64_t CountNonFinite(const uint8_t* source, DType dtype, size_t count) {
  const uint32_t first = EscapeLimitsOf(dtype).nonfinite;
  const uint32_t mask = dtype == DType::kFloat32 ? 0x7FFFFFFF : 0x7FFF;
  uint64_t found = 0;
  for (size_t i = 0; i < count; ++i) found += (LoadWord(source, dtype, i) & mask) >= first;
  return found;
}

}  // namespace spectrumkv
