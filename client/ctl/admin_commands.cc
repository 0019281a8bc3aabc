// health, status, peers, drain, config, log-level.
#include <cstdio>

#include "client/cpp/status.h"
#include "client/ctl/command.h"
#include "client/ctl/output.h"

namespace spectrumkv::ctl {
namespace {

absl::StatusOr<int> Health(const Context& context, Args args) {
  const std::string address = args.Text("address", context.connection.worker_socket);
  const std::string service = args.Text("service");
  if (const absl::Status status = args.Check(); !status.ok()) return status;
  const auto health = CheckHealth(address, service, context.connection.timeout_ms);
  if (!health.ok()) return health.status();
  if (context.json) {
    std::printf("{\"status\": \"%s\"}\n", health->c_str());
  } else {
    std::printf("%s\n", health->c_str());
  }
  return *health == "SERVING" ? kOk : kCheckFailed;
}

std::string Gpu(const v1::DeviceUsage& gpu) {
  const std::string context = !gpu.has_context_bytes()     ? "context of unknown size"
                              : gpu.context_bytes() == 0 ? "no context"
                                                         : "context " + Bytes(gpu.context_bytes());
  return gpu.uuid() + " " + gpu.name() + ": " + context + ", " + Bytes(gpu.owned_bytes()) + " of pools, " +
         std::to_string(gpu.imports()) + " imported, " + std::to_string(gpu.lanes()) + " lanes of " +
         Bytes(gpu.lane_bytes()) + (gpu.failure().empty() ? "" : ", FAILED: " + gpu.failure());
}

absl::StatusOr<int> Status(const Context& context, Args args) {
  if (const absl::Status status = args.Check(); !status.ok()) return status;
  const auto status = CallAdmin(context.connection, &AdminStub::GetStatus, v1::GetStatusRequest());
  if (!status.ok()) return status.status();
  if (context.json) {
    std::fputs(ToJson(*status).c_str(), stdout);
    return status->ready() ? kOk : kCheckFailed;
  }
  std::string supported, slots, gpus;
  for (const v1::DeviceUsage& gpu : status->devices()) {
    gpus += (gpus.empty() ? "" : "; ") + Gpu(gpu);
  }
  for (const std::string& name : status->backends_supported()) supported += (supported.empty() ? "" : ", ") + name;
  for (const v1::SlotUsage& usage : status->slots()) {
    slots += (slots.empty() ? "" : ", ") + usage.partition() + " " + std::to_string(usage.slots_used()) + "/" +
             std::to_string(usage.slots_total()) + " of " + Bytes(usage.slot_bytes());
  }
  std::fputs(Lines({{"version", status->version()},
                    {"state", status->draining() ? "draining"
                              : status->ready()  ? "ready"
                                                 : "not ready"},
                    {"uptime", Seconds(status->uptime_seconds())},
                    {"epoch", std::to_string(status->epoch())},
                    {"backend", status->backend() + " (supported: " + supported + ")"},
                    {"GPUs", gpus.empty() ? "none (" + status->no_device_reason() + ")" : gpus},
                    {"pools", std::to_string(status->pools())},
                    {"transfers", std::to_string(status->inflight_transfers()) + " in flight"},
                    {"staging", slots},
                    {"worker", status->worker_address()},
                    {"peer", status->peer_address() + " (" + status->peer_security() + ")"},
                    {"admin", status->admin_address()},
                    {"health", status->health_address()},
                    {"metrics", status->metrics_address()}})
                 .c_str(),
             stdout);
  return status->ready() ? kOk : kCheckFailed;
}

std::string Rates(const v1::FamilyRates& rates) {
  const auto known = [](bool has, double rate) { return has ? Rate(rate) : "-"; };
  return known(rates.has_raw_bytes_per_second(), rates.raw_bytes_per_second()) + " " +
         known(rates.has_plain_bytes_per_second(), rates.plain_bytes_per_second()) + " " +
         known(rates.has_rotated_bytes_per_second(), rates.rotated_bytes_per_second());
}

std::string Stages(const v1::StageRates& stages) {
  const auto known = [](bool has, double rate) { return has ? Rate(rate) : ""; };
  return Lines({{"scan", known(stages.has_scan_bytes_per_second(), stages.scan_bytes_per_second())},
                {"sample", known(stages.has_sample_bytes_per_second(), stages.sample_bytes_per_second())},
                {"plan", known(stages.has_plan_bytes_per_second(), stages.plan_bytes_per_second())},
                {"encode", Rates(stages.encode())},
                {"decode", Rates(stages.decode())}});
}

absl::StatusOr<int> Peers(const Context& context, Args args) {
  if (const absl::Status status = args.Check(); !status.ok()) return status;
  const auto peers = CallAdmin(context.connection, &AdminStub::ListPeers, v1::ListPeersRequest());
  if (!peers.ok()) return peers.status();
  if (context.json) {
    std::fputs(ToJson(*peers).c_str(), stdout);
    return kOk;
  }
  std::vector<std::vector<std::string>> rows = {
      {"PEER", "DIRECTION", "SESSIONS", "SENT", "RECEIVED", "LINK", "DECODE RAW/PLAIN/ROTATED", "LAST ERROR"}};
  for (const v1::PeerInfo& peer : peers->peers()) {
    rows.push_back({peer.address(), peer.direction(),
                    std::to_string(peer.sessions_active()) + "/" + std::to_string(peer.sessions_total()),
                    Bytes(peer.wire_bytes_sent()), Bytes(peer.wire_bytes_received()),
                    peer.has_link_bytes_per_second() ? Rate(peer.link_bytes_per_second()) : "-", Rates(peer.decode()),
                    peer.last_error()});
  }
  std::fputs(Table(rows).c_str(), stdout);
  const v1::StageRates& stages = peers->stages();
  std::printf("\nThis daemon, %u threads; raw/plain/rotated of one thread:\n%s", stages.threads(), Stages(stages).c_str());
  if (peers->has_gpu_stages()) {
    std::printf("\nIts GPUs, for pools there; raw/plain/rotated of one lane:\n%s", Stages(peers->gpu_stages()).c_str());
  }
  return kOk;
}

// Without --wait: starts the drain and looks once, so a daemon with work left is no error.
absl::StatusOr<int> Drain(const Context& context, Args args) {
  const bool wait = args.Switch("wait");
  const int64_t drain_ms = args.Milliseconds("drain-timeout", 0);
  if (const absl::Status status = args.Check(); !status.ok()) return status;
  v1::DrainRequest request;
  request.set_timeout_ms(static_cast<uint64_t>(wait ? drain_ms : 1));
  // An hour bounds the daemon's own default.
  constexpr int64_t kLongestMs = 3600 * 1000;
  const auto drained =
      CallAdmin(context.connection, &AdminStub::Drain, request, wait && drain_ms == 0 ? kLongestMs : drain_ms);
  // By its reason: a daemon that does not answer at all ends in DEADLINE_EXCEEDED too, and may not be draining.
  if (!drained.ok() && !wait && client::ReasonOf(drained.status()) == "DRAIN_TIMEOUT") {
    std::printf(context.json ? "{\"draining\": true}\n"
                             : "draining; transfers are left, see spectrumkvctl transfers\n");
    return kOk;
  }
  if (!drained.ok()) return drained.status();
  if (context.json) {
    std::fputs(ToJson(*drained).c_str(), stdout);
  } else {
    std::printf("drained: %llu transfers finished, %llu left\n",
                static_cast<unsigned long long>(drained->transfers_finished()),
                static_cast<unsigned long long>(drained->transfers_left()));
  }
  return drained->transfers_left() == 0 ? kOk : kCheckFailed;
}

absl::StatusOr<int> Config(const Context& context, Args args) {
  if (const absl::Status status = args.Check(); !status.ok()) return status;
  const auto config = CallAdmin(context.connection, &AdminStub::GetConfig, v1::GetConfigRequest());
  if (!config.ok()) return config.status();
  std::fputs(context.json ? ToJson(*config).c_str() : config->yaml().c_str(), stdout);
  return kOk;
}

absl::StatusOr<int> LogLevel(const Context& context, Args args) {
  v1::SetLogLevelRequest request;
  request.set_level(args.Positional(0, "LEVEL (debug, info, warning or error)"));
  if (const absl::Status status = args.Check(1); !status.ok()) return status;
  const auto response = CallAdmin(context.connection, &AdminStub::SetLogLevel, request);
  if (!response.ok()) return response.status();
  if (context.json) {
    std::fputs(ToJson(*response).c_str(), stdout);
  } else {
    std::printf("%s -> %s\n", response->previous_level().c_str(), request.level().c_str());
  }
  return kOk;
}

}  // namespace

std::vector<Command> AdminCommands() {
  return {
      {"health",
       "",
       "ask a gRPC health service; exit 0 only if SERVING",
       {{"address", "ADDR", "a path or host:port; default the worker socket"},
        {"service", "NAME", "\"\", readiness or liveness; default \"\""}},
       Health},
      {"status", "", "version, state, addresses, backend, staging; exit 0 only if ready", {}, Status},
      {"peers", "", "daemons this one has talked to", {}, Peers},
      {"drain",
       "",
       "stop taking work; new calls are refused until the daemon restarts",
       {{"wait", "", "return when nothing is left"},
        {"drain-timeout", "SECONDS", "with --wait: how long; default the daemon's"}},
       Drain},
      {"config", "", "the effective configuration, without secrets", {}, Config},
      {"log-level", "LEVEL", "debug, info, warning or error, until the daemon ends", {}, LogLevel},
  };
}

}  // namespace spectrumkv::ctl
