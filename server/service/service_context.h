// What the services act on. Borrowed; all of it outlives the servers.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>
#include <grpcpp/support/status.h>
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/codec/backend.h"
#include "server/base/caller.h"
#include "server/base/executor.h"
#include "server/metrics/metrics.h"
#include "server/pool/pool.h"
#include "server/probe/quality_gate.h"
#include "server/service/convert.h"
#include "server/transfer/transfer_manager.h"

namespace spectrumkv {

struct ServiceContext {
  uint64_t epoch = 0;
  RequestDefaults defaults;
  PoolRegistry* pools = nullptr;
  TransferManager* transfers = nullptr;
  Metrics* metrics = nullptr;
  // Who is behind the connection that gRPC names so (grpc::ServerContext::peer). Thread-safe; nobody where it is not
  // known, who may do nothing with pools and transfers.
  std::function<Caller(const std::string& peer)> caller_of = [](const std::string&) { return Caller(); };
  const Backend* backend = nullptr;
  QualityGate* gate = nullptr;  // null: none
  // What the peer "self" stands for: host:port of this daemon's own PeerService.
  std::string self_peer;
  // Calls that map, copy or plan: they must not hold up gRPC's own threads.
  Executor* calls = nullptr;
  // Scans and attention, a step at a time: what codes for transfers waits in the same queue.
  Executor* compute = nullptr;
  // Plans under way at once.
  uint32_t max_plans = 2;
};

// The end of every call: a failure is counted in errors_total here and nowhere else in the services.
grpc::Status EndOf(const ServiceContext& context, MetricStage stage, const absl::Status& status);

// The reactor of a unary call that is answered now.
grpc::ServerUnaryReactor* AnswerNow(const ServiceContext& context, grpc::CallbackServerContext* call,
                                    const absl::Status& status);

// CANCELLED CANCELLED: the end of a call that nobody waits for any more.
absl::Status CallerGone();

// Asked once, where a call begins: later its connection may be gone.
Caller CallerOf(const ServiceContext& context, const grpc::CallbackServerContext& call);

// host:port of the peer that a request names: "self" is this daemon, whatever peer.allowed_hosts says. Errors: those of
// CheckPeerAddress.
absl::StatusOr<std::string> PeerOf(const ServiceContext& context, const std::string& peer);

// FAILED_PRECONDITION STALE_EPOCH unless `epoch` is this daemon's.
absl::Status CheckEpoch(const ServiceContext& context, uint64_t epoch);

}  // namespace spectrumkv
