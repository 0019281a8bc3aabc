// What one instruction set brings: the work on all cells of one (token, plane). TableBackend does the rest, so that
// files compiled for an instruction set hold nothing but these functions.
//
// Values of a head are contiguous; all addresses need only the alignment of a byte. Nothing outside the ranges given
// here is read or written. Formulas: proto/WIRE_FORMAT.md, kernels/codec/codec_math.h, kernels/codec/scan_math.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/types.h"

namespace spectrumkv {

// heads x head_dim values to read; head h begins at data + h * head_stride_bytes.
struct CellsIn {
  const uint8_t* data;
  int64_t head_stride_bytes;
  uint32_t heads;
  uint32_t head_dim;  // a multiple of 8, 8..1024
  DType dtype;
};

struct CellsOut {
  uint8_t* data;
  int64_t head_stride_bytes;
  uint32_t heads;
  uint32_t head_dim;
  DType dtype;
};

struct CellOps {
  const char* name;

  // per_head[h]: the largest word of head h with its sign bit cleared (EscapeLimitsOf). Returns the largest of all.
  uint32_t (*magnitude)(const CellsIn& cells, uint32_t* per_head);

  // Adds the squares to lanes[kEnergyLanes] in the order of scan_math.h, which also says how they are folded.
  void (*energy)(const CellsIn& cells, float* lanes);

  // sums[h * head_dim + d] += value. All values are finite.
  void (*accumulate)(const CellsIn& cells, float* sums);

  // One tier for all heads, not RAW; no value escapes. means: [heads, head_dim] to subtract (K in a rotated tier), or
  // null. magnitudes: what `magnitude` gave; read by plain tiers only. scales: heads bytes (Q4, Q3, Q2) or float16 words;
  // codes: heads * CellBytes.
  void (*encode)(const CellsIn& cells, Tier tier, const float* means, const uint32_t* magnitudes, uint8_t* scales,
                 uint8_t* codes);

  // The inverse, for any codes and any finite scales. means are added; null adds nothing, not even +0.
  void (*decode)(const CellsOut& cells, Tier tier, const float* means, const uint8_t* scales, const uint8_t* codes);
};

// The definition, in portable code; other instruction sets call it for head sizes they have no fast path for.
const CellOps& ScalarCellOps();

}  // namespace spectrumkv
