#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "server/base/status.h"
#include "server/plan/allocate.h"
#include "server/plan/budget.h"
#include "server/plan/cost.h"
#include "server/plan/drop.h"
#include "server/plan/emit.h"
#include "server/plan/importance.h"
#include "server/plan/ladder.h"
#include "server/plan/optimal.h"
#include "server/plan/plan.h"
#include "server/plan/units.h"

namespace spectrumkv {
namespace {

constexpr uint32_t kDefaultSinks = 4;
constexpr uint64_t kComparedCells = 1 << 16;
constexpr uint64_t kMaxChunks = 1 << 22;  // 4 TiB of raw KV in chunks of 1 MiB

absl::Status InvalidShape(const std::string& message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_SHAPE", message);
}

absl::Status InvalidBatch(const std::string& message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_BATCH", message);
}

absl::Status CheckShape(const std::vector<PlanLayer>& layers, uint32_t token_count) {
  if (token_count == 0) return InvalidShape("token_count is 0");
  if (layers.empty()) return InvalidShape("there are no layers");
  uint64_t chunks = 0;
  for (size_t l = 0; l < layers.size(); ++l) {
    const PlanLayer& layer = layers[l];
    const std::string name = "layer " + std::to_string(layer.layer);
    if (l != 0 && layer.layer <= layers[l - 1].layer) return InvalidShape(name + " is not above the one before it");
    if (layer.heads == 0 || layer.heads > kMaxHeads) {
      return InvalidShape(name + " has " + std::to_string(layer.heads) + " heads; 1 to 1024 are possible");
    }
    if (layer.head_dim == 0 || layer.head_dim % 8 != 0 || layer.head_dim > kMaxHeadDim) {
      return InvalidShape(name + " has head_dim " + std::to_string(layer.head_dim) +
                          "; a multiple of 8 up to 1024 is possible");
    }
    const uint32_t step = TokensPerChunk(layer.heads, layer.head_dim, layer.dtype, layer.has_v);
    chunks += (uint64_t{token_count} + step - 1) / step;
  }
  if (chunks <= kMaxChunks) return absl::OkStatus();
  return InvalidShape("token_count " + std::to_string(token_count) + " makes " + std::to_string(chunks) +
                      " chunks; the limit is " + std::to_string(kMaxChunks));
}

// Raw bytes that have a choice of tiers, times the budgets of their layers.
uint64_t WeightOf(const std::vector<PlanLayer>& layers, const Unit& unit, const Policy& policy) {
  constexpr float kUnits = 1024;
  uint64_t weight = 0;
  for (const uint32_t l : unit.layers) {
    if (layers[l].raw_only) continue;
    const uint64_t bytes = KvBytes(DimsOf(layers[l], unit.tokens.count));
    const bool profiled = policy.allocator == Allocator::kOptimal && !policy.profile.layer_budgets.empty();
    weight += profiled ? bytes * static_cast<uint64_t>(std::lround(kUnits * policy.profile.layer_budgets[l])) : bytes;
  }
  return weight;
}

uint64_t Part(uint64_t amount, uint64_t weight, uint64_t of) {
  if (of == 0 || weight >= of) return amount;
  return static_cast<uint64_t>(static_cast<unsigned __int128>(amount) * weight / of);
}

uint64_t Least(const std::vector<uint64_t>& values) { return *std::min_element(values.begin(), values.end()); }

Unit AllOf(const TransferShape& shape) {
  Unit all{{0, shape.kept_count()}, std::vector<uint32_t>(shape.layers.size())};
  std::iota(all.layers.begin(), all.layers.end(), 0);
  return all;
}

// Of the keys of a unit's tokens, where importance is read from them.
absl::StatusOr<std::vector<double>> EnergyOf(const Policy& policy, const std::vector<PlanLayer>& layers, const Unit& unit,
                                             const std::vector<LayerScan>& scan) {
  if (policy.importance != ImportanceSource::kKeyNorm || policy.allocator == Allocator::kRandom) return std::vector<double>();
  return MeanEnergyLog2(layers, unit.layers, &scan, unit.tokens);
}

// Of ImportanceKeys.
bool KeysAreLogarithms(const Policy& policy) { return !ByScores(policy) || policy.decay_lambda != 0; }

// Index of the 8-bit rung, or the one below the top.
size_t MiddleRung(const Policy& policy, const Ladder& ladder) {
  const Tier eight = EightBitTier(policy.tiers);
  for (size_t i = 0; i < ladder.size(); ++i) {
    if (eight != Tier::kRaw && ladder[i].k == eight) return i;
  }
  return ladder.size() < 2 ? 0 : ladder.size() - 2;
}

// A unit with its cost, and the least it can cost.
struct PricedUnit {
  Unit unit;
  CostModel model;
  uint64_t least = 0;
  uint64_t weight = 0;
};

}  // namespace

struct Planner::State {
  Policy policy;
  Ladder ladder;
  std::vector<uint32_t> positions;  // of the kept tokens
  uint32_t pinned = 0;              // kept tokens
  double rest_score = 0;            // of tokens that SetScores did not name
  std::vector<bool> planned;
  uint64_t kv_bytes = 0;
  uint64_t least_bytes = 0;  // of the kept tokens, escapes not counted
  // What is left of the budget, and for the chunks not planned yet: their cost by rung, escapes not counted, and
  // their raw bytes with a choice of tiers.
  uint64_t budget_left = 0;
  uint64_t budget_total = 0;
  std::vector<uint64_t> rest_by_rung;
  uint64_t weight_left = 0;
  size_t chunks_left = 0;
  bool whole = false;  // the first batch was everything
  std::optional<Tier> fixed;  // of a refinement

