// Which tokens travel, decided once before the first chunk: the same in every layer.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "server/plan/cost.h"
#include "server/plan/importance.h"
#include "server/plan/plan.h"

namespace spectrumkv {

struct KeepInput {
  const Policy* policy = nullptr;
  const std::vector<PlanLayer>* layers = nullptr;
  uint32_t token_count = 0;
  Scores scores;
  const std::vector<LayerScan>* full_scan = nullptr;  // may be null
  Ladder ladder;
  uint64_t kv_bytes = 0;
  uint64_t budget_bytes = 0;
};

// Ascending positions. All of them unless the allocator drops and the budget is too small for its lowest rung.
// Errors as for Planner::Create.
absl::StatusOr<std::vector<uint32_t>> DecideKept(const KeepInput& input);

// Mean TokenScan::energy_log2 of K over `layers` that are not raw_only, for tokens [first, first + count) of the
// scan. KEY_NORM_UNAVAILABLE where a layer has none.
absl::StatusOr<std::vector<double>> MeanEnergyLog2(const std::vector<PlanLayer>& all,
                                                   const std::vector<uint32_t>& layers,
                                                   const std::vector<LayerScan>* scan, TokenRange tokens);

}  // namespace spectrumkv
