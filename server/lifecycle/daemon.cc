#include "server/lifecycle/daemon.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "cmake/version.h"
#include "kernels/codec/registry.h"
#include "kernels/cpu/cpu_backends.h"
#include "kernels/cuda/runtime.h"
#include "server/base/caller.h"
#include "server/base/clock.h"
#include "server/base/executor.h"
#include "server/base/ids.h"
#include "server/base/log.h"
#include "server/base/status.h"
#include "server/lifecycle/bearer_token.h"
#include "server/lifecycle/caller_table.h"
#include "server/lifecycle/certificate_watch.h"
#include "server/lifecycle/drain.h"
#include "server/lifecycle/gate_keeper.h"
#include "server/lifecycle/gauges.h"
#include "server/lifecycle/grpc_log.h"
#include "server/lifecycle/grpc_servers.h"
#include "server/lifecycle/options_of.h"
#include "server/lifecycle/readiness.h"
#include "server/lifecycle/socket_guard.h"
#include "server/memory/device.h"
#include "server/memory/slot_pool.h"
#include "server/memory/threads.h"
#include "server/metrics/metrics.h"
#include "server/pool/pool.h"
#include "server/service/admin_service.h"
#include "server/service/probe_service.h"
#include "server/service/worker_service.h"
#include "server/stream/grpc_transport.h"
#include "server/stream/peer_server.h"
#include "server/transfer/calibrate.h"
#include "server/transfer/transfer_manager.h"

namespace spectrumkv {
namespace {

constexpr size_t kControlThreads = 2;
constexpr size_t kCallThreads = 4;
// Of codec.threads: no thread waits for a Plan's next step, and transfers have their turn.
constexpr size_t kPlansPerThread = 4;
// For calls that end by themselves once their transfers have: watchers get their last event.
constexpr int kServerGraceMs = 500;
// Names of the health service. The first is what a client asks for that names none.
constexpr char kOverall[] = "";
constexpr char kReadiness[] = "readiness";
constexpr char kLiveness[] = "liveness";

// The error of a key's value, with the key.
absl::Status Named(const std::string& key, const absl::Status& error) {
  Metadata metadata = MetadataOf(error);
  metadata["key"] = key;
  return MakeError(error.code(), ReasonOf(error), key + ": " + std::string(error.message()), metadata);
}

}  // namespace

class Daemon::Impl {
 public:
  Impl(const Config& config, gpu::Runtime* gpus)
      : config_(config), epoch_(RandomU64()), gpus_(gpus != nullptr ? gpus : gpu::CudaRuntime()) {}
  ~Impl() { Stop(); }

  absl::Status Start();
  void Stop();
  void Drain(int64_t timeout_ms, std::function<void(DrainOutcome)> done) { drain_->Drain(timeout_ms, std::move(done)); }
  const DaemonAddresses& addresses() const { return addresses_; }
  uint64_t epoch() const { return epoch_; }

 private:
  absl::Status StartCodec();
  void FindDevices();
  absl::Status StartEngine();
  absl::Status StartServers();
  absl::Status StartHealth();
  absl::Status StartPeer();
  absl::Status StartLocal(const std::string& name, const LocalServer::Options& options,
                          std::unique_ptr<SocketGuard>* guard, std::unique_ptr<LocalServer>* server);
  void WatchCertificates(const PeerSecurity& security);
  DaemonStatus Status() const;
  // Into what the Health port and the worker socket say.
  void TellReady(bool ready);

  const Config config_;
  const uint64_t epoch_;
  gpu::Runtime* const gpus_;
  DaemonAddresses addresses_;  // whole before the admin server, which reads it on threads of gRPC
  int64_t started_ns_ = 0;
  Readiness readiness_{[this](bool ready) { TellReady(ready); }};

