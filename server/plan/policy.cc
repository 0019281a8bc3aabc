// Names of the policy's enums, and the checks of its values.
#include <algorithm>
#include <cmath>
#include <string>

#include "server/base/status.h"
#include "server/plan/ladder.h"
#include "server/plan/plan.h"

namespace spectrumkv {
namespace {

// Doubles, as where profiles are read: 0.001f is above 0.001, and what is accepted there must be here.
constexpr double kLeastProfileValue = 0.001, kMostProfileValue = 1000, kLeastProfileError = 1e-12;

struct NamedAllocator {
  Allocator allocator;
  const char* name;
};
constexpr NamedAllocator kAllocators[] = {
    {Allocator::kOptimal, "OPTIMAL"},
    {Allocator::kGreedy, "GREEDY"},
    {Allocator::kSinkProtect, "SINK_PROTECT"},
    {Allocator::kBalanced, "BALANCED"},
    {Allocator::kTwoTier, "TWO_TIER"},
    {Allocator::kUniform, "UNIFORM"},
    {Allocator::kRandom, "RANDOM"},
    {Allocator::kPdTrim, "PDTRIM"},
    {Allocator::kSlidingWindowSink, "SLIDING_WINDOW_SINK"},
    {Allocator::kRaw, "RAW"},
};

absl::Status Invalid(const std::string& reason, const std::string& message, const Metadata& metadata = {}) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason, message, metadata);
}

absl::Status CheckTiers(const Policy& policy) {
  if (policy.tiers.empty()) return Invalid("INVALID_TIERS", "policy.tiers is empty; at least one tier is needed");
  bool seen[kTierCount] = {};
  for (const Tier tier : policy.tiers) {
    const int id = static_cast<int>(tier);
    if (id >= kTierCount) return Invalid("INVALID_TIERS", "policy.tiers has the unknown tier id " + std::to_string(id));
    if (seen[id]) return Invalid("INVALID_TIERS", std::string("policy.tiers names ") + TierName(tier) + " twice");
    seen[id] = true;
  }
  if (policy.allocator == Allocator::kUniform && static_cast<int>(policy.uniform_tier) >= kTierCount) {
    return Invalid("INVALID_TIERS", "policy.uniform_tier is the unknown tier id " +
                                        std::to_string(static_cast<int>(policy.uniform_tier)));
  }
  if (!HasTiersFor(policy.allocator, policy.tiers)) {
    return Invalid("INVALID_TIERS", "policy.allocator TWO_TIER needs P8 or Q8 in policy.tiers");
  }
  return absl::OkStatus();
}

absl::Status CheckScores(const Policy& policy, uint32_t tokens, uint32_t layers) {
  if (policy.scores.empty()) {
    if (policy.importance != ImportanceSource::kScores) return absl::OkStatus();
    return Invalid("INVALID_SCORES", "policy.importance is SCORES but policy.scores is empty");
  }
  const uint64_t want = policy.scores_per_layer ? uint64_t{tokens} * layers : tokens;
  if (policy.scores.size() != want) {
    return Invalid("INVALID_SCORES",
                   "policy.scores has " + std::to_string(policy.scores.size()) + " values, expected " +
                       std::to_string(want) + (policy.scores_per_layer ? " (layers * tokens)" : " (tokens)"),
                   {{"given", std::to_string(policy.scores.size())}, {"expected", std::to_string(want)}});
  }
  for (size_t i = 0; i < policy.scores.size(); ++i) {
    if (std::isfinite(policy.scores[i]) && policy.scores[i] >= 0) continue;
    return Invalid("INVALID_SCORES",
                   "policy.scores[" + std::to_string(i) + "] is " + std::to_string(policy.scores[i]) +
                       "; scores are finite and not negative",
                   {{"index", std::to_string(i)}});
  }
  return absl::OkStatus();
}

