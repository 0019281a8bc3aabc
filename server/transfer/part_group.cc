#include "server/transfer/part_group.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/log.h"
#include "server/base/status.h"

namespace spectrumkv {
namespace {

// What another part is told of why one ended.
absl::Status OfPart(uint32_t index, const absl::Status& why) {
  return MakeError(why.code(), ReasonOf(why),
                   absl::StrCat("part ", index, " ended the transfer: ", std::string(why.message())));
}

// The sum of what parts did; states and errors are the caller's.
void AddReport(const TransferReport& part, TransferReport* sum) {
  sum->tokens = std::max(sum->tokens, part.tokens);
  sum->kept_tokens = std::max(sum->kept_tokens, part.kept_tokens);
  sum->kv_bytes += part.kv_bytes;
  sum->wire_bytes += part.wire_bytes;
  sum->escape_overrun_bytes += part.escape_overrun_bytes;
  for (size_t tier = 0; tier < kTierCount; ++tier) {
    sum->tiers.k[tier] += part.tiers.k[tier];
    sum->tiers.v[tier] += part.tiers.v[tier];
  }
  sum->chunks += part.chunks;
  sum->chunks_total += part.chunks_total;
  sum->chunks_resent += part.chunks_resent;
  sum->chunks_duplicate += part.chunks_duplicate;
  sum->nonfinite_values += part.nonfinite_values;
  sum->rounded_words += part.rounded_words;
  sum->values += part.values;
  sum->attempts = std::max(sum->attempts, part.attempts);
  sum->streams += part.streams;
  sum->first_layer_ready_seconds = std::max(sum->first_layer_ready_seconds, part.first_layer_ready_seconds);
  for (size_t stage = 0; stage < kStageCount; ++stage) sum->stage_seconds[stage] += part.stage_seconds[stage];
  if (part.limited_seconds > sum->limited_seconds) {
    sum->limited_by = part.limited_by;
    sum->limited_seconds = part.limited_seconds;
  }
}

// What parts have alike, or is told of the first.
TransferReport LikeFirst(const TransferReport& first) {
  TransferReport sum;
  sum.transfer_id = first.transfer_id;
  sum.pool_id = first.pool_id;
  sum.role = first.role;
  sum.budget = first.budget;
  sum.allocator = first.allocator;
  sum.importance = first.importance;
  sum.model_profile = first.model_profile;
  sum.backend = first.backend;
  sum.path = first.path;
  sum.source_guard = first.source_guard;
  sum.measured_link = first.measured_link;
  sum.link = first.link;
  sum.choice = first.choice;
  sum.gate = first.gate;
  return sum;
}

}  // namespace

class PartGroup::Ear final : public TransferWatcher {
 public:
  Ear(std::shared_ptr<PartGroup> group, uint32_t index) : group_(std::move(group)), index_(index) {}
  void OnLayersReady(uint32_t layers) override { group_->OnLayers(index_, layers); }
  void OnProgress(const TransferReport&) override { group_->NotifyProgress(); }
  void OnTerminal(const TransferReport& report) override { group_->OnPartSettled(index_, report); }

 private:
  const std::shared_ptr<PartGroup> group_;
  const uint32_t index_;
};

PartGroup::PartGroup(Role role, std::string id, uint32_t count, const TransferParts* engine, Host host)
    : role_(role),
      id_(std::move(id)),
      count_(count),
      engine_(engine),
      host_(std::move(host)),
      started_ns_(engine->clock->NowNs()),
      strand_(engine->control) {}

bool PartGroup::Add(const std::shared_ptr<Transfer>& part, std::vector<uint32_t> layers) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (committed_ || outcome_.has_value() || whole_.has_value()) return false;
  const uint32_t index = part->part().index;
  Part& added = parts_[index];
  added.transfer = part;
  added.layers = std::move(layers);
  part->JoinParts(shared_from_this());
  // Under the lock, so first on its strand: the other parts find it from here on, and may end it.
  part->Post([t = part.get(), ear = std::make_shared<Ear>(shared_from_this(), index)] {
    t->AddWatcher(0, ear);
    t->Start();
  });
  return true;
}