  CostRules rules() const { return {&ladder, pinned, policy.payload_only}; }
  bool per_layer() const {
    return ByScores(policy) && policy.scores_per_layer && policy.allocator != Allocator::kRandom && policy.allocator != Allocator::kOptimal;
  }
  // Of the unit's layer `slot` where scores are per layer.
  Scores ScoresOf(const Unit& unit, size_t slot, uint32_t tokens) const {
    if (ByScores(policy) && policy.scores_per_layer) {
      return {policy.scores.data() + uint64_t{unit.layers[slot]} * tokens, tokens, 0};
    }
    return {policy.scores.data(), static_cast<uint32_t>(std::min<uint64_t>(policy.scores.size(), tokens)), rest_score};
  }

  // keys: of the first layer; weights: see OptimalInput.
  Allocation AllocateOptimal(PricedUnit* priced, const std::vector<double>& keys,
                             const std::vector<TokenWeights>& weights, uint64_t share, const TransferShape& shape,
                             const std::vector<LayerScan>& scan) const;
  // REQUIRES: priced->least <= share.
  absl::StatusOr<Allocation> Allocate(PricedUnit* priced, uint64_t share, const TransferShape& shape,
                                      const std::vector<LayerScan>& scan) const;
};

namespace {

std::vector<PricedUnit> Price(const TransferShape& shape, std::vector<Unit> units, const CostRules& rules,
                              const Policy& policy, const std::vector<LayerScan>* scan) {
  std::vector<PricedUnit> priced;
  priced.reserve(units.size());
  for (Unit& unit : units) {
    CostModel model(shape.layers, unit, rules, scan);
    const uint64_t least = Least(model.BytesByRung());
    const uint64_t weight = WeightOf(shape.layers, unit, policy);
    priced.push_back({std::move(unit), std::move(model), least, weight});
  }
  return priced;
}

uint64_t SumOfLeast(const std::vector<PricedUnit>& units) {
  uint64_t sum = 0;
  for (const PricedUnit& unit : units) sum += unit.least;
  return sum;
}

absl::Status CheckBatch(const std::vector<uint32_t>& indices, const std::vector<bool>& planned,
                        const std::vector<LayerScan>& scan, const TransferShape& shape) {
  if (indices.empty()) return InvalidBatch("the batch has no chunks");
  for (size_t i = 0; i < indices.size(); ++i) {
    const std::string name = "chunk " + std::to_string(indices[i]);
    if (indices[i] >= planned.size())
      return InvalidBatch(name + " is not in the list of " + std::to_string(planned.size()));
    if (i != 0 && indices[i] <= indices[i - 1]) return InvalidBatch(name + " is not above the one before it");
    if (planned[indices[i]]) return InvalidBatch(name + " was planned before");
  }
  if (!scan.empty() && scan.size() != shape.layers.size()) {
    return InvalidBatch("the scan has " + std::to_string(scan.size()) + " layers, the shape " +
                        std::to_string(shape.layers.size()));
  }
  const uint32_t kept = shape.kept_count();
  for (const LayerScan& layer : scan) {
    const size_t sizes[] = {layer.k.size(), layer.v.size(), layer.k_spread.size(), layer.v_spread.size()};
    if (std::any_of(std::begin(sizes), std::end(sizes), [kept](size_t size) { return size != 0 && size < kept; })) {
      return InvalidBatch("the scan of a layer is shorter than the " + std::to_string(kept) + " kept tokens");
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Allocation> Planner::State::Allocate(PricedUnit* priced, uint64_t share, const TransferShape& shape,
                                                    const std::vector<LayerScan>& scan) const {
  const TokenRange tokens = priced->unit.tokens;
  if (ladder.size() == 1) return AllocateGreedy(&priced->model, 1, {}, 0, tokens.count, share);
  const absl::StatusOr<std::vector<double>> energy = EnergyOf(policy, shape.layers, priced->unit, scan);
  if (!energy.ok()) return energy.status();
  const auto keys_of = [&](size_t slot) {
    return ImportanceKeys(policy, shape.token_count, std::span(positions).subspan(tokens.first, tokens.count),
                          ScoresOf(priced->unit, slot, shape.token_count), *energy);
  };
  const std::vector<double> keys = keys_of(0);
  const uint32_t pinned_here = pinned > tokens.first ? std::min(pinned - tokens.first, tokens.count) : 0;
  if (policy.allocator == Allocator::kOptimal) {
    std::vector<TokenWeights> weights;
    const bool by_layer = ByScores(policy) && policy.scores_per_layer;
    for (size_t slot = 0; slot < (by_layer ? priced->unit.layers.size() : 1); ++slot) {
      weights.push_back(WeightsOfKeys(slot == 0 ? keys : keys_of(slot), KeysAreLogarithms(policy), pinned_here));
    }
    return AllocateOptimal(priced, keys, weights, share, shape, scan);
  }
  if (policy.allocator == Allocator::kBalanced) {
    const std::vector<uint32_t> order = OrderByImportance(keys, pinned_here);
    return AllocateBalanced(&priced->model, ladder.size(), MiddleRung(policy, ladder), order, tokens.count, share);
  }
  return AllocateGreedy(&priced->model, ladder.size(), keys, pinned_here, tokens.count, share);
}

Allocation Planner::State::AllocateOptimal(PricedUnit* priced, const std::vector<double>& keys,
                                           const std::vector<TokenWeights>& weights, uint64_t share,
                                           const TransferShape& shape, const std::vector<LayerScan>& scan) const {
  const CostRules cost_rules = rules();
  const OptimalPlan plan(
      {&shape.layers, &priced->unit, &cost_rules, &policy.tiers, &policy.profile, &scan, &weights, share});
  Allocation best;
  const bool fits = plan.Allocate(&best);
  if (fits && plan.cells() > kComparedCells) return best;
  // What padding and whole cells cost shows in small transfers: there the ladder may have the better answer.
  const uint32_t tokens = priced->unit.tokens.count;
  const uint32_t pinned_here = pinned > priced->unit.tokens.first ? pinned - priced->unit.tokens.first : 0;
  Allocation greedy = AllocateGreedy(&priced->model, ladder.size(), keys, std::min(pinned_here, tokens), tokens, share);
  for (size_t slot = 0; slot < priced->unit.layers.size(); ++slot) {
    const PlanLayer& layer = shape.layers[priced->unit.layers[slot]];
    for (uint32_t t = 0; t < tokens; ++t) {
      const Rung rung = layer.raw_only || t < pinned_here ? Rung{} : ladder[greedy.rungs[t]];
      greedy.tier_maps.push_back(TierMapByte(rung.k, layer.has_v ? rung.v : Tier::kRaw));
    }
  }
  greedy.rungs.clear();
  return fits && plan.Distortion(best.tier_maps) <= plan.Distortion(greedy.tier_maps) ? best : greedy;
}

Planner::Planner() = default;
Planner::~Planner() = default;
Planner::Planner(Planner&&) noexcept = default;
Planner& Planner::operator=(Planner&&) noexcept = default;

absl::StatusOr<Planner> Planner::Create(Policy policy, std::vector<PlanLayer> layers, uint32_t token_count,
                                        const std::vector<LayerScan>* full_scan) {
  if (absl::Status status = CheckShape(layers, token_count); !status.ok()) return status;
  if (absl::Status status = CheckPolicy(policy, token_count, static_cast<uint32_t>(layers.size())); !status.ok())
    return status;
  if (policy.allocator == Allocator::kSinkProtect && policy.sinks == 0) policy.sinks = kDefaultSinks;
  Planner planner;
  planner.state_ = std::make_unique<State>();
  State& state = *planner.state_;
  TransferShape& shape = planner.shape_;
  shape.token_count = token_count;
  shape.layers = std::move(layers);
  state.kv_bytes = KvBytesOf(shape);
  state.budget_total = state.budget_left = BudgetBytes(policy.budget, state.kv_bytes);
  state.ladder = LadderOf(policy);

  std::vector<float> mean;
  Scores scores{policy.scores.data(), token_count, 0};
  if (policy.scores_per_layer && !policy.scores.empty() && MayDrop(policy.allocator)) {
    mean = MeanOverLayers(policy.scores, token_count);
    scores.values = mean.data();
  }
  absl::StatusOr<std::vector<uint32_t>> kept = DecideKept(
      {&policy, &shape.layers, token_count, scores, full_scan, state.ladder, state.kv_bytes, state.budget_left});
  if (!kept.ok()) return kept.status();
  state.positions = *std::move(kept);
  shape.kept = RangesOf(state.positions);
  state.pinned = std::min(policy.sinks, token_count);
  state.policy = std::move(policy);
  planner.cuts_ = CutChunks(shape);
  state.planned.assign(planner.cuts_.size(), false);
  state.chunks_left = planner.cuts_.size();

  const Unit all = AllOf(shape);
  state.rest_by_rung = CostModel(shape.layers, all, state.rules(), nullptr).BytesByRung();
  state.weight_left = WeightOf(shape.layers, all, state.policy);
  state.least_bytes = Least(state.rest_by_rung);
  if (state.least_bytes > state.budget_left) {
    if (!state.policy.soft_budget) return BudgetTooSmall(state.policy.budget, state.least_bytes, state.kv_bytes);
    state.budget_total = state.budget_left = state.least_bytes;
  }
  return planner;
}

absl::StatusOr<Planner> Planner::CreateFixed(TransferShape shape, Tier tier) {
  if (shape.layers.empty() || shape.strips.size() != shape.layers.size()) return InvalidShape("there are no strips");
  Planner planner;
  planner.state_ = std::make_unique<State>();
  State& state = *planner.state_;
  state.fixed = tier;
  state.policy.importance = ImportanceSource::kNone;
  state.ladder = LadderOf(state.policy);
  planner.shape_ = std::move(shape);
  planner.cuts_ = CutChunks(planner.shape_);
  if (planner.cuts_.empty() || planner.cuts_.size() > kMaxChunks) {
    return InvalidShape("the strips make " + std::to_string(planner.cuts_.size()) + " chunks");
  }
  state.kv_bytes = KvBytesOf(planner.shape_);
  state.planned.assign(planner.cuts_.size(), false);
  return planner;
}

PlanBatch Planner::PlanFixed(const std::vector<uint32_t>& chunk_indices, const std::vector<LayerScan>& scan) {
  PlanBatch batch;
  Emitter emitter(shape_.layers, cuts_, chunk_indices, state_->rules(), &batch);
  for (const Unit& unit : SplitUnits(cuts_, chunk_indices, /*per_layer=*/true)) {
    const PlanLayer& layer = shape_.layers[unit.layers.front()];
    const Tier tier = layer.raw_only ? Tier::kRaw : *state_->fixed;
    Allocation allocation;
    allocation.tier_maps.assign(unit.tokens.count, TierMapByte(tier, layer.has_v ? tier : Tier::kRaw));
    emitter.Emit(unit, allocation, scan);
  }
  for (const uint32_t index : chunk_indices) state_->planned[index] = true;
  return batch;
}

std::vector<TokenRange> Planner::dropped() const {
  std::vector<TokenRange> dropped;
  uint32_t at = 0;
  for (const TokenRange& range : shape_.kept) {
    if (range.first > at) dropped.push_back({at, range.first - at});
    at = range.first + range.count;
  }
  if (at < shape_.token_count) dropped.push_back({at, shape_.token_count - at});
  return dropped;
}

absl::Status Planner::SetScores(const std::vector<float>& scores) {
  if (scores.empty() || scores.size() > shape_.token_count) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "INVALID_SCORES",
        "scores has " + std::to_string(scores.size()) + " values, expected 1 to " + std::to_string(shape_.token_count));
  }
  double sum = 0;
  for (size_t i = 0; i < scores.size(); ++i) {
    if (!std::isfinite(scores[i]) || scores[i] < 0) {
      return MakeError(
          absl::StatusCode::kInvalidArgument, "INVALID_SCORES",
          "scores[" + std::to_string(i) + "] is " + std::to_string(scores[i]) + "; scores are finite and not negative");
    }
    sum += scores[i];
  }
  Policy& policy = state_->policy;
  policy.importance = ImportanceSource::kScores;
  policy.scores = scores;
  policy.scores_per_layer = false;
  state_->rest_score = sum / static_cast<double>(scores.size());
  return absl::OkStatus();
}

absl::Status Planner::SetAttention(std::vector<float> scores) {
  Policy policy = state_->policy;
  policy.importance = ImportanceSource::kRecentQueries;
  policy.scores = std::move(scores);
  policy.scores_per_layer = true;
  if (absl::Status status = CheckPolicy(policy, shape_.token_count, static_cast<uint32_t>(shape_.layers.size()));
      !status.ok()) {
    return status;
  }
  state_->policy = std::move(policy);
  return absl::OkStatus();
}

ImportanceSource Planner::importance() const {
  return ByScores(state_->policy) ? state_->policy.importance : SourceInUse(state_->policy);
}

std::vector<float> Planner::TokenImportance(const std::vector<LayerScan>& scan) const {
  const State& state = *state_;
  const Policy& policy = state.policy;
  if (importance() == ImportanceSource::kNone || policy.allocator == Allocator::kRandom) return {};  // also where fixed
  std::vector<float> mean;
  Scores scores{policy.scores.data(), static_cast<uint32_t>(policy.scores.size()), state.rest_score};
  if (ByScores(policy) && policy.scores_per_layer) {
    mean = MeanOverLayers(policy.scores, shape_.token_count);
    scores = {mean.data(), shape_.token_count, 0};
  }
  const absl::StatusOr<std::vector<double>> energy = EnergyOf(policy, shape_.layers, AllOf(shape_), scan);
  if (!energy.ok()) return {};
  const std::vector<double> keys = ImportanceKeys(policy, shape_.token_count, state.positions, scores, *energy);
  const TokenWeights weights = WeightsOfKeys(keys, KeysAreLogarithms(policy), /*pinned=*/0);
  std::vector<float> importance(shape_.token_count, 0);
  for (size_t i = 0; i < state.positions.size(); ++i) importance[state.positions[i]] = weights.linear[i];
  return importance;
}

absl::StatusOr<PlanBatch> Planner::Plan(const std::vector<uint32_t>& chunk_indices,
                                        const std::vector<LayerScan>& scan) {
  State& state = *state_;
  if (absl::Status status = CheckBatch(chunk_indices, state.planned, scan, shape_); !status.ok()) return status;
  if (state.fixed.has_value()) return PlanFixed(chunk_indices, scan);
  const CostRules rules = state.rules();
  std::vector<uint64_t> rest = state.rest_by_rung;
  for (const Unit& unit : SplitUnits(cuts_, chunk_indices, /*per_layer=*/false)) {
    const std::vector<uint64_t> cost = CostModel(shape_.layers, unit, rules, nullptr).BytesByRung();
    for (size_t rung = 0; rung < rest.size(); ++rung) rest[rung] -= cost[rung];
  }
  std::vector<PricedUnit> units =
      Price(shape_, SplitUnits(cuts_, chunk_indices, state.per_layer()), rules, state.policy, &scan);
  const uint64_t reserved = Least(rest);  // for the chunks after this batch
  const uint64_t needed = SumOfLeast(units) + reserved;
  const bool whole = state.whole || chunk_indices.size() == cuts_.size();
  PlanBatch batch;
  if (needed > state.budget_left && whole && state.policy.soft_budget) {
    state.budget_total += needed - state.budget_left;
    state.budget_left = needed;
  }
  if (needed > state.budget_left) {
    const uint64_t spent = state.budget_total - state.budget_left;
    if (whole || state.policy.strict_budget) return BudgetTooSmall(state.policy.budget, spent + needed, state.kv_bytes);
    batch.escape_overrun_bytes = needed - state.budget_left;
  }
  uint64_t spare = needed > state.budget_left ? 0 : state.budget_left - needed;
  uint64_t weight_left = state.weight_left;
  uint64_t spent = 0;
  Emitter emitter(shape_.layers, cuts_, chunk_indices, rules, &batch);
  for (PricedUnit& priced : units) {
    const uint64_t share = priced.least + Part(spare, priced.weight, weight_left);
    absl::StatusOr<Allocation> allocation = state.Allocate(&priced, share, shape_, scan);
    if (!allocation.ok()) return allocation.status();
    spent += emitter.Emit(priced.unit, *allocation, scan);
    spare -= allocation->bytes - priced.least;
    weight_left -= priced.weight;
  }
  for (const uint32_t index : chunk_indices) state.planned[index] = true;
  state.whole = whole;
  state.rest_by_rung = std::move(rest);
  state.weight_left = weight_left;
  state.chunks_left -= chunk_indices.size();
  state.budget_left += batch.escape_overrun_bytes;
  state.budget_left -= spent;
  return batch;
}

TierTotals Planner::Withdraw(const std::vector<const PlannedChunk*>& chunks) {
  State& state = *state_;
  const CostRules rules = state.rules();
  TierTotals totals;
  std::vector<uint32_t> indices;
  for (const PlannedChunk* chunk : chunks) {
    indices.push_back(chunk->cut.chunk_index);
    state.planned[chunk->cut.chunk_index] = false;
    const PlanLayer& layer = shape_.layers[chunk->cut.layer_index];
    const TierCounts counts = CountTiers(chunk->tier_map.data(), chunk->cut.token_count, layer.has_v);
    state.budget_left += CountedBytes(DimsOf(layer, chunk->cut.token_count), counts, rules.payload_only);
    for (int tier = 0; tier < kTierCount; ++tier) {
      totals.k[tier] += counts.k[tier];
      totals.v[tier] += counts.v[tier];
    }
  }
  if (state.fixed.has_value()) return totals;
  for (const Unit& unit : SplitUnits(cuts_, indices, /*per_layer=*/false)) {
    const std::vector<uint64_t> cost = CostModel(shape_.layers, unit, rules, nullptr).BytesByRung();
    for (size_t rung = 0; rung < cost.size(); ++rung) state.rest_by_rung[rung] += cost[rung];
    state.weight_left += WeightOf(shape_.layers, unit, state.policy);
  }
  state.chunks_left += chunks.size();
  return totals;
}

double Planner::effective_budget() const {
  if (state_->fixed.has_value()) return 0;
  const double raised = static_cast<double>(state_->budget_total) / static_cast<double>(state_->kv_bytes);
  return state_->policy.soft_budget ? std::max(state_->policy.budget, raised) : state_->policy.budget;
}

double Planner::LeastBudget(const std::vector<LayerScan>& scan) const {
  std::vector<uint32_t> all(cuts_.size());
  std::iota(all.begin(), all.end(), 0);
  const std::vector<PricedUnit> units =
      Price(shape_, SplitUnits(cuts_, all, state_->per_layer()), state_->rules(), state_->policy, &scan);
  // In a chunk of one token an escape may be cheaper than a centre: Create's own check counts too.
  return LeastBudgetFor(std::max(SumOfLeast(units), state_->least_bytes), state_->kv_bytes);
}

}  // namespace spectrumkv
