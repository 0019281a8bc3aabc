// Bytes of one chunk that lie in several pieces, as a network receives them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace spectrumkv {

struct Piece {
  const uint8_t* data = nullptr;
  size_t size = 0;
};

// Pieces in order; borrowed, as are their bytes.
struct Pieces {
  const Piece* first = nullptr;
  size_t count = 0;
  size_t TotalBytes() const {
    size_t bytes = 0;
    for (size_t i = 0; i < count; ++i) bytes += first[i].size;
    return bytes;
  }
};

// A place in pieces. REQUIRES of every call: so many bytes are left.
class PieceCursor {
 public:
  PieceCursor() = default;
  PieceCursor(const Pieces& pieces, uint64_t offset) : piece_(pieces.first), end_(pieces.first + pieces.count) {
    Skip(offset);
  }

  // Bytes from here to the end of the piece; 0 only at the very end.
  size_t InPiece() const { return piece_ == end_ ? 0 : piece_->size - at_; }

  // The next bytes where they lie. REQUIRES: bytes <= InPiece().
  const uint8_t* Take(size_t bytes) {
    if (bytes == 0) return nullptr;
    const uint8_t* taken = piece_->data + at_;
    Skip(bytes);
    return taken;
  }

  void CopyTo(uint8_t* out, size_t bytes) {
    while (bytes > 0) {
      const size_t step = std::min(bytes, InPiece());
      std::memcpy(out, Take(step), step);
      out += step;
      bytes -= step;
    }
  }

  void Skip(uint64_t bytes) {
    at_ += bytes;
    while (piece_ != end_ && at_ >= piece_->size) {
      at_ -= piece_->size;
      ++piece_;
    }
  }

 private:
  const Piece* piece_ = nullptr;
  const Piece* end_ = nullptr;
  uint64_t at_ = 0;
};

}  // namespace spectrumkv
