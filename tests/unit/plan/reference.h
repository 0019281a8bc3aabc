// A slow planner for one batch, written from the definitions alone: it builds every tier map it considers and adds up
// ChunkBytes of each. Shares no code with server/plan but the shape.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "server/plan/plan.h"
#include "tests/unit/plan/random_case.h"

namespace spectrumkv::reference {

struct Pair {
  Tier k, v;
};

// Rungs of the allocator, from the fewest bytes.
std::vector<Pair> Rungs(const Policy& policy);

// Rung of each kept token in each layer; -1: pinned, or the layer is raw_only.
using Levels = std::vector<std::vector<int>>;  // [layers][kept]

// Tier map bytes of each layer, escapes applied.
std::vector<std::vector<uint8_t>> Maps(const RandomCase& c, const std::vector<uint32_t>& kept, const Levels& levels);

// What the budget counts.
uint64_t Cost(const RandomCase& c, const std::vector<uint32_t>& kept, const Levels& levels);

// All tokens of all layers on one rung, sinks pinned.
Levels AllOn(const RandomCase& c, const std::vector<uint32_t>& kept, int rung);

// Kept tokens that are not pinned, the most important first; layer < 0: one order for all layers.
std::vector<uint32_t> Order(const RandomCase& c, const std::vector<uint32_t>& kept, int layer);

uint64_t BudgetBytes(const RandomCase& c);

// GREEDY, SINK_PROTECT, BALANCED, UNIFORM, RAW, or what is left to do for the dropping allocators, one importance for
// all layers. Empty where no rung for all fits. REQUIRES: not RANDOM (its order is the planner's own).
std::optional<Levels> Plan(const RandomCase& c, const std::vector<uint32_t>& kept);

}  // namespace spectrumkv::reference
