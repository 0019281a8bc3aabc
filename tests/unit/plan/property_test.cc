// Random transfers against a brute-force planner and against the promises of plan.h. The seed is fixed; another one is
// taken from SPECTRUMKV_SEED and printed with every failure.
#include <cmath>
#include <cstdlib>
#include <numeric>

#include "gtest/gtest.h"
#include "server/base/status.h"
#include "tests/unit/plan/plan_fixture.h"
#include "tests/unit/plan/reference.h"

namespace spectrumkv {
namespace {

constexpr int kCases = 4000;

uint64_t Seed() {
  const char* text = std::getenv("SPECTRUMKV_SEED");
  return text == nullptr ? 20260608 : std::strtoull(text, nullptr, 10);
}

std::string Describe(const RandomCase& c, uint64_t seed) {
  std::string text = "seed " + std::to_string(seed) + " " + AllocatorName(c.policy.allocator) + " budget " +
                     std::to_string(c.policy.budget) + " tokens " + std::to_string(c.tokens) + " sinks " +
                     std::to_string(c.policy.sinks) + (c.policy.payload_only ? " payload_only" : "") + " tiers";
  for (const Tier tier : c.policy.tiers) text += std::string(" ") + TierName(tier);
  for (const PlanLayer& l : c.layers) {
    text += " | " + std::to_string(l.heads) + "x" + std::to_string(l.head_dim) + " " + DTypeName(l.dtype) +
            (l.has_v ? "" : " no V") + (l.raw_only ? " raw" : "");
  }
  return text;
}

RandomCase WithoutEscapes(RandomCase c) {
  for (LayerScan& scan : c.scan) {
    for (TokenScan& token : scan.k) token.escape = kEscapeNone;
    for (TokenScan& token : scan.v) token.escape = kEscapeNone;
  }
  return c;
}

bool HasEscapes(const std::vector<LayerScan>& scan) {
  const auto escapes = [](const TokenScan& token) { return token.escape != kEscapeNone; };
  return std::any_of(scan.begin(), scan.end(), [&](const LayerScan& layer) {
    return std::any_of(layer.k.begin(), layer.k.end(), escapes) || std::any_of(layer.v.begin(), layer.v.end(), escapes);
  });
}

std::vector<uint32_t> KeptOf(const TransferShape& shape) {
  std::vector<uint32_t> kept;
  for (const TokenRange& range : shape.kept) {
    for (uint32_t i = 0; i < range.count; ++i) kept.push_back(range.first + i);
  }
  return kept;
}

// The scan as Plan wants it: of the kept tokens.
std::vector<LayerScan> KeptScan(const RandomCase& c, const std::vector<uint32_t>& kept) {
  std::vector<LayerScan> scan(c.scan.size());
  for (size_t l = 0; l < scan.size(); ++l) {
    for (const uint32_t position : kept) {
      scan[l].k.push_back(c.scan[l].k[position]);
      if (!c.scan[l].v.empty()) scan[l].v.push_back(c.scan[l].v[position]);
      if (!c.scan[l].k_spread.empty()) scan[l].k_spread.push_back(c.scan[l].k_spread[position]);
      if (!c.scan[l].v_spread.empty()) scan[l].v_spread.push_back(c.scan[l].v_spread[position]);
    }
  }
  return scan;
}

// Tier maps joined by layer; checks cover, sizes and sums on the way.
std::vector<std::vector<uint8_t>> JoinChecked(const Planner& planner, const std::vector<PlanBatch>& batches) {
  const TransferShape& shape = planner.shape();
  std::vector<std::vector<uint8_t>> maps(shape.layers.size(), std::vector<uint8_t>(shape.kept_count(), 0xFF));
  std::vector<int> seen(planner.cuts().size());
  for (const PlanBatch& batch : batches) {
    uint64_t wire = 0, kv = 0;
    TierTotals totals;
    for (const PlannedChunk& chunk : batch.chunks) {
      const PlanLayer& layer = shape.layers[chunk.cut.layer_index];
      ++seen[chunk.cut.chunk_index];
      EXPECT_EQ(chunk.tier_map.size(), chunk.cut.token_count);
      const TierCounts counts = CountTiers(chunk.tier_map.data(), chunk.cut.token_count, layer.has_v);
      EXPECT_EQ(chunk.chunk_bytes, ChunkBytes(DimsOf(layer, chunk.cut.token_count), counts));
      wire += chunk.chunk_bytes;
      kv += KvBytes(DimsOf(layer, chunk.cut.token_count));
      for (int id = 0; id < kTierCount; ++id) {
        totals.k[id] += counts.k[id];
        totals.v[id] += counts.v[id];
      }
      std::copy(chunk.tier_map.begin(), chunk.tier_map.end(),
                maps[chunk.cut.layer_index].begin() + chunk.cut.token_first);
    }
    EXPECT_EQ(batch.wire_bytes, wire);
    EXPECT_EQ(batch.kv_bytes, kv);
    EXPECT_EQ(batch.totals.k, totals.k);
    EXPECT_EQ(batch.totals.v, totals.v);
  }
  for (const int count : seen) EXPECT_EQ(count, 1);
  return maps;
}

TEST(Property, OneBatchEqualsTheBruteForcePlan) {
  const uint64_t seed = Seed();
  CaseMaker maker(seed);
  int planned = 0, refused = 0;
  for (int i = 0; i < kCases; ++i) {
    RandomCase c = maker.Make(
        {Allocator::kGreedy, Allocator::kSinkProtect, Allocator::kBalanced, Allocator::kUniform, Allocator::kRaw});
    if (c.policy.scores_per_layer) continue;
    SCOPED_TRACE(Describe(c, seed) + " case " + std::to_string(i));
    std::vector<uint32_t> kept(c.tokens);
    std::iota(kept.begin(), kept.end(), 0);
    // Create refuses without a look at escapes.
    const bool creates = reference::Plan(WithoutEscapes(c), kept).has_value();
    const auto want = creates ? reference::Plan(c, kept) : std::nullopt;
    auto planner = Planner::Create(c.policy, c.layers, c.tokens);
    const absl::StatusOr<PlanBatch> batch =
        planner.ok() ? planner->Plan(AllChunks(*planner), c.scan) : absl::StatusOr<PlanBatch>(planner.status());
    ASSERT_EQ(batch.ok(), want.has_value()) << batch.status();
    if (!want) {
      ASSERT_EQ(ReasonOf(batch.status()), "BUDGET_TOO_SMALL");
      ++refused;
      continue;
    }
    ++planned;
    const auto maps = JoinChecked(*planner, {*batch});
    ASSERT_EQ(maps, reference::Maps(c, kept, *want));
    ASSERT_EQ(batch->escape_overrun_bytes, 0u);
    if (!c.policy.payload_only) {
      ASSERT_LE(batch->wire_bytes, reference::BudgetBytes(c));
    }
  }
  EXPECT_GT(planned, kCases / 4);
  EXPECT_GT(refused, kCases / 20);
}

// Every allocator: within one layer and one batch, a token that matters more is never on a lower rung.
TEST(Property, TierNeverFallsWhenImportanceRises) {
  const uint64_t seed = Seed() + 1;
  CaseMaker maker(seed);
  int checked = 0;
  for (int i = 0; i < kCases; ++i) {
    RandomCase c = maker.Make({Allocator::kGreedy, Allocator::kSinkProtect, Allocator::kBalanced, Allocator::kTwoTier});
    SCOPED_TRACE(Describe(c, seed) + " case " + std::to_string(i));
    auto planner = Planner::Create(c.policy, c.layers, c.tokens, &c.scan);
    if (!planner.ok()) continue;
    const std::vector<uint32_t> kept = KeptOf(planner->shape());
    if (kept.size() != c.tokens && c.policy.importance == ImportanceSource::kKeyNorm) continue;
    const std::vector<LayerScan> scan = KeptScan(c, kept);
    const auto batch = planner->Plan(AllChunks(*planner), scan);
    if (!batch.ok()) continue;
    const auto maps = JoinChecked(*planner, {*batch});
    const std::vector<reference::Pair> rungs = reference::Rungs(c.policy);
    for (size_t l = 0; l < c.layers.size(); ++l) {
      if (c.layers[l].raw_only) continue;
      const auto height = [&](uint8_t byte) {
        size_t r = 0;
        while (r + 1 < rungs.size() &&
               !(rungs[r].k == TierOfK(byte) && (!c.layers[l].has_v || rungs[r].v == TierOfV(byte))))
          ++r;
        return r;
      };
      size_t before = rungs.size();
      for (const uint32_t t : reference::Order(c, kept, c.policy.scores_per_layer ? static_cast<int>(l) : -1)) {
        if (scan[l].k[t].escape != kEscapeNone || (!scan[l].v.empty() && scan[l].v[t].escape != kEscapeNone)) continue;
        const size_t now = height(maps[l][t]);
        ASSERT_LE(now, before) << "layer " << l << " token " << t;
        before = now;
        ++checked;
      }
    }
  }
  EXPECT_GT(checked, kCases);
}

// Any split into batches, every allocator: covered once, inside the budget, and the same again.
TEST(Property, BatchesStayWithinTheBudget) {
  const uint64_t seed = Seed() + 2;
  CaseMaker maker(seed);
  int planned = 0, overruns = 0;
  for (int i = 0; i < kCases; ++i) {
    RandomCase c = maker.Make({Allocator::kGreedy, Allocator::kSinkProtect, Allocator::kBalanced, Allocator::kTwoTier,
                               Allocator::kUniform, Allocator::kRandom, Allocator::kPdTrim,
                               Allocator::kSlidingWindowSink, Allocator::kRaw, Allocator::kOptimal});
    c.policy.payload_only = false;
    SCOPED_TRACE(Describe(c, seed) + " case " + std::to_string(i));
    auto planner = Planner::Create(c.policy, c.layers, c.tokens, &c.scan);
    auto again = Planner::Create(c.policy, c.layers, c.tokens, &c.scan);
    ASSERT_EQ(planner.status(), again.status());
    if (!planner.ok()) {
      const std::string reason = ReasonOf(planner.status());
      ASSERT_TRUE(reason == "BUDGET_TOO_SMALL" || reason == "DROP_NOT_ALLOWED") << planner.status();
      continue;
    }
    const std::vector<LayerScan> scan = KeptScan(c, KeptOf(planner->shape()));
    std::vector<std::vector<uint32_t>> parts(1 + maker.Below(5));
    for (const uint32_t chunk : AllChunks(*planner))
      maker.Pick<std::vector<uint32_t>*>({&parts[0], &parts[maker.Below(static_cast<uint32_t>(parts.size()))]})
          ->push_back(chunk);
    std::vector<PlanBatch> batches;
    uint64_t spent = 0, overrun = 0;
    for (const std::vector<uint32_t>& part : parts) {
      if (part.empty()) continue;
      auto batch = planner->Plan(part, scan);
      const auto same = again->Plan(part, scan);
      ASSERT_EQ(batch.status(), same.status());
      if (!batch.ok()) {
        ASSERT_EQ(part.size(), planner->cuts().size()) << batch.status();
        ASSERT_EQ(ReasonOf(batch.status()), "BUDGET_TOO_SMALL");
        break;
      }
      ASSERT_EQ(batch->wire_bytes, same->wire_bytes);
      for (size_t k = 0; k < batch->chunks.size(); ++k) ASSERT_EQ(batch->chunks[k].tier_map, same->chunks[k].tier_map);
      spent += batch->wire_bytes;
      overrun += batch->escape_overrun_bytes;
      ASSERT_LE(spent, reference::BudgetBytes(c) + overrun);
      batches.push_back(*std::move(batch));
    }
    if (batches.empty()) continue;
    JoinChecked(*planner, batches);
    ++planned;
    overruns += overrun != 0;
    if (!HasEscapes(scan)) {
      ASSERT_EQ(overrun, 0u);
    }
  }
  EXPECT_GT(planned, kCases / 4);
  EXPECT_GT(overruns, 0);
}

TEST(Property, LeastBudgetIsTight) {
  const uint64_t seed = Seed() + 3;
  CaseMaker maker(seed);
  int above_one = 0;
  for (int i = 0; i < kCases; ++i) {
    RandomCase c = maker.Make(
        {Allocator::kGreedy, Allocator::kBalanced, Allocator::kUniform, Allocator::kRandom, Allocator::kRaw,
         Allocator::kOptimal});
    SCOPED_TRACE(Describe(c, seed) + " case " + std::to_string(i));
    c.policy.budget = kMaxBudget;
    auto planner = Planner::Create(c.policy, c.layers, c.tokens);
    ASSERT_TRUE(planner.ok()) << planner.status();
    const double least = planner->LeastBudget(c.scan);
    ASSERT_LE(least, 9);
    const auto plan_at = [&c](double budget) {
      c.policy.budget = budget;
      auto p = Planner::Create(c.policy, c.layers, c.tokens);
      return p.ok() ? p->Plan(AllChunks(*p), c.scan) : absl::StatusOr<PlanBatch>(p.status());
    };
    ASSERT_TRUE(plan_at(least).ok());
    const auto below = plan_at(std::nextafter(least, 0.0));
    ASSERT_EQ(ReasonOf(below.status()), "BUDGET_TOO_SMALL");
    // The budget the message names works.
    const double named = std::stod(MetadataOf(below.status())["least_budget"]);
    ASSERT_LE(named, least + 1.0001e-6);
    ASSERT_GE(named, least - 1e-12);
    if (named >= least) {
      ASSERT_TRUE(plan_at(named).ok());
    }
    above_one += least > 1;
  }
  EXPECT_GT(above_one, kCases / 20);
}

// The dropping allocators keep the right tokens, and one more would not fit.
TEST(Property, DropsNoMoreThanItMust) {
  const uint64_t seed = Seed() + 4;
  CaseMaker maker(seed);
  int dropped = 0;
  for (int i = 0; i < kCases; ++i) {
    RandomCase c = maker.Make({Allocator::kTwoTier, Allocator::kPdTrim, Allocator::kSlidingWindowSink});
    if (c.policy.scores_per_layer) continue;
    c = WithoutEscapes(c);
    SCOPED_TRACE(Describe(c, seed) + " case " + std::to_string(i));
    std::vector<uint32_t> all(c.tokens);
    std::iota(all.begin(), all.end(), 0);
    const bool fits = reference::Cost(c, all, reference::AllOn(c, all, 0)) <= reference::BudgetBytes(c);
    auto planner = Planner::Create(c.policy, c.layers, c.tokens, &c.scan);
    if (!fits && !c.policy.allow_drop) {
      ASSERT_EQ(ReasonOf(planner.status()), "DROP_NOT_ALLOWED");
    }
    if (!planner.ok()) continue;
    std::vector<uint32_t> kept = KeptOf(planner->shape());
    ASSERT_EQ(fits, kept.size() == c.tokens);
    ASSERT_LE(reference::Cost(c, kept, reference::AllOn(c, kept, 0)), reference::BudgetBytes(c));
    if (fits) continue;
    ++dropped;
    // Ranked as promised: what is kept comes before what is not.
    std::vector<uint32_t> order = reference::Order(c, all, -1);
    if (c.policy.allocator == Allocator::kPdTrim) std::sort(order.rbegin(), order.rend());
    const uint32_t sinks = std::min(c.policy.sinks, c.tokens);
    std::vector<uint32_t> want(order.begin(), order.begin() + (kept.size() - sinks));
    for (uint32_t s = 0; s < sinks; ++s) want.push_back(s);
    std::sort(want.begin(), want.end());
    ASSERT_EQ(kept, want);
    ASSERT_TRUE(planner->Plan(AllChunks(*planner), KeptScan(c, kept)).ok());
    kept.push_back(order[kept.size() - sinks]);
    ASSERT_GT(reference::Cost(c, kept, reference::AllOn(c, kept, 0)), reference::BudgetBytes(c));
  }
  EXPECT_GT(dropped, kCases / 20);
}

}  // namespace
}  // namespace spectrumkv
