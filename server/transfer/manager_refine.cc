// Refinements: how they give way, how the receiver asks for one and the sender answers.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/host_rule.h"
#include "server/base/ids.h"
#include "server/base/log.h"
#include "server/base/status.h"
#include "server/transfer/manager.h"
#include "server/transfer/manager_errors.h"
#include "server/transfer/receiver.h"
#include "server/transfer/sender.h"
#include "server/transfer/shape.h"
#include "server/transfer/state_table.h"
#include "server/transfer/units.h"

namespace spectrumkv {
namespace {

// While other transfers move bytes: how soon a refinement asks again.
constexpr int64_t kBusyPauseNs = 5 * kMsToNs;
// What a refinement may send ahead of its rate.
constexpr int64_t kBurstNs = 20 * kMsToNs;

// What the daemon has begun itself and failed is tried again: at most so often one after another.
constexpr uint32_t kMaxFailures = 3;
constexpr int64_t kFirstPauseNs = 100 * kMsToNs;
constexpr int kMaxRoundsOfOthers = 1000;

bool MayBeOverSoon(const absl::Status& error) {
  const std::string reason = ReasonOf(error);
  if (reason == "DRAINING" || reason == "SHUTTING_DOWN") return false;
  return error.code() == absl::StatusCode::kUnavailable || reason == "TRANSFER_EXISTS" || reason == "PEER_GAVE_UP" ||
         reason == "OUTCOME_UNKNOWN";
}

// The source's daemon has nothing any more to refine from.
bool IsOfNothingRetained(const absl::Status& error) {
  const std::string reason = ReasonOf(error);
  return reason == "NOT_RETAINED" || reason == "RELEASED" || reason == "SOURCE_GONE" || reason == "PEER_RESTARTED" ||
         reason == "RETENTION_EXPIRED" || reason == "RETENTION_EVICTED";
}

// By how much cells grow, at most, where the destination's data type is wider.
uint64_t Growth(const RefineBase& base) {
  uint64_t growth = 1;
  for (const PlanLayer& layer : base.shape.layers) {
    growth = std::max(growth, uint64_t{SizeOf(base.schema.groups[layer.group].dtype)} / SizeOf(layer.dtype));
  }
  return growth;
}

}  // namespace

// --- Refinements give way.

int64_t TransferManagerImpl::RefinePauseNs() {
  if (busy_.load(std::memory_order_relaxed) > 0) return kBusyPauseNs;
  return std::max<int64_t>(0, refine_free_ns_.load() - kBurstNs - parts_.clock->NowNs());
}

void TransferManagerImpl::CountRefined(uint64_t bytes) {
  parts_.metrics->AddRefinedBytes(bytes);
  if (options_.refine_bytes_per_second == 0) return;
  const auto cost_ns = static_cast<int64_t>(1e9 * static_cast<double>(bytes) /
                                            static_cast<double>(options_.refine_bytes_per_second));
  int64_t before = refine_free_ns_.load();
  const int64_t now = parts_.clock->NowNs();
  while (!refine_free_ns_.compare_exchange_weak(before, std::max(before, now) + cost_ns)) {
  }
}

// --- The receiver asks.

// Will all of the destination be as the source has it? Not where tokens were dropped or words rounded.
bool TransferManagerImpl::MakesExact(const RefineSpec& spec, const RefineChoice& choice, RefineBase* base) {
  if (spec.tier != Tier::kRaw || base->shape.kept_count() != base->shape.token_count) return false;
  for (const PlanLayer& layer : base->shape.layers) {
    if (layer.dtype != base->schema.groups[layer.group].dtype) return false;
  }
  std::lock_guard<std::mutex> lock(base->mutex);
  return base->tiers->CoarseCells(base->shape) == choice.cells;
}

void TransferManagerImpl::RefineInBackground(const std::string& transfer_id, const std::optional<std::weak_ptr<RefineBase>>& of) {
  RefineSpec spec;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const Key key{Role::kReceiver, transfer_id};
    const auto kept = kept_.find(key);
    const auto entry = entries_.find(key);
    if (kept == kept_.end() || kept->second.ended || entry == entries_.end() || draining_) return;
    const RefineBase& base = *kept->second.base;
    // Another transfer may have the id by now.
    if (!base.background_tier.has_value() || (of.has_value() && of->lock() != kept->second.base)) return;
    if (entry->second.live()) {  // about to be remembered
      parts_.clock->CallAt(parts_.clock->NowNs() + kMsToNs, [this, transfer_id] {
        parts_.control->Post([this, transfer_id] { RefineInBackground(transfer_id); });
      });
      return;
    }
    spec.transfer_id = transfer_id;
    spec.refine_id = absl::StrCat(transfer_id, ".refine-", ++kept->second.rounds);
    spec.owner = entry->second.owner;
    spec.tier = *base.background_tier;
    spec.direct = base.background_direct;
    spec.deadline_ms = std::max<int64_t>(1, (kept->second.until_ns - parts_.clock->NowNs()) / kMsToNs);
    spec.fingerprint = "B";
  }
  auto started = Refine(spec);
  // Of an earlier transfer of this id, released, whose rounds are remembered still.
  for (int round = 0; round < kMaxRoundsOfOthers && ReasonOf(started.status()) == "TRANSFER_EXISTS"; ++round) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto kept = kept_.find({Role::kReceiver, transfer_id});
      if (kept == kept_.end()) return;
      spec.refine_id = absl::StrCat(transfer_id, ".refine-", ++kept->second.rounds);
    }
    started = Refine(spec);
  }
  // All is there, and the round that brought the last of it did not live to compare checksums: nothing more will come.
  if (started.ok() && started->cells == 0) return EndKept({Role::kReceiver, transfer_id}, absl::OkStatus());
  if (started.ok()) return;
  parts_.metrics->CountError(MetricStage::kQueue, started.status().code());
  SPECTRUMKV_LOG(kWarning, "transfer", "no refinement in the background", {"transfer", transfer_id},
                 {"reason", ReasonOf(started.status())});
}

