#include "server/stream/grpc_transport.h"

#include <list>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/channel_arguments.h>
#include "server/base/log.h"
#include "server/base/status.h"
#include "server/stream/peer_probe.h"
#include "server/stream/status_codec.h"
#include "server/stream/stream_core.h"
#include "server/stream/tls_credentials.h"
#include "server/stream/tls_probe.h"

namespace spectrumkv {
namespace {

constexpr char kControlMethod[] = "/spectrumkv.v1.PeerService/Control";
constexpr char kDataMethod[] = "/spectrumkv.v1.PeerService/Data";
constexpr int64_t kControlConnection = -1;
constexpr int64_t kShutdownTimeoutMs = 10'000;
constexpr int64_t kAskTlsMs = 500;

using RawStub = grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer>;

// The call of one dialled stream.
class DialReactor final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>, public Wire {
 public:
  using OnEnd = std::function<void(const grpc::Status&, const RawStub* stub)>;
  DialReactor(std::shared_ptr<RawStub> stub, std::shared_ptr<StreamCore> core, OnEnd on_end)
      : stub_(std::move(stub)), core_(std::move(core)), on_end_(std::move(on_end)) {}

  void Start(const char* method) {
    stub_->PrepareBidiStreamingCall(&context_, method, {}, this);
    AddHold();  // for writes from outside reactions, until End
    StartRead(&read_message_);
    core_->Attach(this);
    StartCall();  // `this` may be gone afterwards
  }

  void Write(const grpc::ByteBuffer* message) override { StartWrite(message); }
  void End(const absl::Status&, bool lost) override {
    if (!lost) StartWritesDone();
    RemoveHold();
  }
  void Cancel() override { context_.TryCancel(); }

  void OnReadInitialMetadataDone(bool ok) override {
    if (ok) core_->Connected();
  }
  void OnReadDone(bool ok) override {
    if (core_->Read(ok, false, &read_message_)) StartRead(&read_message_);
  }
  void OnWriteDone(bool ok) override { core_->Written(ok); }
  void OnDone(const grpc::Status& status) override {
    on_end_(status, stub_.get());
    // The last channel that goes ends gRPC's callback threads and waits for them, so it must not go on one of them; the
    // call's context holds a channel too.
    const std::shared_ptr<StreamCore> core = core_;
    core->Finished(FromGrpcStatus(status), std::shared_ptr<DialReactor>(this));
  }

 private:
  std::shared_ptr<RawStub> stub_;
  grpc::ClientContext context_;
  grpc::ByteBuffer read_message_;
  std::shared_ptr<StreamCore> core_;
  OnEnd on_end_;
};

grpc::ChannelArguments ChannelArgs(const GrpcTransportOptions& options) {
  grpc::ChannelArguments args;
  args.SetMaxReceiveMessageSize(static_cast<int>(options.max_message_bytes));
  args.SetMaxSendMessageSize(static_cast<int>(options.max_message_bytes));
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // else equal channels share one connection
  args.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);             // a retry would keep chunks and send them twice
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  args.SetInt(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 20'000);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, static_cast<int>(options.undelivered_timeout_ms));  // and TCP_USER_TIMEOUT
  args.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  args.SetInt(GRPC_ARG_CLIENT_IDLE_TIMEOUT_MS, 60'000);
  args.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  args.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, static_cast<int>(options.connect_timeout_ms));
  args.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  // The name a server is asked for; who it must be says the verifier.
  const std::string name = options.security.identities.empty() ? "*" : options.security.identities.front();
  if (name.find_first_of("*:/") == std::string::npos && options.security.mode == PeerSecurity::Mode::kMtls) {
    args.SetSslTargetNameOverride(name);
  }
  return args;
}

StreamLimits LimitsOf(const GrpcTransportOptions& options) {
  StreamLimits limits;
  limits.connect_timeout_ms = options.connect_timeout_ms;
  limits.max_message_bytes = options.max_message_bytes;
  limits.probe_tls = options.security.mode == PeerSecurity::Mode::kPlain;
  return limits;
}

}  // namespace

class GrpcTransport::Impl {
 public:
  // `certificates`: null where the security is plain.
  Impl(const GrpcTransportOptions& options, std::shared_ptr<const Certificates> certificates)
      : max_connections_(options.max_connections),
        args_(ChannelArgs(options)),
        security_(options.security),
        env_(LimitsOf(options)) {
    Use(std::move(certificates));
  }

