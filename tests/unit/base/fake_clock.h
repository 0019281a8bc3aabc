// A clock that stands still until a test moves it. Due timers run on the caller of AdvanceTo, in order of deadline,
// then of CallAt; NowNs inside a callback is the timer's deadline. Thread-safe, but only one thread may advance.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

#include "server/base/clock.h"

namespace spectrumkv {

class FakeClock final : public Clock {
 public:
  explicit FakeClock(int64_t now_ns = 1'000'000'000) : now_ns_(now_ns) {}

  int64_t NowNs() override {
    std::lock_guard<std::mutex> lock(mutex_);
    return now_ns_;
  }

  TimerId CallAt(int64_t deadline_ns, std::function<void()> callback) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const TimerId id = ++last_id_;
    timers_.emplace(std::make_pair(deadline_ns, id), std::move(callback));
    return id;
  }

  bool Cancel(TimerId timer) override {
    std::function<void()> dropped;  // destroyed outside the lock
    std::lock_guard<std::mutex> lock(mutex_);
    const auto at = std::find_if(timers_.begin(), timers_.end(),
                                 [timer](const auto& entry) { return entry.first.second == timer; });
    if (at == timers_.end()) return false;
    dropped = std::move(at->second);
    timers_.erase(at);
    return true;
  }

  void Stop() override {
    std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
  }

  // Runs what is due, also timers that callbacks add up to `now_ns`. Time never goes back. Returns how many ran.
  size_t AdvanceTo(int64_t now_ns) {
    size_t ran = 0;
    for (;;) {
      std::function<void()> callback;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (stopped_ || timers_.empty() || timers_.begin()->first.first > now_ns) {
          now_ns_ = std::max(now_ns_, now_ns);
          return ran;
        }
        auto node = timers_.extract(timers_.begin());
        now_ns_ = std::max(now_ns_, node.key().first);
        callback = std::move(node.mapped());
      }
      callback();
      ++ran;
    }
  }
  size_t AdvanceBy(int64_t delta_ns) { return AdvanceTo(NowNs() + delta_ns); }
  size_t AdvanceMs(int64_t delta_ms) { return AdvanceBy(delta_ms * 1'000'000); }

  size_t pending() {
    std::lock_guard<std::mutex> lock(mutex_);
    return timers_.size();
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int64_t, TimerId>, std::function<void()>> timers_;
  int64_t now_ns_;
  bool stopped_ = false;
  TimerId last_id_ = 0;
};

}  // namespace spectrumkv
