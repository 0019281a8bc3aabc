#include "server/plan/ladder.h"

#include <algorithm>

namespace spectrumkv {
namespace {

bool Has(const std::vector<Tier>& tiers, Tier tier) {
  return std::find(tiers.begin(), tiers.end(), tier) != tiers.end();
}

// Keys are about three times as sensitive as values: they get the same bits or one more.
constexpr Rung kAllRungs[] = {
    {Tier::kQ2, Tier::kQ2}, {Tier::kQ3, Tier::kQ2}, {Tier::kQ3, Tier::kQ3},
    {Tier::kQ4, Tier::kQ3}, {Tier::kQ4, Tier::kQ4}, {Tier::kP4, Tier::kP4},
    {Tier::kP8, Tier::kP8}, {Tier::kQ8, Tier::kQ8}, {Tier::kRaw, Tier::kRaw},
};

}  // namespace

Tier EightBitTier(const std::vector<Tier>& tiers) {
  if (Has(tiers, Tier::kP8)) return Tier::kP8;
  return Has(tiers, Tier::kQ8) ? Tier::kQ8 : Tier::kRaw;
}

bool MayDrop(Allocator allocator) {
  return allocator == Allocator::kPdTrim || allocator == Allocator::kSlidingWindowSink ||
         allocator == Allocator::kTwoTier;
}

Ladder LadderOf(const Policy& policy) {
  switch (policy.allocator) {
    case Allocator::kRaw:
    case Allocator::kPdTrim:
    case Allocator::kSlidingWindowSink: return {Rung{}};
    case Allocator::kUniform: return {Rung{policy.uniform_tier, policy.uniform_tier}};
    case Allocator::kTwoTier: {
      const Tier eight = EightBitTier(policy.tiers);
      Ladder ladder = {Rung{eight, eight}};
      if (Has(policy.tiers, Tier::kRaw)) ladder.push_back(Rung{});
      return ladder;
    }
    case Allocator::kOptimal:
    case Allocator::kGreedy:
    case Allocator::kSinkProtect:
    case Allocator::kBalanced:
    case Allocator::kRandom: break;
  }
  Ladder ladder;
  for (const Rung& rung : kAllRungs) {
    if (!Has(policy.tiers, rung.k) || !Has(policy.tiers, rung.v)) continue;
    if (rung.k == Tier::kP4 && Has(policy.tiers, Tier::kQ4)) continue;
    ladder.push_back(rung);
  }
  return ladder;
}

}  // namespace spectrumkv
