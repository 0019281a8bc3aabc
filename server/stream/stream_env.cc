#include "server/stream/stream_env.h"

#include <chrono>
#include <utility>
#include <vector>

#include "server/stream/stream_core.h"

namespace spectrumkv {
namespace {

thread_local EndsHere* t_ends_here = nullptr;

}  // namespace

EndsHere::EndsHere() : outer_(t_ends_here) { t_ends_here = this; }

EndsHere::~EndsHere() {
  RunAll();
  t_ends_here = outer_;
}

void EndsHere::RunAll() {
  std::vector<std::function<void()>> tasks;
  tasks.swap(tasks_);
  if (tasks.empty()) return;
  EndsHere* const mine = t_ends_here;
  t_ends_here = nullptr;  // what these tasks end in turn is not ours
  for (auto& task : tasks) task();
  t_ends_here = mine;
}

StreamEnv::StreamEnv(const StreamLimits& limits) : limits_(limits), clock_(NewSystemClock()), loop_(1) {}

StreamEnv::~StreamEnv() { std::lock_guard<std::mutex> lock(post_mutex_); }

void StreamEnv::Post(std::function<void()> task) {
  std::lock_guard<std::mutex> lock(post_mutex_);
  loop_.Post(std::move(task));
}

void StreamEnv::PostEnd(std::function<void()> task) {
  if (t_ends_here != nullptr) {
    t_ends_here->tasks_.push_back(std::move(task));
  } else {
    Post(std::move(task));
  }
}

void StreamEnv::AskWhetherTls(const std::string& address, std::function<void(bool tls)> done) {
  ThreadPool* probing = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (probing_ == nullptr) probing_ = std::make_unique<ThreadPool>(1);
    probing = probing_.get();
  }
  probing->Post([this, address, done = std::move(done)] {
    const bool tls = tls_probe_.Ask(address);
    Post([done, tls] { done(tls); });
  });
}

bool StreamEnv::Add(StreamCore* core, std::weak_ptr<StreamCore> weak) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stopping_) return false;
  streams_[core] = std::move(weak);
  return true;
}

void StreamEnv::Remove(StreamCore* core) {
  std::lock_guard<std::mutex> lock(mutex_);
  streams_.erase(core);
  if (streams_.empty() && chunks_ == 0) idle_.notify_all();
}

void StreamEnv::AddChunk() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++chunks_;
}

void StreamEnv::RemoveChunk() {
  std::lock_guard<std::mutex> lock(mutex_);
  --chunks_;
  if (streams_.empty() && chunks_ == 0) idle_.notify_all();
}

void StreamEnv::Stop(const absl::Status& status) {
  std::vector<std::shared_ptr<StreamCore>> alive;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    for (const auto& [core, weak] : streams_) {
      if (auto strong = weak.lock()) alive.push_back(std::move(strong));
    }
  }
  for (const auto& core : alive) core->CloseWith(status);
}

bool StreamEnv::WaitIdle(int64_t timeout_ms) {
  std::unique_lock<std::mutex> lock(mutex_);
  return idle_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                        [this] { return streams_.empty() && chunks_ == 0; });
}

}  // namespace spectrumkv