void TransferManagerImpl::NoteExact(const Key& base, const Refinement& refinement) {
  if (!refinement.exact()) return;
  std::map<uint64_t, std::function<void(const TransferReport&)>> waiters;
  TransferReport report;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto entry = entries_.find(base);
    if (entry == entries_.end()) return;
    entry->second.report.exact = true;
    report = entry->second.report;
    const auto kept = kept_.find(base);
    if (kept != kept_.end()) waiters.swap(kept->second.exact_waiters);
  }
  for (auto& [watch_id, waiter] : waiters) waiter(report);
}

absl::Status TransferManagerImpl::AwaitExact(const Caller& caller, const std::string& transfer_id, Role role, uint64_t watch_id,
                                             std::function<void(const TransferReport&)> done) {
  TransferReport report;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const absl::StatusOr<Key> key = KeyOf(caller, transfer_id, role);
    if (!key.ok()) return key.status();
    const auto kept = kept_.find(*key);
    report = entries_.at(*key).Now();
    if (!report.exact && kept != kept_.end()) {
      kept->second.exact_waiters[watch_id] = std::move(done);
      return absl::OkStatus();
    }
  }
  done(report);
  return absl::OkStatus();
}

// A refinement has settled.
void TransferManagerImpl::OnRefined(const Key& child, const TransferReport& report, const std::shared_ptr<Refinement>& refinement) {
  const Key key{child.first, report.refines};
  const bool committed = report.state == TransferState::kCommitted;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto kept = kept_.find(key);
    if (kept != kept_.end()) {
      EraseOne(child.second, &kept->second);
      kept->second.refined_wire_bytes += report.wire_bytes;
    }
    const auto base = entries_.find(key);
    if (base != entries_.end() && !base->second.live()) base->second.report.refined_wire_bytes += report.wire_bytes;
  }
  bool next = false;
  if (refinement != nullptr) {  // a receiver's
    NoteExact(key, *refinement);
    const bool own = refinement->base().IsOwn(child.second);
    next = own && committed && report.cells_left > 0 && refinement->TakeCompletion();
    if (own) TryAgain(key, report);
    if (IsOfNothingRetained(report.error)) EndKept(key, absl::OkStatus());
  }
  // The destination's daemon has all that was left.
  if (committed && report.completes) EndKept(key, absl::OkStatus());
  FinishKept(key);
  FinishMove(key);
  if (next) RefineInBackground(report.refines);
}

