#include <utility>

#include "server/service/plan_call.h"
#include "server/service/worker_calls.h"

namespace spectrumkv {
namespace {

absl::Status DoRegister(const ServiceContext* context, const Caller& caller, const v1::RegisterPoolRequest& request,
                        v1::RegisterPoolResponse* response) {
  absl::Status status = CheckRequestId(request.request_id());
  if (!status.ok()) return status;
  const auto ttl_ms = LeaseTtlOf(request.lease_ttl_ms(), context->defaults);
  if (!ttl_ms.ok()) return ttl_ms.status();
  const auto schema = SchemaFromProto(request.schema());
  if (!schema.ok()) return schema.status();
  const auto handle = context->pools->Register(caller, request.request_id(), *schema, *ttl_ms);
  if (!handle.ok()) return handle.status();
  response->mutable_pool()->set_pool_id(handle->pool_id);
  response->mutable_pool()->set_epoch(handle->epoch);
  response->set_lease_ttl_ms(static_cast<uint64_t>(handle->lease_ttl_ms));
  return absl::OkStatus();
}

}  // namespace

UnaryReactor* RegisterPool(const ServiceContext* context, CallContext* call, const v1::RegisterPoolRequest* request,
                           v1::RegisterPoolResponse* response, Strand* registers) {
  UnaryReactor* reactor = call->DefaultReactor();
  registers->Post([=, caller = CallerOf(*context, *call)] {
    reactor->Finish(EndOf(*context, MetricStage::kQueue, DoRegister(context, caller, *request, response)));
  });
  return reactor;
}

UnaryReactor* RenewLease(const ServiceContext* context, CallContext* call, const v1::RenewLeaseRequest* request,
                         v1::RenewLeaseResponse* response) {
  const absl::Status status = CheckPoolRef(request->pool());
  if (!status.ok()) return AnswerNow(*context, call, status);
  const auto ttl_ms = context->pools->Renew(CallerOf(*context, *call), request->pool().pool_id(), request->pool().epoch());
  if (ttl_ms.ok()) response->set_lease_ttl_ms(static_cast<uint64_t>(*ttl_ms));
  return AnswerNow(*context, call, ttl_ms.status());
}

UnaryReactor* UnregisterPool(const ServiceContext* context, CallContext* call,
                             const v1::UnregisterPoolRequest* request) {
  const absl::Status status = CheckPoolRef(request->pool());
  if (!status.ok()) return AnswerNow(*context, call, status);
  const auto timeout_ms = UnregisterTimeoutOf(request->timeout_ms(), context->defaults);
  if (!timeout_ms.ok()) return AnswerNow(*context, call, timeout_ms.status());
  UnaryReactor* reactor = call->DefaultReactor();
  context->calls->Post([context, reactor, request, caller = CallerOf(*context, *call), timeout_ms = *timeout_ms] {
    // What is kept for refinements is nothing to wait for; of the caller's own pool alone.
    if (context->pools->SchemaOf(caller, request->pool().pool_id(), request->pool().epoch()).ok()) {
      context->transfers->EndRefinementsOf(request->pool().pool_id());
    }
    context->pools->Unregister(
        caller, request->pool().pool_id(), request->pool().epoch(), timeout_ms,
        [context, reactor](const absl::Status& end) { reactor->Finish(EndOf(*context, MetricStage::kQueue, end)); });
  });
  return reactor;
}

UnaryReactor* PlanTransfer(const ServiceContext* context, CallContext* call, const v1::PlanRequest* request,
                           v1::PlanResponse* response, PlanPlaces* places) {
  // What waits for a thread holds its request, of megabytes, and the daemon's shutdown waits for it in turn.
  const Caller caller = CallerOf(*context, *call);
  if (absl::Status place = places->Take(caller, context->max_plans); !place.ok()) return AnswerNow(*context, call, place);
  UnaryReactor* reactor = call->DefaultReactor();
  StartPlan(context, {caller, request, response, [call] { return call->IsCancelled(); },
                      [context, reactor, places, caller](const absl::Status& end) {
                        places->GiveBack(caller);
                        reactor->Finish(EndOf(*context, MetricStage::kPlan, end));
                      }});
  return reactor;
}

}  // namespace spectrumkv
