// Where the next cell's scale and codes go in a chunk that is written, by tier. Cells are visited in cell order: K, then V.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/format/chunk.h"

namespace spectrumkv {

class SectionCursors {
 public:
  SectionCursors(uint8_t* chunk, const ChunkLayout& layout)
      : scales8_(chunk + layout.scales8.offset), scales16_(chunk + layout.scales16.offset) {
    for (int i = 0; i < kCodeSections; ++i) codes_[i] = chunk + layout.codes[i].offset;
  }

  // Takes the codes of the next `cells` cells of `tier`.
  uint8_t* TakeCodes(Tier tier, uint64_t cells, uint64_t cell_bytes) {
    uint8_t*& cursor = codes_[CodeSectionOf(tier)];
    uint8_t* taken = cursor;
    cursor += cells * cell_bytes;
    return taken;
  }

  // Takes their scales. REQUIRES: tier is not RAW.
  uint8_t* TakeScales(Tier tier, uint64_t cells) {
    uint8_t*& cursor = HasScale8(tier) ? scales8_ : scales16_;
    uint8_t* taken = cursor;
    cursor += HasScale8(tier) ? cells : cells * 2;
    return taken;
  }

 private:
  std::array<uint8_t*, kCodeSections> codes_;
  uint8_t* scales8_;
  uint8_t* scales16_;
};

}  // namespace spectrumkv