// What may be over soon: the source moves, or the peer could not be reached. Not for ever, and after a pause that grows.
void TransferManagerImpl::TryAgain(const Key& base, const TransferReport& report) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = kept_.find(base);
  if (it == kept_.end() || it->second.ended) return;
  if (report.state == TransferState::kCommitted) it->second.failures = 0;
  if (!MayBeOverSoon(report.error) || it->second.failures >= kMaxFailures) return;
  const int64_t pause_ns = kFirstPauseNs << it->second.failures++;
  parts_.clock->CallAt(parts_.clock->NowNs() + pause_ns,
                       [door = door_, transfer_id = base.second, of = std::weak_ptr<RefineBase>(it->second.base)] {
    std::lock_guard<std::mutex> open(door->mutex);
    TransferManagerImpl* const manager = door->manager;
    if (manager == nullptr) return;
    manager->parts_.control->Post([manager, transfer_id, of] { manager->RefineInBackground(transfer_id, of); });
  });
}

absl::StatusOr<std::shared_ptr<RefineBase>> TransferManagerImpl::BaseOf(const RefineSpec& spec) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const absl::StatusOr<Key> key = KeyOf(spec.owner, spec.transfer_id, Role::kReceiver);
  if (!key.ok()) return key.status();
  const Entry& entry = entries_.at(*key);
  if (entry.live() || entry.report.state != TransferState::kCommitted) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "NOT_COMMITTED",
                     absl::StrCat("transfer ", spec.transfer_id, " is ", StateName(entry.Now().state),
                                  ": only what has committed can be refined"));
  }
  const auto kept = kept_.find(*key);
  if (kept == kept_.end() || kept->second.ended) return NotRetained(spec.transfer_id);
  return kept->second.base;
}

absl::StatusOr<RefineChoice> TransferManagerImpl::ChooseFor(const RefineSpec& spec, RefineBase* base) {
  RefineLimits limits;
  if (!spec.direct) limits.kv_bytes = staging_->left() / Growth(*base);
  if (spec.budget.has_value()) {
    limits.wire_bytes = static_cast<uint64_t>(*spec.budget * static_cast<double>(base->kv_bytes));
  }
  absl::StatusOr<RefineChoice> choice = absl::InternalError("");
  {
    std::lock_guard<std::mutex> lock(base->mutex);
    RefineSelection selection = spec.selection;
    if (base->IsOwn(spec.refine_id)) selection.scores = ScoresOfTiers(base->shape, *base->tiers);
    choice = ChooseCells(base->shape, *base->tiers, selection, spec.tier, limits);
  }
  if (!choice.ok() || choice->cells > 0 || choice->cells_left == 0) return choice;
  if (spec.budget.has_value() && (spec.direct || limits.kv_bytes > limits.wire_bytes)) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BUDGET_TOO_SMALL",
                     absl::StrCat("not one token can be refined for ", limits.wire_bytes, " bytes"), {{"field", "budget"}});
  }
  return MakeError(absl::StatusCode::kResourceExhausted, "REFINE_STAGING_FULL",
                   absl::StrCat("not one token fits into the ", staging_->left(), " free bytes of refine.staging_bytes (",
                                staging_->limit(), ")"),
                   {{"field", "refine.staging_bytes"}, {"limit", absl::StrCat(staging_->limit())}}, kTransferRetryMs);
}

