// What TransferManagerImpl keeps of transfers that have committed, so that they can be refined, and how that ends.
#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/status.h"
#include "server/transfer/manager.h"
#include "server/transfer/units.h"

namespace spectrumkv {

bool TransferManagerImpl::AddKept(const Key& key, Kept kept, uint64_t retain_ms) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto of_role = std::count_if(kept_.begin(), kept_.end(), [&](const auto& k) { return k.first.first == key.first; });
  if (draining_ || kept_.count(key) != 0 || of_role >= options_.max_retained) {
    parts_.metrics->CountRetention(MetricRoleOf(key.first), MetricRetention::kRefused);
    return false;
  }
  kept.until_ns = parts_.clock->NowNs() + static_cast<int64_t>(retain_ms) * kMsToNs;
  kept.timer = parts_.clock->CallAt(kept.until_ns, [this, key] {
    parts_.control->Post([this, key] {
      EndKept(key, MakeError(absl::StatusCode::kDeadlineExceeded, "RETENTION_EXPIRED",
                             absl::StrCat("the source of transfer ", key.second, " is no longer retained")));
    });
  });
  kept_.emplace(key, std::move(kept));
  parts_.metrics->CountRetention(MetricRoleOf(key.first), MetricRetention::kKept);
  return true;
}

bool TransferManagerImpl::Retain(RetainedSource source) {
  const Key key{Role::kSender, source.transfer_id};
  const std::shared_ptr<BlockHold> hold = source.hold;
  const uint64_t retain_ms = source.retain_ms;
  const std::string kept_in = source.pool_id;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    source.owner = entries_.at(key).owner;
  }
  Kept kept;
  kept.kv_bytes = source.kv_bytes;
  kept.wire_bytes = source.wire_bytes;
  kept.pool_id = source.pool_id;
  kept.source = std::make_shared<RetainedSource>(std::move(source));
  if (!AddKept(key, std::move(kept), retain_ms)) return false;
  // Outside the lock: where the pool is lost already, it is told at once.
  hold->OnLost([door = door_, key, pool_id = kept_in](absl::Status why) {
    std::lock_guard<std::mutex> lock(door->mutex);
    TransferManagerImpl* const manager = door->manager;
    if (manager == nullptr) return;
    manager->parts_.control->Post([manager, key, why, pool_id] {
      manager->EndKept(key, MakeError(absl::StatusCode::kFailedPrecondition, "SOURCE_GONE",
                                      absl::StrCat("the source pool was lost: ", std::string(why.message()))),
                       nullptr, &pool_id);
    });
  });
  return true;
}

bool TransferManagerImpl::KeepBase(std::shared_ptr<RefineBase> base) {
  const Key key{Role::kReceiver, base->transfer_id};
  const uint64_t retain_ms = base->retain_ms;
  Kept kept;
  kept.kv_bytes = base->kv_bytes;
  kept.wire_bytes = base->wire_bytes;
  kept.pool_id = base->pool_id;
  const bool background = base->background_tier.has_value();
  kept.base = std::move(base);
  if (!AddKept(key, std::move(kept), retain_ms)) return false;
  // Later: the transfer is not remembered as committed yet.
  if (background) parts_.control->Post([this, id = key.second] { RefineInBackground(id); });
  return true;
}

std::vector<std::shared_ptr<Transfer>> TransferManagerImpl::ChildrenOf(const Key& key, const Kept& kept) const {
  std::vector<std::shared_ptr<Transfer>> children;
  for (const std::string& child : std::set<std::string>(kept.children.begin(), kept.children.end())) {
    const auto entry = entries_.find({key.first, child});
    if (entry != entries_.end() && entry->second.transfer != nullptr) children.push_back(entry->second.transfer);
  }
  return children;
}

// Nothing new begins; what runs is ended with `why`, unless that is OK: then it may finish.
void TransferManagerImpl::EndKept(const Key& key, const absl::Status& why, Closer done, const std::string* of_pool) {
  std::vector<std::shared_ptr<Transfer>> children;
  std::vector<std::shared_ptr<Refinement>> refinements;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = kept_.find(key);
    if (it != kept_.end() && (of_pool == nullptr || it->second.pool_id == *of_pool)) {
      Kept& kept = it->second;
      kept.ended = true;
      *kept.over = true;
      parts_.clock->Cancel(kept.timer);
      if (done) kept.waiters.push_back(std::exchange(done, nullptr));
      children = ChildrenOf(key, kept);
    }
    if (done) refinements = RefinementsOf(key);
  }
  if (done) return done(refinements);
  if (!why.ok()) {
    for (auto& child : children) child->Post([t = child.get(), why] { t->Fail(why); });
  }
  FinishKept(key);
}

