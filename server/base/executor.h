// Where work runs. ThreadPool for the daemon, ManualExecutor for tests that want to step. Tasks do not throw.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace spectrumkv {

// Thread-safe.
class Executor {
 public:
  virtual ~Executor() = default;
  // Runs `task` once, later, on some thread of the executor. Never runs it inside this call.
  virtual void Post(std::function<void()> task) = 0;
};

// `threads` workers (at least one) over one FIFO queue. The destructor runs all that is queued, and what those tasks
// post, then joins. Nobody else may begin to Post once it has begun; it waits for a Post whose task has run already but
// which has not returned, as happens where the task tells somebody who destroys the pool.
//
// One task that a task posts to its own pool waits for that task's thread, which is about to come back, and wakes no
// other: post at the end of the work.
class ThreadPool final : public Executor {
 public:
  explicit ThreadPool(size_t threads);
  ~ThreadPool() override;
  void Post(std::function<void()> task) override;

 private:
  void Run();
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> queue_;
  bool stopping_ = false;
  std::atomic<int> waking_{0};  // calls of Post between their task's entry into the queue and their last use of wake_
  std::vector<std::thread> threads_;
};

// Runs tasks only inside RunOne / RunAll, on the caller's thread.
class ManualExecutor final : public Executor {
 public:
  void Post(std::function<void()> task) override;
  // False if nothing was queued.
  bool RunOne();
  // Until the queue is empty; returns how many ran.
  size_t RunAll();

 private:
  std::mutex mutex_;
  std::deque<std::function<void()>> queue_;
};

// Serialises tasks over an executor: at most one runs at a time, in order of Post. Tasks keep the strand's state
// alive, so a Strand may be destroyed while tasks are queued; they still run. The executor must outlive them. One task
// takes one turn on the executor. Post is thread-safe.
class Strand {
 public:
  explicit Strand(Executor* executor);
  void Post(std::function<void()> task);
  // Runs `task` inside this call if the strand is at rest, and a few that were posted meanwhile; else as Post does.
  // Saves the wake of another thread. REQUIRES: the caller holds no lock that a task of this strand may want.
  void Dispatch(std::function<void()> task);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace spectrumkv
