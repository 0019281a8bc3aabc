#include "server/service/admin_service.h"

#include <utility>

#include "server/base/log.h"
#include "server/base/status.h"
#include "server/service/check.h"
#include "spectrumkv/v1/admin_service.grpc.pb.h"

namespace spectrumkv {
namespace {

using CallContext = grpc::CallbackServerContext;
using UnaryReactor = grpc::ServerUnaryReactor;

void RatesToProto(const FamilyRates& rates, v1::FamilyRates* out) {
  const auto of = [&](TierFamily family) { return rates[static_cast<size_t>(family)]; };
  if (const auto rate = of(TierFamily::kRaw)) out->set_raw_bytes_per_second(*rate);
  if (const auto rate = of(TierFamily::kPlain)) out->set_plain_bytes_per_second(*rate);
  if (const auto rate = of(TierFamily::kRotated)) out->set_rotated_bytes_per_second(*rate);
}

void AddSlots(const std::string& partition, const SlotPool& slots, v1::GetStatusResponse* response) {
  v1::SlotUsage* usage = response->add_slots();
  usage->set_partition(partition);
  usage->set_slots_total(slots.count());
  usage->set_slots_used(slots.used());
  usage->set_slot_bytes(slots.slot_bytes());
}

void PoolToProto(const PoolStatus& pool, v1::PoolInfo* out) {
  out->set_pool_id(pool.pool_id);
  out->set_model(pool.model);
  out->set_revision(pool.revision);
  out->set_groups(pool.groups);
  out->set_layers(pool.layers);
  out->set_kv_bytes(pool.kv_bytes);
  out->set_blocks_total(pool.blocks_total);
  out->set_blocks_sending(pool.blocks_sending);
  out->set_blocks_receiving(pool.blocks_receiving);
  out->set_lease_remaining_ms(static_cast<uint64_t>(pool.lease_remaining_ms > 0 ? pool.lease_remaining_ms : 0));
  out->set_state(pool.state);
  out->set_owner(pool.owner.Name());
}

void StagesToProto(const StageRates& stages, v1::StageRates* out) {
  if (stages.scan.has_value()) out->set_scan_bytes_per_second(*stages.scan);
  if (stages.sample.has_value()) out->set_sample_bytes_per_second(*stages.sample);
  RatesToProto(stages.encode, out->mutable_encode());
  RatesToProto(stages.own_decode, out->mutable_decode());
}

// Of the CPU; of GPUs where anything was measured there.
void StagesToProto(TransferManager* transfers, v1::ListPeersResponse* response) {
  const Measured cpu = transfers->MeasuredOf("", CodedBy::kCpu);
  StagesToProto(cpu, response->mutable_stages());
  if (cpu.plan.has_value()) response->mutable_stages()->set_plan_bytes_per_second(*cpu.plan);
  response->mutable_stages()->set_threads(cpu.threads);
  const StageRates gpu = transfers->StagesOf(CodedBy::kGpu);
  bool known = gpu.scan.has_value() || gpu.sample.has_value();
  for (const FamilyRates& rates : {gpu.encode, gpu.own_decode}) {
    for (const std::optional<double>& rate : rates) known = known || rate.has_value();
  }
  if (!known) return;
  StagesToProto(gpu, response->mutable_gpu_stages());
  response->mutable_gpu_stages()->set_threads(cpu.threads);
}

void PeerToProto(const PeerStatus& peer, v1::PeerInfo* out) {
  out->set_address(peer.address);
  out->set_direction(peer.direction);
  out->set_sessions_active(peer.sessions_active);
  out->set_sessions_total(peer.sessions_total);
  out->set_wire_bytes_sent(peer.wire_bytes_sent);
  out->set_wire_bytes_received(peer.wire_bytes_received);
  out->set_last_error(peer.last_error);
  const Measured& measured = peer.measured;
  if (measured.link.has_value()) {
    out->set_link_bytes_per_second(*measured.link);
    out->set_link_age_seconds(measured.link_age_seconds);
  }
  RatesToProto(measured.peer_decode, out->mutable_decode());
  if (measured.setup_seconds.has_value()) out->set_setup_seconds(*measured.setup_seconds);
}

void ProbeToProto(const ProbeResult& result, v1::ProbePeerResponse* out) {
  out->set_version(result.version);
  out->set_epoch(result.epoch);
  out->set_connect_seconds(result.connect_seconds);
  out->set_round_trip_seconds(result.round_trip_seconds);
  out->set_link_bytes_per_second(result.link_bytes_per_second);
  out->set_clock_offset_seconds(result.clock_offset_seconds);
  out->set_clock_error_seconds(result.clock_error_seconds);
}

void CertificatesToProto(const CertificateReport& report, v1::GetCertificateResponse* out) {
  for (const CertificateReport::One& one : report.chain) {
    v1::CertificateInfo* info = out->add_chain();
    info->set_subject(one.subject);
    info->set_issuer(one.issuer);
    for (const std::string& name : one.names) info->add_names(name);
    info->set_not_before(one.not_before);
    info->set_not_after(one.not_after);
  }
  out->set_problem_reason(ReasonOf(report.problem));
  out->set_problem(std::string(report.problem.message()));
}

void AddDevices(const Devices* devices, v1::GetStatusResponse* response) {
  if (devices == nullptr) return;
  if (!devices->why_none().ok()) response->set_no_device_reason(std::string(devices->why_none().message()));
  for (const auto& device : devices->all()) {
    const Device::Use use = device->use();
    v1::DeviceUsage* out = response->add_devices();
    out->set_uuid(device->uuid());
    out->set_name(device->name());
    out->set_total_bytes(device->total_bytes());
    if (use.context_bytes.has_value()) out->set_context_bytes(*use.context_bytes);
    out->set_owned_bytes(use.owned_bytes);
    out->set_imports(use.imports);
    out->set_lanes(use.lanes);
    out->set_lane_bytes(use.lane_bytes);
    out->set_failure(std::string(device->Health().message()));
  }
}

class AdminServiceImpl final : public v1::AdminService::CallbackService {
 public:
  AdminServiceImpl(const ServiceContext* context, const AdminHooks* hooks) : context_(context), hooks_(hooks) {}

