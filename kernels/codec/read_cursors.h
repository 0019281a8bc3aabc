// Where the next cell's scale and codes lie in a received chunk, by tier. Cells are visited in cell order: K, then V.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "kernels/format/chunk.h"

namespace spectrumkv {

class ReadCursors {
 public:
  explicit ReadCursors(const ChunkView& chunk)
      : scales8_(chunk.metadata + chunk.layout.scales8.offset),
        scales16_(chunk.metadata + chunk.layout.scales16.offset) {
    const Pieces pieces = chunk.pieces();
    for (int i = 0; i < kCodeSections; ++i) codes_[i] = PieceCursor(pieces, chunk.layout.codes[i].offset);
  }

  // Takes the codes of the next `*tokens` tokens of `tier`, or of as many as lie in one piece. A token in two pieces is
  // put together in `bounce`.
  const uint8_t* TakeCodes(Tier tier, size_t token_bytes, uint32_t* tokens, uint8_t* bounce) {
    PieceCursor& cursor = codes_[CodeSectionOf(tier)];
    const size_t here = cursor.InPiece() / token_bytes;
    if (here == 0) {
      cursor.CopyTo(bounce, token_bytes);
      *tokens = 1;
      return bounce;
    }
    *tokens = static_cast<uint32_t>(std::min<size_t>(*tokens, here));
    return cursor.Take(*tokens * token_bytes);
  }

  // Takes the scales of the next `cells` cells. REQUIRES: tier is not RAW.
  const uint8_t* TakeScales(Tier tier, uint64_t cells) {
    const uint8_t*& cursor = HasScale8(tier) ? scales8_ : scales16_;
    const uint8_t* taken = cursor;
    cursor += HasScale8(tier) ? cells : cells * 2;
    return taken;
  }

 private:
  std::array<PieceCursor, kCodeSections> codes_;
  const uint8_t* scales8_;
  const uint8_t* scales16_;
};

}  // namespace spectrumkv