  // In the order of their making; Stop undoes it in reverse.
  BackendRegistry backends_;
  const Backend* backend_ = nullptr;
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<Clock> clock_;
  std::unique_ptr<ThreadPool> control_, compute_, calls_;
  std::unique_ptr<SlotPool> send_slots_, receive_slots_;
  std::unique_ptr<Devices> devices_;
  std::unique_ptr<PoolRegistry> pools_;
  std::unique_ptr<GrpcTransport> transport_;
  std::unique_ptr<TransferManager> transfers_;
  std::unique_ptr<GateKeeper> gate_;
  std::unique_ptr<DrainController> drain_;
  std::shared_ptr<CallerTable> callers_;
  std::unique_ptr<GaugeRefresher> gauges_;
  ServiceContext context_;
  AdminHooks hooks_;
  std::unique_ptr<grpc::Service> worker_service_, probe_service_, admin_service_;
  std::unique_ptr<LocalServer> health_;
  std::unique_ptr<SocketGuard> worker_guard_, admin_guard_;
  std::unique_ptr<LocalServer> worker_, admin_;
  std::unique_ptr<PeerServer> peer_;
  std::unique_ptr<CertificateWatch> certificates_;
  std::unique_ptr<MetricsExposer> exposer_;
};

absl::Status Daemon::Impl::StartCodec() {
  AddCpuBackends(&backends_);
  std::string error;
  backend_ = backends_.Choose(config_.codec.backend, &error);
  if (backend_ == nullptr) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "BACKEND_UNAVAILABLE", "codec.backend: " + error,
                     {{"backend", config_.codec.backend}});
  }
  if (config_.codec.self_test && !SelfTest(*backend_, &error)) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "SELF_TEST_FAILED",
                     "codec backend " + std::string(backend_->name()) + " fails its self-test: " + error,
                     {{"backend", backend_->name()}});
  }
  return absl::OkStatus();
}

void Daemon::Impl::FindDevices() {
  Devices::Options options;
  // One for each thread that codes, so that none waits for a lane.
  options.lanes_per_device = static_cast<uint32_t>(CodecThreads(config_));
  options.allow_unpinned = config_.memory.allow_host_fallback;
  devices_ = Devices::Find(gpus_, options);
  const auto [staging, staging_bytes] = send_slots_->memory();
  devices_->PinWhenUsed(staging, staging_bytes);
  if (!devices_->why_none().ok()) {
    SPECTRUMKV_LOG(kInfo, "lifecycle", "no GPU: pools are in host memory",
                   {"reason", ReasonOf(devices_->why_none())}, {"error", std::string(devices_->why_none().message())});
  }
  for (const auto& device : devices_->all()) {
    SPECTRUMKV_LOG(kInfo, "lifecycle", "GPU", {"device", device->uuid()}, {"name", device->name()},
                   {"memory_bytes", device->total_bytes()});
  }
}

absl::Status Daemon::Impl::StartEngine() {
  if (absl::Status room = CheckStaging(config_.memory); !room.ok()) return room;
  clock_ = NewSystemClock();
  started_ns_ = clock_->NowNs();
  control_ = std::make_unique<ThreadPool>(kControlThreads);
  compute_ = std::make_unique<ThreadPool>(CodecThreads(config_));
  calls_ = std::make_unique<ThreadPool>(kCallThreads);
  send_slots_ = std::make_unique<SlotPool>(config_.memory.send_slots, config_.memory.slot_bytes);
  receive_slots_ =
      std::make_unique<SlotPool>(config_.memory.receive_slots, config_.memory.slot_bytes, SlotPool::Backing::kNone);

  FindDevices();

  // Where there is none, FILE segments are refused one by one; whoever uses no files needs none.
  if (mkdir(config_.memory.shared_dir.c_str(), 0770) != 0 && errno != EEXIST) {
    SPECTRUMKV_LOG(kWarning, "lifecycle", "memory.shared_dir cannot be made: FILE segments will be refused",
                   {"memory.shared_dir", config_.memory.shared_dir}, {"error", std::generic_category().message(errno)});
  }
  PoolEvents events;
  events.lease_expired = [metrics = metrics_.get()](const std::string& kind) {
    metrics->CountLeaseExpired(kind == "source"        ? MetricLease::kSource
                               : kind == "destination" ? MetricLease::kDestination
                                                       : MetricLease::kPool);
  };
  events.quota_refused = [metrics = metrics_.get()](PoolQuota quota) {
    metrics->CountQuotaRefused(quota == PoolQuota::kPools   ? MetricQuota::kPools
                               : quota == PoolQuota::kBytes ? MetricQuota::kBytes
                               : quota == PoolQuota::kSegments ? MetricQuota::kSegments
                                                               : MetricQuota::kHolds);
  };
  pools_ = PoolRegistry::Create(PoolLimitsOf(config_), epoch_, clock_.get(), std::move(events), devices_.get(),
                                calls_.get());

  GrpcTransportOptions transport;
  transport.security = SecurityOf(config_);
  transport.connect_timeout_ms = static_cast<int64_t>(config_.peer.connect_timeout_ms);
  transport.undelivered_timeout_ms = UndeliveredTimeoutMs(config_);
  transport.max_message_bytes = config_.peer.max_message_bytes;
  auto made = GrpcTransport::Create(transport);
  if (!made.ok()) return made.status();
  transport_ = *std::move(made);

  const absl::Status identity = CheckOwnIdentity(transport.security);
  if (!identity.ok()) return identity;
  const auto expiry = CertificateExpiry(transport.security);
  if (!expiry.ok()) return expiry.status();
  metrics_->SetCertificateExpiry(static_cast<double>(*expiry));

  TransferParts parts;
  parts.clock = clock_.get();
  parts.control = control_.get();
  parts.compute = compute_.get();
  parts.transport = transport_.get();
  parts.send_slots = send_slots_.get();
  parts.receive_slots = receive_slots_.get();
  parts.backend = backend_;
  parts.metrics = metrics_.get();
  TransferOptions options = TransferOptionsOf(config_, epoch_);
  options.speeds = MeasureStages(*backend_, clock_.get());
  transfers_ = TransferManager::Create(options, parts);
  drain_ = std::make_unique<DrainController>(clock_.get(), transfers_.get(),
                                             static_cast<int64_t>(config_.drain.timeout_ms), [this] {
                                               readiness_.End();
                                               pools_->StartDraining();
                                             });
  callers_ = std::make_shared<CallerTable>(static_cast<uint32_t>(config_.worker.max_connections));
  gauges_ = std::make_unique<GaugeRefresher>(GaugeRefresher::Sources{
      clock_.get(), metrics_.get(), pools_.get(), transfers_.get(), send_slots_.get(), receive_slots_.get(), callers_.get(),
      devices_.get()});
  return absl::OkStatus();
}