  UnaryReactor* GetStatus(CallContext* call, const v1::GetStatusRequest*, v1::GetStatusResponse* response) override {
    const DaemonStatus status = hooks_->status();
    response->set_version(status.version);
    response->set_epoch(context_->epoch);
    response->set_uptime_seconds(status.uptime_seconds);
    response->set_ready(status.ready);
    response->set_draining(status.draining);
    response->set_backend(context_->backend->name());
    for (const Backend* backend : hooks_->backends->all()) {
      if (backend->supported()) response->add_backends_supported(backend->name());
    }
    response->set_worker_address(status.worker_address);
    response->set_peer_address(status.peer_address);
    response->set_admin_address(status.admin_address);
    response->set_health_address(status.health_address);
    response->set_metrics_address(status.metrics_address);
    response->set_peer_security(status.peer_security);
    AddDevices(hooks_->devices, response);
    response->set_pools(static_cast<uint32_t>(context_->pools->List().size()));
    response->set_inflight_transfers(context_->transfers->active());
    AddSlots("send", *hooks_->send_slots, response);
    AddSlots("receive", *hooks_->receive_slots, response);
    return AnswerNow(*context_, call, absl::OkStatus());
  }

  UnaryReactor* ListPools(CallContext* call, const v1::ListPoolsRequest*, v1::ListPoolsResponse* response) override {
    for (const PoolStatus& pool : context_->pools->List()) PoolToProto(pool, response->add_pools());
    return AnswerNow(*context_, call, absl::OkStatus());
  }

  UnaryReactor* ListTransfers(CallContext* call, const v1::ListTransfersRequest* request,
                              v1::ListTransfersResponse* response) override {
    const uint32_t limit = request->limit() == 0 ? kListTransfersDefault : request->limit();
    if (limit > kListTransfersMax) {
      return AnswerNow(*context_, call,
                       Invalid("OUT_OF_RANGE", "limit",
                               "is " + std::to_string(limit) + ", at most " + std::to_string(kListTransfersMax)));
    }
    for (const TransferReport& report : context_->transfers->List(limit, request->active_only())) {
      ReportToProto(report, response->add_transfers());
    }
    return AnswerNow(*context_, call, absl::OkStatus());
  }

  UnaryReactor* ListPeers(CallContext* call, const v1::ListPeersRequest*, v1::ListPeersResponse* response) override {
    for (const PeerStatus& peer : context_->transfers->ListPeers()) PeerToProto(peer, response->add_peers());
    StagesToProto(context_->transfers, response);
    return AnswerNow(*context_, call, absl::OkStatus());
  }

