#include "server/stream/stream_core.h"

#include <utility>

#include "server/base/status.h"
#include "server/stream/dial_error.h"
#include "server/stream/peer_security.h"

namespace spectrumkv {
namespace {

absl::Status PeerGone(const std::string& message) {
  return MakeError(absl::StatusCode::kUnavailable, "PEER_GONE", message);
}

}  // namespace

StreamCore::StreamCore(StreamEnv* env, Side side, std::string peer, size_t max_queue, bool flush_on_error)
    : env_(env), side_(side), peer_(std::move(peer)), max_queue_(max_queue), flush_on_error_(flush_on_error) {}

bool StreamCore::Register() {
  if (env_->Add(this, weak_from_this())) return true;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    finished_ = true;
  }
  HandleClosed(MakeError(absl::StatusCode::kUnavailable, "SHUTTING_DOWN", "this endpoint is shutting down"));
  return false;
}

void StreamCore::Attach(Wire* wire) {
  const int64_t timeout_ms = env_->limits().connect_timeout_ms;
  std::lock_guard<std::mutex> lock(mutex_);
  wire_ = wire;
  if (lost_) {
    wire_->Cancel();
  } else if (side_ == Side::kDialler && !closing_) {
    ArmTimerLocked(timeout_ms, MakeError(absl::StatusCode::kUnavailable, "PEER_UNREACHABLE",
                                         "no answer from " + peer_ + " within " + std::to_string(timeout_ms) + " ms",
                                         {{"peer", peer_}}));
  }
  PumpLocked();
}

bool StreamCore::Enqueue(grpc::ByteBuffer message) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closing_ || lost_ || finished_) return false;
  if (queue_.size() >= max_queue_) {
    CloseLocked(MakeError(absl::StatusCode::kResourceExhausted, "STREAM_QUEUE_FULL",
                          "more than " + std::to_string(max_queue_) + " messages are waiting for " + peer_));
    return false;
  }
  queue_.push_back(std::move(message));
  PumpLocked();
  return true;
}

void StreamCore::CloseWith(const absl::Status& status) {
  std::lock_guard<std::mutex> lock(mutex_);
  CloseLocked(status);
}

void StreamCore::CloseLocked(const absl::Status& status) {
  if (finished_ || !local_error_.ok() || lost_) return;
  if (status.ok()) {
    if (closing_) return;
    closing_ = true;
  } else {
    // An error overtakes an earlier Close(OK) that still waits.
    closing_ = true;
    deaf_ = true;
    local_error_ = status;
    failed_ = true;
    if (side_ == Side::kDialler || !flush_on_error_) queue_.clear();
    if (side_ == Side::kDialler) {
      lost_ = true;
      if (wire_ != nullptr) wire_->Cancel();
    }
  }
  ArmTimerLocked(env_->limits().close_timeout_ms, PeerGone(peer_ + " did not end the stream in time"));
  PumpLocked();
}

// Writes the next message, or ends the call when there is nothing left to write.
void StreamCore::PumpLocked() {
  if (wire_ == nullptr || ended_) return;
  if (side_ == Side::kDialler && lost_) {
    ended_ = true;
    wire_->End(local_error_, true);
    return;
  }
  if (writing_) return;
  if (!queue_.empty()) {
    writing_ = true;
    writing_message_.Swap(&queue_.front());
    queue_.pop_front();
    wire_->Write(&writing_message_);
    return;
  }
  if (closing_ || lost_) {
    ended_ = true;
    wire_->End(local_error_, lost_);
  }
}

void StreamCore::LoseLocked() {
  lost_ = true;
  failed_ = true;
  queue_.clear();
  if (!finished_) ArmTimerLocked(env_->limits().close_timeout_ms, PeerGone(peer_ + " did not end the stream in time"));
  PumpLocked();
}

void StreamCore::Connected() {
  std::lock_guard<std::mutex> lock(mutex_);
  connected_ = true;
  if (!closing_ && !lost_) DisarmTimerLocked();
}

bool StreamCore::Read(bool ok, bool cancelled, grpc::ByteBuffer* message) {
  if (!ok) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (side_ == Side::kAcceptor && !cancelled) {
      CloseLocked(absl::OkStatus());  // the dialler has ended in good order
    } else if (side_ == Side::kAcceptor || !ended_) {
      // Of a dialler: the acceptor has finished, so what is queued here can reach nobody. The status follows in Finished.
      LoseLocked();
    }
    return false;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (deaf_) return false;
  }
  const absl::Status status = HandleMessage(message);
  message->Clear();
  std::lock_guard<std::mutex> lock(mutex_);
  if (!status.ok()) CloseLocked(status);
  return !deaf_ && !(side_ == Side::kAcceptor && ended_);
}