absl::Status CheckAutoBudget(const Policy& policy) {
  if (policy.auto_target_seconds == 0) return absl::OkStatus();
  if (!(policy.auto_target_seconds > 0 && policy.auto_target_seconds <= kMaxTargetSeconds)) {
    return Invalid("INVALID_BUDGET",
                   "policy.auto_budget.target_seconds is " + std::to_string(policy.auto_target_seconds) +
                       "; it must be above 0 and at most " + std::to_string(static_cast<int>(kMaxTargetSeconds)),
                   {{"target_seconds", std::to_string(policy.auto_target_seconds)}});
  }
  if (!(policy.auto_min_budget > 0 && policy.auto_min_budget <= 1)) {
    return Invalid("INVALID_BUDGET",
                   "policy.auto_budget.min_budget is " + std::to_string(policy.auto_min_budget) +
                       "; it must be in (0, 1], a share of the raw bytes and no percentage",
                   {{"min_budget", std::to_string(policy.auto_min_budget)}});
  }
  if (policy.payload_only) {
    return Invalid("INVALID_POLICY", "policy.auto_budget goes by wire bytes: not with policy.payload_only");
  }
  if (BudgetDecides(policy.allocator)) return absl::OkStatus();
  return Invalid("INVALID_POLICY",
                 std::string("policy.auto_budget: the budget does not decide what ") + AllocatorName(policy.allocator) +
                     " sends",
                 {{"allocator", AllocatorName(policy.allocator)}});
}

absl::Status CheckLayerValues(const std::vector<float>& values, const std::string& name, uint32_t layers) {
  if (!values.empty() && values.size() != layers) {
    return Invalid("INVALID_PROFILE", "profile." + name + " has " + std::to_string(values.size()) +
                                          " values, expected none or " + std::to_string(layers) + " (layers)");
  }
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] >= kLeastProfileValue && values[i] <= kMostProfileValue) continue;
    return Invalid("INVALID_PROFILE", "profile." + name + "[" + std::to_string(i) + "] is " +
                                          std::to_string(values[i]) + "; it must be in [0.001, 1000]");
  }
  return absl::OkStatus();
}

absl::Status CheckProfile(const ModelProfile& profile, uint32_t layers) {
  if (!(profile.k_weight >= kLeastProfileValue && profile.k_weight <= kMostProfileValue)) {
    return Invalid("INVALID_PROFILE",
                   "profile.k_weight is " + std::to_string(profile.k_weight) + "; it must be in [0.001, 1000]");
  }
  for (const auto* errors : {&profile.k_errors, &profile.v_errors}) {
    for (const double error : *errors) {
      if (error == 0 || (error >= kLeastProfileError && error <= kMostProfileValue)) continue;
      return Invalid("INVALID_PROFILE", "profile has a tier error of " + std::to_string(error) + "; it must be in [1e-12, 1000]");
    }
  }
  absl::Status status = CheckLayerValues(profile.layer_weights, "layer_weights", layers);
  return status.ok() ? CheckLayerValues(profile.layer_budgets, "layer_budgets", layers) : status;
}

absl::Status CheckGate(const Policy& policy) {
  if (policy.gate.action != GateAction::kNarrowed) return absl::OkStatus();
  const std::vector<Tier>& closed = policy.gate.closed;
  const std::vector<Tier> in_use = TiersInUse(policy);
  if (std::find_first_of(in_use.begin(), in_use.end(), closed.begin(), closed.end()) == in_use.end()) {
    return absl::OkStatus();
  }
  std::string refused;
  for (const Tier tier : closed) refused += std::string(refused.empty() ? "" : ", ") + TierName(tier);
  return MakeError(absl::StatusCode::kFailedPrecondition, "QUALITY_GATE_CLOSED",
                   "the quality gate (quality.gate) is closed to this model for " + refused +
                       ": no probe (ProbeService) has opened it; policy.override_quality_gate passes it",
                   {{"gate", "quality.gate"}, {"tiers", refused}});
}

}  // namespace

