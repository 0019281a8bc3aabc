// OPTIMAL: the tiers that minimise the sum of weight * error over all cells within a share of the budget. A cell is K
// or V of one token of one layer; docs/allocators.md has the formulas. One Lagrange multiplier, found by bisection over
// a histogram of the weights, then the last bytes by whole cells. Linear in the cells; the same result on every
// machine.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "server/plan/allocate.h"
#include "server/plan/cost.h"
#include "server/plan/distortion.h"
#include "server/plan/plan.h"

namespace spectrumkv {

// Everything is borrowed.
struct OptimalInput {
  const std::vector<PlanLayer>* layers = nullptr;
  const Unit* unit = nullptr;
  const CostRules* rules = nullptr;
  const std::vector<Tier>* tiers = nullptr;  // allowed
  const ModelProfile* profile = nullptr;
  const std::vector<LayerScan>* scan = nullptr;  // one entry per layer, or empty
  // How much each token of the unit matters: one entry for all layers, or one for each of the unit.
  const std::vector<TokenWeights>* token_weights = nullptr;
  uint64_t share = 0;
};

// One step up from a tier to the next better one worth its bytes.
struct Upgrade {
  Tier to = Tier::kRaw;
  uint64_t bytes = 0;  // more, of one cell
  int32_t gain = 0;    // WeightLog2 of the error saved per byte, at weight 1; falls from step to step
};

// The tiers that a cell may have: `lowest`, then one upgrade after the other.
struct TierHull {
  Tier lowest = Tier::kRaw;
  uint64_t lowest_bytes = 0;
  std::vector<Upgrade> upgrades;
  std::array<double, kTierCount> error{};  // of a cell of weight 1, consistent with the gains
};
// Tiers that take more bytes for a larger error, or are no step on the way to a better one, are left out.
// errors: ModelProfile's, of K or of V.
TierHull HullOf(const std::vector<Tier>& tiers, const PlanLayer& layer, bool payload_only,
                const std::array<double, kTierCount>& errors = {});

class OptimalPlan {
 public:
  explicit OptimalPlan(const OptimalInput& input);

  // Tier maps for the unit's share; false where not even the lowest tiers surely fit (padding is counted as if it were
  // always needed). allocation->bytes is never below what the maps cost.
  bool Allocate(Allocation* allocation) const;

  // Sum of weight * error of tier maps [layers of the unit, tokens], cells that cannot be changed left out.
  double Distortion(const std::vector<uint8_t>& tier_maps) const;

  uint64_t cells() const { return cells_; }

 private:
  // The cells of K or of V of all layers that have one geometry.
  struct PlaneClass {
    PlanLayer geometry;
    bool is_k = true;
    TierHull hull;
    std::vector<uint64_t> at_least;  // [key]: cells that have a choice and that key or more
  };
  // One layer's K or V.
  struct Plane {
    size_t plane_class = 0;
    uint32_t slot = 0;                   // of the layer in the unit
    const uint8_t* spread = nullptr;     // of the unit's first token; null: all alike
    const TokenScan* escapes = nullptr;  // null: none
    int32_t level = 0;                   // what is added to weight and spread of a cell for its key
  };
  // What becomes of the cells of one class.
  struct Cut {
    std::vector<int32_t> thresholds;  // by upgrade: cells whose key is not below have it
    std::vector<uint64_t> extra;      // by upgrade: and so many of those with the next lower key, the first ones
  };

  void AddPlane(uint32_t slot, bool is_k);
  size_t ClassOf(const PlanLayer& layer, bool is_k);
  uint64_t OverheadBytes(const PlanLayer& layer) const;
  bool IsFixed(const Plane& plane, uint32_t token) const;
  const TokenWeights& WeightsOf(const Plane& plane) const;
  double MeanWeight(const Plane& plane) const;
  void KeysOf(const Plane& plane, uint32_t first, uint32_t count, int16_t* keys) const;
  void CountKeys(const Plane& plane);
  uint64_t BytesAt(int32_t multiplier) const;
  std::vector<Cut> CutAt(uint64_t share, uint64_t* bytes) const;
  void Assign(const Plane& plane, Cut* cut, uint8_t* tier_map) const;

  const OptimalInput in_;
  const uint32_t tokens_;
  uint32_t pinned_ = 0;      // tokens of the unit
  uint64_t base_bytes_ = 0;  // everything on its lowest tier
  uint64_t cells_ = 0;       // that have a choice
  std::vector<PlaneClass> classes_;
  std::vector<Plane> planes_;
};

}  // namespace spectrumkv