void Daemon::Impl::TellReady(bool ready) {
  for (LocalServer* server : {health_.get(), worker_.get()}) {
    if (server == nullptr) continue;
    server->SetServing(kOverall, ready);
    server->SetServing(kReadiness, ready);
    server->SetServing(kLiveness, true);
  }
}

absl::Status Daemon::Impl::StartHealth() {
  LocalServer::Options options;
  options.tcp_address = config_.health.listen_address;
  options.tcp_key = "health.listen_address";
  options.health = true;
  auto server = LocalServer::Start(options);
  if (!server.ok()) return server.status();
  health_ = *std::move(server);
  readiness_.Announce();
  addresses_.health = health_->tcp_address();
  return absl::OkStatus();
}

absl::Status Daemon::Impl::StartLocal(const std::string& name, const LocalServer::Options& options,
                                      std::unique_ptr<SocketGuard>* guard, std::unique_ptr<LocalServer>* server) {
  auto taken = SocketGuard::Take(options.socket);
  if (!taken.ok()) return Named(options.socket_key, taken.status());
  *guard = *std::move(taken);
  auto started = LocalServer::Start(options);
  if (!started.ok()) return started.status();
  *server = *std::move(started);
  const absl::Status status = (*guard)->SetMode(options.socket_mode);
  if (status.ok()) {
    SPECTRUMKV_LOG(kInfo, "lifecycle", "listening", {"server", name}, {"address", "unix:" + options.socket});
  }
  return status;
}

