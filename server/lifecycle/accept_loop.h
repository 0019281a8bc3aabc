// The listening Unix socket of a server that must know its callers: accepts, asks the kernel who has connected, closes
// what is not let in and hands the rest on. gRPC's own listener would not say who calls.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "server/lifecycle/caller_table.h"
#include "server/metrics/metrics.h"

namespace spectrumkv {

class AcceptLoop {
 public:
  struct Options {
    std::string socket, socket_key;  // path, and its configuration key for errors
    unsigned socket_mode = 0600;
    // Empty: everybody who can open the socket, but for the kernel's overflow id, behind which every user is who has no
    // id in this user namespace. That one must be named, or be this process's.
    std::vector<uint32_t> allowed_uids;
    std::shared_ptr<CallerTable> callers;
    // Once for each connection that is not taken. From the loop's thread.
    std::function<void(MetricRefusal)> on_refused = [](MetricRefusal) {};
    // How long to wait where the system has no descriptor for a connection: it is still there afterwards.
    int retry_ms = 100;
  };

  // Binds and listens; connections wait until Run. UNAVAILABLE LISTEN_FAILED. The process's umask is that of socket_mode
  // meanwhile.
  static absl::StatusOr<std::unique_ptr<AcceptLoop>> Listen(Options options);
  // Stop. Does not remove the socket's path.
  ~AcceptLoop();
  AcceptLoop(const AcceptLoop&) = delete;
  AcceptLoop& operator=(const AcceptLoop&) = delete;

  // Starts the thread. `take` consumes a connected, non-blocking socket that the table of callers knows. REQUIRES: once.
  void Run(std::function<void(int fd)> take);
  // No `take` runs any more when it returns; clients that wait to be accepted are refused. Idempotent.
  void Stop();

 private:
  AcceptLoop(Options options, int listener, int wake);
  void Loop();
  // False: wait before the next attempt.
  bool AcceptOne();
  bool Lets(uint32_t uid) const;
  void Refuse(MetricRefusal why, const std::string& what);
  // Until Stop, or for `timeout_ms`; also for a connection, where asked. False after Stop.
  bool Wait(bool for_connection, int timeout_ms) const;

  const Options options_;
  const uint32_t overflow_uid_, own_uid_;
  int listener_;
  const int wake_;  // an eventfd, readable after Stop
  std::function<void(int)> take_;
  std::thread thread_;
  // Of the loop's thread. One line of log in a while for each cause: anybody who may reach the socket can cause them.
  struct Told {
    int64_t at_ms = 0;
    uint64_t since = 0;  // refusals that no line told
  };
  std::array<Told, kMetricRefusals> told_{};
};

}  // namespace spectrumkv
