#include "server/transfer/parking.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/base/status.h"
#include "server/transfer/units.h"

namespace spectrumkv {
namespace {

constexpr int64_t kRetryAfterMs = 200;
// How long the last words of a half that ended are kept for the other.
constexpr int64_t kLastWordsNs = 60'000 * kMsToNs;

}  // namespace

std::string HostOfPeer(const std::string& peer) {
  const bool has_port = peer.rfind("ipv4:", 0) == 0 || peer.rfind("ipv6:", 0) == 0;
  return has_port ? peer.substr(0, peer.rfind(':')) : peer;
}

Parking::Parking(Clock* clock, uint32_t max_parked, int64_t heartbeat_ms, int64_t max_wait_ms)
    : clock_(clock),
      max_parked_(max_parked),
      heartbeat_ns_(heartbeat_ms * kMsToNs),
      max_wait_ns_(max_wait_ms * kMsToNs) {}

Parking::~Parking() {
  std::lock_guard<std::mutex> lock(mutex_);
  *alive_ = false;
  if (timer_ != 0) clock_->Cancel(timer_);
}

absl::Status Parking::Park(Role role, std::shared_ptr<ControlSession> session, HelloFrame hello,
                           const std::string& peer) {
  std::vector<std::shared_ptr<ControlSession>> superseded;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto key = std::make_tuple(role, hello.transfer_id, hello.part_index);
    for (auto it = parked_.lower_bound(key); it != parked_.end() && it->first == key;) {
      const bool same_dialler = it->second.hello.epoch == hello.epoch && it->second.hello.attempt <= hello.attempt;
      const bool stale = same_dialler || it->second.session->LastWords().has_value();
      if (stale) superseded.push_back(it->second.session);
      it = stale ? EraseLocked(it) : std::next(it);
    }
    const std::string host = HostOfPeer(peer);
    if (absl::Status room = MakeRoomLocked(host); !room.ok()) return room;
    const int64_t wait_ns = std::min<int64_t>(
        max_wait_ns_, static_cast<int64_t>(std::min<uint64_t>(hello.deadline_ms, 1u << 30)) * kMsToNs);
    parked_.emplace(key, Parked{std::move(session), std::move(hello), clock_->NowNs() + wait_ns, host});
    ++of_host_[host];
    if (timer_ == 0) {
      timer_ = clock_->CallAt(clock_->NowNs() + heartbeat_ns_, [this, alive = alive_] {
        if (*alive) Tick();
      });
    }
  }
  for (auto& old : superseded) {
    if (auto stream = old->stream()) {
      stream->Close(MakeError(absl::StatusCode::kAborted, "SUPERSEDED", "a newer attempt has taken over"));
    }
  }
  return absl::OkStatus();
}

std::vector<Parking::Parked> Parking::Take(Role role, const std::string& transfer_id,
                                           std::optional<uint32_t> part_index) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Parked> taken;
  const auto end = parked_.upper_bound({role, transfer_id, part_index.value_or(UINT32_MAX)});
  for (auto it = parked_.lower_bound({role, transfer_id, part_index.value_or(0)}); it != end; it = EraseLocked(it)) {
    taken.push_back(Parked{it->second.session, it->second.hello, it->second.deadline_ns, it->second.host});
  }
  return taken;
}

void Parking::Forget(const ControlSession* session) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = std::find_if(parked_.begin(), parked_.end(),
                               [&](const auto& entry) { return entry.second.session.get() == session; });
  if (it == parked_.end()) return;
  if (session->LastWords().has_value()) {
    it->second.deadline_ns = clock_->NowNs() + kLastWordsNs;
  } else {
    EraseLocked(it);
  }
}

Parking::Map::iterator Parking::EraseLocked(Map::iterator at) {
  const auto count = of_host_.find(at->second.host);
  if (--count->second == 0) of_host_.erase(count);
  return parked_.erase(at);
}

// Whoever comes later finds room, however much one host asks for: it never has more than is left.
bool Parking::HasRoomLocked(const std::string& host) const {
  const auto count = of_host_.find(host);
  return parked_.size() + (count == of_host_.end() ? 0 : count->second) < max_parked_;
}

absl::Status Parking::MakeRoomLocked(const std::string& host) {
  if (HasRoomLocked(host) || (ForgetOneThatEndedLocked(host) && HasRoomLocked(host))) return absl::OkStatus();
  const auto count = of_host_.find(host);
  const std::string waiting = absl::StrCat(count == of_host_.end() ? 0 : count->second);
  return MakeError(absl::StatusCode::kResourceExhausted, "WAITING_FULL",
                   absl::StrCat("already ", parked_.size(), " transfers, ", waiting, " of them from ", host,
                                ", wait for their other half; peer.max_waiting_transfers is ", max_parked_,
                                ", and no host may have more waiting than there is room left"),
                   {{"host", host}, {"waiting", waiting}, {"limit", absl::StrCat(max_parked_)}}, kRetryAfterMs);
}

// Those who wait matter more than news of those who do not: of this host, or, for a host that has nothing here and finds
// all full, of anybody.
bool Parking::ForgetOneThatEndedLocked(const std::string& host) {
  const bool full = parked_.size() >= max_parked_ && of_host_.count(host) == 0;
  const auto it = std::find_if(parked_.begin(), parked_.end(), [&](const auto& entry) {
    return (full || entry.second.host == host) && entry.second.session->LastWords().has_value();
  });
  if (it == parked_.end()) return false;
  EraseLocked(it);
  return true;
}

void Parking::CloseAll(const absl::Status& why) {
  Map all;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    all.swap(parked_);
    of_host_.clear();
  }
  for (auto& [key, parked] : all) {
    if (auto stream = parked.session->stream()) stream->Close(why);
  }
}

size_t Parking::size() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return parked_.size();
}

void Parking::Tick() {
  std::vector<std::shared_ptr<ControlSession>> waiting, expired;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const int64_t now = clock_->NowNs();
    for (auto it = parked_.begin(); it != parked_.end();) {
      const bool over = now >= it->second.deadline_ns;
      (over ? expired : waiting).push_back(it->second.session);
      it = over ? EraseLocked(it) : std::next(it);
    }
    timer_ = 0;
    if (!parked_.empty()) {
      timer_ = clock_->CallAt(now + heartbeat_ns_, [this, alive = alive_] {
        if (*alive) Tick();
      });
    }
  }
  for (auto& session : waiting) {
    if (auto stream = session->stream()) stream->Send(HeartbeatFrame{"waiting_peer"});
  }
  for (auto& session : expired) {
    if (auto stream = session->stream()) {
      stream->Close(MakeError(absl::StatusCode::kDeadlineExceeded, "NO_COUNTERPART",
                              "the other half of the transfer never came"));
    }
  }
}

}  // namespace spectrumkv
