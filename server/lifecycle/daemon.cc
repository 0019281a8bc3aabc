#include "server/lifecycle/daemon.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "cmake/version.h"
#include "kernels/codec/registry.h"
#include "kernels/cpu/cpu_backends.h"
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
#include "server/lifecycle/gauges.h"
#include "server/lifecycle/grpc_log.h"
#include "server/lifecycle/grpc_servers.h"
#include "server/lifecycle/socket_guard.h"
#include "server/memory/available.h"
#include "server/memory/slot_pool.h"
#include "server/memory/threads.h"
#include "server/metrics/metrics.h"
#include "server/pool/pool.h"
#include "server/service/admin_service.h"
#include "server/service/worker_service.h"
#include "server/stream/grpc_transport.h"
#include "server/stream/peer_server.h"
#include "server/transfer/calibrate.h"
#include "server/transfer/transfer_manager.h"

namespace spectrumkv {
namespace {

constexpr size_t kControlThreads = 2;
constexpr size_t kCallThreads = 4;
// For calls that end by themselves once their transfers have: watchers get their last event.
constexpr int kServerGraceMs = 500;
// Names of the health service. The first is what a client asks for that names none.
constexpr char kOverall[] = "";
constexpr char kReadiness[] = "readiness";
constexpr char kLiveness[] = "liveness";

PeerSecurity SecurityOf(const Config& config) {
  PeerSecurity security;
  security.mode = config.peer.security == "plain" ? PeerSecurity::Mode::kPlain : PeerSecurity::Mode::kMtls;
  security.cert_file = config.peer.tls.certificate_file;
  security.key_file = config.peer.tls.private_key_file;
  security.ca_file = config.peer.tls.ca_file;
  security.identities = config.peer.identities;
  return security;
}

PoolLimits PoolLimitsOf(const Config& config) {
  PoolLimits limits;
  limits.shared_dir = config.memory.shared_dir;
  limits.shm_prefix = config.memory.shm_prefix;
  limits.allowed_owners = UidsOf(config.memory.allowed_owners);
  limits.token_owners = {geteuid()};
  limits.max_pools_per_user = static_cast<uint32_t>(config.quota.pools_per_user);
  limits.max_holds_per_user = static_cast<uint32_t>(config.quota.holds_per_user);
  limits.max_bytes_per_user = config.quota.user_bytes;
  limits.max_owned_bytes = config.memory.max_owned_bytes;
  limits.max_pools = static_cast<uint32_t>(config.memory.max_pools);
  limits.max_chunk_bytes = kMaxChunkKvBytes;
  limits.lease_default_ttl_ms = static_cast<int64_t>(config.lease.default_ttl_ms);
  limits.lease_min_ttl_ms = static_cast<int64_t>(config.lease.min_ttl_ms);
  limits.lease_max_ttl_ms = static_cast<int64_t>(config.lease.max_ttl_ms);
  return limits;
}

absl::Status CheckStaging(const Config::Memory& memory) {
  return CheckMemory("memory.send_slots (" + std::to_string(memory.send_slots) + ") and memory.receive_slots (" +
                         std::to_string(memory.receive_slots) + ") of memory.slot_bytes (" +
                         std::to_string(memory.slot_bytes) + ") need",
                     (memory.send_slots + memory.receive_slots) * memory.slot_bytes);
}

size_t Cores() { return std::max(1u, std::thread::hardware_concurrency()); }

size_t CodecThreads(const Config& config) {
  return config.codec.threads == 0 ? Cores() : static_cast<size_t>(config.codec.threads);
}

// All of them: the codec's, our own and the HTTP server's, and those gRPC starts by number of cores, some of them
// later.
size_t ThreadsNeeded(const Config& config) { return 30 + CodecThreads(config) + std::min<size_t>(4 * Cores(), 64); }

// The error of a key's value, with the key.
absl::Status Named(const std::string& key, const absl::Status& error) {
  Metadata metadata = MetadataOf(error);
  metadata["key"] = key;
  return MakeError(error.code(), ReasonOf(error), key + ": " + std::string(error.message()), metadata);
}

TransferOptions TransferOptionsOf(const Config& config, uint64_t epoch) {
  TransferOptions options;
  options.epoch = epoch;
  options.compute_threads = static_cast<uint32_t>(CodecThreads(config));
  options.progress_timeout_ms = static_cast<int64_t>(config.transfer.progress_timeout_ms);
  options.streams = static_cast<uint32_t>(config.peer.streams);
  options.credits_per_transfer = static_cast<uint32_t>(config.transfer.credits_per_transfer);
  options.max_active = static_cast<uint32_t>(config.transfer.max_active);
  options.max_active_per_user = static_cast<uint32_t>(config.quota.transfers_per_user);
  options.max_active_per_pool = static_cast<uint32_t>(config.quota.transfers_per_pool);
  options.max_waiting_peers = static_cast<uint32_t>(config.peer.max_waiting_transfers);
  options.terminal_memory_ms = static_cast<int64_t>(config.transfer.terminal_memory_seconds) * 1000;
  options.terminal_memory_count = static_cast<uint32_t>(config.transfer.terminal_memory_count);
  return options;
}

}  // namespace

class Daemon::Impl {
 public:
  explicit Impl(const Config& config) : config_(config), epoch_(RandomU64()) {}
  ~Impl() { Stop(); }

  absl::Status Start();
  void Stop();
  void Drain(int64_t timeout_ms, std::function<void(DrainOutcome)> done) { drain_->Drain(timeout_ms, std::move(done)); }
  const DaemonAddresses& addresses() const { return addresses_; }
  uint64_t epoch() const { return epoch_; }

