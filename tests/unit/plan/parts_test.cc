// The planner's parts by themselves: ladder, importance, units, cuts, budgets, costs.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "gtest/gtest.h"
#include "server/plan/allocate.h"
#include "server/plan/budget.h"
#include "server/plan/cost.h"
#include "server/plan/importance.h"
#include "server/plan/ladder.h"
#include "server/plan/units.h"
#include "tests/unit/plan/plan_fixture.h"

namespace spectrumkv {
namespace {

uint64_t RungBytes(const Rung& rung, uint32_t head_dim, DType dtype) {
  uint64_t bytes = 0;
  for (const Tier tier : {rung.k, rung.v}) {
    bytes += CellBytes(tier, head_dim, dtype) + (HasScale8(tier) ? 1 : 0) + (HasScale16(tier) ? 2 : 0);
  }
  return bytes;
}

TEST(Ladder, AscendsInBytesAtEveryHeadDim) {
  Policy policy;
  for (const bool with_q4 : {false, true}) {
    policy.tiers = {Tier::kRaw, Tier::kQ8, Tier::kP8, Tier::kP4, Tier::kQ3, Tier::kQ2};
    if (with_q4) policy.tiers.push_back(Tier::kQ4);
    const Ladder ladder = LadderOf(policy);
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
      for (uint32_t head_dim = 8; head_dim <= kMaxHeadDim; head_dim += 8) {
        for (size_t i = 1; i < ladder.size(); ++i) {
          ASSERT_LE(RungBytes(ladder[i - 1], head_dim, dtype), RungBytes(ladder[i], head_dim, dtype))
              << head_dim << " " << i;
        }
      }
    }
  }
}

TEST(Ladder, HoldsWhatTheTiersAllow) {
  Policy policy;  // the default tiers
  EXPECT_EQ(LadderOf(policy), (Ladder{{Tier::kQ2, Tier::kQ2},
                                      {Tier::kQ3, Tier::kQ2},
                                      {Tier::kQ3, Tier::kQ3},
                                      {Tier::kQ4, Tier::kQ3},
                                      {Tier::kQ4, Tier::kQ4},
                                      {Tier::kQ8, Tier::kQ8},
                                      {Tier::kRaw, Tier::kRaw}}));
  policy.tiers = kPaperTiers;
  EXPECT_EQ(LadderOf(policy), (Ladder{{Tier::kP4, Tier::kP4}, {Tier::kP8, Tier::kP8}, {}}));
  policy.tiers = {Tier::kQ2, Tier::kQ4, Tier::kP4};
  EXPECT_EQ(LadderOf(policy), (Ladder{{Tier::kQ2, Tier::kQ2}, {Tier::kQ4, Tier::kQ4}}));
  policy.tiers = {Tier::kQ8, Tier::kP8};
  EXPECT_EQ(LadderOf(policy), (Ladder{{Tier::kP8, Tier::kP8}, {Tier::kQ8, Tier::kQ8}}));
  policy.allocator = Allocator::kTwoTier;
  EXPECT_EQ(LadderOf(policy), (Ladder{{Tier::kP8, Tier::kP8}}));
  policy.tiers = {Tier::kRaw, Tier::kQ8, Tier::kQ2};
  EXPECT_EQ(LadderOf(policy), (Ladder{{Tier::kQ8, Tier::kQ8}, {}}));
  for (const Allocator allocator : {Allocator::kRaw, Allocator::kPdTrim, Allocator::kSlidingWindowSink}) {
    policy.allocator = allocator;
    EXPECT_EQ(LadderOf(policy), Ladder{Rung{}});
  }
}

std::vector<uint32_t> Positions(uint32_t count) {
  std::vector<uint32_t> positions(count);
  std::iota(positions.begin(), positions.end(), 0);
  return positions;
}

TEST(Importance, OrderIsAStableSort) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 300; ++round) {
    const uint32_t count = static_cast<uint32_t>(random() % 300), first = static_cast<uint32_t>(random() % 5);
    std::vector<double> keys(count);
    for (double& key : keys) {
      switch (round % 4) {
        case 0: key = static_cast<double>(random() % 5) - 2; break;
        case 1: key = std::log(static_cast<double>(random() % 3)); break;  // -inf too
        case 2: key = std::ldexp(static_cast<double>(random() >> 11), static_cast<int>(random() % 100) - 90); break;
        default: key = random() % 2 ? -0.0 : 0.0;
      }
    }
    std::vector<uint32_t> want = Positions(count);
    want.erase(want.begin(), want.begin() + std::min(first, count));
    std::stable_sort(want.begin(), want.end(), [&](uint32_t a, uint32_t b) { return keys[a] > keys[b]; });
    ASSERT_EQ(OrderByImportance(keys, first), want) << round;
  }
}

