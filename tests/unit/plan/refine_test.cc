// Which cells a refinement asks for, and at which price.
#include "server/plan/refine.h"

#include "gtest/gtest.h"
#include "server/base/status.h"

namespace spectrumkv {
namespace {

TransferShape Base(uint32_t tokens = 200) {
  TransferShape shape;
  shape.token_count = tokens;
  shape.kept = {{0, tokens}};
  for (uint16_t l = 0; l < 3; ++l) shape.layers.push_back({0, static_cast<uint16_t>(2 * l), 2, 64, DType::kFloat16, true, false, 0});
  return shape;
}

// Every cell at K `k`, V `v`.
TierMap Uniform(const TransferShape& shape, Tier k, Tier v) {
  TierMap map(shape);
  const std::vector<uint8_t> bytes(shape.kept_count(), TierMapByte(k, v));
  for (uint32_t l = 0; l < shape.layers.size(); ++l) map.Set(l, 0, shape.kept_count(), bytes.data());
  return map;
}

TEST(RefineTest, OnlyCellsThatGetBetterTravel) {
  const TransferShape base = Base();
  TierMap map = Uniform(base, Tier::kQ4, Tier::kRaw);
  map.SetCell(1, false, 7, Tier::kQ8);
  map.SetCell(2, true, 9, Tier::kQ2);
  const auto exact = ChooseCells(base, map, {}, Tier::kRaw, {});
  ASSERT_TRUE(exact.ok()) << exact.status();
  EXPECT_EQ(exact->cells, 3u * 200 + 1);
  EXPECT_EQ(exact->cells_left, 0u);
  ASSERT_EQ(exact->strips.size(), 4u);
  EXPECT_TRUE(exact->strips[3].values);
  EXPECT_EQ(exact->strips[3].layer_index, 2u);
  EXPECT_EQ(exact->rows[3], (std::vector<TokenRange>{{9, 1}}));
  EXPECT_EQ(exact->kv_bytes, exact->cells * 2 * 64 * 2);
  const auto eight = ChooseCells(base, map, {}, Tier::kQ8, {});
  ASSERT_TRUE(eight.ok());
  EXPECT_EQ(eight->cells, 3u * 200) << "one K has Q8 already, one V gains";
  EXPECT_EQ(ChooseCells(base, map, {}, Tier::kQ3, {})->cells, 1u);
  EXPECT_EQ(map.CoarseCells(base), 3u * 200 + 1);
}

TEST(RefineTest, PricesAreThoseOfThePlan) {
  const TransferShape base = Base();
  const TierMap map = Uniform(base, Tier::kQ4, Tier::kQ2);
  for (const Tier tier : {Tier::kRaw, Tier::kQ8}) {
    const auto choice = ChooseCells(base, map, {}, tier, {});
    ASSERT_TRUE(choice.ok());
    auto planner = Planner::CreateFixed(choice->shape, tier);
    ASSERT_TRUE(planner.ok()) << planner.status();
    std::vector<uint32_t> all(planner->cuts().size());
    for (uint32_t i = 0; i < all.size(); ++i) all[i] = i;
    const auto plan = planner->Plan(all, {});
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(plan->wire_bytes, choice->wire_bytes);
    EXPECT_EQ(plan->kv_bytes, choice->kv_bytes);
    EXPECT_EQ(plan->totals.k[static_cast<size_t>(tier)], choice->cells);
    EXPECT_FALSE(planner->Plan(all, {}).ok()) << "planned before";
  }
}

TEST(RefineTest, ChunksOfStripsAreAnEighth) {
  TransferShape base = Base(5000);
  const uint32_t whole = TokensPerChunk(2, 64, DType::kFloat16, false);
  const auto choice = ChooseCells(base, Uniform(base, Tier::kQ4, Tier::kQ4), {}, Tier::kRaw, {});
  ASSERT_TRUE(choice.ok());
  uint32_t tokens = 0;
  for (const ChunkCut& cut : CutChunks(choice->shape)) {
    EXPECT_LE(cut.token_count, whole / 8);
    EXPECT_EQ(cut.token_first % 64, 0u) << "centres are of 64 tokens";
    tokens += cut.token_count;
  }
  EXPECT_EQ(tokens, 6u * 5000);
}

TEST(RefineTest, EscapesOfAFixedPlanAreRaw) {
  const TransferShape base = Base();
  const auto choice = ChooseCells(base, Uniform(base, Tier::kQ4, Tier::kRaw), {}, Tier::kQ8, {});
  ASSERT_TRUE(choice.ok());
  auto planner = Planner::CreateFixed(choice->shape, Tier::kQ8);
  ASSERT_TRUE(planner.ok());
  std::vector<LayerScan> scan(choice->shape.layers.size());
  for (LayerScan& layer : scan) layer.k.resize(200);
  scan[1].k[5].escape = kEscapeAll;
  std::vector<uint32_t> all(planner->cuts().size());
  for (uint32_t i = 0; i < all.size(); ++i) all[i] = i;
  const auto plan = planner->Plan(all, scan);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->escaped, 1u);
  EXPECT_EQ(plan->totals.k[static_cast<size_t>(Tier::kRaw)], 1u);
  std::vector<const PlannedChunk*> chunks;
  for (const PlannedChunk& chunk : plan->chunks) chunks.push_back(&chunk);
  EXPECT_EQ(planner->Withdraw(chunks).k[static_cast<size_t>(Tier::kRaw)], 1u);
  EXPECT_TRUE(planner->Plan(all, {}).ok());
}

TEST(RefineTest, SelectionsNarrow) {
  const TransferShape base = Base();
  const TierMap map = Uniform(base, Tier::kQ4, Tier::kQ4);
  RefineSelection selection;
  selection.tokens = {{10, 5}, {100, 1}};
  selection.layers = {2};
  const auto choice = ChooseCells(base, map, selection, Tier::kRaw, {});
  ASSERT_TRUE(choice.ok());
  EXPECT_EQ(choice->cells, 12u);
  EXPECT_EQ(choice->shape.strips[0], selection.tokens);
  EXPECT_EQ(choice->shape.layers[0].layer, 2u);
  EXPECT_FALSE(choice->shape.layers[0].has_v);
}

TEST(RefineTest, DroppedTokensStayDroppedAndRowsCountWhatWasKept) {
  TransferShape base = Base();
  base.kept = {{0, 4}, {50, 150}};
  const auto choice = ChooseCells(base, Uniform(base, Tier::kQ8, Tier::kQ8), {}, Tier::kRaw, {});
  ASSERT_TRUE(choice.ok());
  EXPECT_EQ(choice->shape.strips[0], base.kept);
  EXPECT_EQ(choice->rows[0], (std::vector<TokenRange>{{0, 154}}));
}

TEST(RefineTest, LimitsTakeTheTokensThatMatterMost) {
  const TransferShape base = Base();
  const TierMap map = Uniform(base, Tier::kQ4, Tier::kQ4);
  RefineSelection selection;
  selection.scores.assign(200, 0);
  selection.scores[150] = 2;
  selection.scores[3] = 1;
  const uint64_t two_tokens = 2 * 6 * 256;
  RefineLimits limits;
  limits.kv_bytes = two_tokens + 10;
  const auto choice = ChooseCells(base, map, selection, Tier::kRaw, limits);
  ASSERT_TRUE(choice.ok());
  EXPECT_EQ(choice->shape.strips[0], (std::vector<TokenRange>{{3, 1}, {150, 1}}));
  EXPECT_EQ(choice->kv_bytes, two_tokens);
  EXPECT_EQ(choice->cells_left, 198u * 6);
  limits = {};
  limits.wire_bytes = 5000;
  const auto by_wire = ChooseCells(base, map, {}, Tier::kRaw, limits);
  EXPECT_LE(by_wire->wire_bytes, 5000u);
  EXPECT_EQ(by_wire->shape.strips[0].front().first, 0u);
  limits.wire_bytes = 0;
  EXPECT_EQ(ChooseCells(base, map, {}, Tier::kRaw, limits)->cells, 0u);
}

TEST(RefineTest, WhatCameFinerMattersMore) {
  TransferShape base = Base();
  base.kept = {{0, 100}, {150, 50}};
  TierMap map = Uniform(base, Tier::kQ4, Tier::kQ2);
  map.SetCell(1, false, 20, Tier::kQ8);
  map.SetCell(1, true, 120, Tier::kRaw);  // position 170
  map.SetCell(2, false, 5, Tier::kQ2);
  const std::vector<float> scores = ScoresOfTiers(base, map);
  ASSERT_EQ(scores.size(), 200u);
  EXPECT_GT(scores[170], scores[20]);
  EXPECT_GT(scores[20], scores[21]);
  EXPECT_GT(scores[21], scores[5]);
  EXPECT_EQ(scores[120], 0) << "it did not travel";
}

TEST(RefineTest, SelectionsThatDoNotFitAreRefusedByField) {
  const TransferShape base = Base();
  const TierMap map = Uniform(base, Tier::kQ4, Tier::kQ4);
  const auto field = [&](const RefineSelection& selection) {
    const auto choice = ChooseCells(base, map, selection, Tier::kRaw, {});
    return choice.ok() ? "" : MetadataOf(choice.status())["field"];
  };
  EXPECT_EQ(field({{{0, 0}}, {}, {}}), "selection.tokens");
  EXPECT_EQ(field({{{199, 2}}, {}, {}}), "selection.tokens");
  EXPECT_EQ(field({{{5, 2}, {6, 1}}, {}, {}}), "selection.tokens");
  EXPECT_EQ(field({{}, {1}, {}}), "selection.layers");
  EXPECT_EQ(field({{}, {}, {1, 2}}), "selection.scores");
  EXPECT_EQ(field({{}, {}, std::vector<float>(200, -1)}), "selection.scores");
}

TEST(RefineTest, FinerIsAnOrder) {
  const Tier order[] = {Tier::kRaw, Tier::kQ8, Tier::kP8, Tier::kQ4, Tier::kP4, Tier::kQ3, Tier::kQ2};
  for (int i = 0; i < kTierCount; ++i) {
    for (int j = 0; j < kTierCount; ++j) EXPECT_EQ(IsFiner(order[i], order[j]), i < j);
  }
}

}  // namespace
}  // namespace spectrumkv