// Lets go of what has ended, once nothing reads or writes it any more.
void TransferManagerImpl::FinishKept(const Key& key) {
  Kept kept;  // let go outside the lock
  TransferReport report;
  std::vector<std::shared_ptr<Refinement>> refinements;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = kept_.find(key);
    if (it == kept_.end() || !it->second.ended || !it->second.children.empty() || it->second.copying) return;
    kept = std::move(it->second);
    kept_.erase(it);
    refinements = RefinementsOf(key);  // no other begins any more
    const auto entry = entries_.find(key);
    if (entry != entries_.end()) report = entry->second.report;
  }
  kept.source.reset();  // the blocks first: whoever waits may use them at once
  kept.base.reset();
  kept.copy.reset();
  parts_.metrics->AddSavedBytes(MetricRoleOf(key.first), kept.kv_bytes, kept.wire_bytes + kept.refined_wire_bytes);
  for (auto& [watch_id, waiter] : kept.exact_waiters) waiter(report);
  for (auto& mover : kept.movers) mover(false);
  for (auto& waiter : kept.waiters) waiter(refinements);
}

void TransferManagerImpl::EndAllKept(const std::string& pool_id, const absl::Status& why) {
  std::vector<Key> keys;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [key, kept] : kept_) {
      if (pool_id.empty() || kept.pool_id == pool_id) keys.push_back(key);
    }
  }
  for (const Key& key : keys) EndKept(key, why, nullptr, pool_id.empty() ? nullptr : &pool_id);
}

void TransferManagerImpl::CloseAll(const std::vector<std::shared_ptr<Refinement>>& refinements, std::function<void()> done) {
  const auto left = std::make_shared<std::atomic<size_t>>(refinements.size() + 1);
  const auto closed = [left, done = std::move(done)] {
    if (left->fetch_sub(1) == 1) done();
  };
  for (const auto& refinement : refinements) refinement->Close(closed);
  closed();
}

void TransferManagerImpl::EndRefinements(const Caller& caller, const std::string& transfer_id, std::optional<Role> role,
                                         std::function<void()> done) {
  std::optional<Key> key;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const absl::StatusOr<Key> found = KeyOf(caller, transfer_id, role);
    if (found.ok()) key = *found;
  }
  if (!key.has_value()) return done();
  EndKept(*key, MakeError(absl::StatusCode::kCancelled, "RELEASED", "the worker has released the transfer"),
          [done = std::move(done)](const std::vector<std::shared_ptr<Refinement>>& refinements) { CloseAll(refinements, done); });
}

std::vector<std::shared_ptr<Refinement>> TransferManagerImpl::RefinementsOf(const Key& key) const {
  std::vector<std::shared_ptr<Refinement>> refinements;
  const auto entry = entries_.find(key);
  if (entry == entries_.end()) return refinements;
  // While one still runs, its receiver decodes into what Close gives back.
  if (entry->second.refinement != nullptr && !entry->second.live()) refinements.push_back(entry->second.refinement);
  for (const auto& weak : entry->second.refinements) {
    if (auto refinement = weak.lock(); refinement != nullptr) refinements.push_back(std::move(refinement));
  }
  return refinements;
}

void TransferManagerImpl::EraseOne(const std::string& child, Kept* kept) {
  if (const auto it = kept->children.find(child); it != kept->children.end()) kept->children.erase(it);
}

void TransferManagerImpl::EndRefinementsOf(const std::string& pool_id) {
  EndAllKept(pool_id, MakeError(absl::StatusCode::kCancelled, "RELEASED", "the worker unregisters the pool"));
  std::vector<std::shared_ptr<Refinement>> refinements;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [key, entry] : entries_) {
      if (entry.refinement == nullptr || entry.live()) continue;  // those that run have failed, and close then
      if (entry.refinement->base().pool_id == pool_id) refinements.push_back(entry.refinement);
    }
  }
  CloseAll(refinements, [] {});
}

void TransferManagerImpl::FillRefinement(const Key& key, const Entry& entry, TransferReport* report) const {
  const auto kept = kept_.find(key);
  if (kept != kept_.end() && !kept->second.ended) {
    report->retained_seconds = static_cast<double>(kept->second.until_ns - parts_.clock->NowNs()) * 1e-9;
  }
  if (entry.refinement != nullptr) entry.refinement->AddTo(report);
}

}  // namespace spectrumkv
