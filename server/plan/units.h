// Cuts a batch of chunks into rectangles that are planned as one.
#pragma once

#include <cstdint>
#include <vector>

#include "server/plan/cost.h"

namespace spectrumkv {

// Maximal rectangles (runs of tokens, all layers with the same run) that cover exactly cuts[i] for i in
// `chunk_indices` (ascending), ordered by first token, then count. per_layer: one layer in each.
std::vector<Unit> SplitUnits(const std::vector<ChunkCut>& cuts, const std::vector<uint32_t>& chunk_indices,
                             bool per_layer);

}  // namespace spectrumkv
