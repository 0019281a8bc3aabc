#include "server/service/gate_call.h"

#include <string>

#include "server/base/status.h"

namespace spectrumkv {
namespace {

constexpr char kClosed[] = "QUALITY_GATE_CLOSED";

}  // namespace

void JudgePolicy(const ServiceContext& context, const Caller& caller, const PoolSchema& schema, const v1::Policy& proto,
                 Policy* policy) {
  if (context.gate == nullptr) return;
  const bool named = proto.tiers_size() > 0 || policy->allocator == Allocator::kUniform;
  context.gate->Judge(caller, {schema.model, schema.revision}, named, proto.override_quality_gate(), policy);
}

absl::Status WithGate(const GateOutcome& gate, const absl::Status& status) {
  if (gate.action != GateAction::kNarrowed || ReasonOf(status) != "BUDGET_TOO_SMALL") return status;
  std::string tiers;
  for (const Tier tier : gate.closed) tiers += std::string(tiers.empty() ? "" : ", ") + TierName(tier);
  Metadata metadata = MetadataOf(status);
  metadata["gate"] = "quality.gate";
  metadata["tiers"] = tiers;
  return MakeError(
      absl::StatusCode::kFailedPrecondition, kClosed,
      std::string(status.message()) + " without " + tiers +
          ", which the quality gate (quality.gate) keeps closed to this model: no probe (ProbeService) has opened them",
      metadata);
}

void CountGateDecision(const ServiceContext& context, const GateOutcome& gate, const absl::Status& status) {
  if (context.gate == nullptr || context.gate->options().mode == GateOptions::Mode::kOff) return;
  if (!status.ok() && ReasonOf(status) != kClosed) return;
  MetricGate decision = MetricGate::kRefused;
  if (status.ok()) {
    switch (gate.action) {
      case GateAction::kOpen: decision = MetricGate::kOpen; break;
      case GateAction::kWarned: decision = MetricGate::kWarned; break;
      case GateAction::kOverridden: decision = MetricGate::kOverridden; break;
      case GateAction::kNarrowed: decision = MetricGate::kNarrowed; break;
    }
  }
  context.metrics->CountGate(decision);
}

}  // namespace spectrumkv
