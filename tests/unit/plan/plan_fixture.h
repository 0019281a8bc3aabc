// Shapes, scans and whole-transfer plans for the planner's tests.
#pragma once

#include <numeric>
#include <string>
#include <vector>

#include "server/plan/plan.h"

namespace spectrumkv {

inline std::vector<PlanLayer> Layers(uint32_t count, uint32_t heads = 8, uint32_t head_dim = 128,
                                     DType dtype = DType::kFloat16, bool has_v = true) {
  std::vector<PlanLayer> layers;
  for (uint32_t l = 0; l < count; ++l) {
    layers.push_back({0, static_cast<uint16_t>(l), heads, head_dim, dtype, has_v, false});
  }
  return layers;
}

inline std::vector<uint32_t> AllChunks(const Planner& planner) {
  std::vector<uint32_t> all(planner.cuts().size());
  std::iota(all.begin(), all.end(), 0);
  return all;
}

inline std::vector<LayerScan> NoScan(const Planner& planner) {
  return std::vector<LayerScan>(planner.shape().layers.size());
}

// Everything in one batch.
inline absl::StatusOr<PlanBatch> PlanAll(const Policy& policy, const std::vector<PlanLayer>& layers, uint32_t tokens) {
  absl::StatusOr<Planner> planner = Planner::Create(policy, layers, tokens);
  if (!planner.ok()) return planner.status();
  return planner->Plan(AllChunks(*planner), NoScan(*planner));
}

// (layer, token) pairs with this tier in K.
inline uint64_t TokensAt(const PlanBatch& batch, Tier tier) { return batch.totals.k[static_cast<int>(tier)]; }

inline const std::vector<Tier> kPaperTiers = {Tier::kRaw, Tier::kP8, Tier::kP4};

}  // namespace spectrumkv
