#include "server/base/executor.h"

#include <algorithm>
#include <utility>

namespace spectrumkv {
namespace {

constexpr int kMaxInlineTasks = 8;

thread_local const ThreadPool* t_pool = nullptr;  // of the calling thread, if it belongs to one

}  // namespace

ThreadPool::ThreadPool(size_t threads) {
  const size_t count = std::max<size_t>(threads, 1);
  threads_.reserve(count);
  for (size_t i = 0; i < count; ++i) threads_.emplace_back([this] { Run(); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  while (waking_.load(std::memory_order_acquire) != 0) std::this_thread::yield();
}

void ThreadPool::Post(std::function<void()> task) {
  bool wake = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(task));
    // Waking a thread costs more than a small task; this one takes the next task itself.
    wake = t_pool != this || queue_.size() > 1;
    if (wake) waking_.fetch_add(1, std::memory_order_relaxed);
  }
  if (!wake) return;
  wake_.notify_one();
  waking_.fetch_sub(1, std::memory_order_release);
}

void ThreadPool::Run() {
  t_pool = this;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;  // stopping, and a task that still runs on another thread drains what it posts
    std::function<void()> task = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    task();
    task = nullptr;  // what it captured goes before the next task starts
    lock.lock();
  }
}

void ManualExecutor::Post(std::function<void()> task) {
  std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back(std::move(task));
}

bool ManualExecutor::RunOne() {
  std::function<void()> task;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (queue_.empty()) return false;
    task = std::move(queue_.front());
    queue_.pop_front();
  }
  task();
  return true;
}

size_t ManualExecutor::RunAll() {
  size_t count = 0;
  while (RunOne()) ++count;
  return count;
}

struct Strand::State : std::enable_shared_from_this<Strand::State> {
  explicit State(Executor* e) : executor(e) {}

  void Schedule() {
    executor->Post([self = shared_from_this()] { self->RunNext(); });
  }

  // The next task, if there is one. Only for whoever has the turn.
  bool Take(std::function<void()>* task) {
    std::lock_guard<std::mutex> lock(mutex);
    if (queue.empty()) return false;
    *task = std::move(queue.front());
    queue.pop_front();
    return true;
  }

  // After a task: the next one gets a turn of its own.
  void TurnEnds() {
    bool more = false;
    {
      std::lock_guard<std::mutex> lock(mutex);
      more = !queue.empty();
      scheduled = more;
    }
    if (more) Schedule();
  }

  // One task for each turn on the executor: strands share its threads fairly, and tests can step.
  void RunNext() {
    std::function<void()> task;
    if (Take(&task)) task();
    task = nullptr;
    TurnEnds();
  }

  Executor* const executor;
  std::mutex mutex;
  std::deque<std::function<void()>> queue;
  bool scheduled = false;  // a turn is queued or running
};

Strand::Strand(Executor* executor) : state_(std::make_shared<State>(executor)) {}

void Strand::Post(std::function<void()> task) {
  bool schedule = false;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->queue.push_back(std::move(task));
    schedule = !state_->scheduled;
    state_->scheduled = true;
  }
  if (schedule) state_->Schedule();
}

void Strand::Dispatch(std::function<void()> task) {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    if (state_->scheduled) {
      state_->queue.push_back(std::move(task));
      return;
    }
    state_->scheduled = true;
  }
  const std::shared_ptr<State> state = state_;  // the task may destroy the strand
  task();
  task = nullptr;
  // What came meanwhile is mostly a consequence of the task: cheaper here than on another thread that must wake for it.
  for (int more = 0; more < kMaxInlineTasks && state->Take(&task); ++more) {
    task();
    task = nullptr;
  }
  state->TurnEnds();
}

}  // namespace spectrumkv
