// What `doctor` finds: facts of the machine and answers of the daemon in, findings out. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/ctl/config_text.h"
#include "client/ctl/host_facts.h"
#include "spectrumkv/v1/admin_service.pb.h"

namespace spectrumkv::ctl {

struct Finding {
  enum class Level {
    kFine,
    kUnknown,  // could not be looked at, or does not apply
    kWarning,  // works, but slower or less safely than it should
    kProblem,  // something does not work, or will not soon
  };
  std::string check;    // "shared-memory": stable
  std::string subject;  // which of several, a peer's address; may be empty
  Level level = Level::kFine;
  std::string what;
  std::string advice;  // what to do; empty where nothing is
};

// What the daemon answered.
struct DaemonFacts {
  struct Peer {
    std::string address;
    absl::StatusOr<v1::ProbePeerResponse> probe;
  };
  absl::Status reached;  // why it does not answer; the rest is empty then
  v1::GetStatusResponse status;
  v1::ListPeersResponse peers;
  v1::ListTransfersResponse transfers;
  ConfigText config{""};
  // UNIMPLEMENTED: a daemon from before there was this call.
  absl::StatusOr<v1::GetCertificateResponse> certificate = absl::UnimplementedError("");
  std::vector<Peer> probed;
  std::vector<HostFacts::Directory> worker_socket;  // ReadPathOf
};

struct DoctorOptions {
  std::string own_version;  // of spectrumkvctl
  int64_t now_unix_seconds = 0;
  // Of a worker, where they are known.
  std::optional<uint32_t> worker_uid, worker_gid;
};

// Checks of the machine; those that need the daemon's configuration are kUnknown without it.
std::vector<Finding> CheckHost(const HostFacts& host, const DaemonFacts& daemon);
// Checks of what the daemon says; empty where it does not answer, but for one.
std::vector<Finding> CheckDaemon(const DaemonFacts& daemon, const DoctorOptions& options);
// Of each peer that was probed: reach, clock, link.
std::vector<Finding> CheckPeers(const DaemonFacts& daemon, const std::string& own_version);

// "ok", "unknown", "warning", "problem".
const char* LevelName(Finding::Level level);
std::string DoctorText(const std::vector<Finding>& findings);
std::string DoctorJson(const std::vector<Finding>& findings);

}  // namespace spectrumkv::ctl
