// Executors that one seed drives: what they were given waits until the simulation picks it. One thread, so that a run is
// the same each time; the orders that several threads could give are the simulation's to choose.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "server/base/executor.h"

namespace spectrumkv {

class SimRandom {
 public:
  explicit SimRandom(uint64_t seed) : engine_(seed) {}
  uint64_t Next() { return engine_(); }
  uint64_t Below(uint64_t n) { return engine_() % n; }
  uint64_t Between(uint64_t least, uint64_t most) { return least + engine_() % (most - least + 1); }
  // Once in `n`; never for 0.
  bool OneIn(uint64_t n) { return n != 0 && engine_() % n == 0; }

 private:
  std::mt19937_64 engine_;
};

// `threads`: so many tasks may be under way, so that any of the first ones may come first.
class SimExecutor final : public Executor {
 public:
  explicit SimExecutor(size_t threads) : threads_(threads) {}
  void Post(std::function<void()> task) override { tasks_.push_back(std::move(task)); }
  bool empty() const { return tasks_.empty(); }
  bool Runnable(int64_t now_ns) const { return !tasks_.empty() && now_ns >= stalled_until_ns_; }
  // Nothing of it runs before: a machine that is busy, a codec or a reader that is slow.
  void StallUntil(int64_t ns) { stalled_until_ns_ = ns; }
  void RunOne(SimRandom* random) {
    const size_t choice = tasks_.size() < threads_ ? tasks_.size() : threads_;
    const auto at = tasks_.begin() + static_cast<std::ptrdiff_t>(random->Below(choice));
    const std::function<void()> task = std::move(*at);
    tasks_.erase(at);
    task();
  }

 private:
  const size_t threads_;
  int64_t stalled_until_ns_ = 0;
  std::deque<std::function<void()>> tasks_;
};

class SimScheduler {
 public:
  SimExecutor* NewExecutor(size_t threads) {
    executors_.push_back(std::make_unique<SimExecutor>(threads));
    return executors_.back().get();
  }
  SimExecutor* AnyOf(SimRandom* random) { return executors_[random->Below(executors_.size())].get(); }
  // One task of any executor that is not stalled. False: there is none.
  bool Step(SimRandom* random, int64_t now_ns) {
    std::vector<SimExecutor*> ready;
    for (const auto& executor : executors_) {
      if (executor->Runnable(now_ns)) ready.push_back(executor.get());
    }
    if (ready.empty()) return false;
    ready[random->Below(ready.size())]->RunOne(random);
    return true;
  }
  void EndStalls() {
    for (const auto& executor : executors_) executor->StallUntil(0);
  }

 private:
  std::vector<std::unique_ptr<SimExecutor>> executors_;
};

}  // namespace spectrumkv
