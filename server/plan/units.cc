#include "server/plan/units.h"

#include <map>
#include <utility>

namespace spectrumkv {

std::vector<Unit> SplitUnits(const std::vector<ChunkCut>& cuts, const std::vector<uint32_t>& chunk_indices,
                             bool per_layer) {
  std::map<std::pair<uint32_t, uint32_t>, std::vector<uint32_t>> layers_of_run;  // (first, count) -> layers
  for (size_t i = 0; i < chunk_indices.size();) {
    const ChunkCut& begin = cuts[chunk_indices[i]];
    uint32_t count = begin.token_count;
    for (++i; i < chunk_indices.size(); ++i) {
      const ChunkCut& next = cuts[chunk_indices[i]];
      if (next.layer_index != begin.layer_index || next.token_first != begin.token_first + count) break;
      count += next.token_count;
    }
    layers_of_run[{begin.token_first, count}].push_back(begin.layer_index);
  }
  std::vector<Unit> units;
  for (auto& [run, layers] : layers_of_run) {
    const TokenRange tokens{run.first, run.second};
    if (!per_layer) {
      units.push_back({tokens, std::move(layers)});
      continue;
    }
    for (const uint32_t layer : layers) units.push_back({tokens, {layer}});
  }
  return units;
}

}  // namespace spectrumkv
