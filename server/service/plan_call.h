// The Plan call: what Send would do with these blocks, without sending. Internal to server/service.
#pragma once

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "server/base/fair_share.h"
#include "server/service/service_context.h"
#include "spectrumkv/v1/worker_service.pb.h"

namespace spectrumkv {

// How many Plans are under way, those that wait for a thread too. Thread-safe.
class PlanPlaces {
 public:
  // RESOURCE_EXHAUSTED PLANS_FULL with a retry delay where there is none of `most` for this caller.
  absl::Status Take(const Caller& caller, uint32_t most);
  void GiveBack(const Caller& caller) { share_.Give(caller, 1); }

 private:
  FairShare<Caller> share_;
};

struct PlanCall {
  Caller caller;
  // Live until `done`.
  const v1::PlanRequest* request = nullptr;
  v1::PlanResponse* response = nullptr;
  // Whether nobody waits any more: asked before each piece of work, from any thread.
  std::function<bool()> cancelled;
  // Once, when the source is not held any more.
  std::function<void(const absl::Status&)> done;
};

// Works on context->compute, one step after the other: transfers and other Plans have their turn in between. Errors:
// those of convert.h, HoldSource, Planner::Create and Planner::Plan; CallerGone.
void StartPlan(const ServiceContext* context, PlanCall call);

}  // namespace spectrumkv
