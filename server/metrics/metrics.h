// What the stages count. Every series exists, at zero, from the start. Thread-safe; counting is a relaxed atomic add on
// a fixed slot: no lock, no allocation. A Metrics object needs no HTTP server: unit tests just make one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace prometheus {
class Collectable;
}

namespace spectrumkv {

enum class MetricRole { kSender, kReceiver };
enum class MetricOutcome { kCommitted, kFailed, kCancelled, kExpired };
enum class MetricStage { kQueue, kScan, kPlan, kEncode, kSend, kReceive, kDecode, kCommit };
enum class MetricTier { kRaw, kP8, kQ4, kQ3, kQ2, kP4, kQ8 };  // ids of proto/WIRE_FORMAT.md
enum class MetricLease { kPool, kSource, kDestination };
enum class MetricBlocks { kFree, kSending, kReceiving };
enum class MetricReload { kOk, kFailed };
enum class MetricRefusal { kUid, kFull, kNoDescriptor, kSystem };
enum class MetricQuota { kPools, kBytes, kSegments, kHolds, kTransfers, kPoolTransfers };
enum class MetricRetention { kKept, kRefused, kCached, kUncached, kEvicted };
enum class MetricGate { kOpen, kWarned, kOverridden, kNarrowed, kRefused };
enum class MetricVerdict { kOpen, kClosed };
enum class MetricTrial { kNeedle, kContinuation, kCode };
enum class MetricTrialOutcome { kPassed, kFailed };
enum class MetricDevice { kContext, kPools, kLanes };
enum class MetricRefineMemory { kStaging, kCache };
enum class MetricStaging { kSendUsed, kSendFree, kReceiveUsed, kReceiveFree };
// Numbers as LimitedBy and BudgetReason of report.proto.
enum class MetricLimit { kUnknown, kPlan, kScan, kEncode, kLink, kDecode, kCredits, kPeer, kSource, kStaging };
enum class MetricBudgetReason {
  kUnknown,
  kRawMeetsTarget,
  kRawNotSlower,
  kMeetsTarget,
  kOutOfReach,
  kLinkUnknown,
  kStageUnknown
};

constexpr int kMetricRoles = 2;
constexpr int kMetricOutcomes = 4;
constexpr int kMetricStages = 8;
constexpr int kMetricTiers = 7;
constexpr int kMetricLeases = 3;
constexpr int kMetricBlocks = 3;
constexpr int kMetricReloads = 2;
constexpr int kMetricRefusals = 4;
constexpr int kMetricQuotas = 6;
constexpr int kMetricRetentions = 5;
constexpr int kMetricGates = 5;
constexpr int kMetricVerdicts = 2;
constexpr int kMetricTrials = 3;
constexpr int kMetricTrialOutcomes = 2;
constexpr int kMetricRefineMemories = 2;
constexpr int kMetricStagings = 4;
constexpr int kMetricDevices = 3;
constexpr int kMetricLimits = 10;
constexpr int kMetricBudgetReasons = 7;

class Metrics {
 public:
  struct BuildInfo {
    std::string version;
    std::string revision;
    std::string backend;  // of the codec: scalar, avx2, avx512, cuda
  };
  Metrics() : Metrics(BuildInfo{"unknown", "unknown", "unknown"}) {}
  // `reconstruction_chunks`: see SampleReconstruction.
  explicit Metrics(const BuildInfo& info, uint64_t reconstruction_chunks = 0);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // Once for each transfer that becomes terminal.
  void CountTransfer(MetricRole role, MetricOutcome outcome, double duration_seconds, uint64_t wire_bytes);
  // Every chunk as it passes, resends too: wire_bytes is header and body.
  void CountChunk(MetricRole role, uint64_t kv_bytes, uint64_t wire_bytes);
  // The totals of a transfer, after its commit: wire below kv is saved, wire above kv is expanded.
  void AddSavedBytes(MetricRole role, uint64_t kv_bytes, uint64_t wire_bytes);
  void AddOverheadBytes(uint64_t bytes);
  void CountChunkDuplicate();
  void CountChunkResent();
  void AddTokens(MetricRole role, MetricTier tier, uint64_t tokens);  // (layer, token, K or V) each count one
  void AddNonfiniteValues(uint64_t values);
  void AddCreditStall(double seconds);
  void CountLeaseExpired(MetricLease kind);
  // Of a committed transfer.
  void CountLimit(MetricRole role, MetricLimit limit);
  void CountBudgetChoice(MetricBudgetReason reason);
  // The link to a peer as one transfer saw it.
  void ObserveLinkRate(double bytes_per_second);
  void CountCertificateReload(MetricReload result);
  void CountHandshakeFailure();
  // A connection to the workers' socket that was not taken.
  void CountConnectionRefused(MetricRefusal reason);
  // A request above what one user may have.
  void CountQuotaRefused(MetricQuota quota);
  // Once for each refinement that becomes terminal; bytes that one has sent; bytes that one has put in place.
  void CountRefinement(MetricRole role, MetricOutcome outcome);
  void AddRefinedBytes(uint64_t bytes);
  void AddAppliedBytes(uint64_t bytes);
  // Of a committed transfer that was to be kept for refinements; and what became of one that the daemon's cache was to keep.
  void CountRetention(MetricRole role, MetricRetention result);
  // Of a transfer that was asked for, while the quality gate is on.
  void CountGate(MetricGate decision);
  void AddTrials(MetricTrial kind, MetricTrialOutcome outcome, uint64_t trials);
  void CountError(MetricStage stage, absl::StatusCode code);  // kOk is not counted

