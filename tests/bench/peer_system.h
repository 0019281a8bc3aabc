// Another transfer system as two processes that this one starts and drives; tests/bench/peers/pages.py says how.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "tests/bench/baselines.h"
#include "tests/bench/cluster.h"

namespace spectrumkv::bench {

class PeerSystem {
 public:
  struct Options {
    std::string name;    // nixl or mooncake
    std::string python;  // an interpreter that has its package
    std::string folder;  // tests/bench/peers
    Place from, to;
    uint64_t pages = 0, page_bytes = 0;
  };
  static absl::StatusOr<std::unique_ptr<PeerSystem>> Start(const Options& options);
  ~PeerSystem();
  // All pages once. Both processes run only while this does: some poll, and would take the cores from whoever is
  // measured next.
  absl::StatusOr<Cost> Move();
  // Whether every page arrived and nothing else was written.
  absl::StatusOr<bool> Verified();
  const std::string& name() const { return name_; }

 private:
  struct Process {
    pid_t pid = -1;
    std::FILE* in = nullptr;   // its stdin
    std::FILE* out = nullptr;  // its stdout
  };
  PeerSystem() = default;
  absl::Status StartSide(const Options& options, const std::string& role, const Place& place, const std::string& connect,
                         Process* process);
  // The value of `key` in the next JSON line; other lines are the system's own chatter.
  absl::StatusOr<std::string> Answer(Process* process, const std::string& key);
  absl::StatusOr<std::string> Ask(const char* command, const std::string& key);
  void Signal(int signal);
  std::string name_, log_;
  Process target_, initiator_;
  bool failed_ = false;
};

}  // namespace spectrumkv::bench
