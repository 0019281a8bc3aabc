// The Plan call: what Send would do with these blocks, without sending. Internal to server/service.
#pragma once

#include "absl/status/status.h"
#include "server/service/service_context.h"
#include "spectrumkv/v1/worker_service.pb.h"

namespace spectrumkv {

// Scans the source on the calling thread. Errors: those of convert.h, HoldSource, Planner::Create and Planner::Plan.
absl::Status PlanNow(const ServiceContext& context, const Caller& caller, const v1::PlanRequest& request, v1::PlanResponse* response);

}  // namespace spectrumkv
