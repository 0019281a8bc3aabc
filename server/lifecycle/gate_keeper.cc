#include "server/lifecycle/gate_keeper.h"

#include <unistd.h>

#include <ctime>
#include <string>
#include <utility>

#include "server/base/status.h"

namespace spectrumkv {
namespace {

constexpr char kFileKey[] = "quality.verdicts_file";

void CountVerdicts(Metrics* metrics, const VerdictBook::Counts& counts) {
  for (int tier = 0; tier < kTierCount; ++tier) {
    const auto& of_tier = counts[static_cast<size_t>(tier)];
    metrics->SetGateVerdicts(static_cast<MetricTier>(tier), MetricVerdict::kOpen, of_tier[0]);
    metrics->SetGateVerdicts(static_cast<MetricTier>(tier), MetricVerdict::kClosed, of_tier[1]);
  }
}

void CountTrials(Metrics* metrics, TrialKind kind, const Score& score) {
  const auto label = static_cast<MetricTrial>(static_cast<int>(kind) - 1);
  metrics->AddTrials(label, MetricTrialOutcome::kPassed, score.passed);
  metrics->AddTrials(label, MetricTrialOutcome::kFailed, score.trials - score.passed);
}

QualityGate::Parts PartsOf(Clock* clock, Metrics* metrics, VerdictBook* verdicts) {
  QualityGate::Parts parts;
  parts.clock = clock;
  parts.verdicts = verdicts;
  parts.unix_seconds = [] { return static_cast<int64_t>(time(nullptr)); };
  parts.judged = [metrics](TrialKind kind, const Score& score) { CountTrials(metrics, kind, score); };
  return parts;
}

absl::StatusOr<GateOptions> GateOptionsOf(const Config& config) {
  GateOptions options;
  options.mode = config.quality.gate == "off"    ? GateOptions::Mode::kOff
                 : config.quality.gate == "warn" ? GateOptions::Mode::kWarn
                                                 : GateOptions::Mode::kEnforce;
  options.gated_tiers.clear();
  for (const std::string& name : config.quality.gated_tiers) {
    const auto tier = ParseTier(name);
    if (!tier.ok()) return tier.status();
    options.gated_tiers.push_back(*tier);
  }
  options.trials = static_cast<uint32_t>(config.quality.trials);
  options.trials_needed = static_cast<uint32_t>(config.quality.trials_needed);
  options.min_agreement = config.quality.min_agreement;
  options.administrator = Caller::Uid(geteuid());
  return options;
}

}  // namespace

GateKeeper::GateKeeper(GateOptions options, Clock* clock, Metrics* metrics)
    : verdicts_([metrics](const VerdictBook::Counts& counts) { CountVerdicts(metrics, counts); }),
      gate_(std::move(options), PartsOf(clock, metrics, &verdicts_)) {}

absl::StatusOr<std::unique_ptr<GateKeeper>> GateKeeper::Open(const Config& config, Clock* clock, Metrics* metrics) {
  auto options = GateOptionsOf(config);
  if (!options.ok()) return options.status();
  std::unique_ptr<GateKeeper> keeper(new GateKeeper(*std::move(options), clock, metrics));
  const absl::Status opened = keeper->verdicts_.Open(config.quality.verdicts_file);
  if (opened.ok()) return keeper;
  Metadata metadata = MetadataOf(opened);
  metadata["key"] = kFileKey;
  return MakeError(opened.code(), ReasonOf(opened), std::string(kFileKey) + ": " + std::string(opened.message()),
                   metadata);
}

}  // namespace spectrumkv
