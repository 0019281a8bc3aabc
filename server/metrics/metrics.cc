#include "server/metrics/metrics.h"

#include <prometheus/text_serializer.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "server/metrics/series.h"

namespace spectrumkv {
namespace {

template <typename Enum>
constexpr size_t At(Enum value) {
  return static_cast<size_t>(value);
}

}  // namespace

struct Metrics::Impl : SeriesStore {
  Impl(const std::vector<std::string>& info, uint64_t chunks) : SeriesStore(info), reconstruction_chunks(chunks) {}
  const uint64_t reconstruction_chunks;
  std::atomic<uint64_t> chunks_seen{0};
};

Metrics::Metrics(const BuildInfo& info, uint64_t reconstruction_chunks)
    : impl_(std::make_shared<Impl>(std::vector<std::string>{info.version, info.revision}, reconstruction_chunks)) {
  impl_->Set(MetricId::kBuildInfo, 0, 1);
  // A daemon makes its metrics first of all.
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  impl_->Set(MetricId::kProcessStart, 0, std::chrono::duration<double>(now).count());
  const MetricSpec& codec = AllMetrics()[At(MetricId::kCodecInfo)];
  const std::vector<std::string>& backends = codec.labels[0].values;
  const auto found = std::find(backends.begin(), backends.end(), info.backend);
  if (found != backends.end()) impl_->Set(MetricId::kCodecInfo, static_cast<size_t>(found - backends.begin()), 1);
}

Metrics::~Metrics() = default;

void Metrics::CountTransfer(MetricRole role, MetricOutcome outcome, double duration_seconds, uint64_t wire_bytes) {
  const size_t series = At(role) * kMetricOutcomes + At(outcome);
  impl_->Add(MetricId::kTransfers, series, 1);
  impl_->Observe(MetricId::kTransferDuration, series, duration_seconds);
  impl_->Observe(MetricId::kTransferBytes, At(role), static_cast<double>(wire_bytes));
}

void Metrics::CountChunk(MetricRole role, uint64_t kv_bytes, uint64_t wire_bytes) {
  impl_->Add(MetricId::kChunks, At(role), 1);
  impl_->Add(MetricId::kKvBytes, At(role), static_cast<double>(kv_bytes));
  impl_->Add(MetricId::kWireBytes, At(role), static_cast<double>(wire_bytes));
}

void Metrics::AddSavedBytes(MetricRole role, uint64_t kv_bytes, uint64_t wire_bytes) {
  if (wire_bytes <= kv_bytes) {
    impl_->Add(MetricId::kSavedBytes, At(role), static_cast<double>(kv_bytes - wire_bytes));
  } else {
    impl_->Add(MetricId::kExpandedBytes, 0, static_cast<double>(wire_bytes - kv_bytes));
  }
}

void Metrics::AddOverheadBytes(uint64_t bytes) { impl_->Add(MetricId::kOverheadBytes, 0, static_cast<double>(bytes)); }
void Metrics::CountChunkDuplicate() { impl_->Add(MetricId::kChunksDuplicate, 0, 1); }
void Metrics::CountChunkResent() { impl_->Add(MetricId::kChunksResent, 0, 1); }

void Metrics::AddTokens(MetricRole role, MetricTier tier, uint64_t tokens) {
  impl_->Add(MetricId::kTokens, At(role) * kMetricTiers + At(tier), static_cast<double>(tokens));
}

void Metrics::AddNonfiniteValues(uint64_t values) {
  impl_->Add(MetricId::kNonfiniteValues, 0, static_cast<double>(values));
}

void Metrics::AddCreditStall(double seconds) { impl_->Add(MetricId::kCreditStall, 0, seconds); }
void Metrics::CountLeaseExpired(MetricLease kind) { impl_->Add(MetricId::kLeasesExpired, At(kind), 1); }

void Metrics::CountLimit(MetricRole role, MetricLimit limit) {
  impl_->Add(MetricId::kTransfersLimited, At(role) * kMetricLimits + At(limit), 1);
}
void Metrics::CountBudgetChoice(MetricBudgetReason reason) { impl_->Add(MetricId::kBudgetChoices, At(reason), 1); }
void Metrics::ObserveLinkRate(double bytes_per_second) { impl_->Observe(MetricId::kLinkRate, 0, bytes_per_second); }

void Metrics::CountError(MetricStage stage, absl::StatusCode code) {
  if (code == absl::StatusCode::kOk) return;
  const size_t codes = AllMetrics()[At(MetricId::kErrors)].labels[1].values.size();
  size_t index = static_cast<size_t>(static_cast<int>(code)) - 1;
  if (index >= codes) index = static_cast<size_t>(absl::StatusCode::kUnknown) - 1;  // a code from a newer peer
  impl_->Add(MetricId::kErrors, At(stage) * codes + index, 1);
}

void Metrics::CountCertificateReload(MetricReload result) { impl_->Add(MetricId::kCertificateReloads, At(result), 1); }
void Metrics::CountHandshakeFailure() { impl_->Add(MetricId::kHandshakeFailures, 0, 1); }

void Metrics::CountConnectionRefused(MetricRefusal reason) {
  impl_->Add(MetricId::kConnectionsRefused, At(reason), 1);
}
void Metrics::CountQuotaRefused(MetricQuota quota) { impl_->Add(MetricId::kQuotaRefusals, At(quota), 1); }

void Metrics::CountRefinement(MetricRole role, MetricOutcome outcome) {
  impl_->Add(MetricId::kRefinements, At(role) * kMetricOutcomes + At(outcome), 1);
}
void Metrics::AddRefinedBytes(uint64_t bytes) { impl_->Add(MetricId::kRefinedBytes, 0, static_cast<double>(bytes)); }
void Metrics::AddAppliedBytes(uint64_t bytes) { impl_->Add(MetricId::kAppliedBytes, 0, static_cast<double>(bytes)); }
void Metrics::CountRetention(MetricRole role, MetricRetention result) {
  impl_->Add(MetricId::kRetentions, At(role) * kMetricRetentions + At(result), 1);
}

void Metrics::CountGate(MetricGate decision) { impl_->Add(MetricId::kGateDecisions, At(decision), 1); }
void Metrics::AddTrials(MetricTrial kind, MetricTrialOutcome outcome, uint64_t trials) {
  impl_->Add(MetricId::kProbeTrials, At(kind) * kMetricTrialOutcomes + At(outcome), static_cast<double>(trials));
}

void Metrics::ObserveStage(MetricStage stage, double seconds) {
  impl_->Observe(MetricId::kStageDuration, At(stage), seconds);
}
void Metrics::ObserveFirstLayerReady(double seconds) { impl_->Observe(MetricId::kFirstLayerReady, 0, seconds); }
void Metrics::ObserveFirstToken(double seconds) { impl_->Observe(MetricId::kFirstToken, 0, seconds); }
bool Metrics::SampleReconstruction() {
  if (impl_->reconstruction_chunks == 0) return false;
  // A mix (murmur3's finaliser) that leaves 0 where it is.
  uint64_t mixed = impl_->chunks_seen.fetch_add(1, std::memory_order_relaxed);
  mixed = (mixed ^ mixed >> 33) * 0xff51afd7ed558ccd;
  mixed = (mixed ^ mixed >> 33) * 0xc4ceb9fe1a85ec53;
  return (mixed ^ mixed >> 33) % impl_->reconstruction_chunks == 0;
}
void Metrics::ObserveReconstructionError(MetricTier tier, double ratio) {
  impl_->Observe(MetricId::kReconstructionError, At(tier), ratio);
}

void Metrics::AddInflightTransfers(int64_t delta) {
  impl_->Add(MetricId::kInflightTransfers, 0, static_cast<double>(delta));
}
void Metrics::SetWorkerConnections(uint64_t connections) {
  impl_->Set(MetricId::kWorkerConnections, 0, static_cast<double>(connections));
}
void Metrics::SetPoolBlocks(MetricBlocks state, uint64_t blocks) {
  impl_->Set(MetricId::kPoolBlocks, At(state), static_cast<double>(blocks));
}
void Metrics::SetStagingBytes(MetricStaging state, uint64_t bytes) {
  impl_->Set(MetricId::kStagingBytes, At(state), static_cast<double>(bytes));
}
void Metrics::SetRefineBytes(MetricRefineMemory use, uint64_t bytes) {
  impl_->Set(MetricId::kRefineBytes, At(use), static_cast<double>(bytes));
}
void Metrics::SetDeviceBytes(MetricDevice use, uint64_t bytes) {
  impl_->Set(MetricId::kDeviceBytes, At(use), static_cast<double>(bytes));
}
void Metrics::SetCertificateExpiry(double unix_seconds) { impl_->Set(MetricId::kCertificateExpiry, 0, unix_seconds); }
void Metrics::SetDraining(bool draining) { impl_->Set(MetricId::kDraining, 0, draining ? 1 : 0); }

void Metrics::SetGateVerdicts(MetricTier tier, MetricVerdict verdict, uint64_t verdicts) {
  impl_->Set(MetricId::kGateVerdicts, At(tier) * kMetricVerdicts + At(verdict), static_cast<double>(verdicts));
}

std::string Metrics::Render() const { return prometheus::TextSerializer().Serialize(impl_->Collect()); }

std::shared_ptr<prometheus::Collectable> MetricsExposer::CollectableOf(const Metrics& metrics) { return metrics.impl_; }

}  // namespace spectrumkv