std::vector<Tier> TiersInUse(const Policy& policy) {
  switch (policy.allocator) {
    case Allocator::kRaw:
    case Allocator::kPdTrim:
    case Allocator::kSlidingWindowSink: return {Tier::kRaw};
    case Allocator::kUniform: return {policy.uniform_tier};
    case Allocator::kTwoTier: return {Tier::kRaw, EightBitTier(policy.tiers)};
    default: return policy.tiers;
  }
}

bool HasTiersFor(Allocator allocator, const std::vector<Tier>& tiers) {
  return !tiers.empty() && (allocator != Allocator::kTwoTier || EightBitTier(tiers) != Tier::kRaw);
}

bool ScanChooses(const Policy& policy, bool layerwise) {
  const bool by_keys = (policy.importance == ImportanceSource::kKeyNorm ||
                        policy.importance == ImportanceSource::kRecentQueries) &&
                       MayDrop(policy.allocator);
  const bool by_escapes = policy.allocator == Allocator::kTwoTier && policy.allow_drop && !layerwise;
  return by_keys || by_escapes;
}

bool ByScores(const Policy& policy) {
  return policy.importance == ImportanceSource::kScores ||
         (policy.importance == ImportanceSource::kRecentQueries && !policy.scores.empty());
}

bool BudgetDecides(Allocator allocator) {
  switch (allocator) {
    case Allocator::kTwoTier:
    case Allocator::kUniform:
    case Allocator::kPdTrim:
    case Allocator::kSlidingWindowSink:
    case Allocator::kRaw: return false;
    default: return true;
  }
}

const char* AllocatorName(Allocator allocator) {
  for (const NamedAllocator& entry : kAllocators) {
    if (entry.allocator == allocator) return entry.name;
  }
  return "?";
}

absl::StatusOr<Allocator> ParseAllocator(const std::string& name) {
  for (const NamedAllocator& entry : kAllocators) {
    if (name == entry.name) return entry.allocator;
  }
  return Invalid("INVALID_ALLOCATOR", "\"" + name + "\" is not an allocator", {{"value", name}});
}

const char* ImportanceSourceName(ImportanceSource source) {
  switch (source) {
    case ImportanceSource::kScores: return "SCORES";
    case ImportanceSource::kPosition: return "POSITION";
    case ImportanceSource::kKeyNorm: return "KEY_NORM";
    case ImportanceSource::kNone: return "NONE";
    case ImportanceSource::kRecentQueries: return "RECENT_QUERIES";
  }
  return "?";
}

absl::StatusOr<Tier> ParseTier(const std::string& name) {
  for (int id = 0; id < kTierCount; ++id) {
    if (name == TierName(static_cast<Tier>(id))) return static_cast<Tier>(id);
  }
  return Invalid("INVALID_TIERS", "\"" + name + "\" is not a tier", {{"value", name}});
}

absl::Status CheckPolicy(const Policy& policy, uint32_t tokens, uint32_t layers) {
  if (!std::isfinite(policy.budget) || policy.budget <= 0 || policy.budget > kMaxBudget) {
    return Invalid("INVALID_BUDGET",
                   "policy.budget is " + std::to_string(policy.budget) +
                       "; it must be in (0, 10], a share of the raw bytes and no percentage",
                   {{"budget", std::to_string(policy.budget)}});
  }
  if (absl::Status status = CheckTiers(policy); !status.ok()) return status;
  if (absl::Status status = CheckGate(policy); !status.ok()) return status;
  if (absl::Status status = CheckAutoBudget(policy); !status.ok()) return status;
  if (!std::isfinite(policy.decay_lambda) || policy.decay_lambda < 0) {
    return Invalid("INVALID_DECAY", "policy.importance.decay_lambda is " + std::to_string(policy.decay_lambda) +
                                        "; it must be finite and not negative");
  }
  if (absl::Status status = CheckProfile(policy.profile, layers); !status.ok()) return status;
  return CheckScores(policy, tokens, layers);
}

}  // namespace spectrumkv
