// The rungs an allocator may give a token: pairs of tiers for K and V, from the fewest bytes to the most.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/format/types.h"
#include "server/plan/plan.h"

namespace spectrumkv {

struct Rung {
  Tier k = Tier::kRaw;
  Tier v = Tier::kRaw;
  friend bool operator==(const Rung&, const Rung&) = default;
};

// Ascending by the bytes of a cell, scale included; the order is the same for every head_dim.
using Ladder = std::vector<Rung>;

// The rungs of the policy's allocator: one for RAW, UNIFORM, PDTRIM and SLIDING_WINDOW_SINK, two for TWO_TIER, else
// all that `tiers` allows. P4 is left out beside Q4: more bytes and several times the error, no step up.
// REQUIRES: a policy that CheckPolicy accepts. Never empty.
Ladder LadderOf(const Policy& policy);

// P8 where allowed, else Q8, else RAW (which then stands for "none").
Tier EightBitTier(const std::vector<Tier>& tiers);

// Can this allocator leave tokens behind?
bool MayDrop(Allocator allocator);

}  // namespace spectrumkv
