// Batches: layer-wise sources, chunked prefill, scores that come later, escapes that come late.
#include <cmath>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/status.h"
#include "tests/unit/plan/plan_fixture.h"

namespace spectrumkv {
namespace {

using testing::HasSubstr;

// Chunks of one layer.
std::vector<uint32_t> ChunksOf(const Planner& planner, uint32_t layer, uint32_t begin_token = 0,
                               uint32_t end_token = ~uint32_t{0}) {
  std::vector<uint32_t> chunks;
  for (const ChunkCut& cut : planner.cuts()) {
    if (cut.layer_index == layer && cut.token_first >= begin_token && cut.token_first < end_token) {
      chunks.push_back(cut.chunk_index);
    }
  }
  return chunks;
}

std::vector<LayerScan> FullScan(uint32_t layers, uint32_t tokens) {
  std::vector<LayerScan> scan(layers);
  for (LayerScan& layer : scan) {
    layer.k.resize(tokens);
    layer.v.resize(tokens);
  }
  return scan;
}

uint64_t Budget(const Policy& policy, const Planner& planner) {
  return static_cast<uint64_t>(policy.budget * static_cast<double>(KvBytesOf(planner.shape())));
}

TEST(LayerWise, SpendsTheWholeBudget) {
  Policy policy;
  policy.budget = 0.3;
  auto planner = Planner::Create(policy, Layers(8), 1000);
  ASSERT_TRUE(planner.ok());
  uint64_t wire = 0;
  for (uint32_t l = 0; l < 8; ++l) {
    const auto batch = planner->Plan(ChunksOf(*planner, l), NoScan(*planner));
    ASSERT_TRUE(batch.ok()) << batch.status();
    EXPECT_NEAR(static_cast<double>(batch->wire_bytes) / static_cast<double>(batch->kv_bytes), 0.3, 0.001);
    wire += batch->wire_bytes;
  }
  const uint64_t budget = Budget(policy, *planner);
  EXPECT_LE(wire, budget);
  // Within one token's step in one layer: Q4 to Q8 for K and V of 8 heads x 128, with scales and padding.
  EXPECT_GT(wire + 1200, budget);
}

TEST(LayerWise, ATightBudgetStillPaysEveryLayer) {
  Policy policy;
  policy.budget = 1;
  std::vector<PlanLayer> layers = Layers(6);
  layers[2].raw_only = true;
  layers[4].head_dim = 64;
  layers[4].has_v = false;
  policy.budget = Planner::Create(policy, layers, 777)->LeastBudget({});
  auto planner = Planner::Create(policy, layers, 777);
  ASSERT_TRUE(planner.ok());
  uint64_t wire = 0;
  for (uint32_t l = 0; l < 6; ++l) {
    const auto batch = planner->Plan(ChunksOf(*planner, l), NoScan(*planner));
    ASSERT_TRUE(batch.ok()) << batch.status();
    EXPECT_EQ(batch->escape_overrun_bytes, 0u);
    if (l == 2) {
      EXPECT_EQ(TokensAt(*batch, Tier::kRaw), 777u);
    } else {
      EXPECT_EQ(TokensAt(*batch, Tier::kQ2), 773u);
    }
    wire += batch->wire_bytes;
  }
  EXPECT_EQ(wire, Budget(policy, *planner));
}

TEST(ChunkedPrefill, RectanglesStayWithinTheBudget) {
  Policy policy;
  policy.budget = 0.25;
  auto planner = Planner::Create(policy, Layers(4), 1500);  // chunks of 256 tokens
  ASSERT_TRUE(planner.ok());
  uint64_t wire = 0;
  for (const auto& [begin, end] : {std::pair{0u, 512u}, {512u, 1280u}, {1280u, 1500u}}) {
    std::vector<uint32_t> chunks;
    for (uint32_t l = 0; l < 4; ++l) {
      for (const uint32_t chunk : ChunksOf(*planner, l, begin, end)) chunks.push_back(chunk);
    }
    const auto batch = planner->Plan(chunks, NoScan(*planner));
    ASSERT_TRUE(batch.ok()) << batch.status();
    wire += batch->wire_bytes;
  }
  EXPECT_LE(wire, Budget(policy, *planner));
  EXPECT_GT(wire + 4 * 300, Budget(policy, *planner));
}

TEST(ChunkedPrefill, AnUnevenBatchIsPlannedByRectangles) {
  Policy policy;
  policy.budget = 0.25;
  auto planner = Planner::Create(policy, Layers(3), 1024);
  ASSERT_TRUE(planner.ok());
  // Layer 0 whole, layers 1 and 2 half.
  std::vector<uint32_t> chunks = ChunksOf(*planner, 0);
  for (const uint32_t l : {1u, 2u}) {
    for (const uint32_t chunk : ChunksOf(*planner, l, 0, 512)) chunks.push_back(chunk);
  }
  const auto batch = planner->Plan(chunks, NoScan(*planner));
  ASSERT_TRUE(batch.ok());
  ASSERT_EQ(batch->chunks.size(), 8u);
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(batch->chunks[i].cut.chunk_index, chunks[i]);
  EXPECT_EQ(batch->chunks[4].tier_map, batch->chunks[6].tier_map);
  EXPECT_EQ(batch->chunks[5].tier_map, batch->chunks[7].tier_map);
}

TEST(Scores, LaterOnesReplaceTheImportance) {
  Policy policy;
  policy.budget = 0.24;
  policy.sinks = 0;
  auto planner = Planner::Create(policy, Layers(2, 4, 64), 100);
  ASSERT_TRUE(planner.ok());
  ASSERT_TRUE(planner->Plan(ChunksOf(*planner, 0), NoScan(*planner)).ok());
  std::vector<float> scores(60, 0.f);
  scores[41] = 9;  // the mean, 0.15, goes to tokens 60..99
  ASSERT_TRUE(planner->SetScores(scores).ok());
  const auto batch = planner->Plan(ChunksOf(*planner, 1), NoScan(*planner));
  ASSERT_TRUE(batch.ok());
  const std::vector<uint8_t>& map = batch->chunks[0].tier_map;
  const auto bytes = [](uint8_t b) {
    return CellBytes(TierOfK(b), 64, DType::kFloat16) + CellBytes(TierOfV(b), 64, DType::kFloat16);
  };
  for (uint32_t t = 0; t < 100; ++t) EXPECT_LE(bytes(map[t]), bytes(map[41]));
  for (uint32_t t = 0; t < 60; ++t) EXPECT_LE(bytes(map[t]), t == 41 ? 99 : bytes(map[60]));
  EXPECT_NE(map[41], map[0]);
}

TEST(Scores, LaterOnesAreChecked) {
  auto planner = Planner::Create(Policy(), Layers(1), 100);
  ASSERT_TRUE(planner.ok());
  for (const std::vector<float>& bad : {std::vector<float>(), std::vector<float>(101, 1.f), std::vector<float>{1, -1},
                                        std::vector<float>{std::numeric_limits<float>::quiet_NaN()}}) {
    EXPECT_EQ(ReasonOf(planner->SetScores(bad)), "INVALID_SCORES");
  }
  EXPECT_TRUE(planner->SetScores(std::vector<float>(10, 0.f)).ok());
}

std::vector<float> ImportanceOf(const Policy& policy, uint32_t tokens, const std::vector<float>& later = {}) {
  auto planner = Planner::Create(policy, Layers(2, 4, 64), tokens);
  EXPECT_TRUE(planner.ok()) << planner.status();
  if (!planner.ok()) return {};
  if (!later.empty()) {
    EXPECT_TRUE(planner->SetScores(later).ok());
  }
  return planner->TokenImportance(NoScan(*planner));
}

TEST(Scores, ImportanceIsInTheirOrderWhereverItComesFrom) {
  Policy policy;
  EXPECT_EQ(policy.importance, ImportanceSource::kPosition);
  std::vector<float> importance = ImportanceOf(policy, 100);
  ASSERT_EQ(importance.size(), 100u);
  EXPECT_GT(importance[0], importance[50]);
  EXPECT_GT(importance[99], importance[50]);
  policy.importance = ImportanceSource::kNone;
  EXPECT_TRUE(ImportanceOf(policy, 100).empty());
  policy.importance = ImportanceSource::kKeyNorm;
  EXPECT_TRUE(ImportanceOf(policy, 100).empty()) << "nobody has looked";
  importance = ImportanceOf(policy, 100, {5, 1, 3});
  EXPECT_GT(importance[0], importance[2]);
  EXPECT_GT(importance[2], importance[1]);
  EXPECT_FLOAT_EQ(importance[3], importance[2]) << "the others count as the mean, 3";
  policy.importance = ImportanceSource::kScores;
  policy.scores_per_layer = true;
  policy.scores.assign(200, 0);
  policy.scores[7] = 2;        // of layer 0
  policy.scores[100 + 9] = 6;  // of layer 1
  importance = ImportanceOf(policy, 100);
  EXPECT_GT(importance[9], importance[7]);
  EXPECT_GT(importance[7], importance[8]);
  policy.scores[7] = policy.scores[100 + 9] = 1;
  policy.decay_lambda = 0.5;
  importance = ImportanceOf(policy, 100);
  EXPECT_GT(importance[9], importance[7]) << "it is younger";
}

TEST(Scores, PerLayerOrdersDiffer) {
  Policy policy;
  policy.budget = 0.2;
  policy.sinks = 0;
  policy.importance = ImportanceSource::kScores;
  policy.scores_per_layer = true;
  for (uint32_t t = 0; t < 100; ++t) policy.scores.push_back(static_cast<float>(t));
  for (uint32_t t = 0; t < 100; ++t) policy.scores.push_back(static_cast<float>(100 - t));
  const auto batch = PlanAll(policy, Layers(2, 4, 64), 100);
  ASSERT_TRUE(batch.ok());
  std::vector<uint8_t> reversed = batch->chunks[1].tier_map;
  std::reverse(reversed.begin(), reversed.end());
  EXPECT_NE(batch->chunks[0].tier_map, batch->chunks[1].tier_map);
  EXPECT_EQ(batch->chunks[0].tier_map, reversed);
}

// Attention that comes with a batch orders it as scores given at the start do; until then something stands in for it.
TEST(Scores, AttentionMayComeLater) {
  for (const Allocator allocator : {Allocator::kOptimal, Allocator::kGreedy}) {
    Policy policy;
    policy.budget = 0.2;
    policy.sinks = 0;
    policy.allocator = allocator;
    policy.importance = ImportanceSource::kScores;
    policy.scores_per_layer = true;
    for (uint32_t t = 0; t < 200; ++t) policy.scores.push_back(static_cast<float>(t < 100 ? t : 200 - t));
    const auto given = PlanAll(policy, Layers(2, 4, 64), 100);
    ASSERT_TRUE(given.ok());
    Policy later = policy;
    later.scores.clear();
    later.scores_per_layer = false;
    later.importance = ImportanceSource::kRecentQueries;
    auto planner = Planner::Create(later, Layers(2, 4, 64), 100);
    ASSERT_TRUE(planner.ok()) << planner.status();
    EXPECT_EQ(planner->importance(),
              allocator == Allocator::kOptimal ? ImportanceSource::kNone : ImportanceSource::kPosition);
    EXPECT_EQ(ReasonOf(planner->SetAttention(std::vector<float>(199, 1.f))), "INVALID_SCORES");
    EXPECT_EQ(ReasonOf(planner->SetAttention(std::vector<float>(200, NAN))), "INVALID_SCORES");
    ASSERT_TRUE(planner->SetAttention(policy.scores).ok());
    EXPECT_EQ(planner->importance(), ImportanceSource::kRecentQueries);
    const auto batch = planner->Plan({0, 1}, {});
    ASSERT_TRUE(batch.ok());
    for (size_t i = 0; i < 2; ++i) EXPECT_EQ(batch->chunks[i].tier_map, given->chunks[i].tier_map);
    ASSERT_TRUE(planner->SetScores(std::vector<float>(100, 1.f)).ok());
    EXPECT_EQ(planner->importance(), ImportanceSource::kScores);
  }
}

TEST(KeyNorm, LargeKeysComeFirst) {
  Policy policy;
  policy.budget = 0.2;
  policy.sinks = 0;
  policy.importance = ImportanceSource::kKeyNorm;
  auto planner = Planner::Create(policy, Layers(2, 4, 64), 100);
  ASSERT_TRUE(planner.ok());
  std::vector<LayerScan> scan = FullScan(2, 100);
  for (uint32_t t = 0; t < 100; ++t) {
    scan[0].k[t].energy_log2 = static_cast<uint8_t>(100 + t);  // the mean decides
    scan[1].k[t].energy_log2 = static_cast<uint8_t>(t % 2 ? 120 : 110);
  }
  const auto batch = planner->Plan(AllChunks(*planner), scan);
  ASSERT_TRUE(batch.ok());
  EXPECT_NE(batch->chunks[0].tier_map[99], batch->chunks[0].tier_map[0]);
  EXPECT_EQ(batch->chunks[0].tier_map, batch->chunks[1].tier_map);
}

TEST(KeyNorm, WithoutAScanIsAnError) {
  Policy policy;
  policy.importance = ImportanceSource::kKeyNorm;
  auto planner = Planner::Create(policy, Layers(2), 100);
  ASSERT_TRUE(planner.ok());
  const absl::Status status = planner->Plan(AllChunks(*planner), NoScan(*planner)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(status), "KEY_NORM_UNAVAILABLE");
  EXPECT_TRUE(planner->Plan(AllChunks(*planner), FullScan(2, 100)).ok());
  policy.allocator = Allocator::kSlidingWindowSink;
  policy.allow_drop = true;
  EXPECT_EQ(ReasonOf(Planner::Create(policy, Layers(2), 100).status()), "KEY_NORM_UNAVAILABLE");
}

TEST(Escapes, ArePaidByOtherTokens) {
  Policy policy;
  policy.budget = 0.3;
  policy.sinks = 0;
  auto plan = [&policy](const std::vector<LayerScan>& scan) {
    auto planner = Planner::Create(policy, Layers(2), 200);
    return *planner->Plan(AllChunks(*planner), scan);
  };
  std::vector<LayerScan> scan = FullScan(2, 200);
  const PlanBatch without = plan(scan);
  for (uint32_t t = 50; t < 70; ++t) scan[1].k[t].escape = kEscapeRotated;
  scan[0].v[7].escape = kEscapeNonFinite;
  const PlanBatch with = plan(scan);
  EXPECT_EQ(with.escaped, 21u);
  EXPECT_EQ(with.totals.k[0], 20u);
  EXPECT_EQ(with.totals.v[0], 1u);
  EXPECT_EQ(TierOfV(with.chunks[0].tier_map[7]), Tier::kRaw);
  EXPECT_NE(TierOfK(with.chunks[0].tier_map[7]), Tier::kRaw);
  EXPECT_LE(with.wire_bytes, 3 * with.kv_bytes / 10);
  EXPECT_LE(without.wire_bytes, 3 * without.kv_bytes / 10);
  EXPECT_EQ(with.escape_overrun_bytes, 0u);
}

TEST(Escapes, PlainTiersEscapeLater) {
  Policy policy;
  policy.budget = 0.6;
  policy.sinks = 0;
  policy.allocator = Allocator::kUniform;
  policy.uniform_tier = Tier::kP8;
  auto planner = Planner::Create(policy, Layers(1), 200);
  std::vector<LayerScan> scan = FullScan(1, 200);
  scan[0].k[1].escape = kEscapeRotated;
  scan[0].k[2].escape = kEscapeAll;
  scan[0].k[3].escape = kEscapeNonFinite;
  const auto batch = planner->Plan(AllChunks(*planner), scan);
  ASSERT_TRUE(batch.ok()) << batch.status();
  EXPECT_EQ(batch->escaped, 2u);
}

class LateEscapes : public testing::Test {
 protected:
  // A budget with room for nothing but the lowest tiers; the last layer has 100 escapes.
  LateEscapes() : scan_(FullScan(3, 300)) {
    policy_.budget = 1;
    policy_.budget = Planner::Create(policy_, Layers(3), 300)->LeastBudget({});
    for (uint32_t t = 100; t < 200; ++t) scan_[2].k[t].escape = kEscapeAll;
  }
  Policy policy_;
  std::vector<LayerScan> scan_;
};

TEST_F(LateEscapes, AreReportedAsOverrun) {
  auto planner = Planner::Create(policy_, Layers(3), 300);
  ASSERT_TRUE(planner.ok());
  uint64_t wire = 0;
  for (uint32_t l = 0; l < 3; ++l) {
    const auto batch = planner->Plan(ChunksOf(*planner, l), scan_);
    ASSERT_TRUE(batch.ok());
    wire += batch->wire_bytes;
    if (l < 2) {
      EXPECT_EQ(batch->escape_overrun_bytes, 0u);
      continue;
    }
    EXPECT_EQ(batch->escaped, 100u);
    EXPECT_EQ(wire - batch->escape_overrun_bytes, Budget(policy_, *planner));
  }
}

TEST_F(LateEscapes, FailAStrictBudgetAndChangeNothing) {
  policy_.strict_budget = true;
  auto planner = Planner::Create(policy_, Layers(3), 300);
  ASSERT_TRUE(planner.ok());
  for (uint32_t l = 0; l < 2; ++l) ASSERT_TRUE(planner->Plan(ChunksOf(*planner, l), scan_).ok());
  const absl::Status status = planner->Plan(ChunksOf(*planner, 2), scan_).status();
  EXPECT_EQ(ReasonOf(status), "BUDGET_TOO_SMALL");
  EXPECT_NEAR(std::stod(MetadataOf(status)["least_budget"]), planner->LeastBudget(scan_), 1e-6);
  EXPECT_TRUE(planner->Plan(ChunksOf(*planner, 2), NoScan(*planner)).ok());
}

TEST_F(LateEscapes, FailAWholeTransferInOneBatch) {
  auto planner = Planner::Create(policy_, Layers(3), 300);
  ASSERT_TRUE(planner.ok());
  const absl::Status status = planner->Plan(AllChunks(*planner), scan_).status();
  EXPECT_EQ(ReasonOf(status), "BUDGET_TOO_SMALL");
  policy_.budget = std::stod(MetadataOf(status)["least_budget"]);
  auto enough = Planner::Create(policy_, Layers(3), 300);
  EXPECT_TRUE(enough->Plan(AllChunks(*enough), scan_).ok());
}

TEST_F(LateEscapes, TakeTheSpareOfLaterLayersFirst) {
  policy_.budget += 0.1;
  auto planner = Planner::Create(policy_, Layers(3), 300);
  ASSERT_TRUE(planner.ok());
  std::swap(scan_[0], scan_[2]);  // now the first layer
  uint64_t wire = 0;
  for (uint32_t l = 0; l < 3; ++l) {
    const auto batch = planner->Plan(ChunksOf(*planner, l), scan_);
    ASSERT_TRUE(batch.ok());
    EXPECT_EQ(batch->escape_overrun_bytes, 0u);
    wire += batch->wire_bytes;
  }
  EXPECT_LE(wire, Budget(policy_, *planner));
}

TEST(TwoTier, MakesRoomForKnownEscapesByDropping) {
  Policy policy;
  policy.allocator = Allocator::kTwoTier;
  policy.budget = 0.4;
  policy.allow_drop = true;
  std::vector<LayerScan> scan = FullScan(2, 500);
  for (uint32_t t = 4; t < 30; ++t) scan[1].v[t].escape = kEscapeRotated;
  auto blind = Planner::Create(policy, Layers(2), 500);
  auto seeing = Planner::Create(policy, Layers(2), 500, &scan);
  ASSERT_TRUE(blind.ok() && seeing.ok());
  EXPECT_LT(seeing->shape().kept_count(), blind->shape().kept_count());
  std::vector<LayerScan> kept(2);
  for (const TokenRange& range : seeing->shape().kept) {
    for (uint32_t t = range.first; t < range.first + range.count; ++t) {
      for (int l = 0; l < 2; ++l) {
        kept[l].k.push_back(scan[l].k[t]);
        kept[l].v.push_back(scan[l].v[t]);
      }
    }
  }
  const auto batch = seeing->Plan(AllChunks(*seeing), kept);
  ASSERT_TRUE(batch.ok()) << batch.status();
  EXPECT_EQ(batch->escaped, 26u);
}

TEST(Batch, RefusesWhatDoesNotFit) {
  auto planner = Planner::Create(Policy(), Layers(2), 600);
  ASSERT_TRUE(planner.ok());
  const std::vector<LayerScan> scan = NoScan(*planner);
  std::vector<LayerScan> short_scan = NoScan(*planner);
  short_scan[1].v.resize(599);
  ASSERT_EQ(planner->cuts().size(), 6u);
  struct Bad {
    std::vector<uint32_t> chunks;
    std::vector<LayerScan> scan;
    const char* message;
  };
  const std::vector<Bad> table = {
      {{}, scan, "no chunks"},
      {{6}, scan, "chunk 6 is not in the list of 6"},
      {{1, 1}, scan, "chunk 1 is not above"},
      {{2, 1}, scan, "chunk 1 is not above"},
      {{0}, std::vector<LayerScan>(3), "3 layers"},
      {{0}, short_scan, "shorter than the 600"},
  };
  for (const Bad& bad : table) {
    const absl::Status status = planner->Plan(bad.chunks, bad.scan).status();
    EXPECT_EQ(ReasonOf(status), "INVALID_BATCH");
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.message));
  }
  ASSERT_TRUE(planner->Plan({0, 5}, {}).ok());  // no scan at all: no escapes
  EXPECT_THAT(std::string(planner->Plan({5}, scan).status().message()), HasSubstr("planned before"));
}

