// Draining: no new work, then wait until what runs has ended. Starts once, serves any number of waiters, never undone.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "server/base/clock.h"
#include "server/service/admin_service.h"
#include "server/transfer/transfer_manager.h"

namespace spectrumkv {

// Thread-safe.
class DrainController {
 public:
  // Borrowed. `on_start` runs once, in the first Drain, before transfers are stopped. REQUIRES at destruction: every
  // `done` has come (TransferManager::Shutdown sees to that) and the clock runs no callback of it any more.
  DrainController(Clock* clock, TransferManager* transfers, int64_t default_timeout_ms, std::function<void()> on_start);

  // `done` once: OK when no transfer is left, DEADLINE_EXCEEDED DRAIN_TIMEOUT after timeout_ms (0: the default). Called
  // from any thread, also inside this call.
  void Drain(int64_t timeout_ms, std::function<void(DrainOutcome)> done);
  bool draining() const;

 private:
  struct Waiter {
    std::function<void(DrainOutcome)> done;
    int64_t timeout_ms = 0;
    TimerId timer = 0;
  };
  struct State {
    std::mutex mutex;
    bool draining = false, drained = false;
    uint64_t active_at_start = 0;
    std::vector<std::shared_ptr<Waiter>> waiters;
  };

  void OnDrained();
  void OnTimeout(const std::shared_ptr<Waiter>& waiter);
  DrainOutcome Outcome(const Waiter& waiter, bool drained) const;

  Clock* const clock_;
  TransferManager* const transfers_;
  const int64_t default_timeout_ms_;
  const std::function<void()> on_start_;
  mutable State state_;
};

}  // namespace spectrumkv
