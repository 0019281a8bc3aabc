#include "client/ctl/connection.h"

#include <algorithm>
#include <chrono>

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include "client/cpp/status.h"

namespace spectrumkv::ctl {
namespace {

constexpr int64_t kConnectMs = 3000;

absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(const std::string& address, int64_t timeout_ms) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  auto channel = grpc::CreateCustomChannel(client::TargetOf(address), grpc::InsecureChannelCredentials(), arguments);
  if (!channel->WaitForConnected(std::chrono::system_clock::now() +
                                 std::chrono::milliseconds(std::min(timeout_ms, kConnectMs)))) {
    return client::Unreachable(address);
  }
  return channel;
}

// grpc.health.v1.HealthCheckRequest { string service = 1; } and its response { Status status = 1; }: too small to
// generate code for.
std::string HealthRequest(const std::string& service) {
  return service.empty() ? "" : std::string("\x0a") + static_cast<char>(service.size()) + service;
}

std::string HealthName(const std::string& response) {
  static const char* const kNames[] = {"UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN"};
  const bool set = response.size() == 2 && response[0] == 0x08;
  const auto value = set ? static_cast<unsigned char>(response[1]) : 0u;
  return value < std::size(kNames) ? kNames[value] : kNames[0];
}

}  // namespace

absl::StatusOr<std::unique_ptr<AdminStub>> ConnectAdmin(const Connection& connection) {
  auto channel = Connect(connection.admin_socket, connection.timeout_ms);
  if (!channel.ok()) return channel.status();
  return v1::AdminService::NewStub(*channel);
}

absl::StatusOr<std::unique_ptr<client::Client>> ConnectWorker(const Connection& connection) {
  client::Client::Options options;
  options.address = connection.worker_socket;
  options.token_file = connection.worker_token_file;
  options.connect_timeout_ms = std::min(connection.timeout_ms, kConnectMs);
  options.call_timeout_ms = connection.timeout_ms;
  return client::Client::Connect(options);
}

absl::StatusOr<std::string> CheckHealth(const std::string& address, const std::string& service, int64_t timeout_ms) {
  if (service.size() > 127) return absl::InvalidArgumentError("a service name has at most 127 characters");
  auto channel = Connect(address, timeout_ms);
  if (!channel.ok()) return channel.status();
  grpc::GenericStub stub(*channel);
  grpc::ClientContext context;
  SetDeadline(&context, timeout_ms);
  grpc::CompletionQueue queue;
  const grpc::Slice slice(HealthRequest(service));
  const grpc::ByteBuffer request(&slice, 1);
  const auto call = stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check", request, &queue);
  grpc::ByteBuffer response;
  grpc::Status status;
  call->StartCall();
  call->Finish(&response, &status, &queue);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  if (!status.ok()) {
    if (status.error_code() == grpc::StatusCode::NOT_FOUND) return std::string("SERVICE_UNKNOWN");
    return client::FromGrpc(status);
  }
  grpc::Slice body;
  if (response.TrySingleSlice(&body).ok() || response.DumpToSingleSlice(&body).ok()) {
    return HealthName(std::string(reinterpret_cast<const char*>(body.begin()), body.size()));
  }
  return HealthName("");
}

void SetDeadline(grpc::ClientContext* context, int64_t milliseconds) {
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(milliseconds));
}

absl::Status FromGrpcStatus(const grpc::Status& status) { return client::FromGrpc(status); }

}  // namespace spectrumkv::ctl