TEST(Importance, SelectionIsTheFrontOfTheOrder) {
  std::mt19937_64 random(8);
  for (int round = 0; round < 300; ++round) {
    const uint32_t count = static_cast<uint32_t>(random() % (round % 3 == 0 ? 20000 : 600));
    const uint32_t first = std::min(count, static_cast<uint32_t>(random() % 5));
    std::vector<double> keys(count);
    for (double& key : keys) {
      switch (round % 6) {
        case 0: key = static_cast<double>(random() % 5) - 2; break;
        case 1: key = std::log(static_cast<double>(random() % 3)); break;  // -inf too
        case 2: key = std::ldexp(static_cast<double>(random() >> 11), static_cast<int>(random() % 100) - 90); break;
        case 3: key = static_cast<double>(random() % 1000 + 1000000); break;  // one narrow range
        // The whole range there is: the last of its buckets ends beyond all 64 bits.
        case 4:
          key = random() % 4 == 0 ? -std::numeric_limits<double>::infinity()
                                  : std::ldexp(random() % 2 ? 1.0 : -1.0, static_cast<int>(random() % 2000) - 1000);
          break;
        default: key = 0;
      }
    }
    const std::vector<uint32_t> order = OrderByImportance(keys, first);
    for (const size_t wanted : {size_t{0}, order.size() / 3, order.size() - order.size() / 7, order.size()}) {
      Selection got = SelectMostImportant(keys, first, wanted);
      ASSERT_EQ(got.tokens.size(), wanted) << round;
      ASSERT_TRUE(wanted == 0 || got.sorted_from < wanted) << round << ": the last of them is known";
      std::vector<uint32_t> want(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(wanted));
      ASSERT_TRUE(std::equal(got.tokens.begin() + static_cast<std::ptrdiff_t>(got.sorted_from), got.tokens.end(),
                             want.begin() + static_cast<std::ptrdiff_t>(got.sorted_from)))
          << round;
      std::sort(got.tokens.begin(), got.tokens.end());
      std::sort(want.begin(), want.end());
      ASSERT_EQ(got.tokens, want) << round;
    }
  }
}

// Of so many keys a sample tells where the border lies. Here it tells exactly, as all that are sampled are alike, and
// only the others, every one above them, are wanted; the most important of those are the last.
std::vector<double> KeysThatMisleadTheSample() {
  std::vector<double> keys(8192, -1);
  for (uint32_t t = 0; t < 8192; t += 8) keys[t] = 0;
  for (uint32_t t = 1; t < 8192; t += 8) keys[t] = 1 + t;
  return keys;
}

TEST(Importance, SelectionKnowsItsLastWhereTheSampleMisleads) {
  const std::vector<double> keys = KeysThatMisleadTheSample();
  const std::vector<uint32_t> order = OrderByImportance(keys, 0);
  for (const size_t wanted : {1023u, 1024u, 1025u}) {
    const Selection got = SelectMostImportant(keys, 0, wanted);
    ASSERT_LT(got.sorted_from, wanted);
    EXPECT_TRUE(std::equal(got.tokens.begin() + static_cast<std::ptrdiff_t>(got.sorted_from), got.tokens.end(),
                           order.begin() + static_cast<std::ptrdiff_t>(got.sorted_from)));
  }
}

// The share pays for 1024 tokens one rung up in loose bytes, and for fewer in exact ones: those that go back down are
// the least important.
TEST(AllocateGreedy, GivesUpTheLeastImportantFirst) {
  const std::vector<double> keys = KeysThatMisleadTheSample();
  const uint32_t tokens = static_cast<uint32_t>(keys.size());
  Policy policy;
  policy.tiers = {Tier::kRaw, Tier::kQ8};
  const Ladder ladder = LadderOf(policy);
  const std::vector<PlanLayer> layers = Layers(1);
  const CostRules rules{&ladder, 0, false};
  CostModel model(layers, {{0, tokens}, {0}}, rules, nullptr);
  model.SetAll(0);
  const uint64_t share =
      model.LooseBytes() + model.LastingCentres(0, 1) + 1024 * static_cast<uint64_t>(model.LooseDelta(0, 0, 1));
  const Allocation got = AllocateGreedy(&model, ladder.size(), keys, 0, tokens, share);
  EXPECT_LE(got.bytes, share);
  std::vector<uint32_t> up;
  for (uint32_t t = 0; t < tokens; ++t) {
    if (got.rungs[t] == 1) up.push_back(t);
  }
  ASSERT_GT(up.size(), 512u);
  ASSERT_LT(up.size(), 1024u);
  std::vector<uint32_t> want = OrderByImportance(keys, 0);
  want.resize(up.size());
  std::sort(want.begin(), want.end());
  EXPECT_EQ(up, want);
}

