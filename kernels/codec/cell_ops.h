// What one instruction set brings: the work on the cells of some tokens of one plane. TableBackend does the rest, so
// that files compiled for an instruction set hold nothing but these functions.
//
// Values of a head are contiguous; all addresses need only the alignment of a byte. Nothing outside the ranges given
// here is read or written. Formulas: proto/WIRE_FORMAT.md; codec_math.h, scan_math.h, attend_math.h of kernels/codec.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/codec/attend_queries.h"
#include "kernels/format/types.h"

namespace spectrumkv {

// tokens x heads x head_dim values to read; head h of token t begins at rows[t] + h * head_stride_bytes.
struct CellsIn {
  const uint8_t* const* rows;  // [tokens + ahead]
  uint32_t tokens;
  uint32_t ahead;  // further rows that will be read next, worth a prefetch; they may be prefetched and no more
  int64_t head_stride_bytes;
  uint32_t heads;
  uint32_t head_dim;  // a multiple of 8, 8..1024
  DType dtype;
};

struct CellsOut {
  uint8_t* const* rows;  // [tokens]
  uint32_t tokens;
  int64_t head_stride_bytes;
  uint32_t heads;
  uint32_t head_dim;
  DType dtype;
};

// The centres to subtract or to add: [heads, head_dim], the same for all tokens of a call.
struct Centres {
  const float* means = nullptr;  // null: nothing is subtracted or added, not even +0
  float bound = 0.0f;            // no mean is larger in magnitude; read by `decode` only
};

// A *magnitude word* is a value's word with its sign bit cleared (EscapeLimitsOf); functions that return one give the
// largest of all their cells, so that a caller learns of escapes from the pass that reads the values anyway.
struct CellOps {
  const char* name;

  uint32_t (*magnitude)(const CellsIn& cells);

  // Adds the squares of the values to lanes[kEnergyLanes] and sets `sum` to their fold, both in the order of
  // scan_math.h. lanes null: begins from zeros and keeps no lanes. Returns the magnitude word.
  uint32_t (*energy)(const CellsIn& cells, float* lanes, float* sum);

  // sums[h * head_dim + d] += value, token by token. Returns the magnitude word; where that is not finite the sums are
  // of no use.
  uint32_t (*accumulate)(const CellsIn& cells, float* sums);

  // sums[t] = energy of token t, in the order of scan_math.h; with `means` [heads, head_dim], of value - mean.
  void (*spread)(const CellsIn& cells, const float* means, float* sums);

  // One block of attend_math.h: keys of one head, at most kAttendTokens of them, the first at position first_position.
  // weights: [count, kAttendTokens]; tops, sums: [count]; panel: kAttendTokens * head_dim floats of scratch, 64-byte aligned.
  void (*attend)(const CellsIn& keys, uint32_t first_position, const AttendQueries& queries, float* panel,
                 float* weights, float* tops, float* sums);

  // scores[kAttendTokens] = fma(weight, factor, score), query after query, those whose factor is 0 left out.
  void (*fold)(const float* weights, const float* factors, uint32_t count, float* scores);

  // Copies the words, cells one after another. Returns the magnitude word.
  uint32_t (*copy)(const CellsIn& cells, uint8_t* words);

  // One tier for all cells, not RAW. scales: a byte (Q4, Q3, Q2) or a float16 for each cell; codes: CellBytes for each.
  // Returns the magnitude word, or 0 where there are means (`accumulate` gave it). Where the word says that a value
  // escapes, scales and codes are of no use.
  uint32_t (*encode)(const CellsIn& cells, Tier tier, const Centres& centres, uint8_t* scales, uint8_t* codes);

  // The inverse, for any codes and any finite scales.
  void (*decode)(const CellsOut& cells, Tier tier, const Centres& centres, const uint8_t* scales, const uint8_t* codes);

  // Copies words that nobody here will read soon: past the caches where that is faster.
  void (*store)(uint8_t* to, const uint8_t* words, size_t bytes);
};

// The definition, in portable code; other instruction sets call it for head sizes they have no fast path for.
const CellOps& ScalarCellOps();

}  // namespace spectrumkv
