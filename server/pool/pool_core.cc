#include "server/pool/pool_core.h"

#include <algorithm>
#include <utility>

#include "server/base/log.h"
#include "server/base/status.h"
#include "server/pool/hold.h"

namespace spectrumkv {
namespace {

constexpr int64_t kNsPerMs = 1'000'000;
constexpr int64_t kMaxTimeoutMs = int64_t{7} * 24 * 3600 * 1000;
constexpr size_t kMaxStreams = 64;
constexpr size_t kMaxClosers = 64;

TensorPlace PlaceOf(const GroupSchema& group, const TensorSchema& tensor, const Segment& segment) {
  TensorPlace place;
  place.origin = segment.data() + tensor.offset_bytes;
  place.block_stride = tensor.block_stride_bytes;
  place.token_stride = tensor.token_stride_bytes;
  place.head_stride = tensor.head_stride_bytes;
  place.dim_stride = tensor.dim_stride_bytes;
  place.block_tokens = group.block_tokens;
  place.heads = group.head_count;
  place.head_dim = group.head_dim;
  place.segment = tensor.segment;
  place.element_bytes = static_cast<uint32_t>(SizeOf(group.dtype));
  return place;
}

absl::Status UnknownPool(const std::string& id) {
  return MakeError(absl::StatusCode::kNotFound, "UNKNOWN_POOL", "pool " + id + " is not registered", {{"pool_id", id}});
}

}  // namespace

void LostNotice::Set(std::function<void(absl::Status)> callback) {
  absl::Status why;
  std::function<void(absl::Status)> replaced;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (dropped_) return;
    why = why_;
    if (why.ok()) {
      replaced = std::exchange(callback_, std::move(callback));
      return;
    }
  }
  callback(why);
}

void LostNotice::Fire(const absl::Status& why) {
  std::function<void(absl::Status)> callback;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (dropped_ || !why_.ok()) return;
    why_ = why;
    callback = std::exchange(callback_, nullptr);
  }
  if (callback) callback(why);
}

void LostNotice::Drop() {
  std::function<void(absl::Status)> dropped;  // destroyed outside the lock
  std::lock_guard<std::mutex> lock(mutex_);
  dropped_ = true;
  dropped = std::exchange(callback_, nullptr);
}

PoolCore::PoolCore(Config config)
    : id_(std::move(config.id)),
      owner_(config.owner),
      schema_(std::move(config.schema)),
      segments_(std::make_shared<const Segments>(std::move(config.segments))),
      lease_ttl_ms_(config.lease_ttl_ms),
      unmapper_(config.unmapper),
      events_(std::move(config.events)),
      on_gone_(std::move(config.on_gone)),
      clock_(config.clock) {
  PlaceTensors();
  for (const GroupSchema& group : schema_.groups) use_.emplace_back(group.num_blocks);
}

void PoolCore::PlaceTensors() {
  places_.resize(schema_.groups.size());
  for (size_t g = 0; g < schema_.groups.size(); ++g) {
    const GroupSchema& group = schema_.groups[g];
    for (const LayerSchema& layer : group.layers) {
      std::array<TensorPlace, 2> planes;
      planes[0] = PlaceOf(group, layer.k, *(*segments_)[layer.k.segment]);
      if (layer.v) planes[1] = PlaceOf(group, *layer.v, *(*segments_)[layer.v->segment]);
      places_[g].push_back(planes);
    }
  }
  device_ = (*segments_)[schema_.groups[0].layers[0].k.segment]->device();
  if (schema_.generations) {
    const uint8_t* table = (*segments_)[schema_.generations->segment]->data() + schema_.generations->offset_bytes;
    generations_ = reinterpret_cast<const uint64_t*>(table);
  }
}

bool PoolCore::SegmentFailed() const {
  return std::any_of(segments_->begin(), segments_->end(), [](const auto& segment) { return segment->failed(); });
}

absl::Status PoolCore::LostStatus(const std::string& cause) const {
  const bool failed = cause == "SEGMENT_FAILED";
  return MakeError(
      absl::StatusCode::kFailedPrecondition, failed ? "SEGMENT_FAILED" : "POOL_LOST",
      failed ? "a segment of pool " + id_ + (device_ == nullptr ? " was truncated by its owner" : " is on a GPU that has failed") : "pool " + id_ + " was lost: " + cause,
      {{"pool_id", id_}, {"cause", cause}});
}

absl::Status PoolCore::CheckUsableLocked(std::optional<uint32_t> only) {
  if (state_ == State::kLost || gone_) return UnknownPool(id_);
  if (state_ == State::kClosing) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "POOL_CLOSING", "pool " + id_ + " is being unregistered",
                     {{"pool_id", id_}});
  }
  return CheckSegmentsLocked(only);
}

absl::Status PoolCore::CheckSegmentsLocked(std::optional<uint32_t> only) {
  if (LookAtSegmentsLocked(only)) return absl::OkStatus();
  EndLaterLocked();
  return LostStatus("SEGMENT_FAILED");
}

