// The scan stage: one read pass over a layer of the source, before planning. What it finds (escape classes, key norms)
// is the planner's input.
#pragma once

#include "kernels/codec/backend.h"
#include "kernels/format/chunk.h"
#include "server/plan/plan.h"

namespace spectrumkv {

// Scans tokens [range.first, range.first + range.count) of one layer into out->k and out->v at the same indices.
//   dims     geometry of the layer; dims.tokens is not read
//   k, v     planes of that range alone: rows[0] is token range.first. v REQUIRED exactly where dims.has_v
//   out      REQUIRES: out->k sized beyond the range, out->v too where dims.has_v
// Works in pieces of at most kMaxChunkTokens. Allocates nothing. Thread-safe for disjoint ranges of one `out`.
void ScanLayer(const Backend& backend, const ChunkDims& dims, const SourcePlane& k, const SourcePlane* v,
               TokenRange range, LayerScan* out);

// Samples the tokens of one chunk of one layer into out->k_spread and out->v_spread, at indices from `first` on.
//   dims     of the chunk
//   k, v     its planes. v REQUIRED exactly where dims.has_v
//   pinned   tokens of the layer, from its first, that will be RAW
//   out      REQUIRES: k_spread sized beyond the chunk, v_spread too where dims.has_v
// Thread-safe for disjoint ranges of one `out`.
void SpreadChunk(const Backend& backend, const ChunkDims& dims, const SourcePlane& k, const SourcePlane* v,
                 uint32_t first, uint32_t pinned, Workspace* workspace, LayerScan* out);

}  // namespace spectrumkv