  UnaryReactor* Drain(CallContext* call, const v1::DrainRequest* request, v1::DrainResponse* response) override {
    if (request->timeout_ms() > static_cast<uint64_t>(hooks_->max_drain_timeout_ms)) {
      return AnswerNow(*context_, call,
                       Invalid("OUT_OF_RANGE", "timeout_ms",
                               "is " + std::to_string(request->timeout_ms()) + ", at most " +
                                   std::to_string(hooks_->max_drain_timeout_ms)));
    }
    UnaryReactor* reactor = call->DefaultReactor();
    hooks_->drain(static_cast<int64_t>(request->timeout_ms()), [this, reactor, response](const DrainOutcome& outcome) {
      response->set_transfers_finished(outcome.finished);
      response->set_transfers_left(outcome.left);
      reactor->Finish(EndOf(*context_, MetricStage::kQueue, outcome.status));
    });
    return reactor;
  }

  UnaryReactor* GetConfig(CallContext* call, const v1::GetConfigRequest*, v1::GetConfigResponse* response) override {
    response->set_yaml(hooks_->config_yaml);
    return AnswerNow(*context_, call, absl::OkStatus());
  }

  UnaryReactor* SetLogLevel(CallContext* call, const v1::SetLogLevelRequest* request,
                            v1::SetLogLevelResponse* response) override {
    response->set_previous_level(GetLogLevel());
    const absl::Status status = spectrumkv::SetLogLevel(request->level());
    if (status.ok()) SPECTRUMKV_LOG(kInfo, "admin", "log level set", {"level", request->level()});
    return AnswerNow(*context_, call, status);
  }

  UnaryReactor* RunSelfTest(CallContext* call, const v1::RunSelfTestRequest*,
                            v1::RunSelfTestResponse* response) override {
    UnaryReactor* reactor = call->DefaultReactor();
    context_->compute->Post([this, reactor, response] {
      for (const Backend* backend : hooks_->backends->all()) {
        v1::SelfTestResult* result = response->add_results();
        result->set_backend(backend->name());
        result->set_supported(backend->supported());
        std::string detail;
        result->set_passed(backend->supported() && SelfTest(*backend, &detail));
        result->set_detail(backend->supported() ? detail : "this machine cannot run it");
      }
      reactor->Finish(grpc::Status::OK);
    });
    return reactor;
  }

  UnaryReactor* GetMetrics(CallContext* call, const v1::GetMetricsRequest*, v1::GetMetricsResponse* response) override {
    return Later(call, [this, response] {
      response->set_text(context_->metrics->Render());
      return absl::OkStatus();
    });
  }

  UnaryReactor* ProbePeer(CallContext* call, const v1::ProbePeerRequest* request,
                          v1::ProbePeerResponse* response) override {
    if (request->timeout_ms() > kProbeTimeoutMaxMs) {
      return AnswerNow(*context_, call,
                       Invalid("OUT_OF_RANGE", "timeout_ms",
                               "is " + std::to_string(request->timeout_ms()) + ", at most " +
                                   std::to_string(kProbeTimeoutMaxMs)));
    }
    const absl::Status allowed = CheckPeerAddress(request->peer(), context_->defaults.allowed_hosts);
    if (!allowed.ok()) return AnswerNow(*context_, call, allowed);
    const auto timeout_ms = static_cast<int64_t>(request->timeout_ms());
    return Later(call, [this, peer = request->peer(), timeout_ms, response] {
      const absl::StatusOr<ProbeResult> result = hooks_->probe_peer(peer, timeout_ms);
      if (result.ok()) ProbeToProto(*result, response);
      return result.status();
    });
  }

  UnaryReactor* GetCertificate(CallContext* call, const v1::GetCertificateRequest*,
                               v1::GetCertificateResponse* response) override {
    return Later(call, [this, response] {
      response->set_peer_security(hooks_->status().peer_security);
      CertificatesToProto(hooks_->certificates(), response);
      return absl::OkStatus();
    });
  }

 private:
  // Answers with what `work` returns, from the threads for calls that take their time.
  UnaryReactor* Later(CallContext* call, std::function<absl::Status()> work) {
    UnaryReactor* reactor = call->DefaultReactor();
    context_->calls->Post([this, reactor, work = std::move(work)] {
      reactor->Finish(EndOf(*context_, MetricStage::kQueue, work()));
    });
    return reactor;
  }

  const ServiceContext* const context_;
  const AdminHooks* const hooks_;
};

}  // namespace

std::unique_ptr<grpc::Service> NewAdminService(const ServiceContext* context, const AdminHooks* hooks) {
  return std::make_unique<AdminServiceImpl>(context, hooks);
}

}  // namespace spectrumkv