std::shared_ptr<Transfer> PartGroup::Find(uint32_t index) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = parts_.find(index);
  return it == parts_.end() ? nullptr : it->second.transfer;
}

std::vector<std::shared_ptr<Transfer>> PartGroup::Live() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<Transfer>> live;
  for (const auto& [index, part] : parts_) {
    if (part.transfer != nullptr) live.push_back(part.transfer);
  }
  return live;
}

absl::Status PartGroup::Ending() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return outcome_.has_value() ? outcome_->why : absl::OkStatus();
}

PartGroup::Ruling PartGroup::OnEnding(uint32_t index, bool unknown, TransferState* state, absl::Status* why) {
  std::vector<std::shared_ptr<Transfer>> others;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (*state == TransferState::kCommitted) {
      committed_ = true;
      return Ruling::kEnds;
    }
    if (committed_ && role_ == Role::kReceiver) return Ruling::kWillCommit;
    if (committed_ && unknown) return Ruling::kHasCommitted;
    if (outcome_.has_value()) {
      if (role_ == Role::kReceiver && outcome_->index != index) {
        *state = outcome_->state;
        *why = OfPart(outcome_->index, outcome_->why);
      }
      return Ruling::kEnds;
    }
    outcome_ = Outcome{index, *state, *why};
    for (const auto& [other, part] : parts_) {
      if (other != index && part.transfer != nullptr) others.push_back(part.transfer);
    }
  }
  for (const std::shared_ptr<Transfer>& other : others) {
    other->Post([t = other.get(), state = *state, unknown, told = OfPart(index, *why)] {
      t->EndWithPart(state, told, !unknown);
    });
  }
  return Ruling::kEnds;
}

// Part `index` has come so far; the last of all sends all on.
void PartGroup::Step(uint32_t index, bool Part::*reached, void (Transfer::*next)()) {
  std::vector<std::shared_ptr<Transfer>> all;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    parts_.at(index).*reached = true;
    if (outcome_.has_value() || parts_.size() < count_) return;
    for (const auto& [other, part] : parts_) {
      if (!(part.*reached)) return;
      all.push_back(part.transfer);
    }
    if (reached == &Part::verified) committed_ = true;
  }
  for (const std::shared_ptr<Transfer>& part : all) part->Post([t = part.get(), next] { (t->*next)(); });
}

// The layers of all parts together, ascending: a layer is complete when it is in every part that has it.
uint32_t PartGroup::LayersReady() const {
  if (parts_.size() < count_) return 0;
  std::set<uint32_t> layers;
  for (const auto& [index, part] : parts_) layers.insert(part.layers.begin(), part.layers.end());
  uint32_t ready = 0;
  for (const uint32_t layer : layers) {
    for (const auto& [index, part] : parts_) {
      const auto at = std::lower_bound(part.layers.begin(), part.layers.end(), layer);
      const bool has = at != part.layers.end() && *at == layer;
      if (has && at - part.layers.begin() >= static_cast<std::ptrdiff_t>(part.layers_ready)) return ready;
    }
    ++ready;
  }
  return ready;
}

void PartGroup::OnLayers(uint32_t index, uint32_t layers) {
  uint32_t ready;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    parts_.at(index).layers_ready = layers;
    ready = LayersReady();
  }
  strand_.Post([self = shared_from_this(), this, ready] {
    if (told_ || ready <= layers_told_) return;
    layers_told_ = ready;
    for (const auto& [id, watcher] : watchers_) watcher->OnLayersReady(ready);
  });
}

void PartGroup::NotifyProgress() {
  strand_.Post([self = shared_from_this(), this] {
    if (told_ || watchers_.empty()) return;
    const TransferReport report = Snapshot();
    for (const auto& [id, watcher] : watchers_) watcher->OnProgress(report);
  });
}

