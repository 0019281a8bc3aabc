// Peers that dialled before this daemon's worker brought its half of the transfer. They wait without memory: a stream
// and a hello each, bounded in number, with a deadline, kept alive by heartbeats.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "server/base/clock.h"
#include "server/transfer/session.h"

namespace spectrumkv {

// Thread-safe.
class Parking {
 public:
  struct Parked {
    std::shared_ptr<ControlSession> session;
    HelloFrame hello;
    int64_t deadline_ns = 0;
  };

  Parking(Clock* clock, uint32_t max_parked, int64_t heartbeat_ms, int64_t max_wait_ms);
  ~Parking();

  // `role` is that of the half we wait for. RESOURCE_EXHAUSTED WAITING_FULL with a retry delay when there is no room. An
  // older attempt of the same dialler is closed, and one that has ended is forgotten.
  absl::Status Park(Role role, std::shared_ptr<ControlSession> session, HelloFrame hello);
  // Takes out all that wait for this half.
  std::vector<Parked> Take(Role role, const std::string& transfer_id);
  // The stream has ended. What its dialler said of the end of its half is kept for a minute, so that ours learns it.
  void Forget(const ControlSession* session);
  void CloseAll(const absl::Status& why);
  size_t size() const;

 private:
  void Tick();
  bool ForgetOneThatEndedLocked();
  Clock* const clock_;
  const uint32_t max_parked_;
  const int64_t heartbeat_ns_, max_wait_ns_;
  mutable std::mutex mutex_;
  std::multimap<std::pair<Role, std::string>, Parked> parked_;
  TimerId timer_ = 0;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace spectrumkv
