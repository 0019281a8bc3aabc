// How the TransferManager moves retained sources from their workers' blocks into the daemon's memory, and out of it again.
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/status.h"
#include "server/transfer/host_cache.h"
#include "server/transfer/manager.h"
#include "server/transfer/manager_errors.h"

namespace spectrumkv {
namespace {

absl::Status NoRoom() {
  return MakeError(absl::StatusCode::kCancelled, "RELEASED", "the worker has released the transfer, and the cache has no room for it");
}

}  // namespace

void TransferManagerImpl::MoveToCache(const Caller& caller, const std::string& transfer_id, std::optional<Role> role,
                                      std::function<void(absl::StatusOr<bool>)> done) {
  std::vector<std::shared_ptr<Transfer>> children;
  absl::StatusOr<bool> answer = false;
  bool waits = false, starts = false;
  std::optional<Key> too_large;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const absl::StatusOr<Key> key = KeyOf(caller, transfer_id, role);
    const auto it = key.ok() ? kept_.find(*key) : kept_.end();
    if (!key.ok()) {
      answer = key.status();
    } else if (key->first == Role::kReceiver) {
      answer = MakeError(absl::StatusCode::kInvalidArgument, "NOT_A_SOURCE",
                         "keep_in_cache is given, but the half of this daemon is the receiver: only a sender has a source to keep",
                         {{"field", "keep_in_cache"}});
    } else if (it != kept_.end() && !it->second.ended) {
      Kept& kept = it->second;
      const bool fits = CachedBytes(*kept.source->hold, kept.source->layers) <= cache_->limit();
      answer = kept.cached;
      waits = !kept.cached && fits;
      if (waits) kept.movers.push_back([done](bool cached) { done(cached); });
      if (waits && !kept.moving) {
        kept.moving = true;
        children = ChildrenOf(*key, kept);
        moves_.push_back(*key);
        starts = !std::exchange(moves_run_, true);
        if (starts) ++calls_;
      }
      if (!kept.cached && !fits) too_large = *key;
    }
  }
  if (too_large.has_value()) {
    parts_.metrics->CountRetention(MetricRole::kSender, MetricRetention::kUncached);
    return EndKept(*too_large, NoRoom(), [done = std::move(done)](const auto&) { done(false); });
  }
  if (!waits) return done(answer);
  // Refinements under way read the blocks: they end, and may be asked for again.
  for (auto& child : children) child->Post([t = child.get()] { t->Fail(SourceMoves()); });
  if (starts) parts_.compute->Post([this] { RunMoves(); });
}

// One after another, so that the others who compute have threads left.
void TransferManagerImpl::RunMoves() {
  std::shared_ptr<const RetainedSource> source;
  std::shared_ptr<std::atomic<bool>> over;
  Key key;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    while (source == nullptr && !moves_.empty()) {
      key = std::move(moves_.front());
      moves_.pop_front();
      const auto it = kept_.find(key);
      if (it == kept_.end() || it->second.ended || !it->second.moving || it->second.copy != nullptr) continue;
      it->second.copying = true;
      source = it->second.source;
      over = it->second.over;
    }
    if (source == nullptr) moves_run_ = false;
  }
  if (source == nullptr) return CallEnded();
  CopyToCache(key, std::move(source), *over);
  parts_.compute->Post([this] { RunMoves(); });
}

void TransferManagerImpl::CopyToCache(const Key& key, std::shared_ptr<const RetainedSource> source,
                                      const std::atomic<bool>& over) {
  absl::StatusOr<std::shared_ptr<BlockHold>> copy = NoRoom();
  if (MakeRoomInCache(CachedBytes(*source->hold, source->layers))) {
    copy = CopySource(*source->hold, source->layers, source->places, cache_, [&] { return over.load() || stopping_.load(); });
    if (!copy.ok()) parts_.metrics->CountError(MetricStage::kQueue, copy.status().code());
  }
  source.reset();  // before anybody is told
  const absl::Status made = copy.status();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = kept_.find(key);  // there, for it is being copied
    it->second.copying = false;
    if (copy.ok() && !it->second.ended) it->second.copy = *std::move(copy);
  }
  if (!made.ok()) {
    parts_.metrics->CountRetention(MetricRole::kSender, MetricRetention::kUncached);
    return EndKept(key, made);
  }
  FinishKept(key);
  FinishMove(key);
}

// Takes bytes of the cache, for which those may go that were longest not read; none where that would not be enough.
bool TransferManagerImpl::MakeRoomInCache(uint64_t bytes) {
  while (!cache_->Take(bytes)) {
    std::optional<Key> oldest;
    uint64_t evictable = cache_->left();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      int64_t used_ns = 0;
      for (const auto& [key, kept] : kept_) {
        if (!kept.cached || kept.ended || !kept.children.empty()) continue;
        evictable += CachedBytes(*kept.source->hold, kept.source->layers);
        if (oldest.has_value() && kept.used_ns >= used_ns) continue;
        oldest = key;
        used_ns = kept.used_ns;
      }
    }
    if (evictable < bytes || !oldest.has_value()) return false;
    parts_.metrics->CountRetention(MetricRole::kSender, MetricRetention::kEvicted);
    EndKept(*oldest, MakeError(absl::StatusCode::kResourceExhausted, "RETENTION_EVICTED",
                               absl::StrCat("the cache's room was needed for others (refine.cache_bytes is ", cache_->limit(), ")")));
  }
  return true;
}

// Once the copy is made and nothing reads the blocks any more.
void TransferManagerImpl::FinishMove(const Key& key) {
  std::shared_ptr<RetainedSource> blocks;  // let go outside the lock
  std::vector<std::function<void(bool)>> movers;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = kept_.find(key);
    if (it == kept_.end() || it->second.ended || it->second.copy == nullptr || !it->second.children.empty()) return;
    Kept& kept = it->second;
    auto cached = std::make_shared<RetainedSource>(*kept.source);
    cached->hold = std::exchange(kept.copy, nullptr);
    cached->pool_id.clear();
    blocks = std::exchange(kept.source, std::move(cached));
    kept.pool_id.clear();
    kept.moving = false;
    kept.cached = true;
    kept.used_ns = parts_.clock->NowNs();
    movers.swap(kept.movers);
  }
  blocks.reset();
  parts_.metrics->CountRetention(MetricRole::kSender, MetricRetention::kCached);
  for (auto& told : movers) told(true);
}

}  // namespace spectrumkv