TEST(Importance, PositionFollowsTheFormula) {
  Policy policy;
  const std::vector<double> keys = ImportanceKeys(policy, 1000, Positions(1000), {}, {});
  EXPECT_DOUBLE_EQ(keys[0], 0);
  EXPECT_NEAR(std::exp(keys[50]), std::exp(-0.5), 1e-12);
  EXPECT_NEAR(std::exp(keys[799]), std::exp(-7.99), 1e-12);
  EXPECT_NEAR(std::exp(keys[800]), 0.3, 1e-12);
  EXPECT_NEAR(std::exp(keys[900]), 0.55, 1e-12);
  EXPECT_NEAR(std::exp(keys[999]), 0.7975, 1e-12);
  // In a short prompt the front reaches into the last fifth and the larger of the two counts.
  EXPECT_NEAR(std::exp(ImportanceKeys(policy, 10, Positions(10), {}, {})[9]), std::exp(-0.09), 1e-12);
}

TEST(Importance, DecayNeverUnderflows) {
  Policy policy;
  policy.importance = ImportanceSource::kScores;
  policy.decay_lambda = 1;
  const std::vector<float> scores(100000, 1.f);
  const std::vector<double> keys = ImportanceKeys(policy, 100000, Positions(100000), {scores.data(), 100000, 0}, {});
  for (uint32_t t = 1; t < 100000; ++t) ASSERT_GT(keys[t], keys[t - 1]);
  EXPECT_DOUBLE_EQ(keys[99999], -1);  // exp(-lambda * (n - j)), n - j = 1
}

TEST(Importance, ScoresDecayAndKeyNorm) {
  Policy policy;
  policy.importance = ImportanceSource::kScores;
  const float scores[3] = {0.5f, 0, 2};
  EXPECT_EQ(ImportanceKeys(policy, 5, Positions(5), {scores, 3, 0.25}, {}),
            (std::vector<double>{0.5, 0, 2, 0.25, 0.25}));
  policy.decay_lambda = 0.5;
  const std::vector<double> keys = ImportanceKeys(policy, 5, Positions(5), {scores, 3, 0.25}, {});
  EXPECT_NEAR(std::exp(keys[0]), 0.5 * std::exp(-2.5), 1e-12);
  EXPECT_NEAR(std::exp(keys[2]), 2 * std::exp(-1.5), 1e-12);
  EXPECT_EQ(std::exp(keys[1]), 0);
  policy.decay_lambda = 0;
  policy.importance = ImportanceSource::kKeyNorm;
  const std::vector<double> norms = ImportanceKeys(policy, 2, Positions(2), {}, {136, 128});
  EXPECT_NEAR(std::exp(norms[0] - norms[1]), 2, 1e-12);  // 8 quarter-doublings of the square
}

TEST(Units, AreMaximalRectangles) {
  TransferShape shape;
  shape.token_count = 1000;
  shape.kept = {{0, 1000}};
  shape.layers = Layers(3);    // 256 tokens a chunk: 4 chunks a layer
  shape.layers[2].heads = 16;  // 128 tokens: 8 chunks
  const std::vector<ChunkCut> cuts = CutChunks(shape);
  ASSERT_EQ(cuts.size(), 16u);
  std::vector<uint32_t> all(16);
  std::iota(all.begin(), all.end(), 0);
  const auto describe = [](const std::vector<Unit>& units) {
    std::string text;
    for (const Unit& unit : units) {
      text += std::to_string(unit.tokens.first) + "+" + std::to_string(unit.tokens.count) + ":";
      for (const uint32_t l : unit.layers) text += std::to_string(l);
      text += " ";
    }
    return text;
  };
  EXPECT_EQ(describe(SplitUnits(cuts, all, false)), "0+1000:012 ");
  EXPECT_EQ(describe(SplitUnits(cuts, all, true)), "0+1000:0 0+1000:1 0+1000:2 ");
  EXPECT_EQ(describe(SplitUnits(cuts, {1, 2, 5, 6, 10, 11, 12, 13}, false)), "256+512:012 ");
  EXPECT_EQ(describe(SplitUnits(cuts, {0, 1, 3, 4, 5, 9}, false)), "0+512:01 128+128:2 768+232:0 ");
  EXPECT_EQ(describe(SplitUnits(cuts, {3, 4}, false)), "0+256:1 768+232:0 ");  // neighbours in the list only
}

