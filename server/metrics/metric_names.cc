#include "server/metrics/metric_names.h"

#include <utility>

#include "server/metrics/metrics.h"

namespace spectrumkv {
namespace {

constexpr int kErrorCodes = 16;  // canonical codes 1..16; 0 is OK

// All values of an enum that counts from 0, as label values.
template <typename Enum>
MetricLabel LabelOf(const std::string& name, int count) {
  MetricLabel label{name, {}};
  for (int i = 0; i < count; ++i) label.values.emplace_back(MetricLabelOf(static_cast<Enum>(i)));
  return label;
}

MetricLabel Role() { return LabelOf<MetricRole>("role", kMetricRoles); }
MetricLabel Outcome() { return LabelOf<MetricOutcome>("outcome", kMetricOutcomes); }
MetricLabel Stage() { return LabelOf<MetricStage>("stage", kMetricStages); }
MetricLabel TierLabel() { return LabelOf<MetricTier>("tier", kMetricTiers); }
MetricLabel Code() {
  MetricLabel label{"code", {}};
  for (int code = 1; code <= kErrorCodes; ++code) {
    label.values.emplace_back(MetricLabelOf(static_cast<absl::StatusCode>(code)));
  }
  return label;
}
MetricLabel Backend() { return {"backend", {"scalar", "avx2", "avx512", "cuda"}}; }

// The edges vLLM uses, so that the two can be laid over each other.
std::vector<double> FirstTokenEdges() {
  return {.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560};
}
std::vector<double> TransferEdges() {
  return {.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600};
}
std::vector<double> StageEdges() {
  return {.00001, .000025, .00005, .0001, .00025, .0005, .001, .0025, .005, .01,
          .025,   .05,     .1,     .25,   .5,     1,     2.5,  5,     10,   30};
}
std::vector<double> ByteEdges() {  // 64 KiB to 64 GiB
  std::vector<double> edges;
  for (double edge = 65536; edge <= 68719476736.0; edge *= 4) edges.push_back(edge);
  return edges;
}
// 100 Mbit/s, 1, 10, 25, 100, 200 and 400 Gbit/s are edges, with one or two between.
std::vector<double> RateEdges() {
  return {1.25e6, 4e6, 12.5e6, 4e7, 1.25e8, 3e8, 6e8, 1.25e9, 3.125e9, 6.25e9, 12.5e9, 25e9, 50e9};
}
std::vector<double> ErrorEdges() { return {.001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .5, 1}; }

std::vector<MetricSpec> MakeCounters() {
  const MetricType counter = MetricType::kCounter;
  return {
      {MetricId::kTransfers,
       "spectrumkv_transfers_total",
       counter,
       "Transfers that ended, by role and outcome.",
       {Role(), Outcome()},
       {}},
      {MetricId::kKvBytes,
       "spectrumkv_kv_bytes_total",
       counter,
       "Raw KV bytes of the chunks sent or received.",
       {Role()},
       {}},
      {MetricId::kWireBytes,
       "spectrumkv_wire_bytes_total",
       counter,
       "Bytes of the chunks sent or received, headers included, resends included.",
       {Role()},
       {}},
      {MetricId::kSavedBytes,
       "spectrumkv_saved_bytes_total",
       counter,
       "Raw KV bytes less wire bytes of committed transfers, where that is above 0. Of one that is kept for refinements "
       "it is counted at the end of that, less what they moved.",
       {Role()},
       {}},
      {MetricId::kExpandedBytes,
       "spectrumkv_expanded_bytes_total",
       counter,
       "Wire bytes above raw KV bytes of committed transfers, where that is above 0.",
       {},
       {}},
      {MetricId::kOverheadBytes,
       "spectrumkv_overhead_bytes_total",
       counter,
       "Bytes of the frames between daemons that are no chunks.",
       {},
       {}},
      {MetricId::kChunks, "spectrumkv_chunks_total", counter, "Chunks sent or received.", {Role()}, {}},
      {MetricId::kChunksDuplicate,
       "spectrumkv_chunks_duplicate_total",
       counter,
       "Chunks that came a second time and were dropped.",
       {},
       {}},
      {MetricId::kChunksResent,
       "spectrumkv_chunks_resent_total",
       counter,
       "Chunks sent again after a stream was lost.",
       {},
       {}},
      {MetricId::kTokens,
       "spectrumkv_tokens_total",
       counter,
       "Token planes (K or V of one token in one layer) sent or received, by tier.",
       {Role(), TierLabel()},
       {}},
      {MetricId::kErrors,
       "spectrumkv_errors_total",
       counter,
       "Failures that were handled, by stage and status code.",
       {Stage(), Code()},
       {}},
      {MetricId::kNonfiniteValues,
       "spectrumkv_nonfinite_values_total",
       counter,
       "NaN and infinite values found in sources; their tokens travel raw.",
       {},
       {}},
      {MetricId::kCreditStall,
       "spectrumkv_credit_stall_seconds_total",
       counter,
       "Time senders had chunks ready and waited for room at the receiver.",
       {},
       {}},
      {MetricId::kLeasesExpired,
       "spectrumkv_leases_expired_total",
       counter,
       "Leases that their owner did not renew in time.",
       {LabelOf<MetricLease>("kind", kMetricLeases)},
       {}},
      {MetricId::kTransfersLimited,
       "spectrumkv_transfers_limited_total",
       counter,
       "Committed transfers, by what took most of their time.",
       {Role(), LabelOf<MetricLimit>("limited_by", kMetricLimits)},
       {}},
      {MetricId::kBudgetChoices,
       "spectrumkv_budget_choices_total",
       counter,
       "Budgets that the daemon chose for auto_budget, by reason.",
       {LabelOf<MetricBudgetReason>("reason", kMetricBudgetReasons)},
       {}},
      {MetricId::kCertificateReloads,
       "spectrumkv_certificate_reloads_total",
       counter,
       "Changes of the peer certificate files: ok is in use, failed was refused and the old files stay in use.",
       {LabelOf<MetricReload>("result", kMetricReloads)},
       {}},
      {MetricId::kHandshakeFailures,
       "spectrumkv_handshake_failures_total",
       counter,
       "TLS handshakes with peers that failed, whoever dialled: no certificate, another authority, expired, no TLS.",
       {},
       {}},
      {MetricId::kConnectionsRefused,
       "spectrumkv_worker_connections_refused_total",
       counter,
       "Connections to the workers' socket that were not taken, by cause.",
       {LabelOf<MetricRefusal>("cause", kMetricRefusals)},
       {}},
      {MetricId::kQuotaRefusals,
       "spectrumkv_quota_refusals_total",
       counter,
       "Requests refused because their user, or their pool, has as much as it may have.",
       {LabelOf<MetricQuota>("quota", kMetricQuotas)},
       {}},
      {MetricId::kRefinements,
       "spectrumkv_refinements_total",
       counter,
       "Refinements that ended, by role and outcome. They are not among the transfers.",
       {Role(), Outcome()},
       {}},
      {MetricId::kRetentions,
       "spectrumkv_retentions_total",
       counter,
       "Committed transfers that were to be kept for refinements: kept, or refused because there were as many as "
       "refine.max_retained allows, or the daemon drains. Of kept ones that were to move to refine.cache_bytes: "
       "cached, or uncached because there was no room; and evicted from there, for others.",
       {Role(), LabelOf<MetricRetention>("result", kMetricRetentions)},
       {}},
      {MetricId::kRefinedBytes,
       "spectrumkv_refined_bytes_total",
       counter,
       "Bytes of the chunks that refinements sent, which are in wire_bytes_total as well.",
       {},
       {}},
      {MetricId::kAppliedBytes,
       "spectrumkv_refinement_applied_bytes_total",
       counter,
       "Bytes that ApplyRefinement has copied into destinations.",
       {},
       {}},
      {MetricId::kGateDecisions,
       "spectrumkv_gate_decisions_total",
       counter,
       "Transfers asked for while the quality gate is on, by what it made of their tiers.",
       {LabelOf<MetricGate>("decision", kMetricGates)},
       {}},
      {MetricId::kProbeTrials,
       "spectrumkv_probe_trials_total",
       counter,
       "Trials of probes that were reported, each tier counting one, by kind and outcome.",
       {LabelOf<MetricTrial>("kind", kMetricTrials), LabelOf<MetricTrialOutcome>("result", kMetricTrialOutcomes)},
       {}},
  };
}

std::vector<MetricSpec> MakeHistograms() {
  const MetricType histogram = MetricType::kHistogram;
  return {
      {MetricId::kFirstToken,
       "spectrumkv_time_to_first_token_seconds",
       histogram,
       "Time to first token as decode workers reported it.",
       {},
       FirstTokenEdges()},
      {MetricId::kTransferDuration,
       "spectrumkv_transfer_duration_seconds",
       histogram,
       "From the request to the terminal state.",
       {Role(), Outcome()},
       TransferEdges()},
      {MetricId::kFirstLayerReady,
       "spectrumkv_first_layer_ready_seconds",
       histogram,
       "From the request to the first complete layer at the receiver.",
       {},
       TransferEdges()},
      {MetricId::kStageDuration,
       "spectrumkv_stage_duration_seconds",
       histogram,
       "Time one step of a stage took: a chunk, or a whole plan or commit.",
       {Stage()},
       StageEdges()},
      {MetricId::kTransferBytes,
       "spectrumkv_transfer_bytes",
       histogram,
       "Wire bytes of one transfer.",
       {Role()},
       ByteEdges()},
      {MetricId::kReconstructionError,
       "spectrumkv_reconstruction_error_ratio",
       histogram,
       "Root mean square error over that of the originals, of the K or V tokens of a tier in a sampled chunk.",
       {TierLabel()},
       ErrorEdges()},
      {MetricId::kLinkRate,
       "spectrumkv_link_rate_bytes_per_second",
       histogram,
       "Rate of the link to a peer as one transfer saw it; one observation for each transfer large enough to say.",
       {},
       RateEdges()},
  };
}

std::vector<MetricSpec> MakeGauges() {
  const MetricType gauge = MetricType::kGauge;
  return {
      {MetricId::kInflightTransfers,
       "spectrumkv_inflight_transfers",
       gauge,
       "Transfers that are not terminal.",
       {},
       {}},
      {MetricId::kWorkerConnections,
       "spectrumkv_worker_connections",
       gauge,
       "Connections to the workers' socket.",
       {},
       {}},
      {MetricId::kPoolBlocks,
       "spectrumkv_pool_blocks",
       gauge,
       "Blocks of all registered pools, by use.",
       {LabelOf<MetricBlocks>("state", kMetricBlocks)},
       {}},
      {MetricId::kStagingBytes,
       "spectrumkv_staging_bytes",
       gauge,
       "Bytes of staging slots, by partition and use.",
       {LabelOf<MetricStaging>("state", kMetricStagings)},
       {}},
      {MetricId::kRefineBytes,
       "spectrumkv_refine_bytes",
       gauge,
       "Memory of refinements: refine.staging_bytes and refine.cache_bytes that are in use.",
       {LabelOf<MetricRefineMemory>("use", kMetricRefineMemories)},
       {}},
      {MetricId::kDeviceBytes,
       "spectrumkv_device_bytes",
       gauge,
       "Memory that the daemon has on its GPUs, all of them together, by use; a context whose size is not known counts 0.",
       {LabelOf<MetricDevice>("use", kMetricDevices)},
       {}},
      {MetricId::kCertificateExpiry,
       "spectrumkv_certificate_expiry_timestamp_seconds",
       gauge,
       "When the first certificate of this daemon's chain expires, seconds since 1970; 0 without one.",
       {},
       {}},
      {MetricId::kDraining, "spectrumkv_draining", gauge, "1 while the daemon takes no new work.", {}, {}},
      {MetricId::kProcessStart,
       "process_start_time_seconds",
       gauge,
       "When this process started, seconds since 1970.",
       {},
       {}},
      {MetricId::kGateVerdicts,
       "spectrumkv_gate_verdicts",
       gauge,
       "Verdicts of probes that are kept, by tier: open or closed to their model.",
       {TierLabel(), LabelOf<MetricVerdict>("verdict", kMetricVerdicts)},
       {}},
      {MetricId::kBuildInfo,
       "spectrumkv_build_info",
       gauge,
       "Always 1; what runs is in the labels.",
       {{"version", {}}, {"revision", {}}},
       {}},
      {MetricId::kCodecInfo,
       "spectrumkv_codec_info",
       gauge,
       "1 for the codec backend in use, 0 for the others.",
       {Backend()},
       {}},
  };
}

const char* Pick(const char* const* names, int count, int index) {
  return index >= 0 && index < count ? names[index] : "";
}

}  // namespace

const std::vector<MetricSpec>& AllMetrics() {
  static const auto* const metrics = [] {
    auto* all = new std::vector<MetricSpec>;
    for (auto make : {MakeCounters, MakeHistograms, MakeGauges}) {
      for (MetricSpec& spec : make()) all->push_back(std::move(spec));
    }
    return all;
  }();
  return *metrics;
}

const char* MetricTypeName(MetricType type) {
  static constexpr const char* kNames[] = {"counter", "gauge", "histogram"};
  return Pick(kNames, 3, static_cast<int>(type));
}

const char* MetricLabelOf(MetricRole role) {
  static constexpr const char* kNames[] = {"sender", "receiver"};
  return Pick(kNames, kMetricRoles, static_cast<int>(role));
}
const char* MetricLabelOf(MetricOutcome outcome) {
  static constexpr const char* kNames[] = {"committed", "failed", "cancelled", "expired"};
  return Pick(kNames, kMetricOutcomes, static_cast<int>(outcome));
}
const char* MetricLabelOf(MetricStage stage) {
  static constexpr const char* kNames[] = {"queue", "scan", "plan", "encode", "send", "receive", "decode", "commit"};
  return Pick(kNames, kMetricStages, static_cast<int>(stage));
}
const char* MetricLabelOf(MetricTier tier) {
  static constexpr const char* kNames[] = {"RAW", "P8", "Q4", "Q3", "Q2", "P4", "Q8"};
  return Pick(kNames, kMetricTiers, static_cast<int>(tier));
}
const char* MetricLabelOf(MetricLease kind) {
  static constexpr const char* kNames[] = {"pool", "source", "destination"};
  return Pick(kNames, kMetricLeases, static_cast<int>(kind));
}
const char* MetricLabelOf(MetricBlocks state) {
  static constexpr const char* kNames[] = {"free", "sending", "receiving"};
  return Pick(kNames, kMetricBlocks, static_cast<int>(state));
}
const char* MetricLabelOf(MetricReload result) {
  static constexpr const char* kNames[] = {"ok", "failed"};
  return Pick(kNames, kMetricReloads, static_cast<int>(result));
}
const char* MetricLabelOf(MetricRefusal reason) {
  static constexpr const char* kNames[] = {"uid", "full", "no_descriptor", "system"};
  return Pick(kNames, kMetricRefusals, static_cast<int>(reason));
}
const char* MetricLabelOf(MetricQuota quota) {
  static constexpr const char* kNames[] = {"pools", "bytes", "segments", "holds", "transfers", "pool_transfers"};
  return Pick(kNames, kMetricQuotas, static_cast<int>(quota));
}
const char* MetricLabelOf(MetricRetention result) {
  static constexpr const char* kNames[] = {"kept", "refused", "cached", "uncached", "evicted"};
  return Pick(kNames, kMetricRetentions, static_cast<int>(result));
}
const char* MetricLabelOf(MetricGate decision) {
  static constexpr const char* kNames[] = {"open", "warned", "overridden", "narrowed", "refused"};
  return Pick(kNames, kMetricGates, static_cast<int>(decision));
}
const char* MetricLabelOf(MetricVerdict verdict) {
  static constexpr const char* kNames[] = {"open", "closed"};
  return Pick(kNames, kMetricVerdicts, static_cast<int>(verdict));
}
const char* MetricLabelOf(MetricTrial kind) {
  static constexpr const char* kNames[] = {"needle", "continuation", "code"};
  return Pick(kNames, kMetricTrials, static_cast<int>(kind));
}
const char* MetricLabelOf(MetricTrialOutcome outcome) {
  static constexpr const char* kNames[] = {"passed", "failed"};
  return Pick(kNames, kMetricTrialOutcomes, static_cast<int>(outcome));
}
const char* MetricLabelOf(MetricDevice use) {
  static constexpr const char* kNames[] = {"context", "pools", "lanes"};
  return Pick(kNames, kMetricDevices, static_cast<int>(use));
}

const char* MetricLabelOf(MetricRefineMemory use) {
  static constexpr const char* kNames[] = {"staging", "cache"};
  return Pick(kNames, kMetricRefineMemories, static_cast<int>(use));
}
const char* MetricLabelOf(MetricStaging state) {
  static constexpr const char* kNames[] = {"send_used", "send_free", "receive_used", "receive_free"};
  return Pick(kNames, kMetricStagings, static_cast<int>(state));
}
const char* MetricLabelOf(MetricLimit limit) {
  static constexpr const char* kNames[] = {"unknown", "plan",    "scan", "encode", "link",
                                           "decode",  "credits", "peer", "source", "staging"};
  return Pick(kNames, kMetricLimits, static_cast<int>(limit));
}
const char* MetricLabelOf(MetricBudgetReason reason) {
  static constexpr const char* kNames[] = {"unknown",      "raw_meets_target", "raw_not_slower", "meets_target",
                                           "out_of_reach", "link_unknown",     "stage_unknown"};
  return Pick(kNames, kMetricBudgetReasons, static_cast<int>(reason));
}
const char* MetricLabelOf(absl::StatusCode code) {
  static constexpr const char* kNames[] = {
      "",          "cancelled",      "unknown",           "invalid_argument",   "deadline_exceeded",
      "not_found", "already_exists", "permission_denied", "resource_exhausted", "failed_precondition",
      "aborted",   "out_of_range",   "unimplemented",     "internal",           "unavailable",
      "data_loss", "unauthenticated"};
  const int index = static_cast<int>(code);
  return index >= 0 && index <= kErrorCodes ? kNames[index] : "unknown";
}

}  // namespace spectrumkv
