// The planner: which tier each token travels at, and exactly how many bytes that is. Pure: no clock, no I/O, the same
// input gives the same output on every machine. Sources: the SpectrumKV paper (arXiv 2606.08635) for the allocators
// (docs/allocators.md has the formulas), proto/WIRE_FORMAT.md section "Size" for bytes and chunk cuts.
//
// A transfer is planned in batches: once for a source that is complete, or batch by batch (whole chunks) as a
// layer-wise source advances. Planner keeps what was spent, so that the whole stays within one budget.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/codec/backend.h"
#include "kernels/format/chunk.h"

namespace spectrumkv {

enum class Allocator {
  kOptimal,
  kGreedy,
  kSinkProtect,
  kBalanced,
  kTwoTier,
  kUniform,
  kRandom,
  kPdTrim,
  kSlidingWindowSink,
  kRaw
};
enum class ImportanceSource { kScores, kPosition, kKeyNorm, kNone, kRecentQueries };

// "GREEDY", ...; and back (InvalidArgument names the value).
const char* AllocatorName(Allocator allocator);
absl::StatusOr<Allocator> ParseAllocator(const std::string& name);
const char* ImportanceSourceName(ImportanceSource source);
absl::StatusOr<Tier> ParseTier(const std::string& name);

// Above what any transfer can need: K of one token of one head of 8 float16 values costs 9 times its raw bytes, everything
// else less. What lies higher is a mistake, such as a percentage.
constexpr double kMaxBudget = 10;
// What auto_target_seconds may be at most. What takes longer is no transfer that somebody waits for.
constexpr double kMaxTargetSeconds = 3600;

// How a model takes errors, for OPTIMAL. What is empty or left alone suits every model.
struct ModelProfile {
  std::string name = "default";
  double k_weight = 3.4;             // of an error in K against one in V; in [0.001, 1000]
  std::vector<float> layer_weights;  // [layers] of an error in each layer; in [0.001, 1000]; empty: all 1
  // [layers] how much of what the budget has to spare goes to each layer, for each of its raw bytes; in [0.001,
  // 1000]; empty: all 1. So a layer can be planned before the later ones exist.
  std::vector<float> layer_budgets;
  // Relative squared error of each tier, by tier id; 0: TierError (distortion.h). In [1e-12, 1000].
  std::array<double, kTierCount> k_errors{}, v_errors{};
};

// What the quality gate (server/probe) made of a policy.
enum class GateAction { kOpen, kWarned, kOverridden, kNarrowed };
struct GateOutcome {
  GateAction action = GateAction::kOpen;
  // Tiers that are closed to the model and were, or without the gate would be, in use. With kNarrowed the planner
  // refuses them.
  std::vector<Tier> closed;
};

// Resolved policy: no "default" left in it.
struct Policy {
  double budget = 0.5;  // of raw KV bytes, hard, everything counted; in (0, kMaxBudget]
  // The request left the budget open: where `budget` cannot be met (a short prompt whose pinned sinks cost more, RAW) it
  // is raised to the least that can, instead of BUDGET_TOO_SMALL. Not for allocators that drop.
  bool soft_budget = false;
  // Above 0: whoever starts the transfer replaces this by a budget chosen for the time (server/transfer/predict.h); the
  // planner itself takes `budget`. `auto_min_budget` is the smallest that may be chosen.
  double auto_target_seconds = 0;
  double auto_min_budget = 0.2;
  Allocator allocator = Allocator::kGreedy;
  Tier uniform_tier = Tier::kQ4;
  uint64_t random_seed = 0;
  std::vector<Tier> tiers = {Tier::kRaw, Tier::kQ8, Tier::kQ4, Tier::kQ3, Tier::kQ2};
  bool allow_drop = false;  // DROP was named in the policy's tiers
  ImportanceSource importance = ImportanceSource::kPosition;
  std::vector<float> scores;      // [tokens], or [layers * tokens] layer-major
  bool scores_per_layer = false;  // layers in ascending layer index over all groups
  double decay_lambda = 0;
  uint32_t sinks = 4;
  bool strict_budget = false;
  bool payload_only = false;
  ModelProfile profile;
  GateOutcome gate;
};

// Tiers that the policy's allocator may give a token, in no order: of `tiers`, or the one it has. Of any policy.
std::vector<Tier> TiersInUse(const Policy& policy);
// Are there tiers enough: at least one, and P8 or Q8 for TWO_TIER?
bool HasTiersFor(Allocator allocator, const std::vector<Tier>& tiers);

// Finite budget in range, tiers not empty and unique, scores finite and non-negative and of the right length (given
// at all where they are the source of importance), lambda finite and >= 0, an 8-bit tier for TWO_TIER; where the budget
// is to be chosen, a target and a least budget in range, no payload_only and an allocator that is BudgetDecides.
// InvalidArgument otherwise, with reasons INVALID_BUDGET, INVALID_TIERS, INVALID_SCORES, INVALID_DECAY, INVALID_POLICY,
// INVALID_PROFILE; the message names field, value and limit. FailedPrecondition QUALITY_GATE_CLOSED where a tier in use is
// closed to the model and neither the gate nor the policy lets that pass. UNIFORM and RAW use their tier whether or not `tiers` lists it.
absl::Status CheckPolicy(const Policy& policy, uint32_t tokens, uint32_t layers);

// Must the whole source be looked at to choose the tokens that travel? Key norms of those that may be dropped, or what
// queries attend to in them; escapes that TWO_TIER has to pay for before it drops, unless the source is written layer by layer.
bool ScanChooses(const Policy& policy, bool layerwise);

// Are there scores to go by? With RECENT_QUERIES they are what the queries attended to, and may come later.
bool ByScores(const Policy& policy);

// Does the budget alone decide how many bytes travel? Not where the allocator has one tier, or drops.
bool BudgetDecides(Allocator allocator);

// One layer of the source.
struct PlanLayer {
  uint16_t group = 0;
  uint16_t layer = 0;  // index in the model
  uint32_t heads = 0;
  uint32_t head_dim = 0;
  DType dtype = DType::kFloat16;
  bool has_v = true;
  bool raw_only = false;  // no lossy codec was validated for this group (MLA)
  uint32_t window_tokens = 0;  // that a query sees; 0: all before it. Not read by the planner
};

struct TokenRange {
  uint32_t first = 0;
  uint32_t count = 0;
  friend bool operator==(const TokenRange&, const TokenRange&) = default;
};

// What both sides know before the first chunk: enough to list every chunk.
struct TransferShape {
  uint32_t token_count = 0;       // of the request
  std::vector<TokenRange> kept;   // tokens that travel, ascending, disjoint, not touching
  std::vector<PlanLayer> layers;  // ascending layer index
  // Of a refinement (refine.h): the tokens of each layer that travel, in place of `kept`, which is then all.
  std::vector<std::vector<TokenRange>> strips;
  uint32_t kept_count() const;
  const std::vector<TokenRange>& ranges_of(size_t layer_index) const {
    return strips.empty() ? kept : strips[layer_index];
  }
  uint32_t tokens_of(size_t layer_index) const;
};
uint32_t CountTokens(const std::vector<TokenRange>& ranges);
// Each token of `ranges`, in their order.
std::vector<uint32_t> PositionsOf(const std::vector<TokenRange>& ranges);
// One token more, behind all others.
void AppendToken(std::vector<TokenRange>* ranges, uint32_t token);
// PositionsOf backwards. REQUIRES: ascending.
std::vector<TokenRange> RangesOf(const std::vector<uint32_t>& positions);

// Calls fn(position, count, offset) for each run of positions behind tokens [first, first + count) of `ranges`.
template <typename Fn>
void ForEachRun(const std::vector<TokenRange>& ranges, uint32_t first, uint32_t count, Fn fn) {
  uint32_t before = 0;
  uint32_t done = 0;
  for (const TokenRange& run : ranges) {
    if (done == count) return;
    const uint32_t at = first + done;
    if (at < before + run.count) {
      const uint32_t skip = at - before;
      const uint32_t n = std::min(run.count - skip, count - done);
      fn(run.first + skip, n, done);
      done += n;
    }
    before += run.count;
  }
}

// One chunk of the cut: layers[layer_index], kept tokens [token_first, token_first + token_count) counted in kept
// tokens. chunk_index is its place in the list (layer by layer, tokens ascending).
struct ChunkCut {
  uint32_t chunk_index = 0;
  uint32_t layer_index = 0;
  uint32_t token_first = 0;
  uint32_t token_count = 0;
};
std::vector<ChunkCut> CutChunks(const TransferShape& shape);
// Raw bytes of the whole request, dropped tokens included: what the budget is a share of.
uint64_t KvBytesOf(const TransferShape& shape);
ChunkDims DimsOf(const PlanLayer& layer, uint32_t tokens);

// What the scan stage found in one layer, for kept tokens [0, kept_count); entries outside the planned chunks are not
// read. Empty vectors: no escapes, no key norms; all spreads alike.
struct LayerScan {
  std::vector<TokenScan> k;
  std::vector<TokenScan> v;
  std::vector<uint8_t> k_spread;  // Backend::Spread, that of K centred; read by OPTIMAL
  std::vector<uint8_t> v_spread;
};

// A chunk with its tiers.
struct PlannedChunk {
  ChunkCut cut;
  std::vector<uint8_t> tier_map;  // [token_count], escapes already applied
  uint64_t chunk_bytes = 0;       // exact
};

struct TierTotals {
  std::array<uint64_t, kTierCount> k{};  // (layer, token) pairs by tier id
  std::array<uint64_t, kTierCount> v{};
};

struct PlanBatch {
  std::vector<PlannedChunk> chunks;
  uint64_t wire_bytes = 0;
  uint64_t kv_bytes = 0;
  uint64_t escaped = 0;               // (layer, token, plane) forced to RAW
  uint64_t escape_overrun_bytes = 0;  // above what the budget had left for this batch, forced by escapes
  TierTotals totals;
};

// Plans one transfer. Not thread-safe. Usage: Create; kept() is final from then on; Plan batches until every chunk of
// CutChunks(shape()) was planned once.
class Planner {
 public:
  // `policy` is checked here (CheckPolicy). Decides which tokens travel: all, unless the policy drops.
  // Errors: those of CheckPolicy; INVALID_SHAPE; BUDGET_TOO_SMALL (metadata least_budget) when even the lowest allowed
  // tiers cannot meet the budget, escapes not counted; DROP_NOT_ALLOWED when the allocator must drop but allow_drop
  // is false; KEY_NORM_UNAVAILABLE when it must drop by a KEY_NORM it does not have.
  // `full_scan` (one entry per layer, token_count tokens each) may be null; where the allocator drops tokens it is
  // read for KEY_NORM importance and so that escapes find room in the budget.
  static absl::StatusOr<Planner> Create(Policy policy, std::vector<PlanLayer> layers, uint32_t token_count,
                                        const std::vector<LayerScan>* full_scan = nullptr);