TransferReport PartGroup::Snapshot() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return whole_.has_value() ? *whole_ : SnapshotLocked();
}

TransferReport PartGroup::SnapshotLocked() const {
  std::vector<TransferReport> reports;
  for (const auto& [index, part] : parts_) {
    reports.push_back(part.transfer != nullptr ? part.transfer->Snapshot() : part.report);
  }
  TransferReport sum = LikeFirst(reports.front());
  // It has come as far as the part that is last; one that has settled waits for the others.
  sum.state = TransferState::kVerifying;
  for (const TransferReport& report : reports) {
    AddReport(report, &sum);
    if (!IsTerminal(report.state)) sum.state = std::min(sum.state, report.state);
  }
  sum.layers_ready = LayersReady();
  sum.duration_seconds = static_cast<double>(engine_->clock->NowNs() - started_ns_) * 1e-9;
  sum.part.count = count_;
  sum.parts = std::move(reports);
  return sum;
}

void PartGroup::OnPartSettled(uint32_t index, const TransferReport& report) {
  TransferReport whole;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Part& part = parts_.at(index);
    part.report = report;
    part.transfer = nullptr;
    for (const auto& [other, still] : parts_) {
      if (still.transfer != nullptr) return;
    }
    whole = SnapshotLocked();
    whole.state = outcome_.has_value() ? outcome_->state : TransferState::kCommitted;
    if (outcome_.has_value()) whole.error = outcome_->why;
    whole_ = whole;
  }
  Metrics& metrics = *engine_->metrics;
  const auto outcome =
      static_cast<MetricOutcome>(static_cast<int>(whole.state) - static_cast<int>(TransferState::kCommitted));
  metrics.CountTransfer(MetricRoleOf(role_), outcome, whole.duration_seconds, whole.wire_bytes);
  SPECTRUMKV_LOG(kInfo, "transfer", StateName(whole.state), {"transfer", id_}, {"parts", parts_.size()},
                 {"role", role_ == Role::kSender ? "sender" : "receiver"}, {"reason", ReasonOf(whole.error)});
  host_.over(shared_from_this(), whole);
  strand_.Post([self = shared_from_this(), this, whole = std::move(whole)] { TellTheEnd(whole); });
}

void PartGroup::TellTheEnd(const TransferReport& whole) {
  told_ = true;
  for (const auto& [id, watcher] : watchers_) watcher->OnTerminal(whole);
  watchers_.clear();
  for (const auto& done : cancel_waiters_) done(whole);
  cancel_waiters_.clear();
  host_.told();
}

void PartGroup::AddWatcher(uint64_t id, std::shared_ptr<TransferWatcher> watcher) {
  strand_.Post([self = shared_from_this(), this, id, watcher = std::move(watcher)] {
    if (layers_told_ > 0) watcher->OnLayersReady(layers_told_);
    if (told_) return watcher->OnTerminal(Snapshot());
    watchers_[id] = watcher;
  });
}

void PartGroup::RemoveWatcher(uint64_t id) {
  strand_.Post([self = shared_from_this(), this, id] { watchers_.erase(id); });
}

void PartGroup::Cancel(std::function<void(absl::StatusOr<TransferReport>)> done) {
  strand_.Post([self = shared_from_this(), this, done = std::move(done)] {
    if (told_) return done(Snapshot());
    cancel_waiters_.push_back(done);
    for (const std::shared_ptr<Transfer>& part : Live()) {
      part->Post([t = part.get()] { t->Cancel([](const absl::StatusOr<TransferReport>&) {}); });
    }
  });
}

void PartGroup::Fail(const absl::Status& why) {
  for (const std::shared_ptr<Transfer>& part : Live()) part->Post([t = part.get(), why] { t->Fail(why); });
}

}  // namespace spectrumkv
