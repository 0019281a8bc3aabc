// Peers that dialled before this daemon's worker brought its half of the transfer. They wait with little memory: a
// stream, a hello and what else they said (FrameRoom) each, bounded in number, with a deadline, kept alive by heartbeats. No peer may use up the room of all: it
// may have at most as many waiting as there is room left for others.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "server/base/clock.h"
#include "server/transfer/session.h"

namespace spectrumkv {

// "ipv4:10.0.0.1:5555" -> "ipv4:10.0.0.1": each connection of a host has a port of its own. Of ControlStream::peer().
std::string HostOfPeer(const std::string& peer);

// Thread-safe.
class Parking {
 public:
  struct Parked {
    std::shared_ptr<ControlSession> session;
    HelloFrame hello;
    int64_t deadline_ns = 0;
    std::string host;
  };

  Parking(Clock* clock, uint32_t max_parked, int64_t heartbeat_ms, int64_t max_wait_ms);
  ~Parking();

  // `role` is that of the half we wait for; `peer` as ControlStream::peer(), of whose host the share is. RESOURCE_EXHAUSTED
  // WAITING_FULL with a retry delay when there is no room, or none for this host. An older attempt of the same dialler is
  // closed, and one that has ended is forgotten.
  absl::Status Park(Role role, std::shared_ptr<ControlSession> session, HelloFrame hello, const std::string& peer);
  // Takes out all that wait for this half, of one part or of any.
  std::vector<Parked> Take(Role role, const std::string& transfer_id, std::optional<uint32_t> part_index = std::nullopt);
  // The stream has ended. What its dialler said of the end of its half is kept for a minute, so that ours learns it.
  void Forget(const ControlSession* session);
  void CloseAll(const absl::Status& why);
  size_t size() const;

 private:
  using Map = std::multimap<std::tuple<Role, std::string, uint32_t>, Parked>;
  void Tick();
  Map::iterator EraseLocked(Map::iterator at);
  bool HasRoomLocked(const std::string& host) const;
  absl::Status MakeRoomLocked(const std::string& host);
  bool ForgetOneThatEndedLocked(const std::string& host);
  Clock* const clock_;
  const uint32_t max_parked_;
  const int64_t heartbeat_ns_, max_wait_ns_;
  mutable std::mutex mutex_;
  Map parked_;
  std::map<std::string, size_t> of_host_;  // how many of parked_; no zeros
  TimerId timer_ = 0;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace spectrumkv
