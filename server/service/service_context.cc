#include "server/service/service_context.h"

#include <string>

#include "server/base/status.h"
#include "server/stream/status_codec.h"

namespace spectrumkv {

grpc::Status EndOf(const ServiceContext& context, MetricStage stage, const absl::Status& status) {
  if (!status.ok()) context.metrics->CountError(stage, status.code());
  return ToGrpcStatus(status);
}

grpc::ServerUnaryReactor* AnswerNow(const ServiceContext& context, grpc::CallbackServerContext* call,
                                    const absl::Status& status) {
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  reactor->Finish(EndOf(context, MetricStage::kQueue, status));
  return reactor;
}

absl::Status CallerGone() {
  return MakeError(absl::StatusCode::kCancelled, "CANCELLED", "whoever called has gone");
}

Caller CallerOf(const ServiceContext& context, const grpc::CallbackServerContext& call) {
  return context.caller_of(call.peer());
}

absl::StatusOr<std::string> PeerOf(const ServiceContext& context, const std::string& peer) {
  if (peer == "self" && !context.self_peer.empty()) return context.self_peer;
  if (absl::Status address = CheckPeerAddress(peer, context.defaults.allowed_hosts); !address.ok()) return address;
  return peer;
}

absl::Status CheckEpoch(const ServiceContext& context, uint64_t epoch) {
  if (epoch == context.epoch) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, "STALE_EPOCH",
                   "pool.epoch is of an earlier run of this daemon: register the pool again",
                   {{"epoch", std::to_string(context.epoch)}});
}

}  // namespace spectrumkv
