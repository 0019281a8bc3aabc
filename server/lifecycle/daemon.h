// The whole daemon: builds its parts in their order, serves, drains, stops.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "server/config/config.h"
#include "server/lifecycle/addresses.h"

namespace spectrumkv {

namespace gpu {
class Runtime;
}

// Thread-safe, but for Stop.
class Daemon {
 public:
  // Start order: log, metrics, codec backend and its self-test, clock and executors, staging slots, GPUs, pools, transport,
  // transfers, verdicts, then the servers: health first, so that probes see it starting, peer, worker, admin, metrics. Ready when
  // it returns; what was started is stopped again when a later part fails. Errors: those of the parts;
  // FAILED_PRECONDITION BACKEND_UNAVAILABLE, SELF_TEST_FAILED.
  // `gpus`: what reaches the GPUs; null: this process's CUDA runtime. Borrowed.
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(const Config& config, gpu::Runtime* gpus = nullptr);
  // As Stop.
  ~Daemon();

  const DaemonAddresses& addresses() const;
  uint64_t epoch() const;

  // Not ready and no new work from now on; `done` once, true when no transfer is left, false after drain.timeout_ms.
  void Drain(std::function<void(bool drained)> done);
  // Fails what is left and ends all servers. Idempotent.
  void Stop();

 private:
  class Impl;
  explicit Daemon(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace spectrumkv