 private:
  absl::Status StartCodec();
  absl::Status StartEngine();
  absl::Status StartServers();
  absl::Status StartHealth();
  absl::Status StartLocal(const std::string& name, const LocalServer::Options& options,
                          std::unique_ptr<SocketGuard>* guard, std::unique_ptr<LocalServer>* server);
  void WatchCertificates(const PeerSecurity& security);
  DaemonStatus Status() const;
  // What the Health port and the worker socket say.
  void SetReady(bool ready);

  const Config config_;
  const uint64_t epoch_;
  DaemonAddresses addresses_;
  int64_t started_ns_ = 0;
  std::atomic<bool> ready_{false};

  // In the order of their making; Stop undoes it in reverse.
  BackendRegistry backends_;
  const Backend* backend_ = nullptr;
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<Clock> clock_;
  std::unique_ptr<ThreadPool> control_, compute_, calls_;
  std::unique_ptr<SlotPool> send_slots_, receive_slots_;
  std::unique_ptr<PoolRegistry> pools_;
  std::unique_ptr<GrpcTransport> transport_;
  std::unique_ptr<TransferManager> transfers_;
  std::unique_ptr<DrainController> drain_;
  std::shared_ptr<CallerTable> callers_;
  std::unique_ptr<GaugeRefresher> gauges_;
  ServiceContext context_;
  AdminHooks hooks_;
  std::unique_ptr<grpc::Service> worker_service_, admin_service_;
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

  // Where there is none, FILE segments are refused one by one; whoever uses no files needs none.
  if (mkdir(config_.memory.shared_dir.c_str(), 0770) != 0 && errno != EEXIST) {
    SPECTRUMKV_LOG(kWarning, "lifecycle", "memory.shared_dir cannot be made: FILE segments will be refused",
                   {"memory.shared_dir", config_.memory.shared_dir}, {"error", strerror(errno)});
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
                                                            : MetricQuota::kHolds);
  };
  pools_ = PoolRegistry::Create(PoolLimitsOf(config_), epoch_, clock_.get(), std::move(events));

  GrpcTransportOptions transport;
  transport.security = SecurityOf(config_);
  transport.connect_timeout_ms = static_cast<int64_t>(config_.peer.connect_timeout_ms);
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
                                               SetReady(false);
                                               pools_->StartDraining();
                                             });
  callers_ = std::make_shared<CallerTable>(static_cast<uint32_t>(config_.worker.max_connections));
  gauges_ = std::make_unique<GaugeRefresher>(GaugeRefresher::Sources{
      clock_.get(), metrics_.get(), pools_.get(), send_slots_.get(), receive_slots_.get(), callers_.get()});
  return absl::OkStatus();
}

void Daemon::Impl::SetReady(bool ready) {
  ready_ = ready;
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
  SetReady(false);
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
  context_.epoch = epoch_;
  context_.defaults = *std::move(defaults);
  context_.pools = pools_.get();
  context_.transfers = transfers_.get();
  context_.metrics = metrics_.get();
  context_.caller_of = [callers = callers_](const std::string& peer) { return callers->Find(peer); };
  context_.backend = backend_;
  context_.calls = calls_.get();
  context_.compute = compute_.get();
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
  worker_service_ = NewWorkerService(&context_);
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
  worker.service = worker_service_.get();
  worker.health = worker.reflection = true;
  absl::Status status = StartLocal("worker", worker, &worker_guard_, &worker_);
  if (!status.ok()) return status;
  LocalServer::Options admin;
  admin.socket = config_.admin.socket;
  admin.socket_key = "admin.socket";
  admin.service = admin_service_.get();
  admin.reflection = true;
  status = StartLocal("admin", admin, &admin_guard_, &admin_);
  if (!status.ok()) return status;

  PeerServerOptions peer;
  peer.listen_address = config_.peer.listen_address;
  peer.security = SecurityOf(config_);
  peer.version = VersionText();
  peer.epoch = epoch_;
  peer.max_message_bytes = config_.peer.max_message_bytes;
  auto peer_server = PeerServer::Start(peer, transfers_.get());
  if (!peer_server.ok()) return peer_server.status();
  peer_ = *std::move(peer_server);
  if (peer.security.mode == PeerSecurity::Mode::kMtls) WatchCertificates(peer.security);
  auto exposer = MetricsExposer::Start(config_.metrics.listen_address, *metrics_);
  if (!exposer.ok()) return exposer.status();
  exposer_ = *std::move(exposer);

  addresses_.worker_socket = config_.worker.socket;
  addresses_.admin_socket = config_.admin.socket;
  addresses_.worker_tcp = worker_->tcp_address();
  addresses_.peer = peer_->address();
  addresses_.metrics = WithPort(config_.metrics.listen_address, exposer_->port());
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
  SetReady(true);
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
  status.ready = ready_;
  status.draining = drain_->draining();
  status.worker_address = "unix:" + addresses_.worker_socket;
  status.admin_address = "unix:" + addresses_.admin_socket;
  status.peer_address = addresses_.peer;
  status.health_address = addresses_.health;
  status.metrics_address = addresses_.metrics;
  return status;
}

void Daemon::Impl::Stop() {
  SetReady(false);
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
  transfers_.reset();
  transport_.reset();
  pools_.reset();
  clock_.reset();
  health_.reset();
}

Daemon::Daemon(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Daemon::~Daemon() = default;

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(const Config& config) {
  auto impl = std::make_unique<Impl>(config);
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
