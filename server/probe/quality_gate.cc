#include "server/probe/quality_gate.h"

#include <algorithm>
#include <set>

#include "kernels/format/version.h"
#include "server/base/ids.h"
#include "server/base/status.h"

namespace spectrumkv {
namespace {

constexpr int64_t kProbeRetryMs = 60000;
constexpr size_t kProbeIdBytes = 16;

bool Has(const std::vector<Tier>& tiers, Tier tier) {
  return std::find(tiers.begin(), tiers.end(), tier) != tiers.end();
}

absl::Status Invalid(const std::string& reason, const std::string& message, const Metadata& metadata = {}) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason, message, metadata);
}

absl::Status CheckTiers(const std::vector<Tier>& tiers) {
  if (tiers.empty()) return Invalid("INVALID_TIERS", "tiers is empty; a probe is about at least one");
  for (const Tier tier : tiers) {
    if (tier == Tier::kRaw) return Invalid("INVALID_TIERS", "tiers holds RAW, which loses nothing");
    if (std::count(tiers.begin(), tiers.end(), tier) > 1) {
      return Invalid("INVALID_TIERS", std::string("tiers names ") + TierName(tier) + " twice");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckName(const ModelName& model) {
  if (model.model.empty() || model.revision.empty()) {
    return Invalid("NO_REVISION",
                   "the pool's schema has no model or no revision: a verdict is about both, and would hold for a "
                   "changed model too");
  }
  if (model.model.size() <= kMaxVerdictNameBytes && model.revision.size() <= kMaxVerdictNameBytes)
    return absl::OkStatus();
  return Invalid("OUT_OF_RANGE", "model or revision is longer than " + std::to_string(kMaxVerdictNameBytes) + " bytes");
}

absl::Status InvalidTrial(const TrialOutcome& outcome, const std::string& what) {
  return Invalid("INVALID_TRIAL", "trial " + outcome.trial_id + " at " + TierName(outcome.tier) + " " + what,
                 {{"trial", outcome.trial_id}, {"tier", TierName(outcome.tier)}});
}

const Trial* FindTrial(const std::vector<Trial>& trials, const std::string& id) {
  const auto it = std::find_if(trials.begin(), trials.end(), [&](const Trial& trial) { return trial.id == id; });
  return it == trials.end() ? nullptr : &*it;
}

absl::Status CheckOutcome(const Trial& trial, const TrialOutcome& outcome) {
  if (trial.kind == TrialKind::kNeedle) {
    return outcome.has_answer ? absl::OkStatus() : InvalidTrial(outcome, "is a needle and has no answer");
  }
  if (!outcome.has_agreement) return InvalidTrial(outcome, "has no agreement");
  if (outcome.positions < kMinAgreementPositions || outcome.agreed > outcome.positions) {
    return Invalid("OUT_OF_RANGE", "trial " + outcome.trial_id + ": agreed " + std::to_string(outcome.agreed) + " of " +
                                       std::to_string(outcome.positions) + " positions; at least " +
                                       std::to_string(kMinAgreementPositions) + " are needed, and no more can agree");
  }
  return absl::OkStatus();
}

// Trials at tiers of the probe, each at most once, and no transfer twice.
absl::Status CheckOutcomes(const std::vector<Trial>& trials, const std::vector<Tier>& tiers,
                           const std::vector<TrialOutcome>& outcomes) {
  std::set<std::pair<std::string, Tier>> seen;
  std::set<std::string> transfers;
  for (const TrialOutcome& outcome : outcomes) {
    const Trial* trial = FindTrial(trials, outcome.trial_id);
    if (trial == nullptr || !Has(tiers, outcome.tier)) return InvalidTrial(outcome, "is not of this probe");
    if (!seen.insert({outcome.trial_id, outcome.tier}).second) return InvalidTrial(outcome, "is there twice");
    if (!transfers.insert(outcome.transfer_id).second) return InvalidTrial(outcome, "has the transfer of another one");
    if (absl::Status ok = CheckOutcome(*trial, outcome); !ok.ok()) return ok;
  }
  return absl::OkStatus();
}

}  // namespace

QualityGate::QualityGate(GateOptions options, Parts parts) : options_(std::move(options)), parts_(std::move(parts)) {}

bool QualityGate::IsOpen(const Caller& caller, const ModelName& model, Tier tier) const {
  for (const Caller& owner : {caller, options_.administrator}) {
    const auto verdict = parts_.verdicts->Find({owner.Name(), model.model, model.revision, kFormatVersion, tier});
    if (verdict.has_value()) return verdict->open;
  }
  return false;
}

std::vector<Tier> QualityGate::ClosedInUse(const Caller& caller, const ModelName& model, const Policy& policy) const {
  std::vector<Tier> closed;
  for (const Tier tier : TiersInUse(policy)) {
    if (Has(options_.gated_tiers, tier) && !IsOpen(caller, model, tier)) closed.push_back(tier);
  }
  return closed;
}

void QualityGate::Narrow(const Caller& caller, const ModelName& model, Policy* policy) const {
  const std::vector<Tier> all = policy->tiers;
  // What is left out may bring another tier into use: without P8, TWO_TIER takes Q8.
  for (std::vector<Tier> more = policy->gate.closed; !more.empty();) {
    std::erase_if(policy->tiers, [&](Tier tier) { return Has(more, tier); });
    if (!HasTiersFor(policy->allocator, policy->tiers)) {
      policy->tiers = all;
      return;
    }
    more = ClosedInUse(caller, model, *policy);
    std::erase_if(more, [&](Tier tier) { return Has(policy->gate.closed, tier); });
    policy->gate.closed.insert(policy->gate.closed.end(), more.begin(), more.end());
  }
}

void QualityGate::Judge(const Caller& caller, const ModelName& model, bool named, bool override_gate,
                        Policy* policy) const {
  policy->gate = {};
  if (options_.mode == GateOptions::Mode::kOff) return;
  policy->gate.closed = ClosedInUse(caller, model, *policy);
  if (policy->gate.closed.empty()) return;
  if (override_gate) {
    policy->gate.action = GateAction::kOverridden;
  } else if (options_.mode == GateOptions::Mode::kWarn) {
    policy->gate.action = GateAction::kWarned;
  } else {
    policy->gate.action = GateAction::kNarrowed;
    if (!named) Narrow(caller, model, policy);
  }
}

absl::Status QualityGate::MakeRoom(const Caller& caller) {
  const int64_t now_ns = parts_.clock->NowNs();
  std::erase_if(probes_, [&](const auto& entry) { return entry.second.expires_ns <= now_ns; });
  size_t own = 0;
  auto oldest = probes_.end();
  for (auto it = probes_.begin(); it != probes_.end(); ++it) {
    if (it->second.owner != caller) continue;
    ++own;
    if (oldest == probes_.end() || it->second.expires_ns < oldest->second.expires_ns) oldest = it;
  }
  // One whose worker has died would be in the way for its whole time.
  if (own >= kMaxProbesOfOwner) probes_.erase(oldest);
  if (probes_.size() < kMaxProbes) return absl::OkStatus();
  return MakeError(absl::StatusCode::kResourceExhausted, "PROBES_FULL",
                   std::to_string(kMaxProbes) + " probes are under way, as many as the daemon keeps",
                   {{"limit", std::to_string(kMaxProbes)}}, kProbeRetryMs);
}

absl::StatusOr<StartedProbe> QualityGate::Start(const Caller& caller, const std::string& pool_id,
                                                const ModelName& model, const std::vector<Tier>& tiers,
                                                uint32_t prompt_characters, uint64_t seed) {
  absl::Status status = CheckName(model);
  if (status.ok()) status = CheckTiers(tiers);
  if (!status.ok()) return status;
  if (prompt_characters < kMinPromptCharacters || prompt_characters > kMaxPromptCharacters) {
    return Invalid("OUT_OF_RANGE", "prompt_characters is " + std::to_string(prompt_characters) + ", it must be " +
                                       std::to_string(kMinPromptCharacters) + " to " +
                                       std::to_string(kMaxPromptCharacters));
  }
  StartedProbe started;
  started.id = RandomHex(kProbeIdBytes);
  started.seed = seed != 0 ? seed : RandomU64();
  started.trials = MakeTrials(started.seed, options_.trials, prompt_characters);
  Probe probe{caller, pool_id, model, tiers, started.trials, parts_.clock->NowNs() + options_.probe_ttl_ms * 1'000'000};
  // The grades need no texts.
  for (Trial& trial : probe.trials) {
    trial.prompt.clear();
    trial.suffix.clear();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (absl::Status room = MakeRoom(caller); !room.ok()) return room;
  probes_.emplace(started.id, std::move(probe));
  return started;
}

std::vector<Verdict> QualityGate::VerdictsOf(const Probe& probe, const std::vector<TrialOutcome>& outcomes) const {
  std::vector<Verdict> verdicts;
  for (const Tier tier : probe.tiers) {
    Verdict verdict;
    verdict.key = {probe.owner.Name(), probe.model.model, probe.model.revision, kFormatVersion, tier};
    verdict.unix_seconds = parts_.unix_seconds();
    for (const TrialOutcome& outcome : outcomes) {
      if (outcome.tier != tier) continue;
      const Trial& trial = *FindTrial(probe.trials, outcome.trial_id);
      const bool passed = trial.kind == TrialKind::kNeedle
                              ? AnswersNeedle(trial, outcome.answer)
                              : Agrees(outcome.positions, outcome.agreed, options_.min_agreement);
      Score& score = verdict.scores[static_cast<size_t>(trial.kind) - 1];
      ++score.trials;
      score.passed += passed ? 1 : 0;
    }
    verdict.open = std::all_of(verdict.scores.begin(), verdict.scores.end(),
                               [&](const Score& score) { return score.passed >= options_.trials_needed; });
    verdicts.push_back(std::move(verdict));
  }
  return verdicts;
}

absl::StatusOr<std::vector<Verdict>> QualityGate::Report(const Caller& caller, const std::string& probe_id,
                                                         const std::vector<TrialOutcome>& outcomes,
                                                         const CheckTransfer& check) {
  // One report after the other: they add to each other.
  std::lock_guard<std::mutex> one_at_a_time(report_mutex_);
  Probe probe;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = probes_.find(probe_id);
    if (it == probes_.end() || it->second.owner != caller || it->second.expires_ns <= parts_.clock->NowNs()) {
      return MakeError(absl::StatusCode::kNotFound, "UNKNOWN_PROBE",
                       "there is no such probe of this user, or its time is over");
    }
    probe = it->second;
  }
  if (outcomes.empty()) return Invalid("INVALID_TRIAL", "results are empty");
  probe.outcomes.insert(probe.outcomes.end(), outcomes.begin(), outcomes.end());
  if (absl::Status ok = CheckOutcomes(probe.trials, probe.tiers, probe.outcomes); !ok.ok()) return ok;
  for (const TrialOutcome& outcome : outcomes) {
    if (absl::Status ok = check(outcome.transfer_id, probe.pool_id, outcome.tier); !ok.ok()) return ok;
  }
  if (probe.outcomes.size() < probe.trials.size() * probe.tiers.size()) {
    probe.expires_ns = parts_.clock->NowNs() + options_.probe_ttl_ms * 1'000'000;
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = probes_.find(probe_id);
    if (it != probes_.end()) it->second = std::move(probe);
    return std::vector<Verdict>();
  }
  std::vector<Verdict> verdicts = VerdictsOf(probe, probe.outcomes);
  if (absl::Status put = parts_.verdicts->Put(verdicts); !put.ok()) return put;
  for (const Verdict& verdict : verdicts) {
    for (const TrialKind kind : kTrialKinds) parts_.judged(kind, verdict.scores[static_cast<size_t>(kind) - 1]);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  probes_.erase(probe_id);
  return verdicts;
}

std::vector<Verdict> QualityGate::ListFor(const Caller& caller, const std::string& model) const {
  std::vector<Verdict> out = parts_.verdicts->OfOwner(caller.Name());
  if (caller != options_.administrator) {
    std::set<VerdictKey> own;
    for (const Verdict& verdict : out) own.insert(verdict.key);
    for (const Verdict& verdict : parts_.verdicts->OfOwner(options_.administrator.Name())) {
      VerdictKey key = verdict.key;
      key.owner = caller.Name();
      if (own.count(key) == 0) out.push_back(verdict);
    }
  }
  if (!model.empty()) std::erase_if(out, [&](const Verdict& verdict) { return verdict.key.model != model; });
  return out;
}

absl::StatusOr<uint32_t> QualityGate::Delete(const Caller& caller, const std::string& model,
                                             const std::string& revision) {
  if (model.empty()) return Invalid("INVALID_MODEL", "model is empty: verdicts are forgotten model by model");
  return parts_.verdicts->Delete(caller.Name(), model, revision);
}

}  // namespace spectrumkv
