#include <algorithm>
#include <utility>

#include "server/service/check.h"
#include "server/service/convert.h"

namespace spectrumkv {
namespace {

// Numbers of TIER_RAW .. TIER_Q8 are the wire's tier ids plus one.
static_assert(v1::TIER_RAW == 1 + static_cast<int>(Tier::kRaw) && v1::TIER_P8 == 1 + static_cast<int>(Tier::kP8) &&
              v1::TIER_Q4 == 1 + static_cast<int>(Tier::kQ4) && v1::TIER_Q3 == 1 + static_cast<int>(Tier::kQ3) &&
              v1::TIER_Q2 == 1 + static_cast<int>(Tier::kQ2) && v1::TIER_P4 == 1 + static_cast<int>(Tier::kP4) &&
              v1::TIER_Q8 == 1 + static_cast<int>(Tier::kQ8) && v1::TIER_DROP == 1 + kTierCount);

absl::StatusOr<Allocator> AllocatorFromProto(v1::Allocator allocator) {
  switch (allocator) {
    case v1::ALLOCATOR_GREEDY: return Allocator::kGreedy;
    case v1::ALLOCATOR_SINK_PROTECT: return Allocator::kSinkProtect;
    case v1::ALLOCATOR_BALANCED: return Allocator::kBalanced;
    case v1::ALLOCATOR_TWO_TIER: return Allocator::kTwoTier;
    case v1::ALLOCATOR_UNIFORM: return Allocator::kUniform;
    case v1::ALLOCATOR_RANDOM: return Allocator::kRandom;
    case v1::ALLOCATOR_PDTRIM: return Allocator::kPdTrim;
    case v1::ALLOCATOR_SLIDING_WINDOW_SINK: return Allocator::kSlidingWindowSink;
    case v1::ALLOCATOR_RAW: return Allocator::kRaw;
    case v1::ALLOCATOR_OPTIMAL: return Allocator::kOptimal;
    default:
      return Unsupported("UNKNOWN_ALLOCATOR", "policy.allocator",
                         "is " + std::to_string(static_cast<int>(allocator)) + ", no allocator of this version");
  }
}

absl::Status UnknownTier(const std::string& field, int tier) {
  return Unsupported("UNKNOWN_TIER", field, "holds " + std::to_string(tier) + ", no tier of this version");
}

absl::Status SetTiers(const v1::Policy& proto, Policy* policy) {
  if (proto.tiers_size() == 0) return absl::OkStatus();
  if (proto.tiers_size() > kTierCount + 1) {
    return Invalid("INVALID_TIERS", "policy.tiers",
                   "are " + std::to_string(proto.tiers_size()) + ", there are but " + std::to_string(kTierCount + 1));
  }
  policy->tiers.clear();
  policy->allow_drop = false;
  for (const int tier : proto.tiers()) {
    if (tier == v1::TIER_UNSPECIFIED) return Invalid("INVALID_TIERS", "policy.tiers", "holds TIER_UNSPECIFIED");
    if (tier < 0 || tier > v1::TIER_DROP) return UnknownTier("policy.tiers", tier);
    if (tier == v1::TIER_DROP) {
      policy->allow_drop = true;
      continue;
    }
    policy->tiers.push_back(static_cast<Tier>(tier - 1));
  }
  return absl::OkStatus();
}

// What attends to the first tokens, and how much, is in the scores: more than the first of them need no rule of their own.
// docs/quality.md has what it is worth.
constexpr uint32_t kAttendedSinks = 1;

void SetSinks(const v1::Importance& proto, Policy* policy) {
  const bool attended = policy->importance == ImportanceSource::kScores ||
                        policy->importance == ImportanceSource::kRecentQueries;
  if (proto.has_sinks()) {
    policy->sinks = proto.sinks();
  } else if (attended && policy->allocator == Allocator::kOptimal) {
    policy->sinks = std::min(policy->sinks, kAttendedSinks);
  }
}

absl::Status SetImportance(const v1::Importance& proto, Policy* policy) {
  policy->scores.assign(proto.scores().begin(), proto.scores().end());
  policy->scores_per_layer = proto.scores_per_layer();
  if (proto.decay_lambda() != 0) policy->decay_lambda = proto.decay_lambda();
  if (proto.has_queries() && !policy->scores.empty()) {
    return Invalid("INVALID_POLICY", "policy.importance.queries", "and policy.importance.scores are both given");
  }
  switch (proto.source()) {
    case v1::IMPORTANCE_SOURCE_UNSPECIFIED:
      policy->importance = !policy->scores.empty()                    ? ImportanceSource::kScores
                           : proto.has_queries()                      ? ImportanceSource::kRecentQueries
                           : policy->allocator == Allocator::kOptimal ? ImportanceSource::kNone
                                                                      : ImportanceSource::kPosition;
      return absl::OkStatus();
    case v1::IMPORTANCE_SOURCE_SCORES: policy->importance = ImportanceSource::kScores; return absl::OkStatus();
    case v1::IMPORTANCE_SOURCE_POSITION: policy->importance = ImportanceSource::kPosition; return absl::OkStatus();
    case v1::IMPORTANCE_SOURCE_KEY_NORM: policy->importance = ImportanceSource::kKeyNorm; return absl::OkStatus();
    case v1::IMPORTANCE_SOURCE_NONE: policy->importance = ImportanceSource::kNone; return absl::OkStatus();
    case v1::IMPORTANCE_SOURCE_RECENT_QUERIES:
      policy->importance = ImportanceSource::kRecentQueries;
      return absl::OkStatus();
    default:
      return Invalid("INVALID_POLICY", "policy.importance.source",
                     "is " + std::to_string(static_cast<int>(proto.source())) + ", no importance source");
  }
}

}  // namespace

absl::StatusOr<Policy> PolicyFromProto(const v1::Policy& proto, const Policy& defaults) {
  Policy policy = defaults;
  policy.soft_budget = !proto.has_budget();
  if (proto.has_budget()) policy.budget = proto.budget();
  if (proto.allocator() != v1::ALLOCATOR_UNSPECIFIED) {
    const auto allocator = AllocatorFromProto(proto.allocator());
    if (!allocator.ok()) return allocator.status();
    policy.allocator = *allocator;
  }
  if (proto.uniform_tier() != v1::TIER_UNSPECIFIED) {
    const int tier = proto.uniform_tier();
    if (tier == v1::TIER_DROP)
      return Invalid("INVALID_TIERS", "policy.uniform_tier", "is TIER_DROP: nothing would travel");
    if (tier < 0 || tier > v1::TIER_DROP) return UnknownTier("policy.uniform_tier", tier);
    policy.uniform_tier = static_cast<Tier>(tier - 1);
  }
  policy.random_seed = proto.random_seed();
  const absl::Status tiers = SetTiers(proto, &policy);
  if (!tiers.ok()) return tiers;
  const absl::Status importance = SetImportance(proto.importance(), &policy);
  if (!importance.ok()) return importance;
  SetSinks(proto.importance(), &policy);
  if (proto.has_auto_budget()) {
    if (proto.has_budget()) {
      return Invalid("INVALID_POLICY", "policy.auto_budget", "and policy.budget are both given: the daemon chooses, or you");
    }
    policy.auto_target_seconds = proto.auto_budget().target_seconds();
    if (policy.auto_target_seconds == 0) {
      return Invalid("INVALID_BUDGET", "policy.auto_budget.target_seconds", "is 0; it must be above 0");
    }
    if (proto.auto_budget().has_min_budget()) policy.auto_min_budget = proto.auto_budget().min_budget();
  }
  policy.strict_budget = proto.strict_budget();
  policy.payload_only = proto.payload_only();
  return policy;
}

absl::StatusOr<std::shared_ptr<const RecentQueries>> QueriesFromProto(const v1::RecentQueries& proto) {
  auto queries = std::make_shared<RecentQueries>();
  switch (proto.data_type()) {
    case v1::DATA_TYPE_FLOAT16: queries->dtype = DType::kFloat16; break;
    case v1::DATA_TYPE_BFLOAT16: queries->dtype = DType::kBFloat16; break;
    case v1::DATA_TYPE_FLOAT32: queries->dtype = DType::kFloat32; break;
    default:
      return Invalid("INVALID_QUERIES", "queries.data_type",
                     "is " + std::to_string(static_cast<int>(proto.data_type())) + "; queries are of 16 or 32 bit floats");
  }
  if (proto.layers_size() > kMaxLayers) {
    return Invalid("INVALID_QUERIES", "queries.layers",
                   "are " + std::to_string(proto.layers_size()) + ", the limit is " + std::to_string(kMaxLayers));
  }
  queries->positions.assign(proto.positions().begin(), proto.positions().end());
  for (const v1::LayerQueries& layer : proto.layers()) {
    queries->layers.push_back({layer.layer(), layer.queries(), layer.query_heads(),
                               static_cast<float>(layer.softmax_scale()), static_cast<float>(layer.logit_soft_cap()),
                               layer.window_tokens()});
  }
  return queries;
}

ModelProfile ProfileOf(const std::vector<ProfileFile>& profiles, const PoolSchema& schema,
                       const std::vector<PlanLayer>& layers) {
  ModelProfile profile;
  const ProfileFile* file = FindProfile(profiles, schema.model, schema.revision);
  if (file == nullptr) return profile;
  profile.name = file->name;
  if (file->k_weight != 0) profile.k_weight = file->k_weight;
  for (int id = 0; id < kTierCount; ++id) {
    const std::string tier = TierName(static_cast<Tier>(id));
    const auto k = file->k_errors.find(tier), v = file->v_errors.find(tier);
    if (k != file->k_errors.end()) profile.k_errors[static_cast<size_t>(id)] = k->second;
    if (v != file->v_errors.end()) profile.v_errors[static_cast<size_t>(id)] = v->second;
  }
  // A pool may hold some layers of the model; a layer that the file does not know is like any other.
  const auto of_layers = [&layers](const std::vector<double>& by_index) {
    std::vector<float> values;
    for (const PlanLayer& layer : layers) {
      if (by_index.empty()) break;
      values.push_back(layer.layer < by_index.size() ? static_cast<float>(by_index[layer.layer]) : 1.0f);
    }
    return values;
  };
  profile.layer_weights = of_layers(file->layer_weights);
  profile.layer_budgets = of_layers(file->layer_budgets);
  return profile;
}

absl::StatusOr<RequestDefaults> DefaultsOf(const Config& config) {
  RequestDefaults defaults;
  defaults.policy.budget = config.policy.budget;
  defaults.policy.auto_min_budget = config.policy.auto_min_budget;
  const auto allocator = ParseAllocator(config.policy.allocator);
  if (!allocator.ok()) return allocator.status();
  defaults.policy.allocator = *allocator;
  defaults.policy.tiers.clear();
  for (const std::string& name : config.policy.tiers) {
    if (name == "DROP") {
      defaults.policy.allow_drop = true;
      continue;
    }
    const auto tier = ParseTier(name);
    if (!tier.ok()) return tier.status();
    defaults.policy.tiers.push_back(*tier);
  }
  defaults.policy.sinks = static_cast<uint32_t>(config.policy.sinks);
  defaults.policy.decay_lambda = config.policy.decay_lambda;
  defaults.max_tokens = static_cast<uint32_t>(config.transfer.max_tokens);
  defaults.deadline_ms = static_cast<int64_t>(config.transfer.default_deadline_ms);
  defaults.max_deadline_ms = static_cast<int64_t>(config.transfer.max_deadline_ms);
  defaults.lease_ttl_ms = static_cast<int64_t>(config.lease.default_ttl_ms);
  defaults.min_lease_ttl_ms = static_cast<int64_t>(config.lease.min_ttl_ms);
  defaults.max_lease_ttl_ms = static_cast<int64_t>(config.lease.max_ttl_ms);
  defaults.max_retain_ms = static_cast<int64_t>(config.refine.max_retain_seconds) * 1000;
  defaults.allowed_hosts = config.peer.allowed_hosts;
  return defaults;
}

}  // namespace spectrumkv