std::vector<const PlannedChunk*> Pointers(const PlanBatch& batch, size_t from) {
  std::vector<const PlannedChunk*> chunks;
  for (size_t i = from; i < batch.chunks.size(); ++i) chunks.push_back(&batch.chunks[i]);
  return chunks;
}

TEST(Withdraw, WhatIsTakenBackIsPlannedAsBefore) {
  for (const bool payload_only : {false, true}) {
    Policy policy;
    policy.budget = 0.3;
    policy.payload_only = payload_only;
    auto planner = Planner::Create(policy, Layers(3), 1000);
    ASSERT_TRUE(planner.ok());
    const auto first = planner->Plan(AllChunks(*planner), {});
    ASSERT_TRUE(first.ok()) << first.status();
    const TierTotals totals = planner->Withdraw(Pointers(*first, 0));
    EXPECT_EQ(totals.k, first->totals.k);
    EXPECT_EQ(totals.v, first->totals.v);
    const auto second = planner->Plan(AllChunks(*planner), {});
    ASSERT_TRUE(second.ok()) << second.status();
    ASSERT_EQ(second->chunks.size(), first->chunks.size());
    for (size_t i = 0; i < first->chunks.size(); ++i) EXPECT_EQ(second->chunks[i].tier_map, first->chunks[i].tier_map);
  }
}

