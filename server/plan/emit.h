// Turns the rungs of a unit into tier maps, exact sizes and totals.
#pragma once

#include <cstdint>
#include <vector>

#include "server/plan/allocate.h"
#include "server/plan/cost.h"
#include "server/plan/plan.h"

namespace spectrumkv {

// Fills `chunks` of one batch, unit by unit, and adds up its totals. Everything given is borrowed.
class Emitter {
 public:
  // chunk_indices: of the batch, ascending; batch->chunks gets one entry for each, in that order.
  Emitter(const std::vector<PlanLayer>& layers, const std::vector<ChunkCut>& cuts,
          const std::vector<uint32_t>& chunk_indices, const CostRules& rules, PlanBatch* batch);

  // scan: one entry per layer, or empty. Returns the counted bytes of the unit (codes alone for payload_only).
  uint64_t Emit(const Unit& unit, const Allocation& allocation, const std::vector<LayerScan>& scan);

 private:
  struct CleanChunk {
    TierCounts counts;
    uint64_t chunk_bytes = 0;
    uint64_t counted_bytes = 0;
  };
  struct CleanLayer {  // chunks without escapes of all layers of one geometry
    PlanLayer geometry;
    std::vector<CleanChunk> chunks;
  };

  const std::vector<uint8_t>& MapOf(const PlanLayer& layer) const {
    return layer.raw_only ? map_raw_ : layer.has_v ? map_ : map_k_;
  }
  const CleanLayer& CleanOf(const PlanLayer& layer, size_t first_slot, size_t slots, const Unit& unit,
                            const uint8_t* map);
  uint64_t EmitChunk(const PlanLayer& layer, const LayerScan* scan, const uint8_t* map, const CleanChunk& clean,
                     PlannedChunk* chunk);
  void FillMaps(const Unit& unit, const Allocation& allocation);
  void AddTotals(const TierCounts& counts);

  const std::vector<PlanLayer>& layers_;
  const std::vector<ChunkCut>& cuts_;
  const std::vector<uint32_t>& indices_;
  const CostRules rules_;
  PlanBatch* batch_;
  std::vector<uint8_t> map_, map_k_, map_raw_;  // of the unit: K and V, K alone, RAW only
  std::vector<CleanLayer> clean_;
};

}  // namespace spectrumkv
