#include "server/transfer/transfer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/log.h"
#include "server/base/status.h"
#include "server/transfer/part_group.h"
#include "server/transfer/units.h"

namespace spectrumkv {
namespace {


bool IsReason(const std::string& text) {
  return !text.empty() && text.size() <= 64 && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
  });
}

TransferReport FirstReport(const TransferSetup& setup) {
  TransferReport report;
  report.transfer_id = setup.id;
  report.role = setup.role;
  report.part = setup.part;
  report.refines = setup.refines;
  report.backend = setup.parts->backend->name();
  return report;
}

}  // namespace

absl::Status PeerError(const CancelFrame& cancel, const std::string& who) {
  const bool known = cancel.code >= 1 && cancel.code <= 16;
  return MakeError(known ? static_cast<absl::StatusCode>(cancel.code) : absl::StatusCode::kUnknown,
                   IsReason(cancel.reason) ? cancel.reason : "PEER_ERROR",
                   absl::StrCat("the ", who, " ended the transfer: ", cancel.message.substr(0, 1024)));
}

Transfer::Transfer(TransferSetup setup)
    : setup_(std::move(setup)),
      strand_(setup_.parts->control),
      started_ns_(setup_.parts->clock->NowNs()),
      peer_epoch_(setup_.peer_epoch),
      report_(FirstReport(setup_)) {}

TransferReport Transfer::Snapshot() const {
  std::lock_guard<std::mutex> lock(report_mutex_);
  TransferReport report = report_;
  if (!settled()) report.duration_seconds = SecondsSinceStart();
  return report;
}

std::function<void()> Transfer::Weakly(void (Transfer::*method)()) {
  return [weak = weak_from_this(), method] {
    if (std::shared_ptr<Transfer> self = weak.lock()) {
      Transfer* t = self.get();
      t->Post([t, method] { (t->*method)(); });
    }
  };
}

int64_t Transfer::DeadlineLeftMs() const { return std::max<int64_t>(1, (deadline_ns_ - NowNs()) / kMsToNs); }

void Transfer::ArmDeadline(int64_t deadline_ms) {
  if (deadline_timer_ != 0) parts().clock->Cancel(deadline_timer_);
  deadline_ns_ = NowNs() + deadline_ms * kMsToNs;
  deadline_timer_ = parts().clock->CallAt(deadline_ns_, [weak = weak_from_this(), deadline_ms] {
    std::shared_ptr<Transfer> self = weak.lock();
    if (self == nullptr) return;
    Transfer* t = self.get();
    t->Post([t, deadline_ms] {
      if (t->NowNs() < t->deadline_ns_) return;  // armed again meanwhile
      t->Apply(Event::kExpire, MakeError(absl::StatusCode::kDeadlineExceeded, "DEADLINE_EXCEEDED",
                                         absl::StrCat("the transfer did not commit within its deadline of ",
                                                      deadline_ms, " ms",
                                                      t->last_break_.empty() ? "" : "; the link had broken: ",
                                                      t->last_break_),
                                         {{"deadline_ms", absl::StrCat(deadline_ms)}}));
    });
  });
}

void Transfer::Apply(Event event, absl::Status why) {
  Transition transition = NextState(role(), state_, event);
  if (transition.action == Action::kIgnore) return;
  if (transition.action == Action::kBug) {
    SPECTRUMKV_LOG(kError, "transfer", "impossible event", {"state", StateName(state_)}, {"event", EventName(event)});
    parts().metrics->CountError(ErrorStage(), absl::StatusCode::kInternal);
    return Apply(Event::kFail, MakeError(absl::StatusCode::kInternal, "IMPOSSIBLE_EVENT", EventName(event)));
  }
  if (transition.action == Action::kOutcomeUnknown) {
    why = MakeError(absl::StatusCode::kUnknown, "OUTCOME_UNKNOWN",
                    absl::StrCat("all was sent but the receiver's receipt did not arrive: ", std::string(why.message())));
  }
  if (group_ != nullptr && IsTerminal(transition.next)) {
    switch (group_->OnEnding(part().index, transition.action == Action::kOutcomeUnknown, &transition.next, &why)) {
      case PartGroup::Ruling::kEnds: break;
      case PartGroup::Ruling::kWillCommit: return;
      case PartGroup::Ruling::kHasCommitted: return Apply(Event::kCommit);
    }
  }
  const MetricStage stage = ErrorStage();
  state_ = transition.next;
  if (terminal()) {
    error_ = state_ == TransferState::kCommitted ? absl::OkStatus() : why;
    if (!error_.ok()) parts().metrics->CountError(stage, error_.code());
  }
  // A terminal state is told only once no byte can land any more.
  if (!terminal()) UpdateReport([&](TransferReport& r) { r.state = state_; });
  if (transition.action == Action::kTerminate || transition.action == Action::kOutcomeUnknown) return Terminate();
  OnAction(transition.action);
  NotifyProgress();
}

