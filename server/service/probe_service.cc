#include "server/service/probe_service.h"

#include <optional>
#include <utility>
#include <vector>

#include "kernels/format/version.h"
#include "server/base/status.h"
#include "server/service/check.h"
#include "server/service/worker_calls.h"
#include "spectrumkv/v1/probe_service.grpc.pb.h"

namespace spectrumkv {
namespace {

constexpr uint32_t kDefaultPromptCharacters = 3000;
constexpr char kSelf[] = "self";
// A trial is at one tier where at least so much of it is; the rest is pinned tokens, and cells that only RAW can carry.
constexpr double kMinShareAtTier = 0.5;

static_assert(v1::TRIAL_KIND_NEEDLE == static_cast<int>(TrialKind::kNeedle) &&
              v1::TRIAL_KIND_CONTINUATION == static_cast<int>(TrialKind::kContinuation) &&
              v1::TRIAL_KIND_CODE == static_cast<int>(TrialKind::kCode));

absl::StatusOr<Tier> TierFromProto(int tier, const std::string& field) {
  if (tier <= v1::TIER_UNSPECIFIED || tier == v1::TIER_DROP)
    return Invalid("INVALID_TIERS", field, "holds no tier that codes");
  if (tier > v1::TIER_DROP) {
    return Unsupported("UNKNOWN_TIER", field, "holds " + std::to_string(tier) + ", no tier of this version");
  }
  return static_cast<Tier>(tier - 1);
}

void VerdictToProto(const QualityGate& gate, const Caller& caller, const Verdict& verdict, v1::Verdict* out) {
  out->set_model(verdict.key.model);
  out->set_revision(verdict.key.revision);
  out->set_codec_version(verdict.key.codec_version);
  out->set_tier(TierToProto(verdict.key.tier));
  out->set_open(verdict.open);
  for (const TrialKind kind : kTrialKinds) {
    const Score& score = verdict.scores[static_cast<size_t>(kind) - 1];
    v1::KindScore* to = out->add_scores();
    to->set_kind(static_cast<v1::TrialKind>(kind));
    to->set_passed(score.passed);
    to->set_trials(score.trials);
  }
  out->set_unix_seconds(verdict.unix_seconds);
  out->set_shared(gate.IsShared(verdict) && verdict.key.owner != caller.Name());
}

// The caller's pool, for the name of its model.
absl::StatusOr<ModelName> ModelOf(const ServiceContext& context, const Caller& caller, const v1::PoolRef& pool) {
  absl::Status status = CheckPoolRef(pool);
  if (status.ok()) status = CheckEpoch(context, pool.epoch());
  // An own pool alone may be renewed, which also says that it is still there.
  if (status.ok()) status = context.pools->Renew(caller, pool.pool_id(), pool.epoch()).status();
  if (!status.ok()) return status;
  for (const PoolStatus& found : context.pools->List()) {
    if (found.pool_id == pool.pool_id()) return ModelName{found.model, found.revision};
  }
  return MakeError(absl::StatusCode::kNotFound, "UNKNOWN_POOL", "pool.pool_id has gone");
}

absl::Status StartProbe(const ServiceContext& context, const Caller& caller, const v1::StartProbeRequest& request,
                        v1::StartProbeResponse* response) {
  const auto model = ModelOf(context, caller, request.pool());
  if (!model.ok()) return model.status();
  std::vector<Tier> tiers;
  if (request.tiers_size() > kTierCount) return Invalid("INVALID_TIERS", "tiers", "are more than there are");
  for (const int tier : request.tiers()) {
    const auto known = TierFromProto(tier, "tiers");
    if (!known.ok()) return known.status();
    tiers.push_back(*known);
  }
  const uint32_t characters = request.prompt_characters() == 0 ? kDefaultPromptCharacters : request.prompt_characters();
  const auto started = context.gate->Start(caller, request.pool().pool_id(), *model, tiers, characters, request.seed());
  if (!started.ok()) return started.status();
  response->set_probe_id(started->id);
  response->set_seed(started->seed);
  response->set_peer(kSelf);
  response->set_expires_in_ms(static_cast<uint64_t>(context.gate->options().probe_ttl_ms));
  response->set_trials_needed(context.gate->options().trials_needed);
  response->set_codec_version(kFormatVersion);
  for (const Trial& trial : started->trials) {
    v1::Trial* to = response->add_trials();
    to->set_trial_id(trial.id);
    to->set_kind(static_cast<v1::TrialKind>(trial.kind));
    to->set_prompt(trial.prompt);
    to->set_suffix(trial.suffix);
    to->set_depth(trial.depth);
    to->set_answer_characters(static_cast<uint32_t>(trial.expected.size()));
  }
  return absl::OkStatus();
}

bool AtTier(const std::array<uint64_t, kTierCount>& tokens, Tier tier) {
  uint64_t all = 0;
  for (int id = 0; id < kTierCount; ++id) {
    const uint64_t count = tokens[static_cast<size_t>(id)];
    if (id != static_cast<int>(tier) && id != static_cast<int>(Tier::kRaw) && count > 0) return false;
    all += count;
  }
  return static_cast<double>(tokens[static_cast<size_t>(tier)]) >= kMinShareAtTier * static_cast<double>(all) &&
         all > 0;
}

// Both halves were here, the pool's, and at the tier.
absl::Status CheckTrialTransfer(const ServiceContext& context, const Caller& caller, const std::string& transfer_id,
                                const std::string& pool_id, Tier tier) {
  if (absl::Status id = CheckTransferId(transfer_id); !id.ok()) return id;
  const auto wrong = [&](const std::string& what) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "NOT_A_TRIAL", "transfer " + transfer_id + " " + what,
                     {{"transfer_id", transfer_id}, {"tier", TierName(tier)}});
  };
  for (const Role role : {Role::kSender, Role::kReceiver}) {
    const auto report = context.transfers->Get(caller, transfer_id, role);
    if (!report.ok()) return report.status();
    if (report->state != TransferState::kCommitted) return wrong("has not committed");
    if (report->pool_id != pool_id) return wrong("is not from and into the pool of the probe");
    if (role == Role::kReceiver) continue;
    uint64_t v_tokens = 0;
    for (const uint64_t count : report->tiers.v) v_tokens += count;
    if (!AtTier(report->tiers.k, tier) || (v_tokens > 0 && !AtTier(report->tiers.v, tier))) {
      return wrong(std::string("is not at ") + TierName(tier) + " alone");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<TrialOutcome> OutcomeFromProto(const v1::TrialResult& result) {
  const auto tier = TierFromProto(result.tier(), "results.tier");
  if (!tier.ok()) return tier.status();
  TrialOutcome outcome;
  outcome.trial_id = result.trial_id();
  outcome.tier = *tier;
  outcome.transfer_id = result.transfer_id();
  outcome.has_answer = result.outcome_case() == v1::TrialResult::kAnswer;
  outcome.answer = result.answer().substr(0, kMaxNameLength);
  outcome.has_agreement = result.outcome_case() == v1::TrialResult::kAgreement;
  outcome.positions = result.agreement().positions();
  outcome.agreed = result.agreement().agreed();
  return outcome;
}

absl::Status ReportTrials(const ServiceContext& context, const Caller& caller, const v1::ReportTrialsRequest& request,
                          v1::ReportTrialsResponse* response) {
  const GateOptions& options = context.gate->options();
  const auto most = static_cast<int>(options.trials * std::size(kTrialKinds)) * kTierCount;
  if (request.results_size() > most) {
    return Invalid("OUT_OF_RANGE", "results",
                   "are " + std::to_string(request.results_size()) + ", a probe has at most " + std::to_string(most));
  }
  std::vector<TrialOutcome> outcomes;
  for (const v1::TrialResult& result : request.results()) {
    const auto outcome = OutcomeFromProto(result);
    if (!outcome.ok()) return outcome.status();
    if (outcome->trial_id.size() > kMaxNameLength) return Invalid("INVALID_TRIAL", "results.trial_id", "is too long");
    outcomes.push_back(*outcome);
  }
  const auto check = [&](const std::string& transfer_id, const std::string& pool_id, Tier tier) {
    return CheckTrialTransfer(context, caller, transfer_id, pool_id, tier);
  };
  const auto verdicts = context.gate->Report(caller, request.probe_id(), outcomes, check);
  if (!verdicts.ok()) return verdicts.status();
  for (const Verdict& verdict : *verdicts) VerdictToProto(*context.gate, caller, verdict, response->add_verdicts());
  return absl::OkStatus();
}

class ProbeServiceImpl final : public v1::ProbeService::CallbackService {
 public:
  explicit ProbeServiceImpl(const ServiceContext* context) : context_(context) {}

  UnaryReactor* StartProbe(CallContext* call, const v1::StartProbeRequest* request,
                           v1::StartProbeResponse* response) override {
    const Caller caller = CallerOf(*context_, *call);
    return RunCall(context_, call, [=, this] { return spectrumkv::StartProbe(*context_, caller, *request, response); });
  }
  UnaryReactor* ReportTrials(CallContext* call, const v1::ReportTrialsRequest* request,
                             v1::ReportTrialsResponse* response) override {
    const Caller caller = CallerOf(*context_, *call);
    return RunCall(context_, call,
                   [=, this] { return spectrumkv::ReportTrials(*context_, caller, *request, response); });
  }
  UnaryReactor* ListVerdicts(CallContext* call, const v1::ListVerdictsRequest* request,
                             v1::ListVerdictsResponse* response) override {
    const Caller caller = CallerOf(*context_, *call);
    // Whoever writes the file of verdicts keeps them locked meanwhile.
    return RunCall(context_, call, [=, this]() -> absl::Status {
      if (absl::Status known = CheckOwner(caller, caller, "verdicts"); !known.ok()) return known;
      if (request->model().size() > kMaxVerdictNameBytes) {
        return Invalid("OUT_OF_RANGE", "model", "is longer than a model's name");
      }
      for (const Verdict& verdict : context_->gate->ListFor(caller, request->model())) {
        VerdictToProto(*context_->gate, caller, verdict, response->add_verdicts());
      }
      return absl::OkStatus();
    });
  }
  UnaryReactor* DeleteVerdicts(CallContext* call, const v1::DeleteVerdictsRequest* request,
                               v1::DeleteVerdictsResponse* response) override {
    const Caller caller = CallerOf(*context_, *call);
    return RunCall(context_, call, [=, this]() -> absl::Status {
      if (absl::Status known = CheckOwner(caller, caller, "verdicts"); !known.ok()) return known;
      const auto deleted = context_->gate->Delete(caller, request->model(), request->revision());
      if (deleted.ok()) response->set_deleted(*deleted);
      return deleted.status();
    });
  }

 private:
  const ServiceContext* const context_;
};

}  // namespace

std::unique_ptr<grpc::Service> NewProbeService(const ServiceContext* context) {
  return std::make_unique<ProbeServiceImpl>(context);
}

}  // namespace spectrumkv
