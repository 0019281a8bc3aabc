// The quality gate: which tiers a model may use, and the probes that open them. A tier of `gated_tiers` is closed to a
// model until a probe has opened it; every other is open.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/caller.h"
#include "server/base/clock.h"
#include "server/plan/plan.h"
#include "server/probe/trials.h"
#include "server/probe/verdicts.h"

namespace spectrumkv {

struct GateOptions {
  enum class Mode { kOff, kWarn, kEnforce };
  Mode mode = Mode::kOff;
  std::vector<Tier> gated_tiers = {Tier::kQ4, Tier::kQ3, Tier::kQ2, Tier::kP4};
  uint32_t trials = 3, trials_needed = 2;  // of each kind
  double min_agreement = 0.9;
  int64_t probe_ttl_ms = 3600000;
  // Whose verdicts hold for every caller that has none of its own: the daemon's user.
  Caller administrator;
};

// What a pool says of its model.
struct ModelName {
  std::string model, revision;
};

// A worker's report of one trial at one tier, and what the daemon itself knows of the transfer.
struct TrialOutcome {
  std::string trial_id;
  Tier tier = Tier::kQ4;
  std::string transfer_id;
  // Of a needle.
  bool has_answer = false;
  std::string answer;
  // Of the others.
  bool has_agreement = false;
  uint32_t positions = 0, agreed = 0;
};

struct StartedProbe {
  std::string id;
  uint64_t seed = 0;
  std::vector<Trial> trials;
};

inline constexpr size_t kMaxProbes = 64, kMaxProbesOfOwner = 8;

// Thread-safe.
class QualityGate {
 public:
  struct Parts {  // borrowed; all outlive the gate
    Clock* clock = nullptr;
    VerdictBook* verdicts = nullptr;
    std::function<int64_t()> unix_seconds;
    // After a report, for each kind and tier.
    std::function<void(TrialKind, const Score&)> judged = [](TrialKind, const Score&) {};
  };
  QualityGate(GateOptions options, Parts parts);

  const GateOptions& options() const { return options_; }

  // Sets policy->gate, and narrows policy->tiers until no tier in use is closed, or leaves them where too few would be
  // left for the allocator; the planner (CheckPolicy) refuses what is left to refuse. `named`: the request names its
  // tiers, or an allocator of one tier, and nothing is narrowed.
  void Judge(const Caller& caller, const ModelName& model, bool named, bool override_gate, Policy* policy) const;

  // INVALID_ARGUMENT NO_REVISION (the pool's schema has no model or no revision: no verdict could expire),
  // INVALID_TIERS, OUT_OF_RANGE; RESOURCE_EXHAUSTED PROBES_FULL. The caller's oldest makes
  // room where it has kMaxProbesOfOwner.
  absl::StatusOr<StartedProbe> Start(const Caller& caller, const std::string& pool_id, const ModelName& model,
                                     const std::vector<Tier>& tiers, uint32_t prompt_characters, uint64_t seed);

  // Of some trials; none of them was reported before. No verdict until the last one has been. `check` says whether a
  // transfer of the caller carried a trial of a pool at a tier: asked at once, a daemon forgets transfers that have
  // ended. NOT_FOUND UNKNOWN_PROBE, also for another caller's; INVALID_ARGUMENT INVALID_TRIAL (none, unknown, twice, an
  // outcome of another kind), OUT_OF_RANGE; what `check` and VerdictBook::Put answer. Nothing of such a report counts.
  using CheckTransfer =
      std::function<absl::Status(const std::string& transfer_id, const std::string& pool_id, Tier tier)>;
  absl::StatusOr<std::vector<Verdict>> Report(const Caller& caller, const std::string& probe_id,
                                              const std::vector<TrialOutcome>& outcomes, const CheckTransfer& check);

  // The caller's own, then those of the administrator that hold for it. model "": all.
  std::vector<Verdict> ListFor(const Caller& caller, const std::string& model) const;
  absl::StatusOr<uint32_t> Delete(const Caller& caller, const std::string& model, const std::string& revision);
  bool IsShared(const Verdict& verdict) const { return verdict.key.owner == options_.administrator.Name(); }

 private:
  struct Probe {
    Caller owner;
    std::string pool_id;
    ModelName model;
    std::vector<Tier> tiers;
    std::vector<Trial> trials;
    int64_t expires_ns = 0;
    std::vector<TrialOutcome> outcomes;
  };
  bool IsOpen(const Caller& caller, const ModelName& model, Tier tier) const;
  std::vector<Tier> ClosedInUse(const Caller& caller, const ModelName& model, const Policy& policy) const;
  void Narrow(const Caller& caller, const ModelName& model, Policy* policy) const;
  absl::Status MakeRoom(const Caller& caller);  // REQUIRES mutex_
  std::vector<Verdict> VerdictsOf(const Probe& probe, const std::vector<TrialOutcome>& outcomes) const;

  const GateOptions options_;
  const Parts parts_;
  std::mutex report_mutex_;  // before mutex_
  mutable std::mutex mutex_;
  std::map<std::string, Probe> probes_;
};

}  // namespace spectrumkv