absl::Status Daemon::Impl::StartServers() {
  auto defaults = DefaultsOf(config_);
  if (!defaults.ok()) return defaults.status();
  auto profiles = LoadProfiles(config_.policy.profile_dir);
  if (!profiles.ok()) return profiles.status();
  for (const ProfileFile& profile : *profiles) {
    SPECTRUMKV_LOG(kInfo, "lifecycle", "model profile", {"profile", profile.name}, {"model", profile.model},
                   {"revision", profile.revision});
  }
  auto gate = GateKeeper::Open(config_, clock_.get(), metrics_.get());
  if (!gate.ok()) return gate.status();
  gate_ = *std::move(gate);
  context_.epoch = epoch_;
  context_.defaults = *std::move(defaults);
  context_.defaults.profiles = *std::move(profiles);
  context_.pools = pools_.get();
  context_.transfers = transfers_.get();
  context_.metrics = metrics_.get();
  context_.caller_of = [callers = callers_](const std::string& peer) { return callers->Find(peer); };
  context_.backend = backend_;
  context_.gate = gate_->gate();
  context_.calls = calls_.get();
  context_.compute = compute_.get();
  context_.max_plans = static_cast<uint32_t>(kPlansPerThread * CodecThreads(config_));
  hooks_.status = [this] { return Status(); };
  hooks_.drain = [this](int64_t timeout_ms, std::function<void(DrainOutcome)> done) {
    Drain(timeout_ms, std::move(done));
  };
  hooks_.config_yaml = PrintConfig(config_);
  hooks_.backends = &backends_;
  hooks_.send_slots = send_slots_.get();
  hooks_.receive_slots = receive_slots_.get();
  hooks_.probe_peer = [this](const std::string& peer, int64_t timeout_ms) {
    const int64_t most_ms = std::min<int64_t>(static_cast<int64_t>(config_.peer.connect_timeout_ms), kProbeTimeoutMaxMs);
    return transport_->Probe(peer, timeout_ms == 0 ? most_ms : timeout_ms);
  };
  hooks_.certificates = [security = SecurityOf(config_)] { return InspectCertificates(security); };
  hooks_.devices = devices_.get();
  worker_service_ = NewWorkerService(&context_);
  probe_service_ = NewProbeService(&context_);
  admin_service_ = NewAdminService(&context_, &hooks_);

  LocalServer::Options worker;
  worker.socket = config_.worker.socket;
  worker.socket_key = "worker.socket";
  worker.tcp_key = "worker.tcp_address";
  worker.socket_mode = static_cast<unsigned>(config_.worker.socket_mode);
  worker.callers = callers_;
  worker.allowed_uids = UidsOf(config_.worker.allowed_uids);
  worker.on_refused = [metrics = metrics_.get()](MetricRefusal why) { metrics->CountConnectionRefused(why); };
  worker.tcp_address = config_.worker.tcp_address;
  if (!worker.tcp_address.empty()) {
    const auto token = ReadTokenFile(config_.worker.tcp_token_file);
    if (!token.ok()) return token.status();
    worker.tcp_credentials = BearerCredentials(*token, [metrics = metrics_.get()](const absl::Status& refused) {
      metrics->CountError(MetricStage::kQueue, refused.code());
    });
  }
  worker.services = {worker_service_.get(), probe_service_.get()};
  worker.health = worker.reflection = true;
  if (absl::Status peer = StartPeer(); !peer.ok()) return peer;
  context_.self_peer = SelfAddress(peer_->address());
  absl::Status status = StartLocal("worker", worker, &worker_guard_, &worker_);
  if (!status.ok()) return status;
  readiness_.Announce();
  auto exposer = MetricsExposer::Start(config_.metrics.listen_address, *metrics_);
  if (!exposer.ok()) return exposer.status();
  exposer_ = *std::move(exposer);
  addresses_.worker_socket = config_.worker.socket;
  addresses_.admin_socket = config_.admin.socket;
  addresses_.worker_tcp = worker_->tcp_address();
  addresses_.peer = peer_->address();
  addresses_.metrics = WithPort(config_.metrics.listen_address, exposer_->port());

  // Last: from here on others ask for the status, and drain.
  LocalServer::Options admin;
  admin.socket = config_.admin.socket;
  admin.socket_key = "admin.socket";
  admin.services = {admin_service_.get()};
  admin.reflection = true;
  return StartLocal("admin", admin, &admin_guard_, &admin_);
}

absl::Status Daemon::Impl::StartPeer() {
  PeerServerOptions peer;
  peer.listen_address = config_.peer.listen_address;
  peer.security = SecurityOf(config_);
  peer.undelivered_timeout_ms = UndeliveredTimeoutMs(config_);
  peer.version = VersionText();
  peer.epoch = epoch_;
  peer.max_message_bytes = config_.peer.max_message_bytes;
  auto server = PeerServer::Start(peer, transfers_.get());
  if (!server.ok()) return server.status();
  peer_ = *std::move(server);
  const std::string at = peer_->address();
  transfers_->SetPeerPort(static_cast<uint32_t>(std::stoul(at.substr(at.rfind(':') + 1))));
  if (peer.security.mode == PeerSecurity::Mode::kMtls) WatchCertificates(peer.security);
  return absl::OkStatus();
}