  // A refinement: what `shape.strips` names travels at `tier`, escapes and layers that are RAW alone aside; there is no
  // budget. INVALID_SHAPE.
  static absl::StatusOr<Planner> CreateFixed(TransferShape shape, Tier tier);

  ~Planner();
  Planner(Planner&&) noexcept;
  Planner& operator=(Planner&&) noexcept;

  const TransferShape& shape() const { return shape_; }
  const std::vector<ChunkCut>& cuts() const { return cuts_; }
  // The budget that holds: policy.budget, or what a soft one was raised to.
  double effective_budget() const;
  // Positions that do not travel.
  std::vector<TokenRange> dropped() const;

  // Scores known later (Advance): replace the importance used for batches planned from now on; [n] for tokens
  // 0..n-1, the others count as their mean. INVALID_SCORES as in CheckPolicy.
  absl::Status SetScores(const std::vector<float>& scores);

  // The same by layer: [layers * tokens], as Policy::scores, computed from recent queries.
  absl::Status SetAttention(std::vector<float> scores);

  // Where importance comes from in what is planned from now on: policy.importance or what replaced it; RECENT_QUERIES without
  // scores yet are NONE for OPTIMAL and POSITION for others.
  ImportanceSource importance() const;

  // [token_count] how much each token matters by that, 0 for those that do not travel; by layer, the mean. Empty where no
  // token matters more than another, or that cannot be known. `scan`: as for Plan, read for KEY_NORM.
  std::vector<float> TokenImportance(const std::vector<LayerScan>& scan) const;