  absl::StatusOr<bool> Reload() {
    if (security_.mode == PeerSecurity::Mode::kPlain) return false;
    absl::StatusOr<std::shared_ptr<Certificates>> read = Certificates::Read(security_);
    if (!read.ok()) return read.status();
    if (absl::Status own = CheckOwnIdentity(security_); !own.ok()) return own;
    std::lock_guard<std::mutex> lock(mutex_);
    if ((*read)->SameFiles(*certificates_)) return false;
    Use(*std::move(read));
    // Nobody dials on a connection of before.
    for (auto at = connections_.begin(); at != connections_.end();) at = DropLocked(at);
    return true;
  }

  StreamEnv& env() { return env_; }

  void Dial(const std::string& peer, int64_t connection, const char* method, const std::shared_ptr<StreamCore>& core) {
    const Key key(peer, connection);
    std::shared_ptr<RawStub> stub = Connection(key);
    auto* reactor =
        new DialReactor(std::move(stub), core, [this, key](const grpc::Status& status, const RawStub* used) {
          // A connection that failed is in back-off; the next dial shall try at once.
          if (status.error_code() == grpc::StatusCode::UNAVAILABLE) Forget(key, used);
        });
    reactor->Start(method);
  }

  // From here on nobody dials on the connections that there are.
  void GiveUp(const std::string& peer) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto at = connections_.lower_bound(Key(peer, kControlConnection));
         at != connections_.end() && at->first.first == peer;) {
      at = DropLocked(at);
    }
  }

  absl::StatusOr<ProbeResult> Probe(const std::string& peer, int64_t timeout_ms) {
    std::shared_ptr<grpc::Channel> channel;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      channel = grpc::CreateCustomChannel(peer, credentials_, args_);
    }
    grpc::ClientContext* begun = nullptr;
    const auto track = [&](grpc::ClientContext* context) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (begun != nullptr) probes_.erase(begun);
      begun = context;
      if (context == nullptr) return true;
      if (stopping_) return false;
      probes_.insert(context);
      return true;
    };
    const absl::StatusOr<ProbeResult> result = ProbeOver(channel, peer, timeout_ms, track);
    if (!result.ok() && security_.mode == PeerSecurity::Mode::kPlain && result.status().code() == absl::StatusCode::kUnavailable &&
        SpeaksTls(peer, kAskTlsMs)) {
      return SecurityMismatch(peer, "it speaks TLS, this daemon does not");
    }
    return result;
  }

  void StopProbes() {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    for (grpc::ClientContext* probe : probes_) probe->TryCancel();
  }

  bool Shutdown() {
    StopProbes();
    env_.Stop(MakeError(absl::StatusCode::kUnavailable, "SHUTTING_DOWN", "this endpoint is shutting down"));
    {
      std::lock_guard<std::mutex> lock(mutex_);
      connections_.clear();
      recent_.clear();
    }
    return env_.WaitIdle(kShutdownTimeoutMs);
  }

 private:
  using Key = std::pair<std::string, int64_t>;
  struct Entry {
    std::shared_ptr<RawStub> stub;
    std::list<Key>::iterator recent;
  };

  void Use(std::shared_ptr<const Certificates> certificates) {
    credentials_ =
        certificates == nullptr ? grpc::InsecureChannelCredentials() : ChannelCredentialsOf(*certificates, security_);
    certificates_ = std::move(certificates);
  }

  // The connection lives on until its streams have ended. Not let go of on a thread of gRPC's, see DialReactor::OnDone.
  std::map<Key, Entry>::iterator DropLocked(std::map<Key, Entry>::iterator at) {
    env_.Post([stub = std::move(at->second.stub)] {});
    recent_.erase(at->second.recent);
    return connections_.erase(at);
  }

  std::shared_ptr<RawStub> Connection(const Key& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = connections_.find(key);
    if (found != connections_.end()) {
      recent_.splice(recent_.begin(), recent_, found->second.recent);
      return found->second.stub;
    }
    while (!recent_.empty() && connections_.size() >= max_connections_) {
      DropLocked(connections_.find(recent_.back()));
    }
    auto stub = std::make_shared<RawStub>(grpc::CreateCustomChannel(key.first, credentials_, args_));
    recent_.push_front(key);
    connections_[key] = Entry{stub, recent_.begin()};
    return stub;
  }

  void Forget(const Key& key, const RawStub* stub) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = connections_.find(key);
    if (found == connections_.end() || found->second.stub.get() != stub) return;
    recent_.erase(found->second.recent);
    connections_.erase(found);  // the call that failed still holds the stub
  }

  const size_t max_connections_;
  const grpc::ChannelArguments args_;
  const PeerSecurity security_;
  std::mutex mutex_;
  std::shared_ptr<grpc::ChannelCredentials> credentials_;
  std::shared_ptr<const Certificates> certificates_;
  std::map<Key, Entry> connections_;
  std::list<Key> recent_;
  bool stopping_ = false;
  std::set<grpc::ClientContext*> probes_;  // calls of Probe under way
  StreamEnv env_;
};