bool PoolCore::LookAtSegmentsLocked(std::optional<uint32_t> only) {
  if (only.has_value()) return (*segments_)[*only]->StillWhole();
  return std::all_of(segments_->begin(), segments_->end(), [](const auto& segment) { return segment->StillWhole(); });
}

void PoolCore::EndLaterLocked() {
  if (clock_ == nullptr || lost_.load() || end_scheduled_.exchange(true)) return;
  clock_->CallAt(clock_->NowNs(), [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->End("SEGMENT_FAILED", self->unmapper_);
  });
}

absl::Status PoolCore::MemoryHealth() {
  // Called by users of the pool only, so the segments are there.
  if (!SegmentFailed()) return absl::OkStatus();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    EndLaterLocked();
  }
  return LostStatus("SEGMENT_FAILED");
}

absl::Status PoolCore::LookAtMemory() {
  std::lock_guard<std::mutex> lock(mutex_);
  return CheckSegmentsLocked(std::nullopt);
}

absl::Status PoolCore::Health() {
  absl::Status memory = MemoryHealth();
  if (!memory.ok() || !lost_.load()) return memory;
  std::lock_guard<std::mutex> lock(mutex_);
  return LostStatus(lost_cause_);
}

void PoolCore::ArmLeaseLocked() {
  lease_timer_ = clock_->CallAt(lease_deadline_ns_, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->OnLeaseTimer();
  });
}

void PoolCore::StartLease() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (clock_ == nullptr || state_ == State::kLost) return;
  lease_deadline_ns_ = clock_->NowNs() + lease_ttl_ms_ * kNsPerMs;
  ArmLeaseLocked();
}

void PoolCore::OnLeaseTimer() {
  std::string cause;
  uint64_t sources = 0, targets = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state_ == State::kLost || gone_ || clock_ == nullptr) return;
    if (!LookAtSegmentsLocked(std::nullopt)) {
      cause = "SEGMENT_FAILED";
    } else if (clock_->NowNs() < lease_deadline_ns_) {
      ArmLeaseLocked();  // renewed meanwhile
      return;
    } else {
      cause = "LEASE_EXPIRED";
      sources = source_notices_.size();
      targets = target_notices_.size();
    }
  }
  End(cause, unmapper_);
  if (cause != "LEASE_EXPIRED") return;
  events_.lease_expired("pool");
  for (; sources > 0; --sources) events_.lease_expired("source");
  for (; targets > 0; --targets) events_.lease_expired("destination");
}

absl::StatusOr<int64_t> PoolCore::Renew() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (state_ == State::kLost || gone_ || clock_ == nullptr) return UnknownPool(id_);
  lease_deadline_ns_ = clock_->NowNs() + lease_ttl_ms_ * kNsPerMs;
  return lease_ttl_ms_;
}

absl::StatusOr<uint64_t> PoolCore::OpenHold(std::function<void(const std::string&)> on_event) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (state_ == State::kLost || gone_ || clock_ == nullptr) return UnknownPool(id_);
  if (streams_.size() >= kMaxStreams) {
    return MakeError(absl::StatusCode::kResourceExhausted, "HOLDS_FULL",
                     "pool " + id_ + " has " + std::to_string(kMaxStreams) + " hold streams, the most allowed",
                     {{"pool_id", id_}}, 1000);
  }
  lease_deadline_ns_ = clock_->NowNs() + lease_ttl_ms_ * kNsPerMs;
  const uint64_t hold_id = next_id_++;
  streams_.emplace(hold_id, std::move(on_event));
  return hold_id;
}

size_t PoolCore::streams() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return streams_.size();
}

void PoolCore::CloseHold(uint64_t hold_id) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (streams_.erase(hold_id) == 0 || !streams_.empty()) return;
  }
  End("WORKER_GONE");
}

void PoolCore::End(const std::string& cause, Executor* unmapper) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (state_ == State::kLost || gone_) return;
  state_ = State::kLost;
  lost_cause_ = cause;
  lost_.store(true);
  auto streams = std::exchange(streams_, {});
  std::vector<std::shared_ptr<LostNotice>> notices(source_notices_.begin(), source_notices_.end());
  notices.insert(notices.end(), target_notices_.begin(), target_notices_.end());
  if (lease_timer_ != 0 && clock_ != nullptr) clock_->Cancel(lease_timer_);
  const absl::Status why = LostStatus(cause);
  FinishIfIdle(std::move(lock), unmapper);
  SPECTRUMKV_LOG(kInfo, "pool", "lost", {"pool", ShortPoolId(id_)}, {"cause", cause});
  for (const auto& notice : notices) notice->Fire(why);
  for (const auto& [hold_id, on_event] : streams) on_event(cause);
}

void PoolCore::Announce(const std::string& event) {
  std::map<uint64_t, std::function<void(const std::string&)>> streams;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    streams = streams_;
  }
  for (const auto& [hold_id, on_event] : streams) on_event(event);
}