// A sender in VERIFYING need not ask: its receiver commits all parts or none.
void Transfer::EndWithPart(TransferState state, const absl::Status& why, bool known) {
  if (!known) return Fail(why);
  Apply(state == TransferState::kCancelled ? Event::kPeerCancelled
        : state == TransferState::kExpired ? Event::kPeerExpired
                                           : Event::kPeerFailed,
        why);
}

void Transfer::Terminate() {
  for (TimerId* timer : {&deadline_timer_, &tick_timer_, &redial_timer_}) {
    if (*timer != 0) parts().clock->Cancel(*timer);
    *timer = 0;
  }
  StopWork();
}

void Transfer::Settle() {
  const bool committed = state_ == TransferState::kCommitted;
  Conclude();
  // Blocks first: whoever hears of the end, here or at the peer, may use them at once.
  ReleaseAll();
  SayGoodbye();
  GiveUpSilentPeer();
  DropLink(committed);
  UpdateReport([&](TransferReport& r) {
    r.state = state_;
    r.error = error_;
    r.duration_seconds = SecondsSinceStart();
    r.attempts = attempt_.load();
  });
  settled_.store(true, std::memory_order_release);
  NoteBusy(false);
  const TransferReport report = Snapshot();
  CountOutcome(report);
  SPECTRUMKV_LOG(kInfo, "transfer", StateName(state_), {"transfer", id()},
                 {"role", role() == Role::kSender ? "sender" : "receiver"}, {"reason", ReasonOf(error_)},
                 {"kv_bytes", report.kv_bytes}, {"wire_bytes", report.wire_bytes},
                 {"seconds", report.duration_seconds});
  // Remembered first: who hears of the end may release the transfer at once.
  setup_.host->OnSettled(shared_from_this());
  for (auto& [watch_id, watcher] : watchers_) watcher->OnTerminal(report);
  watchers_.clear();
  for (auto& done : cancel_waiters_) done(report);
  cancel_waiters_.clear();
  setup_.host->OnDone(*this);
}

void Transfer::AddStage(Stage stage, double seconds) {
  parts().metrics->ObserveStage(static_cast<MetricStage>(stage), seconds);
  UpdateReport([&](TransferReport& r) { r.stage_seconds[static_cast<size_t>(stage)] += seconds; });
}

void Transfer::AddWatcher(uint64_t watch_id, std::shared_ptr<TransferWatcher> watcher) {
  if (layers_told_ > 0) watcher->OnLayersReady(layers_told_);
  if (settled()) return watcher->OnTerminal(Snapshot());
  watchers_[watch_id] = std::move(watcher);
}

void Transfer::NotifyLayers(uint32_t layers) {
  if (layers <= layers_told_) return;
  layers_told_ = layers;
  for (auto& [watch_id, watcher] : watchers_) watcher->OnLayersReady(layers);
}

void Transfer::NotifyProgress() {
  if (watchers_.empty() || terminal()) return;
  const TransferReport report = Snapshot();
  for (auto& [watch_id, watcher] : watchers_) watcher->OnProgress(report);
}

void Transfer::Cancel(std::function<void(absl::StatusOr<TransferReport>)> done) {
  if (settled()) return done(Snapshot());
  cancel_waiters_.push_back(std::move(done));
  Apply(Event::kCancel, MakeError(absl::StatusCode::kCancelled, "CANCELLED", "the worker cancelled the transfer"));
}

MetricStage Transfer::ErrorStage() const {
  switch (state_) {
    case TransferState::kWaiting: return MetricStage::kQueue;
    case TransferState::kPlanned: return MetricStage::kPlan;
    case TransferState::kStreaming: return role() == Role::kSender ? MetricStage::kSend : MetricStage::kReceive;
    default: return MetricStage::kCommit;
  }
}

void Transfer::CountOutcome(const TransferReport& report) {
  Metrics& metrics = *parts().metrics;
  const MetricRole who = metric_role();
  const auto outcome = static_cast<MetricOutcome>(static_cast<int>(state_) - static_cast<int>(TransferState::kCommitted));
  if (refines()) {
    metrics.CountRefinement(who, outcome);
  } else if (!is_part()) {  // else PartGroup
    metrics.CountTransfer(who, outcome, report.duration_seconds, report.wire_bytes);
  }
  if (state_ == TransferState::kCommitted) {
    if (!refines() && !kept_) metrics.AddSavedBytes(who, report.kv_bytes, report.wire_bytes);
    metrics.CountLimit(who, static_cast<MetricLimit>(report.limited_by));
    for (int tier = 0; tier < kTierCount; ++tier) {
      const uint64_t tokens = report.tiers.k[tier] + report.tiers.v[tier];
      if (tokens > 0) metrics.AddTokens(who, static_cast<MetricTier>(tier), tokens);
    }
  }
  if (dials()) setup_.host->CountPeer(setup_.peer, "dialled", &report);
}

}  // namespace spectrumkv