TEST(Cuts, FollowTheFormat) {
  TransferShape shape;
  shape.token_count = 5000;
  shape.kept = {{0, 4}, {100, 600}};
  shape.layers = Layers(2);
  shape.layers[1].has_v = false;  // 512 tokens a chunk
  const std::vector<ChunkCut> cuts = CutChunks(shape);
  ASSERT_EQ(cuts.size(), 5u);
  const uint32_t want[5][3] = {{0, 0, 256}, {0, 256, 256}, {0, 512, 92}, {1, 0, 512}, {1, 512, 92}};
  for (uint32_t i = 0; i < 5; ++i) {
    EXPECT_EQ(cuts[i].chunk_index, i);
    EXPECT_EQ(cuts[i].layer_index, want[i][0]);
    EXPECT_EQ(cuts[i].token_first, want[i][1]);
    EXPECT_EQ(cuts[i].token_count, want[i][2]);
  }
  EXPECT_EQ(shape.kept_count(), 604u);
  EXPECT_EQ(KvBytesOf(shape), 5000u * (4096 + 2048));
}

TEST(Budget, LeastIsTheSmallestDoubleThatPays) {
  std::mt19937_64 random(11);
  for (int i = 0; i < 20000; ++i) {
    const uint64_t kv = 1 + random() % (uint64_t{1} << (1 + random() % 46));
    const uint64_t bytes = 1 + random() % kv;
    const double least = LeastBudgetFor(bytes, kv);
    ASSERT_GE(BudgetBytes(least, kv), bytes);
    ASSERT_LT(BudgetBytes(std::nextafter(least, 0.0), kv), bytes);
  }
}

// Moving one by one, moving many, and setting afresh agree; loose bytes are a lower bound that adds up.
TEST(CostModel, MovesAddUp) {
  std::mt19937_64 random(13);
  Policy policy;
  policy.tiers = {Tier::kRaw, Tier::kP8, Tier::kP4, Tier::kQ3, Tier::kQ2};
  const Ladder ladder = LadderOf(policy);
  for (int round = 0; round < 300; ++round) {
    std::vector<PlanLayer> layers = Layers(4, 32);
    layers[1].heads = 3;
    layers[2].raw_only = round % 3 == 0;
    layers[3].has_v = round % 2 == 0;
    const uint32_t tokens = 64 + static_cast<uint32_t>(random() % 200), pinned = static_cast<uint32_t>(random() % 4);
    std::vector<LayerScan> scan(4);
    for (LayerScan& layer : scan) {
      layer.k.resize(tokens);
      layer.v.resize(tokens);
      if (random() % 2 == 0) layer.k[random() % tokens].escape = static_cast<EscapeClass>(random() % 4);
      if (random() % 2 == 0) layer.v[random() % tokens].escape = static_cast<EscapeClass>(random() % 4);
    }
    const Unit unit{{0, tokens}, {0, 1, 2, 3}};
    const CostRules rules{&ladder, pinned, round % 5 == 0};
    CostModel one(layers, unit, rules, &scan), many(layers, unit, rules, &scan), fresh(layers, unit, rules, &scan);
    const size_t from = random() % ladder.size(), to = random() % ladder.size();
    one.SetAll(from);
    many.SetAll(from);
    std::vector<uint32_t> order;
    for (uint32_t t = pinned; t < tokens; ++t) order.push_back(t);
    std::shuffle(order.begin(), order.end(), random);
    uint64_t loose = one.LooseBytes();
    for (const uint32_t token : order) {
      loose += static_cast<uint64_t>(one.LooseDelta(token, from, to));
      one.Move(token, from, to);
      ASSERT_EQ(one.LooseBytes(), loose);
      ASSERT_LE(loose, one.bytes());
    }
    many.MoveMany(order.data(), order.size(), from, to);
    ASSERT_EQ(one.bytes(), many.bytes());
    ASSERT_EQ(one.bytes(), fresh.SetAll(to));
    if (rules.payload_only) {
      ASSERT_EQ(loose, one.bytes());
    }
  }
}

}  // namespace
}  // namespace spectrumkv