GrpcTransport::GrpcTransport(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

absl::StatusOr<std::unique_ptr<GrpcTransport>> GrpcTransport::Create(const GrpcTransportOptions& options) {
  std::shared_ptr<const Certificates> certificates;
  if (options.security.mode == PeerSecurity::Mode::kMtls) {
    auto read = Certificates::Read(options.security);
    if (!read.ok()) return read.status();
    certificates = *std::move(read);
  }
  return std::unique_ptr<GrpcTransport>(new GrpcTransport(std::make_unique<Impl>(options, std::move(certificates))));
}

GrpcTransport::~GrpcTransport() {
  if (impl_->Shutdown()) return;
  // Memory that gRPC may still touch is better lost than freed.
  SPECTRUMKV_LOG(kError, "stream", "streams did not end; their memory is given up");
  (void)impl_.release();
}

std::shared_ptr<ControlStream> GrpcTransport::OpenControl(const std::string& peer_address,
                                                          std::shared_ptr<ControlListener> listener) {
  auto core = std::make_shared<ControlCore>(&impl_->env(), StreamCore::Side::kDialler, peer_address);
  core->SetListener(std::move(listener));
  if (core->Register()) impl_->Dial(peer_address, kControlConnection, kControlMethod, core);
  return core;
}

std::shared_ptr<DataStream> GrpcTransport::OpenData(const std::string& peer_address, const DataOpenFrame& open,
                                                    std::shared_ptr<DataListener> listener) {
  auto core = std::make_shared<DataCore>(&impl_->env(), StreamCore::Side::kDialler, peer_address, nullptr);
  core->SetListener(std::move(listener));
  if (core->Register()) {
    core->SendOpen(open);
    impl_->Dial(peer_address, open.stream, kDataMethod, core);
  }
  return core;
}

absl::StatusOr<bool> GrpcTransport::ReloadSecurity() { return impl_->Reload(); }

void GrpcTransport::GiveUp(const std::string& peer_address) { impl_->GiveUp(peer_address); }

absl::StatusOr<ProbeResult> GrpcTransport::Probe(const std::string& peer_address, int64_t timeout_ms) {
  return impl_->Probe(peer_address, timeout_ms);
}

void GrpcTransport::StopProbes() { impl_->StopProbes(); }

void GrpcTransport::Shutdown() { impl_->Shutdown(); }

}  // namespace spectrumkv