absl::StatusOr<RefineStarted> TransferManagerImpl::Refine(RefineSpec spec) {
  const auto repeat = FindRepeat(spec.owner, spec.refine_id, Role::kReceiver, PartId{}, spec.fingerprint);
  if (repeat.has_value() && !repeat->ok()) return *repeat;
  if (repeat.has_value()) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = entries_.find({Role::kReceiver, spec.refine_id});
    if (it == entries_.end() || it->second.refinement == nullptr) return TransferExists(spec.refine_id);
    const RefineChoice& choice = it->second.refinement->choice();
    return RefineStarted{choice.cells, choice.cells_left, choice.kv_bytes};
  }
  auto base = BaseOf(spec);
  if (!base.ok()) return base.status();
  const bool named = !spec.peer.empty();
  if (!named) spec.peer = (*base)->peer;
  if (spec.peer.empty()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "PEER_UNKNOWN",
                     "the address of the daemon that retains the source is not known: name it", {{"field", "peer"}});
  }
  if (!named && !AllowsHost(options_.allowed_hosts, PeerKey(spec.peer, /*dialled=*/false))) {
    return MakeError(absl::StatusCode::kPermissionDenied, "PEER_NOT_ALLOWED",
                     absl::StrCat("peer ", spec.peer, " is not one of peer.allowed_hosts of this daemon"),
                     {{"peer", spec.peer}});
  }
  RefineStarted started;
  std::shared_ptr<Refinement> refinement;
  std::unique_ptr<BlockHold> target;
  for (bool gains = false; !gains;) {
    target.reset();
    absl::StatusOr<RefineChoice> choice = ChooseFor(spec, base->get());
    if (!choice.ok()) return choice.status();
    started = {choice->cells, choice->cells_left, choice->kv_bytes};
    if (choice->cells == 0) return started;
    const bool verify = MakesExact(spec, *choice, base->get());
    auto created = Refinement::Create(*base, *std::move(choice), spec.tier, spec.direct ? nullptr : staging_, verify);
    if (!created.ok()) return created.status();
    refinement = *std::move(created);
    auto reserved = refinement->NewTarget();
    if (!reserved.ok()) return reserved.status();
    target = *std::move(reserved);
    // What another has made finer before these blocks were reserved must not become coarser again.
    gains = !spec.direct || refinement->StillGains();
  }
  ReceiverSpec receiver;
  receiver.transfer_id = spec.refine_id;
  receiver.transfer_token = (*base)->token;
  receiver.peer = spec.peer;
  receiver.owner = spec.owner;
  receiver.pool_id = (*base)->pool_id;
  receiver.target = std::move(target);
  receiver.deadline_ms = spec.deadline_ms;
  receiver.fingerprint = spec.fingerprint;
  receiver.refinement = std::move(refinement);
  if (absl::Status begun = StartReceiver(std::move(receiver)); !begun.ok()) return begun;
  return started;
}

// --- The sender answers.

absl::StatusOr<std::shared_ptr<RetainedSource>> TransferManagerImpl::RetainedFor(const HelloFrame& hello) {
  const Key key{Role::kSender, hello.refine->transfer_id};
  const auto kept = kept_.find(key);
  const auto entry = entries_.find(key);
  if (kept == kept_.end() || kept->second.ended) {
    // The receiver commits, and may ask, before its receipt has come here.
    if (entry != entries_.end() && entry->second.live()) {
      return MakeError(absl::StatusCode::kUnavailable, "RETENTION_PENDING", "the transfer has not ended here yet");
    }
    return NotRetained(hello.refine->transfer_id);
  }
  if (kept->second.moving) {
    return MakeError(absl::StatusCode::kUnavailable, "RETENTION_PENDING", "the source moves into the daemon's cache");
  }
  if (!ConstantTimeEqual(kept->second.source->token, hello.transfer_token)) {
    return MakeError(absl::StatusCode::kPermissionDenied, "TOKEN_MISMATCH",
                     "transfer_token is not that of the transfer to be refined");
  }
  // Nobody else has the rest of it.
  if (hello.epoch != kept->second.source->peer_epoch) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "PEER_RESTARTED",
                     "this daemon is not the one that has received the transfer, or it has restarted since");
  }
  kept->second.children.insert(hello.transfer_id);  // from now on it is read
  return kept->second.source;
}

