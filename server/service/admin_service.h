// AdminService: what operators and spectrumkvctl ask. What only the daemon as a whole knows comes through AdminHooks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <grpcpp/impl/service_type.h>
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/codec/registry.h"
#include "server/memory/device.h"
#include "server/memory/slot_pool.h"
#include "server/service/service_context.h"
#include "server/stream/certificate_report.h"
#include "server/stream/probe_result.h"

namespace spectrumkv {

struct DaemonStatus {
  std::string version, peer_security;
  double uptime_seconds = 0;
  bool ready = false, draining = false;
  std::string worker_address, peer_address, admin_address, health_address, metrics_address;
};

struct DrainOutcome {
  absl::Status status;  // DEADLINE_EXCEEDED DRAIN_TIMEOUT when transfers are left
  uint64_t finished = 0, left = 0;
};

// Thread-safe, borrowed with all they capture.
struct AdminHooks {
  std::function<DaemonStatus()> status;
  // Stops taking work; `done` once. 0: the default timeout.
  std::function<void(int64_t timeout_ms, std::function<void(DrainOutcome)> done)> drain;
  std::string config_yaml;
  const BackendRegistry* backends = nullptr;
  const SlotPool* send_slots = nullptr;
  const SlotPool* receive_slots = nullptr;
  const Devices* devices = nullptr;
  int64_t max_drain_timeout_ms = 3600000;
  // Blocks (GrpcTransport::Probe). timeout_ms 0: the default.
  std::function<absl::StatusOr<ProbeResult>(const std::string& peer, int64_t timeout_ms)> probe_peer;
  // Reads files.
  std::function<CertificateReport()> certificates;
};

constexpr uint32_t kListTransfersDefault = 100;
constexpr uint32_t kListTransfersMax = 10000;
constexpr uint64_t kProbeTimeoutMaxMs = 10000;

// Both are borrowed.
std::unique_ptr<grpc::Service> NewAdminService(const ServiceContext* context, const AdminHooks* hooks);

}  // namespace spectrumkv
