// What the streams of one endpoint share: the thread that runs `done` and OnClosed, a clock for time limits, and the
// count of what is still alive. Internal to server/stream.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/base/clock.h"
#include "server/base/executor.h"
#include "server/stream/tls_probe.h"

namespace spectrumkv {

class StreamCore;

// While one lives, what this thread would hand to the env's thread by PostEnd is collected, and run here by RunAll: at
// a place where no lock is held.
class EndsHere {
 public:
  EndsHere();
  ~EndsHere();
  EndsHere(const EndsHere&) = delete;
  EndsHere& operator=(const EndsHere&) = delete;
  void RunAll();

 private:
  friend class StreamEnv;
  EndsHere* const outer_;
  std::vector<std::function<void()>> tasks_;
};

struct StreamLimits {
  // How long a dialled stream may take until the peer has answered at all.
  int64_t connect_timeout_ms = 3000;
  // How long a peer may take to send the hello or DataOpen of a stream it opened.
  int64_t open_timeout_ms = 10'000;
  // From Close to the end of the call; then it is cut.
  int64_t close_timeout_ms = 5000;
  // From the end of the call until OnClosed although the network still holds chunks.
  int64_t linger_ms = 2000;
  size_t max_message_bytes = size_t{16} << 20;
  // Of a plain dialler: ask a peer that hangs up whether it speaks TLS.
  bool probe_tls = false;
};

class StreamEnv {
 public:
  explicit StreamEnv(const StreamLimits& limits);
  // REQUIRES: WaitIdle has returned true.
  ~StreamEnv();

  const StreamLimits& limits() const { return limits_; }
  void Post(std::function<void()> task);
  // Post, or left to the EndsHere of this thread. For what ends a chunk.
  void PostEnd(std::function<void()> task);
  Clock& clock() { return *clock_; }
  // Calls `done` on the env's thread, once the peer has been asked (tls_probe.h).
  void AskWhetherTls(const std::string& address, std::function<void(bool tls)> done);

  // False once Stop has begun. A registered stream stays until Remove.
  bool Add(StreamCore* core, std::weak_ptr<StreamCore> weak);
  void Remove(StreamCore* core);
  void AddChunk();
  void RemoveChunk();

  // Refuses new streams and closes those there are with `status`.
  void Stop(const absl::Status& status);
  // True when no stream and no chunk is left; false after `timeout_ms`.
  bool WaitIdle(int64_t timeout_ms);

 private:
  const StreamLimits limits_;
  std::mutex mutex_;
  std::condition_variable idle_;
  bool stopping_ = false;
  size_t chunks_ = 0;
  std::map<StreamCore*, std::weak_ptr<StreamCore>> streams_;
  std::mutex post_mutex_;  // a Post is over before the end of what it posted can end the env
  std::unique_ptr<Clock> clock_;
  ThreadPool loop_;
  TlsProbe tls_probe_;
  std::unique_ptr<ThreadPool> probing_;  // where peers may be asked; last, it posts to the others
};

}  // namespace spectrumkv
