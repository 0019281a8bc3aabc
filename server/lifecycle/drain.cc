#include "server/lifecycle/drain.h"

#include <algorithm>
#include <string>
#include <utility>

#include "server/base/log.h"
#include "server/base/status.h"

namespace spectrumkv {

DrainController::DrainController(Clock* clock, TransferManager* transfers, int64_t default_timeout_ms,
                                 std::function<void()> on_start)
    : clock_(clock), transfers_(transfers), default_timeout_ms_(default_timeout_ms), on_start_(std::move(on_start)) {}

void DrainController::Drain(int64_t timeout_ms, std::function<void(DrainOutcome)> done) {
  auto waiter = std::make_shared<Waiter>();
  waiter->done = std::move(done);
  waiter->timeout_ms = timeout_ms > 0 ? timeout_ms : default_timeout_ms_;
  bool first = false;
  bool drained = false;
  {
    std::lock_guard<std::mutex> lock(state_.mutex);
    first = !state_.draining;
    if (first) state_.active_at_start = transfers_->active();
    state_.draining = true;
    drained = state_.drained;
    if (!drained) {
      waiter->timer =
          clock_->CallAt(clock_->NowNs() + waiter->timeout_ms * 1'000'000, [this, waiter] { OnTimeout(waiter); });
      state_.waiters.push_back(waiter);
    }
  }
  if (drained) return waiter->done(Outcome(*waiter, true));
  if (!first) return;
  SPECTRUMKV_LOG(kInfo, "lifecycle", "draining", {"transfers", transfers_->active()},
                 {"timeout_ms", waiter->timeout_ms});
  on_start_();
  transfers_->StartDraining([this] { OnDrained(); });
}

bool DrainController::draining() const {
  std::lock_guard<std::mutex> lock(state_.mutex);
  return state_.draining;
}

void DrainController::OnDrained() {
  std::vector<std::shared_ptr<Waiter>> waiters;
  {
    std::lock_guard<std::mutex> lock(state_.mutex);
    state_.drained = true;
    waiters.swap(state_.waiters);
  }
  for (const auto& waiter : waiters) {
    clock_->Cancel(waiter->timer);
    waiter->done(Outcome(*waiter, true));
  }
}

void DrainController::OnTimeout(const std::shared_ptr<Waiter>& waiter) {
  {
    std::lock_guard<std::mutex> lock(state_.mutex);
    const auto at = std::find(state_.waiters.begin(), state_.waiters.end(), waiter);
    if (at == state_.waiters.end()) return;  // drained just now
    state_.waiters.erase(at);
  }
  waiter->done(Outcome(*waiter, false));
}

DrainOutcome DrainController::Outcome(const Waiter& waiter, bool drained) const {
  DrainOutcome outcome;
  outcome.left = drained ? 0 : transfers_->active();
  {
    std::lock_guard<std::mutex> lock(state_.mutex);
    outcome.finished = state_.active_at_start > outcome.left ? state_.active_at_start - outcome.left : 0;
  }
  if (!drained) {
    outcome.status = MakeError(absl::StatusCode::kDeadlineExceeded, "DRAIN_TIMEOUT",
                               std::to_string(outcome.left) + " transfers are left after " +
                                   std::to_string(waiter.timeout_ms) + " ms; the daemon stays draining",
                               {{"transfers_left", std::to_string(outcome.left)}});
  }
  return outcome;
}

}  // namespace spectrumkv
