// What both sides derive from the manifest: the chunk list and the raw size.
#include <algorithm>

#include "server/plan/plan.h"

namespace spectrumkv {
namespace {

// Chunks of refinements are smaller: another transfer that begins waits for the one that is under way.
constexpr uint32_t kStripChunksPerChunk = 8;

uint32_t StripStep(uint32_t step) {
  const uint32_t finer = step / kStripChunksPerChunk / 64 * 64;
  return finer > 0 ? finer : std::min(step, 64u);
}

}  // namespace

uint32_t CountTokens(const std::vector<TokenRange>& ranges) {
  uint32_t count = 0;
  for (const TokenRange& range : ranges) count += range.count;
  return count;
}

void AppendToken(std::vector<TokenRange>* ranges, uint32_t token) {
  if (!ranges->empty() && ranges->back().first + ranges->back().count == token) {
    ++ranges->back().count;
  } else {
    ranges->push_back({token, 1});
  }
}

std::vector<TokenRange> RangesOf(const std::vector<uint32_t>& positions) {
  std::vector<TokenRange> ranges;
  for (const uint32_t position : positions) AppendToken(&ranges, position);
  return ranges;
}

std::vector<uint32_t> PositionsOf(const std::vector<TokenRange>& ranges) {
  std::vector<uint32_t> positions;
  positions.reserve(CountTokens(ranges));
  for (const TokenRange& run : ranges) {
    for (uint32_t i = 0; i < run.count; ++i) positions.push_back(run.first + i);
  }
  return positions;
}

uint32_t TransferShape::kept_count() const { return CountTokens(kept); }

uint32_t TransferShape::tokens_of(size_t layer_index) const { return CountTokens(ranges_of(layer_index)); }

ChunkDims DimsOf(const PlanLayer& layer, uint32_t tokens) {
  return ChunkDims{tokens, layer.heads, layer.head_dim, layer.dtype, layer.has_v};
}

std::vector<ChunkCut> CutChunks(const TransferShape& shape) {
  std::vector<ChunkCut> cuts;
  uint32_t kept = shape.kept_count();
  for (uint32_t l = 0; l < shape.layers.size(); ++l) {
    const PlanLayer& layer = shape.layers[l];
    if (!shape.strips.empty()) kept = shape.tokens_of(l);
    const uint32_t whole = TokensPerChunk(layer.heads, layer.head_dim, layer.dtype, layer.has_v);
    const uint32_t step = shape.strips.empty() ? whole : StripStep(whole);
    for (uint64_t first = 0; first < kept; first += step) {
      const uint32_t at = static_cast<uint32_t>(first);
      cuts.push_back({static_cast<uint32_t>(cuts.size()), l, at, std::min(step, kept - at)});
    }
  }
  return cuts;
}

uint64_t KvBytesOf(const TransferShape& shape) {
  uint64_t bytes = 0;
  for (size_t l = 0; l < shape.layers.size(); ++l) {
    bytes += KvBytes(DimsOf(shape.layers[l], shape.strips.empty() ? shape.token_count : shape.tokens_of(l)));
  }
  return bytes;
}

}  // namespace spectrumkv
