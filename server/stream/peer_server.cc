#include "server/stream/peer_server.h"

#include <chrono>
#include <mutex>
#include <utility>
#include <vector>

#include <google/protobuf/stubs/logging.h>

#include <grpc/grpc_security_constants.h>
#include <grpcpp/impl/server_builder_option.h>
#include <grpcpp/impl/server_builder_plugin.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include "server/base/listen.h"
#include "server/base/log.h"
#include "server/base/status.h"
#include "server/stream/status_codec.h"
#include "server/stream/stream_core.h"
#include "server/stream/tls_credentials.h"
#include "spectrumkv/v1/peer_service.grpc.pb.h"

namespace spectrumkv {
namespace {

constexpr int64_t kShutdownTimeoutMs = 8000;

using RawReactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

// The call of one accepted stream.
class AcceptReactor final : public RawReactor, public Wire {
 public:
  AcceptReactor(grpc::CallbackServerContext* context, std::shared_ptr<StreamCore> core)
      : context_(context), core_(std::move(core)) {}

  void Start() {
    StartSendInitialMetadata();  // tells the dialler that somebody answered
    StartRead(&read_message_);
    core_->Attach(this);
  }

  void Write(const grpc::ByteBuffer* message) override { StartWrite(message); }
  void End(const absl::Status& status, bool) override { Finish(ToGrpcStatus(status)); }
  void Cancel() override { context_->TryCancel(); }

  void OnReadDone(bool ok) override {
    if (core_->Read(ok, context_->IsCancelled(), &read_message_)) StartRead(&read_message_);
  }
  void OnWriteDone(bool ok) override { core_->Written(ok); }
  void OnCancel() override { core_->Cancelled(); }
  void OnDone() override {
    const std::shared_ptr<StreamCore> core = core_;
    core->Finished(context_->IsCancelled() ? absl::CancelledError("the peer broke off") : absl::OkStatus(),
                   std::shared_ptr<AcceptReactor>(this));
  }

 private:
  grpc::CallbackServerContext* const context_;
  grpc::ByteBuffer read_message_;
  std::shared_ptr<StreamCore> core_;
};

// A call that is refused before it has a stream.
class RefusingReactor final : public RawReactor {
 public:
  explicit RefusingReactor(const absl::Status& status) { Finish(ToGrpcStatus(status)); }
  void OnDone() override { delete this; }
};

using PeerServiceBase = v1::PeerService::WithRawCallbackMethod_Control<v1::PeerService::WithRawCallbackMethod_Data<
    v1::PeerService::WithCallbackMethod_Probe<v1::PeerService::Service>>>;

class PeerServiceImpl final : public PeerServiceBase {
 public:
  // `certificates`: null where the security is plain.
  PeerServiceImpl(const PeerServerOptions& options, StreamEnv* env, PeerAcceptor* acceptor,
                  std::shared_ptr<Certificates> certificates)
      : version_(options.version), epoch_(options.epoch), env_(env), acceptor_(acceptor),
        certificates_(std::move(certificates)) {}

  std::shared_ptr<Certificates> certificates() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return certificates_;
  }
  void Use(std::shared_ptr<Certificates> certificates) {
    std::lock_guard<std::mutex> lock(mutex_);
    certificates_ = std::move(certificates);
  }

  RawReactor* Control(grpc::CallbackServerContext* context) override {
    const absl::Status identity = CheckIdentity(*context);
    if (!identity.ok()) return new RefusingReactor(identity);
    auto core = std::make_shared<ControlCore>(env_, StreamCore::Side::kAcceptor, context->peer());
    if (!core->Register()) return new RefusingReactor(Draining());
    core->ExpectHello();
    auto* reactor = new AcceptReactor(context, core);
    std::shared_ptr<ControlListener> listener = acceptor_->OnControl(core);
    if (listener == nullptr) {
      core->CloseWith(Draining());
    } else {
      core->SetListener(std::move(listener));
    }
    reactor->Start();
    return reactor;
  }

  RawReactor* Data(grpc::CallbackServerContext* context) override {
    const absl::Status identity = CheckIdentity(*context);
    if (!identity.ok()) return new RefusingReactor(identity);
    auto core = std::make_shared<DataCore>(env_, StreamCore::Side::kAcceptor, context->peer(), acceptor_);
    if (!core->Register()) return new RefusingReactor(Draining());
    core->ExpectOpen();
    auto* reactor = new AcceptReactor(context, core);
    reactor->Start();
    return reactor;
  }