  void ObserveStage(MetricStage stage, double seconds);
  void ObserveFirstLayerReady(double seconds);
  void ObserveFirstToken(double seconds);
  // Whether the sender should measure this chunk: the first one, then one in `reconstruction_chunks` at no regular
  // distance, so that it is not always the same layer. 0: never.
  bool SampleReconstruction();
  void ObserveReconstructionError(MetricTier tier, double ratio);

  void AddInflightTransfers(int64_t delta);
  void SetWorkerConnections(uint64_t connections);
  void SetPoolBlocks(MetricBlocks state, uint64_t blocks);
  void SetStagingBytes(MetricStaging state, uint64_t bytes);
  void SetRefineBytes(MetricRefineMemory use, uint64_t bytes);
  void SetDeviceBytes(MetricDevice use, uint64_t bytes);
  void SetCertificateExpiry(double unix_seconds);
  void SetDraining(bool draining);
  void SetGateVerdicts(MetricTier tier, MetricVerdict verdict, uint64_t verdicts);

  // The text exposition, as /metrics serves it.
  std::string Render() const;

 private:
  friend class MetricsExposer;
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

// Serves Render() over HTTP at /metrics until destroyed.
class MetricsExposer {
 public:
  virtual ~MetricsExposer() = default;
  // The port it listens on (the one chosen for ":0").
  virtual int port() const = 0;
  // `address` is host:port. ListenFailed (server/base/listen.h) if it cannot listen there. `metrics` may die first.
  static absl::StatusOr<std::unique_ptr<MetricsExposer>> Start(const std::string& address, const Metrics& metrics);

 protected:
  static std::shared_ptr<prometheus::Collectable> CollectableOf(const Metrics& metrics);
};

// "sender", "committed", "encode", "Q4", ...: the label values.
const char* MetricLabelOf(MetricRole role);
const char* MetricLabelOf(MetricOutcome outcome);
const char* MetricLabelOf(MetricStage stage);
const char* MetricLabelOf(MetricTier tier);
const char* MetricLabelOf(MetricLease kind);
const char* MetricLabelOf(MetricBlocks state);
const char* MetricLabelOf(MetricReload result);
const char* MetricLabelOf(MetricRefusal reason);
const char* MetricLabelOf(MetricQuota quota);
const char* MetricLabelOf(MetricRetention result);
const char* MetricLabelOf(MetricGate decision);
const char* MetricLabelOf(MetricVerdict verdict);
const char* MetricLabelOf(MetricTrial kind);
const char* MetricLabelOf(MetricTrialOutcome outcome);
const char* MetricLabelOf(MetricRefineMemory use);
const char* MetricLabelOf(MetricStaging state);
const char* MetricLabelOf(MetricDevice use);
const char* MetricLabelOf(MetricLimit limit);
const char* MetricLabelOf(MetricBudgetReason reason);
// "invalid_argument": canonical names in lower snake; "" for kOk.
const char* MetricLabelOf(absl::StatusCode code);

}  // namespace spectrumkv
