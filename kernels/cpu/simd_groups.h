// The cells of a call, flattened over tokens and heads, in groups: a scale takes as long for eight cells as for one,
// and while it is computed another group is worked on. See simd_bytes.h for why all is in an unnamed namespace.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/simd_rotate.h"

namespace spectrumkv {
namespace {

constexpr uint32_t kGroupCells = 8;
constexpr uint32_t kGroupFloats = 2048;  // rotated values of a group

// Cells of a group, fewer where they are large.
inline uint32_t GroupCells(uint32_t head_dim) {
  return head_dim * kGroupCells <= kGroupFloats ? kGroupCells : kGroupFloats / head_dim;
}

struct GroupIn {
  uint32_t count;
  uint32_t head_dim;
  const uint8_t* from[kGroupCells];
  const float* mean[kGroupCells];  // unset where there are no means
};

struct GroupOut {
  uint32_t count;
  uint32_t head_dim;
  uint8_t* to[kGroupCells];
  const float* mean[kGroupCells];  // null where there are no means
  alignas(32) float scale[kGroupCells];
  bool clamp;  // a value may be beyond the largest float16
};

// Which rows a Prefetcher asks for.
enum class Rows {
  kScattered,  // those that do not follow the row before them: elsewhere the hardware does it better
  kAll,
};

// Asks for cells before they are read, into the second-level cache: the first has too few places for lines that are on
// their way from memory.
template <Rows kRows>
class Prefetcher {
 public:
  Prefetcher(const CellsIn& cells, uint32_t distance_tokens)
      : cells_(cells),
        cell_bytes_(cells.head_dim * WordBytes(cells.dtype)),
        distance_(distance_tokens),
        last_(cells.tokens + cells.ahead) {}

  // Called as cell (token, head) is read.
  SPECTRUMKV_SIMD_INLINE void At(uint32_t token, uint32_t head) {
    if (head == 0) later_ = LaterRow(token + distance_);
    if (later_ == nullptr) return;
    const uint8_t* cell = later_ + head * cells_.head_stride_bytes;
    for (uint32_t byte = 0; byte < cell_bytes_; byte += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(cell + byte), _MM_HINT_T1);
    }
  }

 private:
  const uint8_t* LaterRow(uint32_t token) const {
    if (token >= last_) return nullptr;
    if (kRows == Rows::kAll) return cells_.rows[token];
    const uint8_t *row = cells_.rows[token], *before = cells_.rows[token - 1];
    const uintptr_t step =
        reinterpret_cast<uintptr_t>(row) - reinterpret_cast<uintptr_t>(before);  // huge where it goes back
    return step <= uint64_t{cell_bytes_} * cells_.heads ? nullptr : row;
  }

  const CellsIn& cells_;
  const uint32_t cell_bytes_;
  const uint32_t distance_, last_;  // tokens
  const uint8_t* later_ = nullptr;
};

// The cells of a call, one after another.
class CellCursor {
 public:
  explicit CellCursor(const CellsIn& cells) : cells_(cells) {}

  uint32_t token() const { return token_; }
  uint32_t head() const { return head_; }

  const uint8_t* Next() {
    const uint8_t* cell = cells_.rows[token_] + head_ * cells_.head_stride_bytes;
    if (++head_ == cells_.heads) head_ = 0, ++token_;
    return cell;
  }

 private:
  const CellsIn& cells_;
  uint32_t token_ = 0, head_ = 0;
};

class CellReader {
 public:
  explicit CellReader(const CellsIn& cells) : cells_(cells), left_(cells.tokens * cells.heads) {}

  uint32_t left() const { return left_; }

  // The next cells, at most `most`. means: [heads, head_dim] or null.
  void Next(uint32_t most, const float* means, GroupIn* group) {
    group->count = left_ < most ? left_ : most;
    group->head_dim = cells_.head_dim;
    for (uint32_t i = 0; i < group->count; ++i) {
      group->from[i] = cells_.rows[token_] + head_ * cells_.head_stride_bytes;
      if (means != nullptr) group->mean[i] = means + size_t{head_} * cells_.head_dim;
      if (++head_ == cells_.heads) head_ = 0, ++token_;
    }
    left_ -= group->count;
  }

 private:
  const CellsIn& cells_;
  uint32_t left_;
  uint32_t token_ = 0, head_ = 0;
};

class CellWriter {
 public:
  explicit CellWriter(const CellsOut& cells) : cells_(cells), left_(cells.tokens * cells.heads) {}

  uint32_t left() const { return left_; }

  void Next(uint32_t most, const float* means, GroupOut* group) {
    group->count = left_ < most ? left_ : most;
    group->head_dim = cells_.head_dim;
    for (uint32_t i = 0; i < group->count; ++i) {
      group->to[i] = cells_.rows[token_] + head_ * cells_.head_stride_bytes;
      group->mean[i] = means == nullptr ? nullptr : means + size_t{head_} * cells_.head_dim;
      if (++head_ == cells_.heads) head_ = 0, ++token_;
    }
    left_ -= group->count;
  }

 private:
  const CellsOut& cells_;
  uint32_t left_;
  uint32_t token_ = 0, head_ = 0;
};

}  // namespace
}  // namespace spectrumkv