TEST(Withdraw, EscapesThatComeLateStayWithinTheBudgetOfTheWhole) {
  Policy policy;
  policy.budget = 0.4;
  auto planner = Planner::Create(policy, Layers(4), 1000);
  ASSERT_TRUE(planner.ok());
  const auto first = planner->Plan(AllChunks(*planner), {});
  ASSERT_TRUE(first.ok()) << first.status();
  const size_t sent = 5;
  uint64_t wire = 0;
  for (size_t i = 0; i < sent; ++i) wire += first->chunks[i].chunk_bytes;
  planner->Withdraw(Pointers(*first, sent));
  std::vector<LayerScan> scan = FullScan(4, 1000);
  for (uint32_t t = 300; t < 420; ++t) scan[3].k[t].escape = scan[2].v[t].escape = kEscapeAll;
  std::vector<uint32_t> rest;
  for (uint32_t i = sent; i < planner->cuts().size(); ++i) rest.push_back(i);
  const auto second = planner->Plan(rest, scan);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_GT(second->escaped, 0u);
  EXPECT_EQ(second->escape_overrun_bytes, 0u);
  EXPECT_LE(wire + second->wire_bytes, Budget(policy, *planner));
}

TEST(Withdraw, WhatNoLongerFitsIsAnErrorNotAnOverrun) {
  Policy policy;
  policy.budget = 0.2;
  for (const bool soft : {false, true}) {
    policy.soft_budget = soft;
    auto planner = Planner::Create(policy, Layers(2), 1000);
    ASSERT_TRUE(planner.ok());
    const auto first = planner->Plan(AllChunks(*planner), {});
    ASSERT_TRUE(first.ok());
    planner->Withdraw(Pointers(*first, 1));
    std::vector<LayerScan> scan = FullScan(2, 1000);
    for (TokenScan& token : scan[1].k) token.escape = kEscapeAll;
    std::vector<uint32_t> rest;
    for (uint32_t i = 1; i < planner->cuts().size(); ++i) rest.push_back(i);
    const auto second = planner->Plan(rest, scan);
    if (soft) {
      ASSERT_TRUE(second.ok()) << second.status();
      EXPECT_EQ(second->escape_overrun_bytes, 0u);
      EXPECT_GT(planner->effective_budget(), 0.2);
    } else {
      EXPECT_EQ(ReasonOf(second.status()), "BUDGET_TOO_SMALL");
    }
  }
}

}  // namespace
}  // namespace spectrumkv
