// Checks of what the daemon says of itself, and of its peers.
#include <algorithm>
#include <cmath>
#include <map>

#include "client/cpp/status.h"
#include "client/ctl/doctor.h"
#include "client/ctl/output.h"

namespace spectrumkv::ctl {
namespace {

using Level = Finding::Level;

constexpr int64_t kDaySeconds = 86400;
constexpr double kSkewWarningSeconds = 1, kSkewProblemSeconds = 60;
constexpr double kSlowLinkBytes = 12.5e6;  // 100 Mbit/s
constexpr double kFarSeconds = 0.01;

Finding State(const DaemonFacts& daemon, const std::string& own_version) {
  const v1::GetStatusResponse& status = daemon.status;
  Finding f{"daemon", "", Level::kFine, status.version() + ", up " + Seconds(status.uptime_seconds()), ""};
  if (status.draining()) {
    f.level = Level::kWarning;
    f.what += ", draining";
    f.advice = "it takes no new work; only a restart takes a drain back";
  } else if (!status.ready()) {
    f.level = Level::kProblem;
    f.what += ", not ready";
    f.advice = "look at its log";
  } else if (status.version() != own_version) {
    f.level = Level::kWarning;
    f.what += "; spectrumkvctl is " + own_version;
    f.advice = "use the one of the daemon's image: kubectl exec POD -c spectrumkvd -- spectrumkvctl doctor";
  }
  return f;
}

std::string Octal(unsigned mode) {
  std::string text = "0";
  for (int shift = 6; shift >= 0; shift -= 3) text += static_cast<char>('0' + (mode >> shift & 7));
  return text;
}

std::string Who(const HostFacts::Directory& place) {
  return place.path + " (mode " + Octal(place.mode & 0777) + ", user " + std::to_string(place.uid) + ", group " +
         std::to_string(place.gid) + ")";
}

bool MayEnter(const HostFacts::Directory& directory, uint32_t uid, uint32_t gid) {
  return MayReach({{"", 0777, uid, gid}, directory}, uid, gid);
}

// A worker of this user and group: may it connect?
Finding WorkerOf(const DaemonFacts& daemon, uint32_t uid, uint32_t gid) {
  const auto& path = daemon.worker_socket;
  Finding f{"worker", "uid " + std::to_string(uid), Level::kFine, "may connect to " + path[0].path, ""};
  const std::vector<std::string> allowed = daemon.config.List("worker.allowed_uids");
  if (!allowed.empty() && std::find(allowed.begin(), allowed.end(), std::to_string(uid)) == allowed.end()) {
    f.level = Level::kProblem;
    f.what = "is not one of worker.allowed_uids";
    f.advice = "add it there and restart the daemon";
  } else if (!MayReach(path, uid, gid)) {
    size_t at = path.size() - 1;
    while (at > 0 && MayEnter(path[at], uid, gid)) --at;
    f.level = Level::kProblem;
    f.what = "group " + std::to_string(gid) + " cannot get to the socket: " + Who(path[at]);
    f.advice = at == 0 ? "worker.socket_mode 0660 and a common group (fsGroup, supplementalGroups)"
                       : "a common group (fsGroup), or a directory the worker may enter";
  }
  return f;
}

std::vector<Finding> Sockets(const DaemonFacts& daemon, const DoctorOptions& options) {
  std::string socket = daemon.status.worker_address();
  if (socket.compare(0, 5, "unix:") == 0) socket = socket.substr(5);
  const auto& path = daemon.worker_socket;
  if (path.empty()) {
    return {{"sockets", socket, Level::kProblem, "there is no socket at this path, as far as is to be seen from here",
             "if it is gone for the workers, too: mount the directory into both containers and restart the daemon"}};
  }
  Finding f{"sockets", socket, Level::kFine, "mode " + Octal(path[0].mode & 0777), ""};
  if ((path[0].mode & 020) == 0) {
    f.what += ": for user " + std::to_string(path[0].uid) + " and root alone (worker.socket_mode)";
  } else {
    f.what += ": for group " + std::to_string(path[0].gid);
    constexpr uint32_t kNobody = 0xfffffffe;
    const auto closed = std::find_if(path.begin() + 1, path.end(), [&](const HostFacts::Directory& place) {
      return !MayEnter(place, kNobody, path[0].gid);
    });
    if (closed != path.end()) {
      f.level = Level::kProblem;
      f.what += ", which cannot enter " + Who(*closed);
      f.advice = "give the directory the same group and mode 0750 or more, or use another directory (worker.socket)";
    }
  }
  std::vector<Finding> found = {f};
  if (options.worker_uid) found.push_back(WorkerOf(daemon, *options.worker_uid, options.worker_gid.value_or(*options.worker_uid)));
  return found;
}

Finding Certificate(const DaemonFacts& daemon, int64_t now) {
  Finding f{"certificate", "", Level::kFine, "", ""};
  if (daemon.status.peer_security() == "plain") {
    f.level = Level::kWarning;
    f.what = "peers are not authenticated and their link is not encrypted (peer.security plain)";
    f.advice = "mtls, unless nobody else can enter the network";
    return f;
  }
  if (!daemon.certificate.ok()) {
    f.level = Level::kUnknown;
    f.what = "the daemon does not say: " + std::string(daemon.certificate.status().message());
    return f;
  }
  const v1::GetCertificateResponse& told = *daemon.certificate;
  int64_t end = INT64_MAX;
  for (const v1::CertificateInfo& one : told.chain()) end = std::min(end, one.not_after());
  const double days = static_cast<double>(end - now) / kDaySeconds;
  if (told.chain_size() > 0) f.what = told.chain(0).subject() + ", ends in " + Real(days, 1) + " days";
  if (!told.problem().empty()) {
    f.level = Level::kProblem;
    f.what = told.problem_reason() + ": " + told.problem();
    f.advice = told.chain_size() > 0 && now < told.chain(0).not_before()
                   ? "it begins in the future: set this machine's clock, or that of whoever issued it"
                   : "issue certificate, key and authorities anew, for one of peer.identities, into the configured files; "
                     "no restart is needed";
  } else if (days < 7) {
    f.level = days < 1 ? Level::kProblem : Level::kWarning;
    f.advice = "the rotation has not replaced it: see whoever issues it. A subPath mount never sees new files";
  }
  return f;
}

std::vector<Finding> DataPath(const DaemonFacts& daemon) {
  const v1::GetStatusResponse& status = daemon.status;
  std::map<std::string, uint64_t> paths;
  for (const v1::TransferReport& report : daemon.transfers.transfers()) {
    if (report.state() == v1::TRANSFER_STATE_COMMITTED) ++paths[report.path() + ", " + report.backend()];
  }
  Finding f{"data-path", "", Level::kFine, "backend " + status.backend(), ""};
  for (const auto& [path, count] : paths) f.what += "; " + std::to_string(count) + " recent transfers: " + path;
  if (paths.empty()) f.what += "; no transfer yet";
  if (status.backend() == "scalar") {
    f.level = Level::kWarning;
    f.advice = "coding is several times slower than with avx2: another node, or codec.backend auto";
  }
  std::vector<Finding> found = {f};
  for (const v1::SlotUsage& usage : status.slots()) {
    if (usage.slots_used() < usage.slots_total()) continue;
    found.push_back({"staging", usage.partition(), Level::kWarning, "all " + std::to_string(usage.slots_total()) + " slots in use",
                     "transfers wait for each other: more memory." + usage.partition() + "_slots"});
  }
  return found;
}

std::string AdviceFor(const absl::Status& status) {
  const std::string reason = client::ReasonOf(status);
  if (reason.empty()) return "the daemon itself did not say: look whether it still runs, and again with a longer --timeout";
  if (reason == "PEER_NOT_ALLOWED") return "add its host to peer.allowed_hosts and restart the daemon";
  if (reason == "PEER_SECURITY_MISMATCH") return "set the same peer.security on both sides";
  if (reason == "PEER_IDENTITY") return "its certificate must be for one of peer.identities, and ours for one of its own";
  if (reason == "PEER_HANDSHAKE") return "look at the peer's certificate: spectrumkvctl doctor there; and at peer.tls.ca_file here";
  if (reason == "PEER_CERTIFICATE") return "the peer does not take our certificate: see the finding on it, and its peer.tls.ca_file";
  if (reason == "NOT_A_PEER") return "another port of the daemon (health is 7421), another server, or a daemon too old to be probed";
  if (reason == "INVALID_PEER") return "write host:port";
  if (reason == "NOBODY_LISTENS") return "the machine is there and the daemon is not: is it up, and is this its peer.listen_address?";
  return "is the daemon there up (spectrumkvctl health), is it the right port, does a NetworkPolicy or firewall let it through?";
}

Finding ClockOf(const std::string& address, const v1::ProbePeerResponse& probe) {
  const double offset = probe.clock_offset_seconds(), sure = std::max(0.0, std::abs(offset) - probe.clock_error_seconds());
  Finding f{"clock", address, Level::kFine, "", ""};
  f.what = "its clock is " + Seconds(std::abs(offset)) + (offset < 0 ? " behind" : " ahead") + " (to " +
           Seconds(probe.clock_error_seconds()) + ")";
  if (sure > kSkewWarningSeconds) {
    f.level = sure > kSkewProblemSeconds ? Level::kProblem : Level::kWarning;
    f.advice = "set the clocks by NTP: certificates begin and end by them, and logs do not fit each other";
  }
  return f;
}

Finding LinkOf(const std::string& address, const v1::ProbePeerResponse& probe, const v1::ListPeersResponse& peers) {
  Finding f{"link", address, Level::kFine, "", ""};
  f.what = "one connection carries " + Rate(probe.link_bytes_per_second()) + ", round trip " +
           Seconds(probe.round_trip_seconds());
  for (const v1::PeerInfo& peer : peers.peers()) {
    if (peer.address() == address && peer.has_link_bytes_per_second()) {
      f.what += "; transfers have seen " + Rate(peer.link_bytes_per_second());
    }
  }
  if (probe.link_bytes_per_second() < kSlowLinkBytes) {
    f.level = Level::kWarning;
    f.advice = "slower than 100 Mbit/s: the wrong interface, a limit of the pod network, or loss";
  } else if (probe.round_trip_seconds() > kFarSeconds) {
    f.level = Level::kWarning;
    f.advice = "far away: raise peer.streams and transfer.credits_per_transfer, or place the pods nearer to each other";
  }
  return f;
}

}  // namespace

std::vector<Finding> CheckDaemon(const DaemonFacts& daemon, const DoctorOptions& options) {
  if (!daemon.reached.ok()) {
    return {{"daemon", "", Level::kProblem, "does not answer: " + std::string(daemon.reached.message()),
             "is it running (its log says why a start fails), and is --admin-socket the right one? As its user or root"}};
  }
  std::vector<Finding> found = {State(daemon, options.own_version)};
  for (Finding& f : Sockets(daemon, options)) found.push_back(std::move(f));
  found.push_back(Certificate(daemon, options.now_unix_seconds));
  for (Finding& f : DataPath(daemon)) found.push_back(std::move(f));
  return found;
}

std::vector<Finding> CheckPeers(const DaemonFacts& daemon, const std::string& own_version) {
  if (daemon.probed.empty()) {
    return {{"peer", "", Level::kUnknown, "the daemon has dialled nobody yet", "name one with --peer HOST:PORT"}};
  }
  std::vector<Finding> found;
  for (const DaemonFacts::Peer& peer : daemon.probed) {
    Finding f{"peer", peer.address, Level::kFine, "", ""};
    if (!peer.probe.ok()) {
      const absl::Status& why = peer.probe.status();
      const std::string reason = client::ReasonOf(why);
      f.level = Level::kProblem;
      f.what = (reason.empty() ? "" : reason + ": ") + std::string(why.message());
      f.advice = AdviceFor(why);
      if (reason.empty() && absl::IsUnimplemented(why)) {
        f = {"peer", peer.address, Level::kUnknown, "this daemon is too old to look at peers", ""};
      }
      found.push_back(f);
      continue;
    }
    f.what = "reached in " + Seconds(peer.probe->connect_seconds()) + ", " + peer.probe->version();
    if (peer.probe->version() != daemon.status.version() && !own_version.empty()) {
      f.level = Level::kWarning;
      f.what += "; this one is " + daemon.status.version();
      f.advice = "finish the upgrade: daemons whose wire formats differ refuse each other";
    }
    found.push_back(f);
    found.push_back(ClockOf(peer.address, *peer.probe));
    found.push_back(LinkOf(peer.address, *peer.probe, daemon.peers));
  }
  return found;
}

}  // namespace spectrumkv::ctl
