#include "server/lifecycle/grpc_servers.h"

#include <chrono>
#include <utility>
#include <vector>

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/impl/server_builder_option.h>
#include <grpcpp/impl/server_builder_plugin.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/server_posix.h>
#include "server/base/listen.h"
#include "server/lifecycle/addresses.h"
#include "server/lifecycle/socket_guard.h"
#include "server/service/convert.h"

namespace spectrumkv {
namespace {

constexpr int kMaxCallsPerConnection = 1024;

// Linking reflection puts it on every server, unless the server says no.
class NoPlugins final : public grpc::ServerBuilderOption {
 public:
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override { plugins->clear(); }
};

}  // namespace

absl::StatusOr<std::unique_ptr<LocalServer>> LocalServer::Start(const Options& options) {
  // Before the builder is made: it takes its plugins then.
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  std::unique_ptr<LocalServer> local(new LocalServer());
  grpc::ServerBuilder builder;
  if (!options.reflection) builder.SetOption(std::make_unique<NoPlugins>());
  builder.SetMaxReceiveMessageSize(kMaxWorkerMessageBytes);
  builder.SetMaxSendMessageSize(kMaxWorkerMessageBytes);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // else a second daemon would share the port
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxCallsPerConnection);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 20'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5000);
  int socket_bound = 1, port = 1;
  const auto credentials = grpc::InsecureServerCredentials();
  if (!options.socket.empty() && options.callers == nullptr) {
    builder.AddListeningPort("unix:" + options.socket, credentials, &socket_bound);
  }
  if (!options.tcp_address.empty()) {
    builder.AddListeningPort(options.tcp_address,
                             options.tcp_credentials != nullptr ? options.tcp_credentials : credentials, &port);
  }
  for (grpc::Service* service : options.services) builder.RegisterService(service);
  if (options.services.empty()) {
    // gRPC starts no server without a service; this one answers UNIMPLEMENTED to everything.
    local->refuse_all_ = std::make_unique<grpc::CallbackGenericService>();
    builder.RegisterCallbackGenericService(local->refuse_all_.get());
  }
  {
    // The health service is a switch of the process that each server reads as it is built.
    grpc::EnableDefaultHealthCheckService(options.health);
    const PrivateUmask mask(options.socket_mode);
    local->server_ = builder.BuildAndStart();
    grpc::EnableDefaultHealthCheckService(false);
  }
  if (local->server_ == nullptr || socket_bound == 0 || port == 0) {
    return socket_bound == 0 || options.tcp_address.empty() ? ListenFailed(options.socket_key, options.socket)
                                                            : ListenFailed(options.tcp_key, options.tcp_address);
  }
  if (options.callers != nullptr) {
    if (absl::Status accepting = local->StartAccepting(options); !accepting.ok()) return accepting;
  }
  if (!options.tcp_address.empty()) local->tcp_address_ = WithPort(options.tcp_address, port);
  return local;
}

absl::Status LocalServer::StartAccepting(const Options& options) {
  AcceptLoop::Options accept;
  accept.socket = options.socket;
  accept.socket_key = options.socket_key;
  accept.socket_mode = options.socket_mode;
  accept.allowed_uids = options.allowed_uids;
  accept.callers = options.callers;
  accept.on_refused = options.on_refused;
  auto loop = AcceptLoop::Listen(std::move(accept));
  if (!loop.ok()) return loop.status();
  accept_loop_ = *std::move(loop);
  accept_loop_->Run([server = server_.get()](int fd) { grpc::AddInsecureChannelFromFd(server, fd); });
  return absl::OkStatus();
}

LocalServer::~LocalServer() { Shutdown(0); }

void LocalServer::SetServing(const std::string& name, bool serving) {
  if (server_ == nullptr) return;
  if (auto* health = server_->GetHealthCheckService(); health != nullptr) health->SetServingStatus(name, serving);
}

void LocalServer::Shutdown(int grace_ms) {
  if (server_ == nullptr) return;
  if (accept_loop_ != nullptr) accept_loop_->Stop();
  server_->Shutdown(std::chrono::system_clock::now() + std::chrono::milliseconds(grace_ms));
  server_->Wait();
  server_.reset();
}

}  // namespace spectrumkv
