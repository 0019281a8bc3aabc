// Whether the daemon is ready, and who is told. Draining and stopping are final: what starts meanwhile undoes neither.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>

namespace spectrumkv {

// Thread-safe.
class Readiness {
 public:
  // `tell` is called under a lock, one call after the other: what was told last is what holds. It must not call back.
  explicit Readiness(std::function<void(bool ready)> tell);

  // Says "not ready": of what has begun to serve, but is not all there.
  void Announce();
  // Ready from now on; nothing after End.
  void Begin();
  // Not ready any more, for good.
  void End();
  bool ready() const { return ready_.load(); }

 private:
  const std::function<void(bool)> tell_;
  std::mutex mutex_;
  bool over_ = false;  // under mutex_
  std::atomic<bool> ready_{false};
};

}  // namespace spectrumkv
