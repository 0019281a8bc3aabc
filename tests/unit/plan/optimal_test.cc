// OPTIMAL against brute force, against GREEDY, and against itself with more to spend. The seed is fixed; another one is
// taken from SPECTRUMKV_SEED.
#include "server/plan/optimal.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <numeric>

#include "gtest/gtest.h"
#include "server/base/status.h"
#include "server/plan/importance.h"
#include "server/plan/ladder.h"
#include "tests/unit/plan/plan_fixture.h"
#include "tests/unit/plan/random_case.h"

namespace spectrumkv {
namespace {

uint64_t Seed() {
  const char* text = std::getenv("SPECTRUMKV_SEED");
  return text == nullptr ? 20260711 : std::strtoull(text, nullptr, 10);
}

using Maps = std::vector<std::vector<uint8_t>>;  // [layers][tokens]

struct Planned {
  Maps maps;
  uint64_t counted = 0;  // what the budget counts
};

Planned PlanCase(const RandomCase& c, absl::Status* status) {
  Planned planned;
  auto planner = Planner::Create(c.policy, c.layers, c.tokens);
  *status = planner.status();
  if (!planner.ok()) return planned;
  const auto batch = planner->Plan(AllChunks(*planner), c.scan);
  *status = batch.status();
  if (!batch.ok()) return planned;
  planned.maps.resize(c.layers.size());
  for (const PlannedChunk& chunk : batch->chunks) {
    const PlanLayer& layer = c.layers[chunk.cut.layer_index];
    std::vector<uint8_t>& map = planned.maps[chunk.cut.layer_index];
    map.insert(map.end(), chunk.tier_map.begin(), chunk.tier_map.end());
    const ChunkDims dims = DimsOf(layer, chunk.cut.token_count);
    const TierCounts counts = CountTiers(chunk.tier_map.data(), chunk.cut.token_count, layer.has_v);
    EXPECT_EQ(chunk.chunk_bytes, ChunkBytes(dims, counts));
    planned.counted += CountedBytes(dims, counts, c.policy.payload_only);
  }
  return planned;
}

// The definition, with real numbers: weight of each (layer, plane, token).
struct Cell {
  size_t layer;
  uint32_t token;
  bool is_k;
  double weight;
};

std::vector<Cell> Cells(const RandomCase& c) {
  std::vector<Cell> cells;
  for (size_t l = 0; l < c.layers.size(); ++l) {
    if (c.layers[l].raw_only) continue;
    std::vector<double> importance(c.tokens);
    const uint32_t first = std::min(c.policy.sinks, c.tokens);
    double sum = 0;
    for (uint32_t t = 0; t < c.tokens; ++t) {
      const size_t at = c.policy.scores_per_layer ? l * c.tokens + t : t;
      importance[t] = c.policy.importance == ImportanceSource::kScores ? double{c.policy.scores[at]} : 1;
      importance[t] *= std::exp(-c.policy.decay_lambda * (static_cast<double>(c.tokens) - t));
      if (t >= first) sum += importance[t];
    }
    const double mean = sum / (c.tokens - first);
    for (const bool is_k : {true, false}) {
      if (!is_k && !c.layers[l].has_v) continue;
      const std::vector<uint8_t>& spread = is_k ? c.scan[l].k_spread : c.scan[l].v_spread;
      const std::vector<float>& layer_weights = c.policy.profile.layer_weights;
      double energy_sum = 0;
      const size_t begin = cells.size();
      for (uint32_t t = first; t < c.tokens; ++t) {
        const double energy = std::exp2(((spread.empty() ? 128 : spread[t]) - 128) / 4.0);
        cells.push_back({l, t, is_k, (sum > 0 ? importance[t] / mean + 0.1 : 1) * energy});
        energy_sum += cells.back().weight;
      }
      for (size_t i = begin; i < cells.size(); ++i) {
        cells[i].weight *= (c.tokens - first) / energy_sum * (is_k ? c.policy.profile.k_weight : 1) *
                           (layer_weights.empty() ? 1.0 : double{layer_weights[l]});
      }
    }
  }
  return cells;
}

double Distortion(const RandomCase& c, const std::vector<Cell>& cells, const Maps& maps) {
  double sum = 0;
  for (const Cell& cell : cells) {
    const uint8_t byte = maps[cell.layer][cell.token];
    sum += cell.weight * TierError(cell.is_k ? TierOfK(byte) : TierOfV(byte), c.layers[cell.layer].head_dim);
  }
  return sum;
}

// The planner's own measure of finished maps.
double Measure(const RandomCase& c, const Maps& maps) {
  std::vector<TokenWeights> weights;
  std::vector<uint32_t> positions(c.tokens);
  std::iota(positions.begin(), positions.end(), 0);
  const bool scored = c.policy.importance == ImportanceSource::kScores;
  for (size_t l = 0; l < (scored && c.policy.scores_per_layer ? c.layers.size() : 1); ++l) {
    std::vector<double> keys =
        ImportanceKeys(c.policy, c.tokens, positions, {c.policy.scores.data() + l * c.tokens, c.tokens, 0},
                       std::vector<double>(c.tokens, 128));
    weights.push_back(WeightsOfKeys(keys, !scored || c.policy.decay_lambda != 0, std::min(c.policy.sinks, c.tokens)));
  }
  Unit unit{{0, c.tokens}, std::vector<uint32_t>(c.layers.size())};
  std::iota(unit.layers.begin(), unit.layers.end(), 0);
  const Ladder ladder = LadderOf(c.policy);
  const CostRules rules{&ladder, c.policy.sinks, c.policy.payload_only};
  std::vector<uint8_t> joined;
  for (const std::vector<uint8_t>& map : maps) joined.insert(joined.end(), map.begin(), map.end());
  return OptimalPlan({&c.layers, &unit, &rules, &c.policy.tiers, &c.policy.profile, &c.scan, &weights, 0})
      .Distortion(joined);
}

double Share(uint64_t bytes, const RandomCase& c) {
  TransferShape shape;
  shape.token_count = c.tokens;
  shape.layers = c.layers;
  return (static_cast<double>(bytes) + 0.5) / static_cast<double>(KvBytesOf(shape));
}

RandomCase MakeOptimal(CaseMaker* maker) {
  RandomCase c = maker->Make({Allocator::kOptimal});
  // MeanEnergyLog2 is the planner's, and would have to be repeated here.
  if (c.policy.importance == ImportanceSource::kKeyNorm) c.policy.importance = ImportanceSource::kNone;
  return c;
}

// What a layer's chunk costs, centres always counted where a rotated tier is allowed: that a map without any rotated
// key saves them is left to the comparison with the ladder.
uint64_t CostWithCentres(const RandomCase& c, size_t layer, const std::vector<uint8_t>& map) {
  const ChunkDims dims = DimsOf(c.layers[layer], c.tokens);
  const TierCounts counts = CountTiers(map.data(), c.tokens, dims.has_v);
  uint64_t bytes = CountedBytes(dims, counts, c.policy.payload_only);
  const auto rotated = std::find_if(c.policy.tiers.begin(), c.policy.tiers.end(), IsRotated);
  if (c.policy.payload_only || rotated == c.policy.tiers.end()) return bytes;
  TierCounts with = counts;
  ++with.k[static_cast<size_t>(*rotated)];
  const ChunkLayout layout = LayoutOf(dims, with), own = LayoutOf(dims, counts);
  return bytes + layout.centre_scales.bytes + layout.centre_codes.bytes - own.centre_scales.bytes -
         own.centre_codes.bytes;
}

// Lowest distortion of all tier maps within `budget_bytes`, every one tried.
double BruteForce(const RandomCase& c, const std::vector<Cell>& cells, uint64_t budget_bytes) {
  Maps maps(c.layers.size(), std::vector<uint8_t>(c.tokens, TierMapByte(Tier::kRaw, Tier::kRaw)));
  std::vector<size_t> pick(cells.size(), 0);
  double best = std::numeric_limits<double>::infinity();
  for (;;) {
    for (size_t i = 0; i < cells.size(); ++i) {
      uint8_t& byte = maps[cells[i].layer][cells[i].token];
      const Tier tier = c.policy.tiers[pick[i]];
      byte = cells[i].is_k ? TierMapByte(tier, TierOfV(byte)) : TierMapByte(TierOfK(byte), tier);
    }
    uint64_t bytes = 0;
    for (size_t l = 0; l < c.layers.size(); ++l) bytes += CostWithCentres(c, l, maps[l]);
    if (bytes <= budget_bytes) best = std::min(best, Distortion(c, cells, maps));
    size_t i = 0;
    while (i < pick.size() && ++pick[i] == c.policy.tiers.size()) pick[i++] = 0;
    if (i == pick.size()) return best;
  }
}

TEST(Optimal, IsWithinOneCellOfBruteForce) {
  CaseMaker maker(Seed());
  int planned = 0;
  for (int round = 0; round < 800; ++round) {
    RandomCase c = MakeOptimal(&maker);
    // One geometry without padding, and few enough cells: at most 5^7 maps.
    c.layers = Layers(1 + maker.Below(2), 16, maker.Pick<uint32_t>({64, 128}));
    c.tokens = c.layers.size() == 1 ? 1 + maker.Below(3) : 1;
    c.policy.tiers.resize(std::min<size_t>(c.policy.tiers.size(), 5));
    c.policy.sinks = maker.Below(2);
    if (c.policy.importance == ImportanceSource::kPosition) c.policy.importance = ImportanceSource::kNone;
    c.policy.scores_per_layer = false;
    c.policy.scores.resize(c.tokens, 1);
    c.policy.profile = {};
    c.scan.assign(c.layers.size(), {});
    for (LayerScan& scan : c.scan) maker.MakeSpreads(c.tokens, true, &scan);
    absl::Status status;
    const Planned plan = PlanCase(c, &status);
    if (!status.ok()) {
      ASSERT_EQ(ReasonOf(status), "BUDGET_TOO_SMALL");
      continue;
    }
    ++planned;
    const std::vector<Cell> cells = Cells(c);
    if (cells.empty()) continue;
    TransferShape shape;
    shape.token_count = c.tokens;
    shape.layers = c.layers;
    const uint64_t budget = static_cast<uint64_t>(c.policy.budget * static_cast<double>(KvBytesOf(shape)));
    ASSERT_LE(plan.counted, budget);
    const double heaviest = std::max_element(cells.begin(), cells.end(), [](const Cell& a, const Cell& b) {
                              return a.weight < b.weight;
                            })->weight;
    double worst = 0;
    for (const Tier tier : c.policy.tiers) worst = std::max(worst, TierError(tier, c.layers[0].head_dim));
    const double best = BruteForce(c, cells, budget), got = Distortion(c, cells, plan.maps);
    // Weights and gains are rounded to parts of 256 of a doubling.
    ASSERT_LE(got, 1.01 * (best + heaviest * worst)) << round << " budget " << c.policy.budget;
  }
  EXPECT_GT(planned, 200);
}

TEST(Optimal, IsNeverWorseThanGreedyAtTheSameBytes) {
  CaseMaker maker(Seed() + 1);
  int compared = 0, better = 0;
  for (int round = 0; round < 3000; ++round) {
    RandomCase c = MakeOptimal(&maker);
    if (c.policy.scores_per_layer) continue;
    c.policy.profile.layer_budgets.clear();
    RandomCase greedy = c;
    greedy.policy.allocator = Allocator::kGreedy;
    absl::Status status;
    const Planned theirs = PlanCase(greedy, &status);
    if (!status.ok()) continue;
    c.policy.budget = Share(theirs.counted, c);
    if (c.policy.budget > kMaxBudget) continue;
    const Planned ours = PlanCase(c, &status);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_LE(ours.counted, theirs.counted);
    const double our_distortion = Measure(c, ours.maps), their_distortion = Measure(c, theirs.maps);
    ASSERT_LE(our_distortion, their_distortion * (1 + 1e-12)) << round;
    ++compared;
    better += our_distortion < their_distortion * 0.99;
  }
  EXPECT_GT(compared, 500);
  EXPECT_GT(better, compared / 5);
}

TEST(Optimal, ALargerBudgetIsNeverWorse) {
  CaseMaker maker(Seed() + 2);
  int compared = 0;
  for (int round = 0; round < 1500; ++round) {
    RandomCase c = MakeOptimal(&maker);
    double before = std::numeric_limits<double>::infinity();
    uint64_t kv_bytes = 0;
    for (const PlanLayer& layer : c.layers) kv_bytes += KvBytes(DimsOf(layer, c.tokens));
    const bool fine = maker.Chance(0.5);  // byte by byte
    for (int step = 0; step < 12; ++step) {
      c.policy.budget += fine ? (1.0 + maker.Below(40)) / static_cast<double>(kv_bytes) : 0.01 * (1 + maker.Below(10));
      absl::Status status;
      const Planned plan = PlanCase(c, &status);
      if (!status.ok()) continue;
      const double distortion = Measure(c, plan.maps);
      ASSERT_LE(distortion, before * (1 + 1e-12)) << round << " " << step;
      before = distortion;
      ++compared;
    }
  }
  EXPECT_GT(compared, 5000);
}

// Many cells: no comparison with the ladder, and the budget is used up to a few cells.
TEST(Optimal, LargeTransfersUseTheirBudget) {
  CaseMaker maker(Seed() + 3);
  for (const uint32_t heads : {8u, 3u}) {
    RandomCase c;
    c.layers = Layers(24, heads, 64);
    c.tokens = 3000;
    c.policy.allocator = Allocator::kOptimal;
    c.policy.importance = ImportanceSource::kScores;
    for (uint32_t t = 0; t < c.tokens; ++t) c.policy.scores.push_back(1.0f / static_cast<float>(1 + maker.Below(1000)));
    c.scan.resize(c.layers.size());
    for (LayerScan& scan : c.scan) maker.MakeSpreads(c.tokens, true, &scan);
    double before = std::numeric_limits<double>::infinity();
    for (const double budget : {0.16, 0.2, 0.3, 0.5, 0.9}) {
      c.policy.budget = budget;
      c.policy.allocator = Allocator::kOptimal;
      absl::Status status;
      const Planned ours = PlanCase(c, &status);
      ASSERT_TRUE(status.ok()) << status;
      const double used = Share(ours.counted, c);
      EXPECT_LE(used, budget + 1e-6);
      EXPECT_GT(used, budget * 0.999);
      c.policy.allocator = Allocator::kGreedy;
      const Planned theirs = PlanCase(c, &status);
      ASSERT_TRUE(status.ok()) << status;
      const double distortion = Measure(c, ours.maps);
      EXPECT_LT(distortion, 0.9 * Measure(c, theirs.maps));
      EXPECT_LT(distortion, before);
      before = distortion;
    }
  }
}

// A source that grows layer by layer: each layer is planned when only it and those before exist.
TEST(Optimal, LayersArePlannedAsTheyCome) {
  CaseMaker maker(Seed() + 4);
  RandomCase c;
  c.layers = Layers(8, 8, 128);
  c.tokens = 600;
  c.policy.allocator = Allocator::kOptimal;
  c.policy.importance = ImportanceSource::kNone;
  c.policy.budget = 0.3;
  c.policy.profile.layer_budgets = {2, 1, 1, 1, 1, 1, 1, 1};
  auto planner = Planner::Create(c.policy, c.layers, c.tokens);
  ASSERT_TRUE(planner.ok());
  std::vector<LayerScan> scan(c.layers.size());
  std::vector<uint64_t> bytes(c.layers.size());
  for (uint32_t l = 0; l < c.layers.size(); ++l) {
    maker.MakeSpreads(c.tokens, true, &scan[l]);  // later layers have none yet
    std::vector<uint32_t> chunks;
    for (const ChunkCut& cut : planner->cuts()) {
      if (cut.layer_index == l) chunks.push_back(cut.chunk_index);
    }
    const auto batch = planner->Plan(chunks, scan);
    ASSERT_TRUE(batch.ok()) << batch.status();
    bytes[l] = batch->wire_bytes;
  }
  const uint64_t raw = KvBytesOf(planner->shape()) / c.layers.size();
  EXPECT_LE(std::accumulate(bytes.begin(), bytes.end(), uint64_t{0}), raw * 8 * 3 / 10);
  EXPECT_GT(bytes[0], bytes[1] * 5 / 4);
  for (uint32_t l = 2; l < c.layers.size(); ++l) {
    EXPECT_NEAR(static_cast<double>(bytes[l]), static_cast<double>(bytes[1]), 0.01 * static_cast<double>(raw));
  }
}

TEST(Optimal, HullsAreConvex) {
  CaseMaker maker(Seed() + 5);
  for (uint32_t head_dim = 8; head_dim <= kMaxHeadDim; head_dim += 8) {
    for (const DType dtype : {DType::kFloat16, DType::kFloat32}) {
      RandomCase c = maker.Make({Allocator::kOptimal});
      const PlanLayer layer{0, 0, 3, head_dim, dtype, true, false};
      const TierHull hull = HullOf(c.policy.tiers, layer, c.policy.payload_only);
      double error = hull.error[static_cast<size_t>(hull.lowest)];
      for (size_t i = 0; i < hull.upgrades.size(); ++i) {
        const Upgrade& up = hull.upgrades[i];
        ASSERT_GT(up.bytes, 0u);
        ASSERT_LT(hull.error[static_cast<size_t>(up.to)], error);
        error = hull.error[static_cast<size_t>(up.to)];
        // The measure agrees with the table.
        ASSERT_NEAR(error, TierError(up.to, head_dim), 0.005 * hull.error[static_cast<size_t>(hull.lowest)]);
        if (i > 0) {
          ASSERT_LT(up.gain, hull.upgrades[i - 1].gain);
          ASSERT_GE(up.bytes, hull.upgrades[i - 1].bytes);
        }
      }
    }
  }
}

// A profile that knows a tier to be bad keeps OPTIMAL from it, in its plane alone.
TEST(Optimal, MeasuredErrorsReplaceTheTable) {
  RandomCase c;
  c.layers = Layers(2);
  c.tokens = 300;
  c.policy.allocator = Allocator::kOptimal;
  c.policy.importance = ImportanceSource::kNone;
  c.policy.budget = 0.3;
  const auto totals_of = [&c] {
    auto planner = Planner::Create(c.policy, c.layers, c.tokens);
    EXPECT_TRUE(planner.ok()) << planner.status();
    std::vector<uint32_t> all(planner->cuts().size());
    std::iota(all.begin(), all.end(), 0);
    return planner->Plan(all, {})->totals;
  };
  const size_t q4 = static_cast<size_t>(Tier::kQ4), q8 = static_cast<size_t>(Tier::kQ8);
  const TierTotals table = totals_of();
  EXPECT_GT(table.k[q4], 0u);
  c.policy.profile.k_errors[q4] = 0.9;  // worse than Q2
  const TierTotals measured = totals_of();
  EXPECT_EQ(measured.k[q4], 0u);
  EXPECT_GT(measured.v[q4] + measured.v[q8], 0u);
  c.policy.profile.k_errors[q4] = -1;
  EXPECT_EQ(ReasonOf(CheckPolicy(c.policy, c.tokens, 2)), "INVALID_PROFILE");
  c.policy.profile.k_errors[q4] = NAN;
  EXPECT_EQ(ReasonOf(CheckPolicy(c.policy, c.tokens, 2)), "INVALID_PROFILE");
}

TEST(Optimal, EscapedCellsAreLeftAlone) {
  RandomCase c;
  c.layers = Layers(2);
  c.tokens = 300;
  c.policy.allocator = Allocator::kOptimal;
  c.policy.importance = ImportanceSource::kNone;
  c.policy.budget = 0.3;
  c.scan.resize(2);
  for (LayerScan& scan : c.scan) {
    scan.k.resize(c.tokens);
    scan.v.resize(c.tokens);
    scan.k_spread.assign(c.tokens, 128);
    scan.v_spread.assign(c.tokens, 128);
    scan.k[50] = {kEscapeRotated, 255};
    scan.k_spread[50] = 255;  // would drown all others
    scan.v[51] = {kEscapeNonFinite, 255};
  }
  absl::Status status;
  const Planned plan = PlanCase(c, &status);
  ASSERT_TRUE(status.ok()) << status;
  for (const std::vector<uint8_t>& map : plan.maps) {
    EXPECT_EQ(TierOfK(map[50]), Tier::kRaw);
    EXPECT_EQ(TierOfV(map[51]), Tier::kRaw);
    EXPECT_NE(TierOfV(map[50]), Tier::kRaw);
    EXPECT_TRUE(TierOfK(map[200]) == Tier::kQ4 || TierOfK(map[200]) == Tier::kQ3);
  }
}

}  // namespace
}  // namespace spectrumkv
