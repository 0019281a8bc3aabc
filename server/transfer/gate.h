// Keeps the promise "no byte lands late": whoever touches a worker's blocks holds the gate open while it does.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>

namespace spectrumkv {

// Thread-safe.
class Gate {
 public:
  // False once the gate is closed: the blocks must not be touched.
  [[nodiscard]] bool Enter() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return false;
    ++inside_;
    return true;
  }

  // REQUIRES: an Enter that answered true.
  void Leave() {
    std::function<void()> drained;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (--inside_ == 0 && closed_) drained = std::move(drained_);
    }
    if (drained) drained();
  }

  // For those inside who may stop early.
  bool closed() {
    std::lock_guard<std::mutex> lock(mutex_);
    return closed_;
  }

  // Nobody enters any more; `drained` once, when the last one inside has left (inside this call if nobody is). Only the
  // first Close counts.
  void Close(std::function<void()> drained) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (closed_) return;
      closed_ = true;
      if (inside_ != 0) {
        drained_ = std::move(drained);
        return;
      }
    }
    drained();
  }

 private:
  std::mutex mutex_;
  uint64_t inside_ = 0;
  bool closed_ = false;
  std::function<void()> drained_;
};

}  // namespace spectrumkv
