// The words of a retained source, or of its destination, in the order that both sides have them: layer by layer, K before V.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "server/encode/encode.h"
#include "server/pool/rows.h"

namespace spectrumkv {

// Calls fn(tensor, token_first, count, row_bytes) -> absl::Status for pieces of at most `piece_bytes`, at least a token, of each
// K and V; a tensor's first piece begins at token 0. Stops at the first error.
template <typename Fn>
absl::Status ForEachPiece(const BlockHold& hold, const std::vector<PlanLayer>& layers, const std::vector<LayerPlace>& places,
                          uint64_t piece_bytes, Fn fn) {
  for (size_t l = 0; l < layers.size(); ++l) {
    for (const PlaneId plane : {PlaneId::kK, PlaneId::kV}) {
      if (plane == PlaneId::kV && !layers[l].has_v) continue;
      const TensorOfHold tensor{places[l].group, places[l].layer_slot, plane};
      const uint64_t row_bytes = DenseRowBytes(hold, tensor);
      const auto step = static_cast<uint32_t>(std::max<uint64_t>(1, piece_bytes / row_bytes));
      for (uint32_t first = 0; first < hold.token_count(); first += step) {
        absl::Status done = fn(tensor, first, std::min(step, hold.token_count() - first), row_bytes);
        if (!done.ok()) return done;
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace spectrumkv