// The hello is answered: a refinement that has begun is a child by itself.
void TransferManagerImpl::ForgetChild(const Key& base, const std::string& child) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto kept = kept_.find(base);
    if (kept != kept_.end()) EraseOne(child, &kept->second);
  }
  FinishKept(base);
  FinishMove(base);
}

void TransferManagerImpl::OnRefineHello(std::shared_ptr<ControlSession> session, HelloFrame hello) {
  const std::shared_ptr<ControlStream> stream = session->stream();
  if (stream == nullptr) return;
  const absl::Status refusal = [&] {
    if (absl::Status ok = CheckRefineHello(hello); !ok.ok()) return ok;
    std::shared_ptr<RetainedSource> source;
    std::shared_ptr<Transfer> running;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto it = entries_.find({Role::kSender, hello.transfer_id});
      if (it != entries_.end()) {
        if (!ConstantTimeEqual(it->second.token, hello.transfer_token)) return TokenOfAnother();
        if (it->second.transfer == nullptr || !it->second.transfer->refines()) return TransferExists(hello.transfer_id);
        running = it->second.transfer;
      } else {
        auto found = RetainedFor(hello);
        if (!found.ok()) return found.status();
        source = *found;
      }
    }
    if (running == nullptr) {
      const Key base{Role::kSender, source->transfer_id};
      const absl::Status begun = StartRefining(*source, hello);
      source.reset();
      ForgetChild(base, hello.transfer_id);
      if (!begun.ok()) return begun;
      std::lock_guard<std::mutex> lock(mutex_);
      const auto it = entries_.find({Role::kSender, hello.transfer_id});
      if (it == entries_.end() || it->second.transfer == nullptr) return TransferExists(hello.transfer_id);
      running = it->second.transfer;
    }
    running->Post([t = running.get(), session, hello] { t->Adopt(session, hello); });
    return absl::OkStatus();
  }();
  if (!refusal.ok()) stream->Close(refusal);
}

absl::Status TransferManagerImpl::CheckRefineHello(const HelloFrame& hello) const {
  if (hello.role != Role::kReceiver || hello.part_count != 1) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_REFINE",
                     "a refinement is asked for by a receiver, of a transfer of one part");
  }
  if (hello.format_version != 1) return UnsupportedVersion(hello.format_version);
  if (hello.expected_epoch != 0 && hello.expected_epoch != options_.epoch) return PeerRestarted();
  return absl::OkStatus();
}

absl::Status TransferManagerImpl::StartRefining(const RetainedSource& source, const HelloFrame& hello) {
  auto refine = SourceOfRequest(*hello.refine, source.layers, source.places, source.hold->token_count());
  if (!refine.ok()) return refine.status();
  SenderSpec spec;
  spec.transfer_id = hello.transfer_id;
  spec.transfer_token = source.token;
  spec.owner = source.owner;
  spec.pool_id = source.pool_id;
  spec.source = std::make_unique<SharedHold>(source.hold);
  spec.policy.budget = 0;
  spec.policy.allocator = refine->tier == Tier::kRaw ? Allocator::kRaw : Allocator::kUniform;
  spec.policy.uniform_tier = refine->tier;
  spec.policy.importance = ImportanceSource::kNone;
  spec.deadline_ms = static_cast<int64_t>(std::min<uint64_t>(std::max<uint64_t>(hello.deadline_ms, 1),
                                                             static_cast<uint64_t>(options_.max_deadline_ms)));
  spec.refines = source.transfer_id;
  refine->importance = source.importance;
  spec.refine = std::make_shared<const RefineSource>(*std::move(refine));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto kept = kept_.find({Role::kSender, source.transfer_id});
    if (kept != kept_.end()) kept->second.used_ns = parts_.clock->NowNs();
  }
  return StartSender(std::move(spec));
}

}  // namespace spectrumkv
