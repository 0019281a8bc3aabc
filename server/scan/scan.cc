#include "server/scan/scan.h"

#include <algorithm>

namespace spectrumkv {
namespace {

void ScanPlane(const Backend& backend, ChunkDims dims, const SourcePlane& plane, uint32_t tokens, TokenScan* out) {
  for (uint32_t done = 0; done < tokens; done += dims.tokens) {
    dims.tokens = std::min(tokens - done, kMaxChunkTokens);
    SourcePlane piece = plane;
    piece.rows = plane.rows + done;
    backend.Scan(dims, piece, out + done);
  }
}

}  // namespace

void ScanLayer(const Backend& backend, const ChunkDims& dims, const SourcePlane& k, const SourcePlane* v,
               TokenRange range, LayerScan* out) {
  ScanPlane(backend, dims, k, range.count, out->k.data() + range.first);
  if (v != nullptr) ScanPlane(backend, dims, *v, range.count, out->v.data() + range.first);
}

void SpreadChunk(const Backend& backend, const ChunkDims& dims, const SourcePlane& k, const SourcePlane* v,
                 uint32_t first, uint32_t pinned, Workspace* workspace, LayerScan* out) {
  const uint32_t pinned_here = pinned > first ? std::min(pinned - first, dims.tokens) : 0;
  backend.Spread(dims, k, true, pinned_here, workspace, out->k_spread.data() + first);
  if (v != nullptr) backend.Spread(dims, *v, false, pinned_here, workspace, out->v_spread.data() + first);
}

}  // namespace spectrumkv