  // Plans the chunks of `chunk_indices` (ascending, each not planned before). `scan` has one entry per layer of the
  // shape. A batch may spend what its lowest tiers cost plus its part, by raw bytes, of what is left of the budget
  // above the lowest tiers of all that is unplanned: so a later batch without escapes can always be paid.
  // wire_bytes - escape_overrun_bytes, summed over all batches, never exceeds the budget.
  // Errors, after which nothing has changed: BUDGET_TOO_SMALL (a transfer planned as a whole, escapes counted; or
  // strict_budget); INVALID_BATCH (indices or scan do not fit the shape); KEY_NORM_UNAVAILABLE.
  absl::StatusOr<PlanBatch> Plan(const std::vector<uint32_t>& chunk_indices, const std::vector<LayerScan>& scan);

  // Takes back chunks that were planned and not sent: they may be planned once more, when escapes have come to light.
  // A transfer whose first batch was the whole stays a whole: its budget is as hard for the second plan. Returns their
  // part of PlanBatch::totals. REQUIRES: `chunks` ascending, as Plan returned them.
  TierTotals Withdraw(const std::vector<const PlannedChunk*>& chunks);

  // Smallest budget the allowed tiers can meet for the kept tokens in one batch, escapes of `scan` counted. Plan of
  // all chunks succeeds exactly where the policy's budget is not below it. REQUIRES: scan as in Plan, or empty.
  double LeastBudget(const std::vector<LayerScan>& scan) const;

 private:
  struct State;
  Planner();
  PlanBatch PlanFixed(const std::vector<uint32_t>& chunk_indices, const std::vector<LayerScan>& scan);
  TransferShape shape_;
  std::vector<ChunkCut> cuts_;
  std::unique_ptr<State> state_;
};

}  // namespace spectrumkv
