// The quality gate on the calls that choose tiers. Internal to server/service.
#pragma once

#include "absl/status/status.h"
#include "server/service/service_context.h"
#include "spectrumkv/v1/worker_service.pb.h"

namespace spectrumkv {

// Has context.gate judge the policy for a source of this schema. Counts nothing.
void JudgePolicy(const ServiceContext& context, const Caller& caller, const PoolSchema& schema, const v1::Policy& proto,
                 Policy* policy);

// The end of a call whose policy was judged: names the gate where what it has left cannot meet the budget.
absl::Status WithGate(const GateOutcome& gate, const absl::Status& status);

// Of a transfer that was asked for, with the end of WithGate.
void CountGateDecision(const ServiceContext& context, const GateOutcome& gate, const absl::Status& status);

}  // namespace spectrumkv