void StreamCore::Written(bool ok) {
  // The message that was written usually ends here: its slot is free, and the engine hears of it, without a wake of the
  // env's thread. The call has not finished, so the env is there.
  EndsHere ends;
  std::lock_guard<std::mutex> lock(mutex_);
  writing_ = false;
  writing_message_.Clear();
  if (ok) {
    PumpLocked();
  } else {
    LoseLocked();
  }
}

void StreamCore::Cancelled() {
  std::lock_guard<std::mutex> lock(mutex_);
  LoseLocked();
}

absl::Status StreamCore::FinalStatusLocked(const absl::Status& wire_status) const {
  if (!local_error_.ok()) return local_error_;
  return CallError(peer_, wire_status, side_ == Side::kDialler && !connected_);
}

void StreamCore::Finished(const absl::Status& wire_status, std::shared_ptr<void> call) {
  absl::Status status;
  bool ask = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    wire_ = nullptr;
    env_->Post([call = std::move(call)] {});
    finished_ = true;
    status = FinalStatusLocked(wire_status);
    if (!status.ok()) failed_ = true;
    ask = chunks_ == 0 && side_ == Side::kDialler && !connected_ && local_error_.ok() && env_->limits().probe_tls &&
          HungUp(wire_status);
    queue_.clear();
    writing_message_.Clear();
    DisarmTimerLocked();
    closed_pending_ = true;
    closed_status_ = status;
    if (chunks_ > 0) {
      // Usually the slices come home at once; a peer that stopped reading may hold them until keepalive cuts the
      // connection, and OnClosed does not wait that long.
      std::weak_ptr<StreamCore> weak = weak_from_this();
      timer_ = env_->clock().CallAt(env_->clock().NowNs() + env_->limits().linger_ms * 1'000'000, [weak] {
        auto core = weak.lock();
        if (core == nullptr) return;
        std::lock_guard<std::mutex> late_lock(core->mutex_);  // as long as it is pending, the env lives
        if (core->closed_pending_) core->env_->Post([core] { core->DeliverClosed(core->closed_status_); });
      });
      return;
    }
  }
  if (!ask) return env_->Post([self = shared_from_this(), status] { self->DeliverClosed(status); });
  env_->AskWhetherTls(peer_, [self = shared_from_this(), status](bool tls) {
    self->DeliverClosed(tls ? SecurityMismatch(self->peer_, "it speaks TLS, this daemon does not") : status);
  });
}

// On the env's thread.
void StreamCore::DeliverClosed(const absl::Status& status) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!closed_pending_) return;
    closed_pending_ = false;
    DisarmTimerLocked();
  }
  HandleClosed(status);
  env_->Remove(this);
}

void StreamCore::ChunkBegins() {
  env_->AddChunk();
  std::lock_guard<std::mutex> lock(mutex_);
  ++chunks_;
}

// On the env's thread.
void StreamCore::ChunkEnds() {
  bool last = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    last = --chunks_ == 0 && closed_pending_ && finished_;
  }
  if (last) DeliverClosed(closed_status_);
  env_->RemoveChunk();
}

void StreamCore::ArmTimer(int64_t delay_ms, absl::Status status) {
  std::lock_guard<std::mutex> lock(mutex_);
  ArmTimerLocked(delay_ms, std::move(status), WhenLate::kClose);
}

void StreamCore::DisarmTimer() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!closing_ && !lost_) DisarmTimerLocked();
}

void StreamCore::ArmTimerLocked(int64_t delay_ms, absl::Status status, WhenLate then) {
  DisarmTimerLocked();
  std::weak_ptr<StreamCore> weak = weak_from_this();
  const uint64_t serial = timer_serial_;
  timer_ = env_->clock().CallAt(env_->clock().NowNs() + delay_ms * 1'000'000,
                                [weak, serial, status = std::move(status), then] {
                                  if (auto core = weak.lock()) core->TimerFired(serial, status, then);
                                });
}

void StreamCore::DisarmTimerLocked() {
  if (timer_ != 0) env_->clock().Cancel(timer_);
  timer_ = 0;
  ++timer_serial_;
}

void StreamCore::TimerFired(uint64_t serial, const absl::Status& status, WhenLate then) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (serial != timer_serial_ || wire_ == nullptr) return;
  timer_ = 0;
  if (then == WhenLate::kClose) return CloseLocked(status);
  if (local_error_.ok()) local_error_ = status;
  closing_ = true;
  deaf_ = true;
  lost_ = true;
  failed_ = true;
  queue_.clear();
  wire_->Cancel();
  PumpLocked();
}

}  // namespace spectrumkv
