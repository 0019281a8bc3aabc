// How the TransferManager comes to its end: transfers that are over, draining, shutting down.
#include <algorithm>
#include <utility>

#include "server/base/status.h"
#include "server/transfer/manager.h"
#include "server/transfer/manager_errors.h"
#include "server/transfer/units.h"

namespace spectrumkv {

void TransferManagerImpl::StartDraining(std::function<void()> done) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    draining_ = true;
    if (untold_ > 0) {
      drained_.push_back(std::move(done));
      done = nullptr;
    }
  }
  parts_.metrics->SetDraining(true);
  EndAllKept("", absl::OkStatus());  // refinements that run may finish
  parking_.CloseAll(Draining());
  if (done) done();
}

void TransferManagerImpl::Shutdown() {
  std::vector<std::shared_ptr<Transfer>> running;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    draining_ = true;
    stopping_ = true;
    for (auto& [key, entry] : entries_) {
      if (entry.transfer != nullptr) running.push_back(entry.transfer);
      if (entry.group == nullptr) continue;
      for (auto& part : entry.group->Live()) running.push_back(std::move(part));
    }
  }
  const absl::Status why = MakeError(absl::StatusCode::kUnavailable, "SHUTTING_DOWN", "the daemon is shutting down");
  parking_.CloseAll(why);
  {
    std::lock_guard<std::mutex> lock(door_->mutex);
    door_->manager = nullptr;
  }
  EndAllKept("", why);
  for (auto& transfer : running) {
    Transfer* t = transfer.get();
    transfer->Post([t, why] { t->Fail(why); });
  }
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, [this] { return untold_ == 0 && calls_ == 0; });
}

void TransferManagerImpl::CallEnded() {
  std::lock_guard<std::mutex> lock(mutex_);
  --calls_;
  idle_.notify_all();
}

void TransferManagerImpl::OnDone(const Transfer& transfer) {
  if (!transfer.is_part()) parts_.metrics->AddInflightTransfers(-1);
  Told();
}

void TransferManagerImpl::Told() {
  std::vector<std::function<void()>> drained;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--untold_ == 0) drained.swap(drained_);
    Forget();
    idle_.notify_all();
  }
  for (auto& done : drained) done();
}

void TransferManagerImpl::Forget() {
  const int64_t now = parts_.clock->NowNs();
  for (size_t left = ended_.size(); left > 0; --left) {
    const Key key = ended_.front();
    const auto it = entries_.find(key);
    const bool old = now - it->second.ended_ns > options_.terminal_memory_ms * kMsToNs;
    if (!old && ended_.size() <= options_.terminal_memory_count) return;
    ended_.pop_front();
    if (kept_.count(key) != 0) {  // may be asked for; there are few
      it->second.ended_ns = now;
      ended_.push_back(key);
    } else {
      entries_.erase(it);
    }
  }
}

}  // namespace spectrumkv
