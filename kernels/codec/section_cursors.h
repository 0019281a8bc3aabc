// Where the next cell's scale and codes lie, by tier. Cells are visited in cell order: K, then V.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/format/chunk.h"

namespace spectrumkv {

// Byte is uint8_t to write a chunk, const uint8_t to read one.
template <typename Byte>
class SectionCursors {
 public:
  SectionCursors(Byte* chunk, const ChunkLayout& layout)
      : scales8_(chunk + layout.scales8.offset), scales16_(chunk + layout.scales16.offset) {
    for (int i = 0; i < kCodeSections; ++i) codes_[i] = chunk + layout.codes[i].offset;
  }

  // Takes the codes of the next `cells` cells of `tier`.
  Byte* TakeCodes(Tier tier, uint64_t cells, uint64_t cell_bytes) {
    Byte*& cursor = codes_[CodeSectionOf(tier)];
    Byte* taken = cursor;
    cursor += cells * cell_bytes;
    return taken;
  }

  // Takes their scales. REQUIRES: tier is not RAW.
  Byte* TakeScales(Tier tier, uint64_t cells) {
    Byte*& cursor = HasScale8(tier) ? scales8_ : scales16_;
    Byte* taken = cursor;
    cursor += HasScale8(tier) ? cells : cells * 2;
    return taken;
  }

 private:
  std::array<Byte*, kCodeSections> codes_;
  Byte* scales8_;
  Byte* scales16_;
};

}  // namespace spectrumkv
