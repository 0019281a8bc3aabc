#include "server/base/clock.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

namespace spectrumkv {
namespace {

int64_t SteadyNowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// One thread and an ordered map of timers: cancelled timers leave at once, so they hold no memory until their deadline.
class SystemClock final : public Clock {
 public:
  SystemClock() : thread_([this] { Run(); }) {}

  ~SystemClock() override { Stop(); }

  void Stop() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

  int64_t NowNs() override { return SteadyNowNs(); }

  TimerId CallAt(int64_t deadline_ns, std::function<void()> callback) override {
    bool is_first = false;
    TimerId id = 0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      id = ++last_id_;
      deadline_of_.emplace(id, deadline_ns);
      const auto at = timers_.emplace(Key(deadline_ns, id), std::move(callback)).first;
      is_first = at == timers_.begin();
    }
    if (is_first) wake_.notify_one();
    return id;
  }

  bool Cancel(TimerId timer) override {
    std::function<void()> dropped;  // destroyed outside the lock: what it captures may call the clock
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = deadline_of_.find(timer);
    if (found == deadline_of_.end()) return false;
    const auto at = timers_.find(Key(found->second, timer));
    dropped = std::move(at->second);
    timers_.erase(at);
    deadline_of_.erase(found);
    return true;
  }

 private:
  using Key = std::pair<int64_t, TimerId>;

  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopping_) {
      if (timers_.empty()) {
        wake_.wait(lock);
        continue;
      }
      const int64_t now_ns = SteadyNowNs();
      const int64_t deadline_ns = timers_.begin()->first.first;
      if (deadline_ns > now_ns) {
        // Bounded sleeps keep a deadline of INT64_MAX away from the arithmetic of the standard library.
        const int64_t sleep_ns = std::min<int64_t>(deadline_ns - now_ns, kLongestSleepNs);
        wake_.wait_for(lock, std::chrono::nanoseconds(sleep_ns));
        continue;
      }
      auto node = timers_.extract(timers_.begin());
      deadline_of_.erase(node.key().second);
      lock.unlock();
      node.mapped()();
      node.mapped() = nullptr;
      lock.lock();
    }
  }

  static constexpr int64_t kLongestSleepNs = int64_t{3600} * 1000 * 1000 * 1000;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::map<Key, std::function<void()>> timers_;
  std::unordered_map<TimerId, int64_t> deadline_of_;
  TimerId last_id_ = 0;
  bool stopping_ = false;
  std::thread thread_;  // last: starts when the rest exists
};

}  // namespace

std::unique_ptr<Clock> NewSystemClock() { return std::make_unique<SystemClock>(); }

}  // namespace spectrumkv
