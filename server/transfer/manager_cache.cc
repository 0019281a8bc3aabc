// How the TransferManager moves retained sources from their workers' blocks into the daemon's memory, and out of it again.
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/status.h"
#include "server/transfer/host_cache.h"
#include "server/transfer/manager.h"

namespace spectrumkv {

// Refinements under way read the blocks: they end, and may be asked for again.
void TransferManagerImpl::MoveToCache(const Caller& caller, const std::string& transfer_id, std::optional<Role> role,
                                      std::function<void(absl::StatusOr<bool>)> done) {
  std::shared_ptr<const RetainedSource> source;
  std::vector<std::shared_ptr<Transfer>> children;
  absl::StatusOr<bool> answer = false;
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
      answer = kept.cached;
      if (!kept.cached) kept.movers.push_back([done](bool cached) { done(cached); });
      if (!kept.cached && kept.moving) return;
      if (!kept.cached) {
        kept.moving = true;
        source = kept.source;
        children = ChildrenOf(*key, kept);
        ++calls_;
      }
    }
  }
  if (source == nullptr) return done(answer);
  for (auto& child : children) {
    child->Post([t = child.get()] {
      t->Fail(MakeError(absl::StatusCode::kUnavailable, "SOURCE_MOVED", "the source moves into the daemon's cache: ask again"));
    });
  }
  parts_.compute->Post([this, source] {
    CopyToCache({Role::kSender, source->transfer_id}, *source);
    CallEnded();
  });
}

void TransferManagerImpl::CopyToCache(const Key& key, const RetainedSource& source) {
  const bool room = MakeRoomInCache(CachedBytes(*source.hold, source.layers));
  absl::StatusOr<std::shared_ptr<BlockHold>> copy =
      MakeError(absl::StatusCode::kCancelled, "RELEASED", "the worker has released the transfer, and the cache has no room for it");
  if (room) {
    copy = CopySource(*source.hold, source.layers, source.places, cache_, [this] { return stopping_.load(); });
    if (!copy.ok()) parts_.metrics->CountError(MetricStage::kQueue, copy.status().code());
  }
  parts_.metrics->CountRetention(MetricRole::kSender, copy.ok() ? MetricRetention::kCached : MetricRetention::kUncached);
  if (!copy.ok()) return EndKept(key, copy.status());
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = kept_.find(key);
    if (it != kept_.end() && it->second.moving) it->second.copy = *std::move(copy);
  }
  FinishMove(key);
}

// Takes bytes of the cache, for which those may go that were longest not read.
bool TransferManagerImpl::MakeRoomInCache(uint64_t bytes) {
  while (!cache_->Take(bytes)) {
    std::optional<Key> oldest;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      int64_t used_ns = 0;
      for (const auto& [key, kept] : kept_) {
        if (!kept.cached || kept.ended || !kept.children.empty()) continue;
        if (oldest.has_value() && kept.used_ns >= used_ns) continue;
        oldest = key;
        used_ns = kept.used_ns;
      }
    }
    if (bytes > cache_->limit() || !oldest.has_value()) return false;
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
  for (auto& told : movers) told(true);
}

}  // namespace spectrumkv
