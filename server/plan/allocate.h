// Gives every token of a unit its rung, within a share of the budget. Formulas: docs/allocators.md.
#pragma once

#include <cstdint>
#include <vector>

#include "server/plan/cost.h"

namespace spectrumkv {

struct Allocation {
  std::vector<uint8_t> rungs;  // by token of the unit; those of pinned tokens mean nothing
  // Tier map bytes [layers of the unit, tokens], escapes not applied, where layers differ: then rungs is empty.
  std::vector<uint8_t> tier_maps;
  uint64_t bytes = 0;          // as the model counts them; at most `share`
};

// REQUIRES: some rung for all tokens costs no more than `share`.

// The highest rung that all tokens can have, then the most tokens one rung up, by importance, that still fit.
// keys: of each token, greater = more important; the first `pinned` are never moved. May be empty for a single rung.
Allocation AllocateGreedy(CostModel* model, size_t rungs, const std::vector<double>& keys, uint32_t pinned,
                          uint32_t tokens, uint64_t share);

// The most tokens x that fit with x on the top rung, the next 2x on rung `middle`, and the rest on the highest rung
// below the middle that all can have.
// order: the tokens of the unit that are not pinned, by falling importance.
Allocation AllocateBalanced(CostModel* model, size_t rungs, size_t middle, const std::vector<uint32_t>& order,
                            uint32_t tokens, uint64_t share);

}  // namespace spectrumkv