void PoolCore::Shutdown() {
  std::map<uint64_t, std::function<void(const std::string&)>> streams;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    streams = std::exchange(streams_, {});  // nobody listens any more
  }
  End("SHUTTING_DOWN");
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [closer_id, closer] : closers_) {
    if (clock_ != nullptr) clock_->Cancel(closer.timer);
  }
  clock_ = nullptr;
}

void PoolCore::Unregister(int64_t timeout_ms, std::function<void(absl::Status)> done) {
  std::unique_lock<std::mutex> lock(mutex_);
  absl::Status status;
  if (state_ == State::kLost || gone_ || clock_ == nullptr) status = UnknownPool(id_);
  if (status.ok() && closers_.size() >= kMaxClosers) {
    status = MakeError(absl::StatusCode::kResourceExhausted, "POOL_BUSY", "too many calls unregister pool " + id_,
                       {{"pool_id", id_}}, 1000);
  }
  if (!status.ok()) {
    lock.unlock();
    done(status);
    return;
  }
  state_ = State::kClosing;
  const uint64_t closer_id = next_id_++;
  Closer& closer = closers_[closer_id];
  closer.done = std::move(done);
  if (users_ > 0) {
    const int64_t wait_ns = std::clamp<int64_t>(timeout_ms, 0, kMaxTimeoutMs) * kNsPerMs;
    closer.timer = clock_->CallAt(clock_->NowNs() + wait_ns, [weak = weak_from_this(), closer_id] {
      if (const auto self = weak.lock()) self->OnCloseTimeout(closer_id);
    });
  }
  FinishIfIdle(std::move(lock));
}

void PoolCore::OnCloseTimeout(uint64_t closer_id) {
  std::function<void(absl::Status)> done;
  uint64_t users = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = closers_.find(closer_id);
    if (found == closers_.end()) return;
    done = std::move(found->second.done);
    closers_.erase(found);
    users = users_;
    if (closers_.empty() && state_ == State::kClosing) state_ = State::kActive;
  }
  done(MakeError(absl::StatusCode::kDeadlineExceeded, "POOL_BUSY",
                 "pool " + id_ + " is still used by " + std::to_string(users) + " holds",
                 {{"pool_id", id_}, {"holds", std::to_string(users)}}));
}

void PoolCore::FinishIfIdle(std::unique_lock<std::mutex> lock, Executor* unmapper) {
  if (gone_ || users_ > 0 || state_ == State::kActive) return;
  gone_ = true;
  const bool unregistered = state_ == State::kClosing;
  if (unregistered) lost_cause_ = "UNREGISTERED";
  lost_.store(true);
  if (clock_ != nullptr) {
    for (const auto& [closer_id, closer] : closers_) clock_->Cancel(closer.timer);
    if (unregistered) clock_->Cancel(lease_timer_);
  }
  // Needs nothing of the pool, which may be gone first.
  auto finish = [segments = std::exchange(segments_, std::make_shared<const Segments>()),
                 on_gone = std::exchange(on_gone_, nullptr), closers = std::exchange(closers_, {}),
                 streams = unregistered ? std::exchange(streams_, {}) : decltype(streams_)()]() mutable {
    segments.reset();  // unmapped, unless the network still reads
    if (on_gone) on_gone();
    for (const auto& [hold_id, on_event] : streams) on_event("UNREGISTERED");
    for (const auto& [closer_id, closer] : closers) closer.done(absl::OkStatus());
  };
  if (unmapper != nullptr && clock_ != nullptr) {
    unmapper->Post(std::move(finish));  // under the lock: none is posted once Shutdown has returned
    return;
  }
  lock.unlock();
  finish();
}

PoolStatus PoolCore::Describe() const {
  PoolStatus status;
  status.pool_id = id_;
  status.owner = owner_;
  status.model = schema_.model;
  status.revision = schema_.revision;
  status.groups = static_cast<uint32_t>(schema_.groups.size());
  for (const GroupSchema& group : schema_.groups) {
    status.layers += static_cast<uint32_t>(group.layers.size());
    status.blocks_total += group.num_blocks;
    for (const LayerSchema& layer : group.layers) {
      status.kv_bytes += uint64_t{layer.v ? 2u : 1u} * group.num_blocks * group.block_tokens * group.head_count *
                         group.head_dim * SizeOf(group.dtype);
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (const BlockUse& use : use_) {
    status.blocks_sending += use.shared();
    status.blocks_receiving += use.reserved();
  }
  status.state = state_ == State::kActive ? "active" : state_ == State::kClosing ? "draining" : "lost";
  if (state_ != State::kLost && clock_ != nullptr) {
    status.lease_remaining_ms = std::max<int64_t>(0, lease_deadline_ns_ - clock_->NowNs()) / kNsPerMs;
  }
  return status;
}

}  // namespace spectrumkv
