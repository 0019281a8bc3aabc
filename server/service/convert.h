// Protobuf <-> domain: the last place that sees a worker's messages. Everything a worker can send is bounded and
// checked here for shape: lengths, counts, enum ranges, characters. What depends on the pool or the plan is checked
// there.
//
// Errors are InvalidArgument with the reason stated, Unimplemented for what this version knows and refuses; the message
// names the field, the value and the limit. Pure and thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/config/config.h"
#include "server/config/profiles.h"
#include "server/plan/plan.h"
#include "server/pool/pool.h"
#include "server/pool/schema.h"
#include "server/scan/attention.h"
#include "server/transfer/report.h"
#include "server/transfer/transfer_manager.h"
#include "spectrumkv/v1/worker_service.pb.h"

namespace spectrumkv {

// Of one message, in either direction. Bounds what one call can hold in memory.
constexpr int kMaxWorkerMessageBytes = 16 << 20;
// PutBlocks and GetBlocks put no more data in one message, unless a single block is larger.
constexpr uint64_t kBlockMessageBytes = 1 << 20;

constexpr size_t kMaxNameLength = 256;
constexpr size_t kMaxPathLength = 1024;
constexpr int kMaxGroups = 64;
constexpr int kMaxLayers = 2048;
constexpr int kMaxSegments = 8192;
constexpr int kMaxBlockRuns = 1 << 20;
constexpr size_t kTransferTokenBytes = 16;

// What requests leave open, and how far they may go.
struct RequestDefaults {
  Policy policy;
  uint32_t max_tokens = 1 << 22;
  int64_t deadline_ms = 30000, max_deadline_ms = 600000;
  int64_t lease_ttl_ms = 30000, min_lease_ttl_ms = 1000, max_lease_ttl_ms = 600000;
  int64_t max_retain_ms = 600000;
  int64_t unregister_timeout_ms = 60000;
  int64_t max_unregister_timeout_ms = 600000;
  std::vector<std::string> allowed_hosts;
  std::vector<ProfileFile> profiles;
};
// INVALID_CONFIG for names that are no allocator or tier. Without profiles: they are files.
absl::StatusOr<RequestDefaults> DefaultsOf(const Config& config);

// INVALID_SCHEMA, OUT_OF_RANGE; UNSUPPORTED_DTYPE.
absl::StatusOr<PoolSchema> SchemaFromProto(const v1::PoolSchema& proto);

// What is left open comes from `defaults`. INVALID_POLICY, INVALID_TIERS; UNKNOWN_TIER. Budget, scores and decay are
// checked by the planner.
absl::StatusOr<Policy> PolicyFromProto(const v1::Policy& proto, const Policy& defaults);

// policy.retain_seconds. OUT_OF_RANGE; UNIMPLEMENTED RETENTION_OF_PARTS.
absl::StatusOr<int64_t> RetainMsOf(const v1::Policy& proto, const PartId& part, const RequestDefaults& defaults);

// policy.refine. INVALID_POLICY (no retain_seconds), INVALID_TIERS, UNKNOWN_TIER.
absl::StatusOr<std::optional<Tier>> BackgroundTierOf(const v1::Policy& proto);
// UNSPECIFIED is STAGED. INVALID_MODE.
absl::StatusOr<bool> IsDirect(v1::RefineMode mode, const std::string& field);

// All but owner and peer. INVALID_TRANSFER_ID, INVALID_TIERS, UNKNOWN_TIER, INVALID_BUDGET, INVALID_MODE, INVALID_SELECTION.
absl::StatusOr<RefineSpec> RefineFromProto(const v1::RefineRequest& proto, const RequestDefaults& defaults);

// INVALID_QUERIES. What depends on the pool is checked where the pool is known (CheckQueries).
absl::StatusOr<std::shared_ptr<const RecentQueries>> QueriesFromProto(const v1::RecentQueries& proto);

// The profile for a pool's model, for the layers as the planner has them; what suits every model where there is none.
ModelProfile ProfileOf(const std::vector<ProfileFile>& profiles, const PoolSchema& schema,
                       const std::vector<PlanLayer>& layers);

// INVALID_BLOCKS.
absl::StatusOr<std::vector<GroupBlockList>> BlocksFromProto(
    const google::protobuf::RepeatedPtrField<v1::GroupBlocks>& proto);
absl::StatusOr<std::vector<BlockRange>> RunsFromProto(const google::protobuf::RepeatedPtrField<v1::BlockRun>& proto,
                                                      const std::string& field);

// The rule of server/base/ids.h: INVALID_TRANSFER_ID, INVALID_REQUEST_ID.
absl::Status CheckTransferId(const std::string& id);
absl::Status CheckId(const std::string& id, const std::string& field, const std::string& reason);
absl::Status CheckRequestId(const std::string& id);
// INVALID_POOL_REF.
absl::Status CheckPoolRef(const v1::PoolRef& pool);
// Empty or 16 bytes: INVALID_TOKEN. The value is never shown.
absl::Status CheckTransferToken(const std::string& token);
// host:port or [v6]:port: INVALID_PEER. PERMISSION_DENIED PEER_NOT_ALLOWED where no rule of `allowed_hosts` fits
// (server/base/host_rule.h).
absl::Status CheckPeerAddress(const std::string& peer, const std::vector<std::string>& allowed_hosts = {});
// Absent: 0 of 1. INVALID_PART.
absl::StatusOr<PartId> PartFromProto(bool present, const v1::Part& part);
// 1..max_tokens: OUT_OF_RANGE.
absl::Status CheckTokenCount(uint32_t tokens, const RequestDefaults& defaults);
// 0: the default. OUT_OF_RANGE above the maximum.
absl::StatusOr<int64_t> DeadlineOf(uint64_t deadline_ms, const RequestDefaults& defaults);
absl::StatusOr<int64_t> LeaseTtlOf(uint64_t ttl_ms, const RequestDefaults& defaults);
absl::StatusOr<int64_t> UnregisterTimeoutOf(uint64_t timeout_ms, const RequestDefaults& defaults);
// UNSPECIFIED: empty. INVALID_ROLE.
absl::StatusOr<std::optional<Role>> RoleFromProto(v1::TransferRole role);
// INVALID_BLOCKS.
absl::StatusOr<PlaneId> PlaneFromProto(v1::Plane plane);

// Above 0 and finite: OUT_OF_RANGE.
absl::Status CheckLinkRate(double bytes_per_second);

// Equal messages have equal fingerprints, others practically never; of this process only.
std::string FingerprintOf(const google::protobuf::MessageLite& request);

v1::Tier TierToProto(Tier tier);
v1::TransferState StateToProto(TransferState state);
void TierCountsToProto(const TierTotals& totals, google::protobuf::RepeatedPtrField<v1::TierCount>* out);
void TokenRunsToProto(const std::vector<TokenRange>& runs, google::protobuf::RepeatedPtrField<v1::TokenRun>* out);
void BudgetChoiceToProto(const BudgetChoice& choice, v1::BudgetChoice* out);
// To gate_action and closed_tiers of a TransferReport or a PlanResponse.
template <typename Message>
void GateToProto(const GateOutcome& gate, Message* out) {
  out->set_gate_action(static_cast<v1::GateAction>(gate.action));
  for (const Tier tier : gate.closed) out->add_closed_tiers(TierToProto(tier));
}
void ReportToProto(const TransferReport& report, v1::TransferReport* out);

}  // namespace spectrumkv
