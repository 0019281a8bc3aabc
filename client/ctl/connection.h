// The two sockets of a daemon.
#pragma once

#include <limits>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "client/cpp/retry.h"
#include "spectrumkv/v1/admin_service.grpc.pb.h"

namespace spectrumkv::ctl {

struct Connection {
  std::string admin_socket, worker_socket;
  std::string worker_token_file;  // of a worker_socket that is host:port
  // Of each call; one that the daemon asks to repeat is repeated within it.
  int64_t timeout_ms = 30000;
};

using AdminStub = v1::AdminService::Stub;

// UNAVAILABLE without a reason where no daemon answers.
absl::StatusOr<std::unique_ptr<AdminStub>> ConnectAdmin(const Connection& connection);
absl::StatusOr<std::unique_ptr<client::Client>> ConnectWorker(const Connection& connection);

// One admin call on a connection of its own. extra_ms: time the daemon is asked to take.
template <typename Request, typename Response>
absl::StatusOr<Response> CallAdmin(const Connection& connection,
                                   grpc::Status (AdminStub::*method)(grpc::ClientContext*, const Request&, Response*),
                                   const Request& request, int64_t extra_ms = 0);

// One worker call.
template <typename Request, typename Response>
absl::StatusOr<Response> CallWorker(client::Client* client, const Connection& connection,
                                    grpc::Status (v1::WorkerService::Stub::*method)(grpc::ClientContext*,
                                                                                    const Request&, Response*),
                                    const Request& request, int64_t extra_ms = 0);

// One worker call that is idempotent, again and again while the daemon asks for that and timeout_ms allows.
template <typename Request, typename Response>
absl::StatusOr<Response> CallWorkerPatiently(client::Client* client, const Connection& connection,
                                             grpc::Status (v1::WorkerService::Stub::*method)(grpc::ClientContext*,
                                                                                             const Request&, Response*),
                                             const Request& request);

// "SERVING", "NOT_SERVING", "UNKNOWN" or "SERVICE_UNKNOWN" by grpc.health.v1. address: a path or host:port.
absl::StatusOr<std::string> CheckHealth(const std::string& address, const std::string& service, int64_t timeout_ms);

// --- Implementation of the templates

void SetDeadline(grpc::ClientContext* context, int64_t milliseconds);
absl::Status FromGrpcStatus(const grpc::Status& status);

template <typename Request, typename Response>
absl::StatusOr<Response> CallAdmin(const Connection& connection,
                                   grpc::Status (AdminStub::*method)(grpc::ClientContext*, const Request&, Response*),
                                   const Request& request, int64_t extra_ms) {
  absl::StatusOr<std::unique_ptr<AdminStub>> stub = ConnectAdmin(connection);
  if (!stub.ok()) return stub.status();
  grpc::ClientContext context;
  SetDeadline(&context, connection.timeout_ms + extra_ms);
  Response response;
  const absl::Status status = FromGrpcStatus(((**stub).*method)(&context, request, &response));
  if (!status.ok()) return status;
  return response;
}

template <typename Request, typename Response>
absl::StatusOr<Response> CallWorker(client::Client* client, const Connection& connection,
                                    grpc::Status (v1::WorkerService::Stub::*method)(grpc::ClientContext*,
                                                                                    const Request&, Response*),
                                    const Request& request, int64_t extra_ms) {
  grpc::ClientContext context;
  SetDeadline(&context, connection.timeout_ms + extra_ms);
  Response response;
  const absl::Status status = FromGrpcStatus((client->stub().*method)(&context, request, &response));
  if (!status.ok()) return status;
  return response;
}

template <typename Request, typename Response>
absl::StatusOr<Response> CallWorkerPatiently(client::Client* client, const Connection& connection,
                                             grpc::Status (v1::WorkerService::Stub::*method)(grpc::ClientContext*,
                                                                                             const Request&, Response*),
                                             const Request& request) {
  client::RetryOptions patience;
  patience.attempts = std::numeric_limits<int>::max();  // time alone bounds them
  patience.timeout_ms = connection.timeout_ms;
  Connection left = connection;
  return client::Retry(
      [&](int64_t left_ms) {
        left.timeout_ms = left_ms;
        return CallWorker(client, left, method, request);
      },
      patience);
}

}  // namespace spectrumkv::ctl
