#include "server/base/status.h"
#include "server/service/convert.h"

namespace spectrumkv {
namespace {

v1::Allocator AllocatorToProto(Allocator allocator) {
  switch (allocator) {
    case Allocator::kGreedy: return v1::ALLOCATOR_GREEDY;
    case Allocator::kSinkProtect: return v1::ALLOCATOR_SINK_PROTECT;
    case Allocator::kBalanced: return v1::ALLOCATOR_BALANCED;
    case Allocator::kTwoTier: return v1::ALLOCATOR_TWO_TIER;
    case Allocator::kUniform: return v1::ALLOCATOR_UNIFORM;
    case Allocator::kRandom: return v1::ALLOCATOR_RANDOM;
    case Allocator::kPdTrim: return v1::ALLOCATOR_PDTRIM;
    case Allocator::kSlidingWindowSink: return v1::ALLOCATOR_SLIDING_WINDOW_SINK;
    case Allocator::kRaw: return v1::ALLOCATOR_RAW;
    case Allocator::kOptimal: return v1::ALLOCATOR_OPTIMAL;
  }
  return v1::ALLOCATOR_UNSPECIFIED;
}

// The numbers of the domain's enums are those of the protos.
static_assert(v1::LimitedBy_ARRAYSIZE == kLimitCount && v1::LIMITED_BY_PLAN == static_cast<int>(Limit::kPlan) &&
              v1::LIMITED_BY_SCAN == static_cast<int>(Limit::kScan) &&
              v1::LIMITED_BY_ENCODE == static_cast<int>(Limit::kEncode) &&
              v1::LIMITED_BY_LINK == static_cast<int>(Limit::kLink) &&
              v1::LIMITED_BY_DECODE == static_cast<int>(Limit::kDecode) &&
              v1::LIMITED_BY_CREDITS == static_cast<int>(Limit::kCredits) &&
              v1::LIMITED_BY_PEER == static_cast<int>(Limit::kPeer) &&
              v1::LIMITED_BY_SOURCE == static_cast<int>(Limit::kSource) &&
              v1::LIMITED_BY_STAGING == static_cast<int>(Limit::kStaging));
static_assert(v1::BudgetReason_ARRAYSIZE == kBudgetReasonCount &&
              v1::BUDGET_REASON_RAW_MEETS_TARGET == static_cast<int>(BudgetReason::kRawMeetsTarget) &&
              v1::BUDGET_REASON_RAW_NOT_SLOWER == static_cast<int>(BudgetReason::kRawNotSlower) &&
              v1::BUDGET_REASON_MEETS_TARGET == static_cast<int>(BudgetReason::kMeetsTarget) &&
              v1::BUDGET_REASON_OUT_OF_REACH == static_cast<int>(BudgetReason::kOutOfReach) &&
              v1::BUDGET_REASON_LINK_UNKNOWN == static_cast<int>(BudgetReason::kLinkUnknown) &&
              v1::BUDGET_REASON_STAGE_UNKNOWN == static_cast<int>(BudgetReason::kStageUnknown));

static_assert(v1::GateAction_ARRAYSIZE == 4 && v1::GATE_ACTION_WARNED == static_cast<int>(GateAction::kWarned) &&
              v1::GATE_ACTION_OVERRIDDEN == static_cast<int>(GateAction::kOverridden) &&
              v1::GATE_ACTION_NARROWED == static_cast<int>(GateAction::kNarrowed));

v1::ImportanceSource ImportanceToProto(ImportanceSource source) {
  switch (source) {
    case ImportanceSource::kScores: return v1::IMPORTANCE_SOURCE_SCORES;
    case ImportanceSource::kPosition: return v1::IMPORTANCE_SOURCE_POSITION;
    case ImportanceSource::kKeyNorm: return v1::IMPORTANCE_SOURCE_KEY_NORM;
    case ImportanceSource::kNone: return v1::IMPORTANCE_SOURCE_NONE;
    case ImportanceSource::kRecentQueries: return v1::IMPORTANCE_SOURCE_RECENT_QUERIES;
  }
  return v1::IMPORTANCE_SOURCE_UNSPECIFIED;
}

}  // namespace

v1::Tier TierToProto(Tier tier) { return static_cast<v1::Tier>(static_cast<int>(tier) + 1); }
v1::TransferState StateToProto(TransferState state) { return static_cast<v1::TransferState>(state); }

void TierCountsToProto(const TierTotals& totals, google::protobuf::RepeatedPtrField<v1::TierCount>* out) {
  for (int i = 0; i < kTierCount; ++i) {
    const size_t at = static_cast<size_t>(i);
    if (totals.k[at] == 0 && totals.v[at] == 0) continue;
    v1::TierCount* count = out->Add();
    count->set_tier(TierToProto(static_cast<Tier>(i)));
    count->set_k_tokens(totals.k[at]);
    count->set_v_tokens(totals.v[at]);
  }
}

void TokenRunsToProto(const std::vector<TokenRange>& runs, google::protobuf::RepeatedPtrField<v1::TokenRun>* out) {
  for (const TokenRange& run : runs) {
    v1::TokenRun* to = out->Add();
    to->set_first(run.first);
    to->set_count(run.count);
  }
}

void BudgetChoiceToProto(const BudgetChoice& choice, v1::BudgetChoice* out) {
  out->set_target_seconds(choice.target_seconds);
  out->set_min_budget(choice.min_budget);
  out->set_budget(choice.budget);
  out->set_reason(static_cast<v1::BudgetReason>(choice.reason));
  if (choice.predicted_seconds.has_value()) out->set_predicted_seconds(*choice.predicted_seconds);
  if (choice.link_bytes_per_second.has_value()) out->set_link_bytes_per_second(*choice.link_bytes_per_second);
}

void ReportToProto(const TransferReport& report, v1::TransferReport* out) {
  out->set_transfer_id(report.transfer_id);
  out->set_role(report.role == Role::kSender ? v1::TRANSFER_ROLE_SENDER : v1::TRANSFER_ROLE_RECEIVER);
  if (report.part.count > 1 && report.parts.empty()) {
    out->mutable_part()->set_index(report.part.index);
    out->mutable_part()->set_count(report.part.count);
  }
  for (const TransferReport& part : report.parts) ReportToProto(part, out->add_parts());
  out->set_state(StateToProto(report.state));
  out->set_code(static_cast<int32_t>(report.error.code()));
  out->set_reason(ReasonOf(report.error));
  out->set_message(std::string(report.error.message()));
  out->set_tokens(report.tokens);
  out->set_kv_bytes(report.kv_bytes);
  out->set_wire_bytes(report.wire_bytes);
  out->set_saved_bytes(report.saved_bytes());
  out->set_budget(report.budget);
  if (report.values > 0) {
    out->set_bits_per_value(8.0 * static_cast<double>(report.wire_bytes) / static_cast<double>(report.values));
  }
  out->set_escape_overrun_bytes(report.escape_overrun_bytes);
  TierCountsToProto(report.tiers, out->mutable_tiers());
  TokenRunsToProto(report.dropped, out->mutable_dropped_tokens());
  out->set_kept_tokens(report.kept_tokens);
  out->set_chunks(report.chunks);
  out->set_chunks_resent(report.chunks_resent);
  out->set_chunks_duplicate(report.chunks_duplicate);
  out->set_nonfinite_values(report.nonfinite_values);
  out->set_rounded_words(report.rounded_words);
  // A receiver knows neither: it sees tiers alone.
  if (report.role == Role::kSender) {
    out->set_allocator(AllocatorToProto(report.allocator));
    out->set_importance(ImportanceToProto(report.importance));
    out->set_model_profile(report.model_profile);
  }
  out->set_backend(report.backend);
  out->set_path(report.path);
  out->set_source_guard(report.source_guard);
  out->set_attempts(report.attempts);
  out->set_streams(report.streams);
  out->set_first_layer_ready_seconds(report.first_layer_ready_seconds);
  out->set_duration_seconds(report.duration_seconds);
  for (size_t i = 0; i < kStageCount; ++i) {
    if (report.stage_seconds[i] <= 0) continue;
    v1::StageTime* stage = out->add_stages();
    stage->set_stage(StageName(static_cast<Stage>(i)));
    stage->set_seconds(report.stage_seconds[i]);
  }
  out->set_layers_ready(report.layers_ready);
  out->set_limited_by(static_cast<v1::LimitedBy>(report.limited_by));
  out->set_limited_seconds(report.limited_seconds);
  if (report.measured_link.has_value()) out->set_measured_link_bytes_per_second(*report.measured_link);
  if (report.link.has_value()) out->set_link_bytes_per_second(*report.link);
  out->set_retained_seconds(report.retained_seconds);
  out->set_refined_wire_bytes(report.refined_wire_bytes);
  out->set_refines(report.refines);
  out->set_cells(report.cells);
  out->set_cells_left(report.cells_left);
  out->set_staged_bytes(report.staged_bytes);
  out->set_applied_bytes(report.applied_bytes);
  out->set_stale_cells(report.stale_cells);
  out->set_exact(report.exact);
  GateToProto(report.gate, out);
  if (report.choice.has_value()) BudgetChoiceToProto(*report.choice, out->mutable_budget_choice());
}

}  // namespace spectrumkv
