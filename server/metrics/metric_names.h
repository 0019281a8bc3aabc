// The one list of metrics: name, type, help, labels with their closed sets of values, bucket edges. The exporter, the
// documentation test and the dashboard test read it. Label values never come from requests or peers.
#pragma once

#include <string>
#include <vector>

namespace spectrumkv {

enum class MetricType { kCounter, kGauge, kHistogram };

// Index into AllMetrics().
enum class MetricId {
  kTransfers,
  kKvBytes,
  kWireBytes,
  kSavedBytes,
  kExpandedBytes,
  kOverheadBytes,
  kChunks,
  kChunksDuplicate,
  kChunksResent,
  kTokens,
  kErrors,
  kNonfiniteValues,
  kCreditStall,
  kLeasesExpired,
  kTransfersLimited,
  kBudgetChoices,
  kCertificateReloads,
  kHandshakeFailures,
  kConnectionsRefused,
  kQuotaRefusals,
  kRefinements,
  kRetentions,
  kRefinedBytes,
  kAppliedBytes,
  kGateDecisions,
  kProbeTrials,
  kFirstToken,
  kTransferDuration,
  kFirstLayerReady,
  kStageDuration,
  kTransferBytes,
  kReconstructionError,
  kLinkRate,
  kInflightTransfers,
  kWorkerConnections,
  kPoolBlocks,
  kStagingBytes,
  kRefineBytes,
  kDeviceBytes,
  kCertificateExpiry,
  kDraining,
  kProcessStart,
  kGateVerdicts,
  kBuildInfo,
  kCodecInfo,
  kCount  // not a metric
};

struct MetricLabel {
  std::string name;
  std::vector<std::string> values;  // closed set; empty: one value, given at the start (version, revision)
};

struct MetricSpec {
  MetricId id = MetricId::kCount;
  std::string name;  // with the prefix spectrumkv_, but for what every exporter names alike
  MetricType type = MetricType::kCounter;
  std::string help;
  std::vector<MetricLabel> labels;
  std::vector<double> buckets;  // upper edges of a histogram, ascending, without +Inf
};

const std::vector<MetricSpec>& AllMetrics();

// "counter", "gauge", "histogram".
const char* MetricTypeName(MetricType type);

}  // namespace spectrumkv