  grpc::ServerUnaryReactor* Probe(grpc::CallbackServerContext* context, const v1::ProbeRequest*,
                                  v1::ProbeResponse* response) override {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const absl::Status identity = CheckIdentity(*context);
    if (identity.ok()) {
      response->set_version(version_);
      response->set_epoch(epoch_);
      response->set_unix_time_ns(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
    }
    reactor->Finish(ToGrpcStatus(identity));
    return reactor;
  }

 private:
  static absl::Status Draining() {
    return MakeError(absl::StatusCode::kUnavailable, "DRAINING", "this daemon takes no new streams", {}, 1000);
  }

  // TLS has checked the certificate when the connection was made; this checks it as of now, and for whom it is.
  absl::Status CheckIdentity(const grpc::CallbackServerContext& context) const {
    const std::shared_ptr<Certificates> certificates = this->certificates();
    if (certificates == nullptr) return absl::OkStatus();
    const auto auth = context.auth_context();
    const absl::Status refusal = certificates->CheckPeer(Property(*auth, GRPC_X509_PEM_CERT_PROPERTY_NAME),
                                                         Property(*auth, GRPC_X509_PEM_CERT_CHAIN_PROPERTY_NAME));
    if (!refusal.ok()) acceptor_->OnStranger(refusal);
    return refusal;
  }
  static std::string Property(const grpc::AuthContext& auth, const char* name) {
    const std::vector<grpc::string_ref> values = auth.FindPropertyValues(name);
    return values.empty() ? "" : std::string(values[0].data(), values[0].size());
  }

  const std::string version_;
  const uint64_t epoch_;
  StreamEnv* const env_;
  PeerAcceptor* const acceptor_;
  mutable std::mutex mutex_;
  std::shared_ptr<Certificates> certificates_;
};

// Libraries that are linked in (reflection) register themselves with every server; this one serves its service alone.
class NoPlugins final : public grpc::ServerBuilderOption {
 public:
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override { plugins->clear(); }
};

StreamLimits LimitsOf(const PeerServerOptions& options) {
  StreamLimits limits;
  limits.open_timeout_ms = options.open_timeout_ms;
  limits.max_message_bytes = options.max_message_bytes;
  return limits;
}

void SetArguments(const PeerServerOptions& options, grpc::ServerBuilder* builder) {
  builder->SetOption(std::make_unique<NoPlugins>());
  builder->SetMaxReceiveMessageSize(static_cast<int>(options.max_message_bytes));
  builder->SetMaxSendMessageSize(static_cast<int>(options.max_message_bytes));
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // else a second daemon would share the port
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, options.max_streams_per_connection);
  builder->AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 20'000);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,  // and TCP_USER_TIMEOUT
                              static_cast<int>(options.undelivered_timeout_ms));
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, static_cast<int>(options.idle_connection_timeout_ms));
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5000);
}

}  // namespace

class PeerServer::Impl {
 public:
  Impl(const PeerServerOptions& options, PeerAcceptor* acceptor, std::shared_ptr<Certificates> certificates)
      : security(options.security), env(LimitsOf(options)), service(options, &env, acceptor, std::move(certificates)) {}

  absl::StatusOr<bool> Reload() {
    if (served == nullptr) return false;
    absl::StatusOr<std::shared_ptr<Certificates>> read = Certificates::Read(security);
    if (!read.ok()) return read.status();
    if (absl::Status own = CheckOwnIdentity(security); !own.ok()) return own;
    if ((*read)->SameFiles(*service.certificates())) return false;
    if (absl::Status kept = served->Use(**read); !kept.ok()) return kept;
    service.Use(*std::move(read));
    return true;
  }

  bool Shutdown() {
    env.Stop(MakeError(absl::StatusCode::kUnavailable, "DRAINING", "this daemon is shutting down", {}, 1000));
    if (server != nullptr) server->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(2));
    return env.WaitIdle(kShutdownTimeoutMs);
  }

  const PeerSecurity security;
  StreamEnv env;
  PeerServiceImpl service;
  std::unique_ptr<ServedCertificates> served;  // null where the security is plain
  std::unique_ptr<grpc::Server> server;
  int port = 0;
  std::string address;
};

PeerServer::PeerServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

absl::StatusOr<std::unique_ptr<PeerServer>> PeerServer::Start(const PeerServerOptions& options,
                                                              PeerAcceptor* acceptor) {
  std::shared_ptr<Certificates> certificates;
  std::unique_ptr<ServedCertificates> served;
  if (options.security.mode == PeerSecurity::Mode::kMtls) {
    auto read = Certificates::Read(options.security);
    if (!read.ok()) return read.status();
    certificates = *std::move(read);
    auto made = ServedCertificates::Create(*certificates);
    if (!made.ok()) return made.status();
    served = *std::move(made);
  }
  // Else a peer could write to our log, a line for each broken frame; it gets MALFORMED_FRAME instead.
  google::protobuf::SetLogHandler(nullptr);
  auto impl = std::make_unique<Impl>(options, acceptor, std::move(certificates));
  impl->served = std::move(served);
  grpc::ServerBuilder builder;
  SetArguments(options, &builder);
  builder.AddListeningPort(options.listen_address,
                           impl->served != nullptr ? impl->served->credentials() : grpc::InsecureServerCredentials(),
                           &impl->port);
  builder.RegisterService(&impl->service);
  impl->server = builder.BuildAndStart();
  if (impl->server == nullptr || impl->port == 0) {
    return ListenFailed("peer.listen_address", options.listen_address);
  }
  impl->address =
      options.listen_address.substr(0, options.listen_address.rfind(':')) + ":" + std::to_string(impl->port);
  return std::unique_ptr<PeerServer>(new PeerServer(std::move(impl)));
}

PeerServer::~PeerServer() {
  if (impl_->Shutdown()) return;
  // Memory that gRPC may still touch is better lost than freed.
  SPECTRUMKV_LOG(kError, "stream", "streams did not end; their memory is given up");
  (void)impl_.release();
}

int PeerServer::port() const { return impl_->port; }
const std::string& PeerServer::address() const { return impl_->address; }
absl::StatusOr<bool> PeerServer::ReloadSecurity() { return impl_->Reload(); }
void PeerServer::Shutdown() { impl_->Shutdown(); }

}  // namespace spectrumkv
