// The paper's formulas, to the token: shares of the tiers under payload_only accounting.
#include <algorithm>
#include <cmath>

#include "gtest/gtest.h"
#include "server/base/status.h"
#include "tests/unit/plan/plan_fixture.h"

namespace spectrumkv {
namespace {

constexpr uint32_t kTokens = 10000;

Policy PaperPolicy(Allocator allocator, double budget) {
  Policy policy;
  policy.allocator = allocator;
  policy.budget = budget;
  policy.tiers = kPaperTiers;
  policy.payload_only = true;
  policy.sinks = 0;
  return policy;
}

struct Shares {
  double budget, raw, p8, p4;
};

class Greedy : public testing::TestWithParam<DType> {};

TEST_P(Greedy, HasThePapersShares) {
  for (const double b : {0.25, 0.26, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.75, 0.9, 1.0}) {
    const Shares want = b <= 0.5 ? Shares{b, 0, 4 * b - 1, 2 - 4 * b} : Shares{b, 2 * b - 1, 2 - 2 * b, 0};
    for (const Allocator allocator : {Allocator::kGreedy, Allocator::kRandom}) {
      const auto batch = PlanAll(PaperPolicy(allocator, b), Layers(3, 4, 64, GetParam()), kTokens);
      ASSERT_TRUE(batch.ok()) << batch.status();
      EXPECT_NEAR(TokensAt(*batch, Tier::kRaw) / (3.0 * kTokens), want.raw, 1.01 / kTokens) << b;
      EXPECT_NEAR(TokensAt(*batch, Tier::kP8) / (3.0 * kTokens), want.p8, 1.01 / kTokens) << b;
      EXPECT_NEAR(TokensAt(*batch, Tier::kP4) / (3.0 * kTokens), want.p4, 1.01 / kTokens) << b;
      EXPECT_EQ(batch->totals.k, batch->totals.v);
    }
  }
}
INSTANTIATE_TEST_SUITE_P(SixteenBitPools, Greedy, testing::Values(DType::kFloat16, DType::kBFloat16));

TEST(Greedy, PinnedSinksArePaidInsideTheBudget) {
  Policy policy = PaperPolicy(Allocator::kGreedy, 0.3);
  policy.sinks = 100;
  const auto batch = PlanAll(policy, Layers(1, 4, 64), kTokens);
  ASSERT_TRUE(batch.ok());
  EXPECT_EQ(TokensAt(*batch, Tier::kRaw), 100u);
  // 100 + x / 2 + (9900 - x) / 4 = 3000
  EXPECT_EQ(TokensAt(*batch, Tier::kP8), 1700u);
}

TEST(Greedy, Float32RawCostsFourBytes) {
  // Costs 1, 1/4, 1/8: at 0.5 a third of the tokens above 1/4 are raw.
  const auto batch = PlanAll(PaperPolicy(Allocator::kGreedy, 0.5), Layers(1, 4, 64, DType::kFloat32), kTokens);
  ASSERT_TRUE(batch.ok());
  EXPECT_EQ(TokensAt(*batch, Tier::kRaw), 3333u);
  EXPECT_EQ(TokensAt(*batch, Tier::kP8), 6667u);
}

TEST(Greedy, UpgradesTheMostImportantTokens) {
  Policy policy = PaperPolicy(Allocator::kGreedy, 0.375);
  policy.importance = ImportanceSource::kScores;
  for (uint32_t t = 0; t < 100; ++t) policy.scores.push_back(static_cast<float>((t * 37) % 100));
  const auto batch = PlanAll(policy, Layers(1, 4, 64), 100);
  ASSERT_TRUE(batch.ok());
  ASSERT_EQ(batch->chunks.size(), 1u);
  for (uint32_t t = 0; t < 100; ++t) {
    const Tier want = policy.scores[t] >= 50 ? Tier::kP8 : Tier::kP4;
    EXPECT_EQ(TierOfK(batch->chunks[0].tier_map[t]), want) << t;
  }
}

TEST(Balanced, HasThePapersShares) {
  for (const double b : {0.25, 0.3, 0.4, 0.5, 0.6, 0.65}) {
    const double r = 4 * b - 1;
    const auto batch = PlanAll(PaperPolicy(Allocator::kBalanced, b), Layers(2, 4, 64), kTokens);
    ASSERT_TRUE(batch.ok()) << batch.status();
    EXPECT_NEAR(TokensAt(*batch, Tier::kRaw) / (2.0 * kTokens), r / 5, 1.01 / kTokens) << b;
    EXPECT_NEAR(TokensAt(*batch, Tier::kP8) / (2.0 * kTokens), 2 * r / 5, 2.01 / kTokens) << b;
    EXPECT_NEAR(TokensAt(*batch, Tier::kP4) / (2.0 * kTokens), 1 - 3 * r / 5, 3.01 / kTokens) << b;
  }
}

TEST(Balanced, AboveTwoThirdsHasRawAndEightBitsOnly) {
  const auto batch = PlanAll(PaperPolicy(Allocator::kBalanced, 0.8), Layers(1, 4, 64), kTokens);
  ASSERT_TRUE(batch.ok());
  EXPECT_EQ(TokensAt(*batch, Tier::kRaw), 6000u);
  EXPECT_EQ(TokensAt(*batch, Tier::kP8), 4000u);
}

TEST(TwoTier, AboveOneHalfMixesRawAndEightBits) {
  const auto batch = PlanAll(PaperPolicy(Allocator::kTwoTier, 0.7), Layers(1, 4, 64), kTokens);
  ASSERT_TRUE(batch.ok()) << batch.status();
  EXPECT_EQ(TokensAt(*batch, Tier::kRaw), 4000u);
  EXPECT_EQ(TokensAt(*batch, Tier::kP8), 6000u);
}

TEST(TwoTier, BelowOneHalfDropsTheLeastImportant) {
  Policy policy = PaperPolicy(Allocator::kTwoTier, 0.3);
  policy.importance = ImportanceSource::kScores;
  for (uint32_t t = 0; t < 1000; ++t) policy.scores.push_back(static_cast<float>((t * 37) % 1000));
  EXPECT_EQ(ReasonOf(Planner::Create(policy, Layers(2, 4, 64), 1000).status()), "DROP_NOT_ALLOWED");
  policy.allow_drop = true;
  auto planner = Planner::Create(policy, Layers(2, 4, 64), 1000);
  ASSERT_TRUE(planner.ok()) << planner.status();
  EXPECT_EQ(planner->shape().kept_count(), 600u);
  std::vector<bool> kept(1000);
  for (const TokenRange& range : planner->shape().kept) {
    for (uint32_t t = range.first; t < range.first + range.count; ++t) kept[t] = true;
  }
  for (uint32_t t = 0; t < 1000; ++t) EXPECT_EQ(kept[t], policy.scores[t] >= 400) << t;
  const auto batch = planner->Plan(AllChunks(*planner), NoScan(*planner));
  ASSERT_TRUE(batch.ok());
  EXPECT_EQ(TokensAt(*batch, Tier::kP8), 1200u);
}

TEST(TwoTier, PrefersThePlainEightBitTier) {
  Policy policy = PaperPolicy(Allocator::kTwoTier, 0.7);
  policy.tiers = {Tier::kRaw, Tier::kQ8, Tier::kQ4};
  EXPECT_EQ(TokensAt(*PlanAll(policy, Layers(1, 4, 64), 1000), Tier::kQ8), 600u);
  policy.tiers.push_back(Tier::kP8);
  EXPECT_EQ(TokensAt(*PlanAll(policy, Layers(1, 4, 64), 1000), Tier::kP8), 600u);
}

TEST(PdTrim, KeepsTheFirstAndTheLast) {
  Policy policy = PaperPolicy(Allocator::kPdTrim, 0.3);
  policy.sinks = 4;
  policy.allow_drop = true;
  auto planner = Planner::Create(policy, Layers(2, 4, 64), 1000);
  ASSERT_TRUE(planner.ok()) << planner.status();
  EXPECT_EQ(planner->shape().kept, (std::vector<TokenRange>{{0, 4}, {704, 296}}));
  EXPECT_EQ(planner->dropped(), (std::vector<TokenRange>{{4, 700}}));
  const auto batch = planner->Plan(AllChunks(*planner), NoScan(*planner));
  ASSERT_TRUE(batch.ok());
  EXPECT_EQ(TokensAt(*batch, Tier::kRaw), 600u);
}

TEST(SlidingWindowSink, KeepsSinksAndTheBestScores) {
  Policy policy = PaperPolicy(Allocator::kSlidingWindowSink, 0.1);
  policy.sinks = 2;
  policy.allow_drop = true;
  policy.importance = ImportanceSource::kScores;
  policy.scores.assign(100, 0.5f);
  for (const uint32_t t : {10, 11, 12, 50, 51, 99}) policy.scores[t] = 1;
  auto planner = Planner::Create(policy, Layers(2, 4, 64), 100);
  ASSERT_TRUE(planner.ok()) << planner.status();
  // Two places are left for equal scores: the first of them.
  EXPECT_EQ(planner->shape().kept, (std::vector<TokenRange>{{0, 4}, {10, 3}, {50, 2}, {99, 1}}));
}

TEST(SinkProtect, ProtectsFourTokensWhereNoneArePinned) {
  const auto batch = PlanAll(PaperPolicy(Allocator::kSinkProtect, 0.3), Layers(1, 4, 64), kTokens);
  ASSERT_TRUE(batch.ok());
  EXPECT_EQ(TokensAt(*batch, Tier::kRaw), 4u);
}

TEST(Uniform, HasOneTierAndAHardBudget) {
  Policy policy;
  policy.allocator = Allocator::kUniform;
  policy.sinks = 0;
  for (const Tier tier : {Tier::kRaw, Tier::kP8, Tier::kQ8, Tier::kP4, Tier::kQ4, Tier::kQ3, Tier::kQ2}) {
    policy.uniform_tier = tier;
    policy.budget = 1.1;
    const auto batch = PlanAll(policy, Layers(2), 1000);
    ASSERT_TRUE(batch.ok()) << batch.status();
    EXPECT_EQ(TokensAt(*batch, tier), 2000u);
    policy.budget = static_cast<double>(batch->wire_bytes - 1) / static_cast<double>(batch->kv_bytes);
    EXPECT_EQ(ReasonOf(PlanAll(policy, Layers(2), 1000).status()), "BUDGET_TOO_SMALL");
  }
}

TEST(Raw, CostsHeadersAndTierMaps) {
  Policy policy;
  policy.allocator = Allocator::kRaw;
  policy.budget = 1.1;
  const auto batch = PlanAll(policy, Layers(2), 1000);  // 256 tokens a chunk
  ASSERT_TRUE(batch.ok());
  EXPECT_EQ(batch->wire_bytes, batch->kv_bytes + 2 * (4 * 64 + 3 * 256 + 240));
}

TEST(Random, DependsOnTheSeedAlone) {
  Policy policy = PaperPolicy(Allocator::kRandom, 0.4);
  const auto plan = [&policy](uint64_t seed) {
    policy.random_seed = seed;
    return PlanAll(policy, Layers(1, 4, 64), 200)->chunks[0].tier_map;
  };
  EXPECT_EQ(plan(1), plan(1));
  EXPECT_NE(plan(1), plan(2));
}

}  // namespace
}  // namespace spectrumkv
