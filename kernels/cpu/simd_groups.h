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

// The cells of a call, one after another.
class CellCursor {
 public:
  explicit CellCursor(const CellsIn& cells) : cells_(cells) {}

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
