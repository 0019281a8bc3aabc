// doctor: what is wrong with a deployment, and what to do.
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <set>

#include "cmake/version.h"
#include "client/cpp/status.h"
#include "client/ctl/command.h"
#include "client/ctl/doctor.h"

namespace spectrumkv::ctl {
namespace {

constexpr uint32_t kTransfersRead = 100;
// Peers are probed one after another, about two seconds each.
constexpr size_t kPeersMost = 16;
constexpr int64_t kProbeMs = 5000;
// Where the daemon does not say.
constexpr char kDefaultSharedDir[] = "/dev/shm/spectrumkv";

// Those named, else those the daemon has dialled.
std::vector<std::string> PeersToProbe(const std::vector<std::string>& named, const v1::ListPeersResponse& peers) {
  std::vector<std::string> all = named;
  for (const v1::PeerInfo& peer : peers.peers()) {
    if (named.empty() && peer.direction() == "dialled") all.push_back(peer.address());
  }
  std::vector<std::string> distinct;
  std::set<std::string> seen;
  for (const std::string& address : all) {
    if (seen.insert(address).second && distinct.size() < kPeersMost) distinct.push_back(address);
  }
  return distinct;
}

// A finding of every part that can be had: an older daemon lacks some calls.
DaemonFacts Ask(const Connection& connection, const std::vector<std::string>& named_peers) {
  DaemonFacts facts;
  const auto status = CallAdmin(connection, &AdminStub::GetStatus, v1::GetStatusRequest());
  facts.reached = status.status();
  if (!status.ok()) return facts;
  facts.status = *status;
  if (const auto peers = CallAdmin(connection, &AdminStub::ListPeers, v1::ListPeersRequest()); peers.ok()) {
    facts.peers = *peers;
  }
  v1::ListTransfersRequest recent;
  recent.set_limit(kTransfersRead);
  if (const auto transfers = CallAdmin(connection, &AdminStub::ListTransfers, recent); transfers.ok()) {
    facts.transfers = *transfers;
  }
  if (const auto config = CallAdmin(connection, &AdminStub::GetConfig, v1::GetConfigRequest()); config.ok()) {
    facts.config = ConfigText(config->yaml());
  }
  facts.certificate = CallAdmin(connection, &AdminStub::GetCertificate, v1::GetCertificateRequest());
  for (const std::string& address : PeersToProbe(named_peers, facts.peers)) {
    v1::ProbePeerRequest probe;
    probe.set_peer(address);
    probe.set_timeout_ms(static_cast<uint64_t>(std::min(kProbeMs, connection.timeout_ms)));
    // The daemon's time for it comes on top.
    facts.probed.push_back({address, CallAdmin(connection, &AdminStub::ProbePeer, probe, 2 * kProbeMs)});
  }
  std::string socket = facts.status.worker_address();
  if (socket.compare(0, 5, "unix:") == 0) facts.worker_socket = ReadPathOf(socket.substr(5));
  return facts;
}

void Print(const std::vector<Finding>& findings, bool json) {
  if (json) {
    std::fputs(DoctorJson(findings).c_str(), stdout);
    return;
  }
  const auto count = [&](Finding::Level level) {
    return std::to_string(std::count_if(findings.begin(), findings.end(), [&](const Finding& f) { return f.level == level; }));
  };
  std::fputs(DoctorText(findings).c_str(), stdout);
  std::printf("\nproblems: %s, warnings: %s\n", count(Finding::Level::kProblem).c_str(),
              count(Finding::Level::kWarning).c_str());
}

absl::StatusOr<int> Doctor(const Context& context, Args args) {
  const std::vector<std::string> named = args.List("peer");
  const bool strict = args.Switch("strict");
  DoctorOptions options;
  options.own_version = VersionText();
  options.now_unix_seconds = std::time(nullptr);
  if (args.Has("worker-uid")) options.worker_uid = static_cast<uint32_t>(args.Number("worker-uid", 0, 0, UINT32_MAX - 1));
  if (args.Has("worker-gid")) options.worker_gid = static_cast<uint32_t>(args.Number("worker-gid", 0, 0, UINT32_MAX - 1));
  if (options.worker_gid && !options.worker_uid) args.Refuse("--worker-gid needs --worker-uid");
  if (const absl::Status status = args.Check(); !status.ok()) return status;

  const DaemonFacts daemon = Ask(context.connection, named);
  const pid_t pid = daemon.reached.ok() ? ListenerOf(context.connection.admin_socket) : 0;
  const HostFacts host = ReadHost("", pid, daemon.config.Value("memory.shared_dir").value_or(kDefaultSharedDir));
  std::vector<Finding> findings = CheckDaemon(daemon, options);
  for (Finding& f : CheckHost(host, daemon)) findings.push_back(std::move(f));
  if (daemon.reached.ok()) {
    for (Finding& f : CheckPeers(daemon, options.own_version)) findings.push_back(std::move(f));
  }
  // What is worst first; the order of checks within.
  std::stable_sort(findings.begin(), findings.end(), [](const Finding& a, const Finding& b) { return a.level > b.level; });
  Print(findings, context.json);
  if (!daemon.reached.ok()) return kUnreachable;
  const Finding::Level worst = findings.front().level;
  return worst == Finding::Level::kProblem || (strict && worst == Finding::Level::kWarning) ? kCheckFailed : kOk;
}

}  // namespace

std::vector<Command> DoctorCommands() {
  return {{"doctor",
           "",
           "what is wrong with this deployment, and what to do; exit 1 on a problem, 3 where no daemon answers",
           {{"peer", "HOST:PORT,...", "probe these daemons; default those this one has dialled"},
            {"worker-uid", "UID", "whether a worker of this user can connect"},
            {"worker-gid", "GID", "and this group; default as the uid"},
            {"strict", "", "exit 1 on a warning, too"}},
           Doctor}};
}

}  // namespace spectrumkv::ctl