void Daemon::Impl::WatchCertificates(const PeerSecurity& security) {
  CertificateWatch::Parts parts;
  parts.clock = clock_.get();
  parts.executor = calls_.get();
  parts.metrics = metrics_.get();
  parts.interval_ms = static_cast<int64_t>(config_.peer.tls.reload_interval_ms);
  parts.reloads = {[this] { return peer_->ReloadSecurity(); }, [this] { return transport_->ReloadSecurity(); }};
  parts.expiry = [security] { return CertificateExpiry(security); };
  certificates_ = std::make_unique<CertificateWatch>(std::move(parts));
}

absl::Status Daemon::Impl::Start() {
  absl::Status status = SetLogFormat(config_.log.format);
  if (status.ok()) status = SetLogLevel(config_.log.level);
  if (status.ok()) status = CheckThreads(ThreadsNeeded(config_));
  if (status.ok()) status = StartHealth();
  if (status.ok()) status = StartCodec();
  if (!status.ok()) return status;
  metrics_ = std::make_unique<Metrics>(Metrics::BuildInfo{Version(), Revision(), backend_->name()},
                                       config_.metrics.reconstruction_sample_chunks);
  CountHandshakeFailuresIn(metrics_.get());
  status = StartEngine();
  if (status.ok()) status = StartServers();
  if (!status.ok()) return status;
  readiness_.Begin();
  SPECTRUMKV_LOG(kInfo, "lifecycle", "ready", {"version", VersionText()}, {"epoch", epoch_},
                 {"backend", backend_->name()}, {"peer", addresses_.peer}, {"peer_security", config_.peer.security},
                 {"health", addresses_.health}, {"metrics", addresses_.metrics});
  if (config_.peer.security == "plain") {
    SPECTRUMKV_LOG(kWarning, "lifecycle", "peers are not authenticated and their link is not encrypted",
                   {"peer.security", "plain"});
  }
  return absl::OkStatus();
}

DaemonStatus Daemon::Impl::Status() const {
  DaemonStatus status;
  status.version = VersionText();
  status.peer_security = config_.peer.security;
  status.uptime_seconds = static_cast<double>(clock_->NowNs() - started_ns_) * 1e-9;
  status.ready = readiness_.ready();
  status.draining = drain_->draining();
  status.worker_address = "unix:" + addresses_.worker_socket;
  status.admin_address = "unix:" + addresses_.admin_socket;
  status.peer_address = addresses_.peer;
  status.health_address = addresses_.health;
  status.metrics_address = addresses_.metrics;
  return status;
}

void Daemon::Impl::Stop() {
  readiness_.End();
  certificates_.reset();
  CountHandshakeFailuresIn(nullptr);
  // Transfers end while both sides can still be told.
  if (transfers_ != nullptr) transfers_->Shutdown();
  if (transport_ != nullptr) transport_->StopProbes();
  // Before the worker server, whose health a Drain call sets.
  if (admin_ != nullptr) admin_->Shutdown(kServerGraceMs);
  if (worker_ != nullptr) worker_->Shutdown(kServerGraceMs);
  peer_.reset();
  if (transport_ != nullptr) transport_->Shutdown();
  exposer_.reset();
  worker_.reset();
  admin_.reset();
  worker_guard_.reset();
  admin_guard_.reset();
  gauges_.reset();
  // Timers bring work too, as late as this one.
  if (clock_ != nullptr) clock_->Stop();
  // Nothing brings new work any more: what is queued runs, then the threads end.
  calls_.reset();
  compute_.reset();
  control_.reset();
  drain_.reset();
  gate_.reset();
  transfers_.reset();
  transport_.reset();
  pools_.reset();
  devices_.reset();
  clock_.reset();
  health_.reset();
}

Daemon::Daemon(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Daemon::~Daemon() = default;

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(const Config& config, gpu::Runtime* gpus) {
  auto impl = std::make_unique<Impl>(config, gpus);
  const absl::Status status = impl->Start();
  if (!status.ok()) return status;
  return std::unique_ptr<Daemon>(new Daemon(std::move(impl)));
}

const DaemonAddresses& Daemon::addresses() const { return impl_->addresses(); }
uint64_t Daemon::epoch() const { return impl_->epoch(); }
void Daemon::Drain(std::function<void(bool)> done) {
  impl_->Drain(0, [done = std::move(done)](const DrainOutcome& outcome) { done(outcome.status.ok()); });
}
void Daemon::Stop() { impl_->Stop(); }

}  // namespace spectrumkv
