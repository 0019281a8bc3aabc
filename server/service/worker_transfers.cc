#include <utility>

#include "server/base/status.h"
#include "server/service/check.h"
#include "server/service/gate_call.h"
#include "server/service/worker_calls.h"
#include "server/transfer/shape.h"

namespace spectrumkv {
namespace {

// What all four openings check before anything is held.
template <typename Request>
absl::Status CheckOpening(const ServiceContext& context, const Request& request) {
  absl::Status status = CheckTransferId(request.transfer_id());
  if (status.ok()) status = CheckTransferToken(request.transfer_token());
  if (status.ok()) status = CheckPoolRef(request.pool());
  if (status.ok()) status = CheckEpoch(context, request.pool().epoch());
  if (status.ok()) status = CheckTokenCount(request.token_count(), context.defaults);
  return status;
}

template <typename Request>
absl::Status OpenSender(const ServiceContext& context, const Caller& caller, const Request& request, const std::string& peer) {
  absl::Status status = CheckOpening(context, request);
  if (!status.ok()) return status;
  const auto deadline_ms = DeadlineOf(request.deadline_ms(), context.defaults);
  if (!deadline_ms.ok()) return deadline_ms.status();
  auto policy = PolicyFromProto(request.policy(), context.defaults.policy);
  if (!policy.ok()) return policy.status();
  const auto blocks = BlocksFromProto(request.blocks());
  if (!blocks.ok()) return blocks.status();

  const auto part = PartFromProto(request.has_part(), request.part());
  if (!part.ok()) return part.status();
  if (part->count > 1 && policy->allow_drop) {
    return Invalid("INVALID_POLICY", "policy.tiers", "have DROP, and each of several parts would drop other tokens");
  }

  const auto retain_ms = RetainMsOf(request.policy(), *part, context.defaults);
  if (!retain_ms.ok()) return retain_ms.status();
  const auto background = BackgroundTierOf(request.policy());
  if (!background.ok()) return background.status();

  SenderSpec spec;
  spec.part = *part;
  spec.retain_ms = *retain_ms;
  spec.background_tier = *background;
  if (request.policy().importance().has_queries()) {
    auto queries = QueriesFromProto(request.policy().importance().queries());
    if (!queries.ok()) return queries.status();
    spec.queries = *std::move(queries);
  }
  spec.transfer_id = request.transfer_id();
  spec.transfer_token = request.transfer_token();
  spec.peer = peer;
  spec.owner = caller;
  spec.pool_id = request.pool().pool_id();
  spec.policy = *std::move(policy);
  spec.deadline_ms = *deadline_ms;
  spec.layerwise = request.layerwise();
  spec.written_event = request.written_event();
  spec.fingerprint = FingerprintOf(request) + (peer.empty() ? "P" : "S");
  const auto repeat = context.transfers->FindRepeat(caller, spec.transfer_id, Role::kSender, spec.part, spec.fingerprint);
  if (repeat.has_value()) return *repeat;
  auto hold = context.pools->HoldSource(caller, request.pool().pool_id(), request.pool().epoch(), *blocks,
                                        request.token_count());
  if (!hold.ok()) return hold.status();
  spec.source = *std::move(hold);
  if (spec.policy.allocator == Allocator::kOptimal) {
    std::vector<LayerPlace> places;
    const std::vector<PlanLayer> layers = PlanLayersOf(spec.source->schema(), &places);
    spec.policy.profile = ProfileOf(context.defaults.profiles, spec.source->schema(), layers);
  }
  JudgePolicy(context, caller, spec.source->schema(), request.policy(), &spec.policy);
  const GateOutcome gate = spec.policy.gate;
  const absl::Status started = WithGate(gate, context.transfers->StartSender(std::move(spec)));
  CountGateDecision(context, gate, started);
  return started;
}

template <typename Request>
absl::Status OpenReceiver(const ServiceContext& context, const Caller& caller, const Request& request, const std::string& peer) {
  absl::Status status = CheckOpening(context, request);
  if (!status.ok()) return status;
  const auto deadline_ms = DeadlineOf(request.deadline_ms(), context.defaults);
  if (!deadline_ms.ok()) return deadline_ms.status();
  const auto blocks = BlocksFromProto(request.blocks());
  if (!blocks.ok()) return blocks.status();

  const auto part = PartFromProto(request.has_part(), request.part());
  if (!part.ok()) return part.status();

  if (request.refinable() && part->count > 1) {
    return MakeError(absl::StatusCode::kUnimplemented, "RETENTION_OF_PARTS",
                     "refinable is set, but a transfer of several parts cannot be refined", {{"field", "refinable"}});
  }

  ReceiverSpec spec;
  spec.part = *part;
  spec.refinable = request.refinable();
  const auto direct = IsDirect(request.refine_mode(), "refine_mode");
  if (!direct.ok()) return direct.status();
  spec.refine_direct = *direct;
  spec.transfer_id = request.transfer_id();
  spec.transfer_token = request.transfer_token();
  spec.peer = peer;
  spec.owner = caller;
  spec.pool_id = request.pool().pool_id();
  spec.deadline_ms = *deadline_ms;
  spec.accept_dropped = request.accept_dropped();
  spec.exact_conversion = request.exact_conversion();
  spec.fingerprint = FingerprintOf(request) + (peer.empty() ? "E" : "F");
  const auto repeat = context.transfers->FindRepeat(caller, spec.transfer_id, Role::kReceiver, spec.part, spec.fingerprint);
  if (repeat.has_value()) return *repeat;
  auto hold = context.pools->ReserveTarget(caller, request.pool().pool_id(), request.pool().epoch(), *blocks,
                                        request.token_count());
  if (!hold.ok()) return hold.status();
  spec.target = *std::move(hold);
  return context.transfers->StartReceiver(std::move(spec));
}

absl::Status Advance(const ServiceContext& context, const Caller& caller, const v1::AdvanceRequest& request) {
  if (absl::Status id = CheckTransferId(request.transfer_id()); !id.ok()) return id;
  LaterImportance importance;
  importance.scores.assign(request.scores().begin(), request.scores().end());
  if (request.has_queries()) {
    auto queries = QueriesFromProto(request.queries());
    if (!queries.ok()) return queries.status();
    importance.queries = *std::move(queries);
  }
  return context.transfers->Advance(caller, request.transfer_id(), request.layers(), request.tokens(), importance,
                                    request.written_event(), request.part_index());
}

}  // namespace

absl::StatusOr<std::optional<Role>> RoleOfKey(const v1::TransferKey& key) {
  const absl::Status status = CheckTransferId(key.transfer_id());
  if (!status.ok()) return status;
  return RoleFromProto(key.role());
}

UnaryReactor* SendTransfer(const ServiceContext* context, CallContext* call, const v1::SendRequest* request,
                           v1::SendResponse* response) {
  response->set_epoch(context->epoch);
  const Caller caller = CallerOf(*context, *call);
  return RunCall(context, call, [=] {
    const auto peer = PeerOf(*context, request->peer());
    return peer.ok() ? OpenSender(*context, caller, *request, *peer) : peer.status();
  });
}

UnaryReactor* PublishTransfer(const ServiceContext* context, CallContext* call, const v1::PublishRequest* request,
                              v1::PublishResponse* response) {
  response->set_epoch(context->epoch);
  const Caller caller = CallerOf(*context, *call);
  return RunCall(context, call, [=] { return OpenSender(*context, caller, *request, ""); });
}

UnaryReactor* ExpectTransfer(const ServiceContext* context, CallContext* call, const v1::ExpectRequest* request,
                             v1::ExpectResponse* response) {
  response->set_epoch(context->epoch);
  const Caller caller = CallerOf(*context, *call);
  return RunCall(context, call, [=] { return OpenReceiver(*context, caller, *request, ""); });
}

UnaryReactor* FetchTransfer(const ServiceContext* context, CallContext* call, const v1::FetchRequest* request,
                            v1::FetchResponse* response) {
  response->set_epoch(context->epoch);
  const Caller caller = CallerOf(*context, *call);
  return RunCall(context, call, [=] {
    const auto peer = PeerOf(*context, request->peer());
    return peer.ok() ? OpenReceiver(*context, caller, *request, *peer) : peer.status();
  });
}

UnaryReactor* AdvanceTransfer(const ServiceContext* context, CallContext* call, const v1::AdvanceRequest* request) {
  const Caller caller = CallerOf(*context, *call);
  // Most say no more than how far the worker has come. Queries are megabytes, and an event is opened by the GPU's driver.
  if (request->has_queries() || !request->written_event().empty()) {
    return RunCall(context, call, [=] { return Advance(*context, caller, *request); });
  }
  return AnswerNow(*context, call, Advance(*context, caller, *request));
}

UnaryReactor* GetTransfer(const ServiceContext* context, CallContext* call, const v1::GetTransferRequest* request,
                          v1::GetTransferResponse* response) {
  const auto role = RoleOfKey(request->transfer());
  if (!role.ok()) return AnswerNow(*context, call, role.status());
  const auto report = context->transfers->Get(CallerOf(*context, *call), request->transfer().transfer_id(), *role);
  if (report.ok()) ReportToProto(*report, response->mutable_report());
  return AnswerNow(*context, call, report.status());
}

UnaryReactor* CancelTransfer(const ServiceContext* context, CallContext* call, const v1::CancelTransferRequest* request,
                             v1::CancelTransferResponse* response) {
  const auto role = RoleOfKey(request->transfer());
  if (!role.ok()) return AnswerNow(*context, call, role.status());
  UnaryReactor* reactor = call->DefaultReactor();
  context->transfers->Cancel(CallerOf(*context, *call), request->transfer().transfer_id(), *role,
                             [context, reactor, response](const absl::StatusOr<TransferReport>& report) {
                               if (report.ok()) ReportToProto(*report, response->mutable_report());
                               reactor->Finish(EndOf(*context, MetricStage::kQueue, report.status()));
                             });
  return reactor;
}

// Refinements first: their end takes as long as a cancel. Once more where the transfer has committed meanwhile.
void ReleaseWhenOver(const ServiceContext& context, const Caller& caller, const std::string& id, std::optional<Role> role,
                     UnaryReactor* reactor) {
  context.transfers->EndRefinements(caller, id, role, [&context, reactor, caller, id, role] {
    const absl::Status released = context.transfers->Release(caller, id, role);
    if (ReasonOf(released) == "STILL_RETAINED") return ReleaseWhenOver(context, caller, id, role, reactor);
    reactor->Finish(EndOf(context, MetricStage::kQueue, released));
  });
}

UnaryReactor* ReleaseTransfer(const ServiceContext* context, CallContext* call,
                              const v1::ReleaseTransferRequest* request, v1::ReleaseTransferResponse* response) {
  const auto role = RoleOfKey(request->transfer());
  if (!role.ok()) return AnswerNow(*context, call, role.status());
  UnaryReactor* reactor = call->DefaultReactor();
  const Caller caller = CallerOf(*context, *call);
  const std::string id = request->transfer().transfer_id();
  const auto release = [context, reactor, caller, id, role = *role] { ReleaseWhenOver(*context, caller, id, role, reactor); };
  if (!request->keep_in_cache()) {
    release();
    return reactor;
  }
  context->transfers->MoveToCache(caller, id, *role, [context, reactor, response, release](const absl::StatusOr<bool>& cached) {
    if (cached.ok() && !*cached) return release();
    response->set_kept_in_cache(cached.ok());
    reactor->Finish(EndOf(*context, MetricStage::kQueue, cached.status()));
  });
  return reactor;
}

UnaryReactor* RefineTransfer(const ServiceContext* context, CallContext* call, const v1::RefineRequest* request,
                             v1::RefineResponse* response) {
  response->set_epoch(context->epoch);
  const Caller caller = CallerOf(*context, *call);
  return RunCall(context, call, [=] {
    auto spec = RefineFromProto(*request, context->defaults);
    if (!spec.ok()) return spec.status();
    if (!request->peer().empty()) {
      const auto peer = PeerOf(*context, request->peer());
      if (!peer.ok()) return peer.status();
      spec->peer = *peer;
    }
    spec->owner = caller;
    const auto started = context->transfers->Refine(*std::move(spec));
    if (!started.ok()) return started.status();
    response->set_cells(started->cells);
    response->set_cells_left(started->cells_left);
    response->set_kv_bytes(started->kv_bytes);
    return absl::OkStatus();
  });
}

UnaryReactor* ApplyRefinement(const ServiceContext* context, CallContext* call,
                              const v1::ApplyRefinementRequest* request, v1::ApplyRefinementResponse* response) {
  if (absl::Status ok = CheckId(request->refine_id(), "refine_id", "INVALID_TRANSFER_ID"); !ok.ok()) {
    return AnswerNow(*context, call, ok);
  }
  UnaryReactor* reactor = call->DefaultReactor();
  const auto finish = [context, reactor, response](const absl::StatusOr<RefinementApplied>& applied) {
    if (applied.ok()) {
      response->set_applied_bytes(applied->applied_bytes);
      response->set_staged_bytes(applied->staged_bytes);
      response->set_stale_cells(applied->stale_cells);
      response->set_complete(applied->complete);
      response->set_exact(applied->exact);
    }
    reactor->Finish(EndOf(*context, MetricStage::kQueue, applied.status()));
  };
  // It copies all that is staged, and may read the whole destination.
  context->calls->Post([context, call, request, finish, caller = CallerOf(*context, *call)] {
    // Whoever has gone may be writing those blocks again.
    if (call->IsCancelled()) return finish(CallerGone());
    context->transfers->ApplyRefinement({request->refine_id(), caller, request->max_bytes(), request->read_event(),
                                         [call] { return call->IsCancelled(); }},
                                        finish);
  });
  return reactor;
}

UnaryReactor* ReportFirstToken(const ServiceContext* context, CallContext* call,
                               const v1::ReportFirstTokenRequest* request) {
  const auto role = RoleOfKey(request->transfer());
  if (!role.ok()) return AnswerNow(*context, call, role.status());
  return AnswerNow(*context, call,
                   context->transfers->ReportFirstToken(CallerOf(*context, *call), request->transfer().transfer_id(), *role,
                                                        request->time_to_first_token_seconds()));
}

}  // namespace spectrumkv
