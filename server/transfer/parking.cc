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

absl::Status Parking::Park(Role role, std::shared_ptr<ControlSession> session, HelloFrame hello) {
  std::vector<std::shared_ptr<ControlSession>> superseded;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto key = std::make_pair(role, hello.transfer_id);
    for (auto it = parked_.lower_bound(key); it != parked_.end() && it->first == key;) {
      const bool same_dialler = it->second.hello.epoch == hello.epoch && it->second.hello.attempt <= hello.attempt;
      const bool stale = same_dialler || it->second.session->LastWords().has_value();
      if (stale) superseded.push_back(it->second.session);
      it = stale ? parked_.erase(it) : std::next(it);
    }
    if (parked_.size() >= max_parked_ && !ForgetOneThatEndedLocked()) {
      return MakeError(absl::StatusCode::kResourceExhausted, "WAITING_FULL",
                       absl::StrCat("already ", max_parked_, " transfers wait for their other half"), {},
                       kRetryAfterMs);
    }
    const int64_t wait_ns = std::min<int64_t>(
        max_wait_ns_, static_cast<int64_t>(std::min<uint64_t>(hello.deadline_ms, 1u << 30)) * kMsToNs);
    parked_.emplace(key, Parked{std::move(session), std::move(hello), clock_->NowNs() + wait_ns});
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

std::vector<Parking::Parked> Parking::Take(Role role, const std::string& transfer_id) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Parked> taken;
  const auto range = parked_.equal_range({role, transfer_id});
  for (auto it = range.first; it != range.second; ++it) taken.push_back(std::move(it->second));
  parked_.erase(range.first, range.second);
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
    parked_.erase(it);
  }
}

// Those who wait matter more than news of those who do not.
bool Parking::ForgetOneThatEndedLocked() {
  const auto it = std::find_if(parked_.begin(), parked_.end(),
                               [](const auto& entry) { return entry.second.session->LastWords().has_value(); });
  if (it == parked_.end()) return false;
  parked_.erase(it);
  return true;
}

void Parking::CloseAll(const absl::Status& why) {
  std::multimap<std::pair<Role, std::string>, Parked> all;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    all.swap(parked_);
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
      it = over ? parked_.erase(it) : std::next(it);
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
