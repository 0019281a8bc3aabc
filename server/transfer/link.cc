// The link half of Transfer: dialling, adopting, heartbeats, breaking and coming back.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/log.h"
#include "server/base/status.h"
#include "server/transfer/manager_errors.h"
#include "server/transfer/transfer.h"
#include "server/transfer/units.h"

namespace spectrumkv {
namespace {

constexpr int64_t kFirstBackoffMs = 20;
constexpr int64_t kMaxBackoffMs = 1000;
constexpr int64_t kDataGraceMs = 200;

// A peer that answered with a decision will give the same answer again; anything else may be the network.
bool WorthRedialling(const absl::Status& status) {
  if (status.code() == absl::StatusCode::kUnavailable) return ReasonOf(status) != "DRAINING";
  return status.ok() || status.code() == absl::StatusCode::kCancelled ||
         status.code() == absl::StatusCode::kUnknown || status.code() == absl::StatusCode::kInternal;
}

}  // namespace

void Transfer::Dial() {
  if (terminal()) return;
  NoteBusy(true);  // refinements stop now: what they have on its way is gone when this has its first chunk
  const uint32_t attempt = ++attempt_;
  UpdateReport([&](TransferReport& r) { r.attempts = attempt; });
  auto session = std::make_shared<ControlSession>();
  session->Attach(shared_from_this());
  link_ = Link{};
  link_.session = session;
  if (attempt == 1) Heard();  // silence is counted from the last word, or from the begin
  link_.control = parts().transport->OpenControl(setup_.peer, session);
  setup_.host->CountPeer(setup_.peer, "dialled", nullptr);
  HelloFrame hello = MakeHello();
  hello.epoch = options().epoch;
  hello.role = role();
  hello.transfer_id = id();
  hello.transfer_token = token();
  hello.part_index = part().index;
  hello.part_count = part().count;
  hello.attempt = attempt;
  hello.expected_epoch = peer_epoch_;
  hello.deadline_ms = static_cast<uint64_t>(DeadlineLeftMs());
  Tell(hello);
  OnGreeted();
  ArmTick();
}

// Whether this half may go on with the attempt that a peer's hello begins.
absl::Status Transfer::CheckAttempt(const HelloFrame& hello) const {
  if (hello.attempt <= attempt_.load()) {
    return MakeError(absl::StatusCode::kAlreadyExists, "TRANSFER_EXISTS",
                     absl::StrCat("attempt ", hello.attempt, " of this transfer is not newer than the running one"));
  }
  if (dials()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "BOTH_DIAL",
                     "both halves of the transfer dial: one side must use Expect or Publish");
  }
  if (hello.expected_epoch != 0 && hello.expected_epoch != options().epoch) return PeerRestarted();
  if (peer_epoch_ != 0 && hello.epoch != peer_epoch_) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "PEER_RESTARTED",
                     "the dialling daemon has restarted since the transfer began");
  }
  return absl::OkStatus();
}

// A dialler that ended its half before it was heard has said so, and will not come back.
void Transfer::HearLastWords(const ControlSession& session, const HelloFrame& hello) {
  const std::optional<CancelFrame> words = session.LastWords();
  if (!words.has_value() || terminal()) return;
  attempt_.store(hello.attempt);
  parts().metrics->AddOverheadBytes(MessageBytes(ControlFrame(hello)) + MessageBytes(ControlFrame(*words)));
  PeerEnded(*words, role() == Role::kSender ? "receiver" : "sender");
}

void Transfer::Adopt(const std::shared_ptr<ControlSession>& session, const HelloFrame& hello) {
  const std::shared_ptr<ControlStream> control = session->stream();
  const absl::Status refusal = CheckAttempt(hello);
  if (control == nullptr) {  // ended by its dialler, or broken
    if (refusal.ok()) HearLastWords(*session, hello);
    return;
  }
  if (!refusal.ok()) return control->Close(refusal);
  if (terminal()) return control->Close(MakeError(absl::StatusCode::kUnavailable, "SETTLING", "the transfer is ending"));
  if (link_.control != nullptr) {
    link_.control->Close(MakeError(absl::StatusCode::kAborted, "SUPERSEDED", "a newer attempt has taken over"));
    OnLinkLost();
  }
  DropLink(false);
  NoteBusy(true);
  attempt_.store(hello.attempt);
  UpdateReport([&](TransferReport& r) { r.attempts = hello.attempt; });
  peer_epoch_ = hello.epoch;
  link_.session = session;
  link_.control = control;
  Heard();
  parts().metrics->AddOverheadBytes(MessageBytes(ControlFrame(hello)));
  setup_.host->CountPeer(control->peer(), "accepted", nullptr);
  session->Attach(shared_from_this());
  if (absl::Status fits = CheckHello(hello); !fits.ok()) return Fail(fits);
  link_.session_id = setup_.host->NewSession(shared_from_this(), hello.attempt);
  HelloReplyFrame reply;
  reply.epoch = options().epoch;
  reply.session = link_.session_id;
  Tell(reply);
  OnGreeted();
  ArmTick();
}

void Transfer::AdoptData(uint32_t attempt, std::shared_ptr<DataStream> stream) {
  if (terminal() || attempt != attempt_.load() || link_.control == nullptr) {
    return stream->Close(MakeError(absl::StatusCode::kAborted, "SUPERSEDED", "the attempt of this stream has ended"));
  }
  if (link_.data.size() >= options().streams) {  // each is worth some of the slots that all share
    parts().metrics->CountError(ErrorStage(), absl::StatusCode::kInvalidArgument);
    return stream->Close(MakeError(absl::StatusCode::kInvalidArgument, "PROTOCOL_VIOLATION",
                                   absl::StrCat("more data streams than the ", options().streams, " that were offered")));
  }
  link_.data.push_back(std::move(stream));
  UpdateReport([&](TransferReport& r) { r.streams = static_cast<uint32_t>(link_.data.size()); });
  OnDataStreamAdded();
}

void Transfer::OpenDataStreams(uint32_t count) {
  DataOpenFrame open;
  open.transfer_id = id();
  open.part_index = part().index;
  open.attempt = attempt_.load();
  open.session = link_.session_id;
  for (uint32_t i = 0; i < count; ++i) {
    open.stream = i;
    auto session = std::make_shared<DataSession>(shared_from_this(), open.attempt);
    link_.data.push_back(parts().transport->OpenData(setup_.peer, open, session));
    parts().metrics->AddOverheadBytes(MessageBytes(open));
  }
  UpdateReport([&](TransferReport& r) { r.streams = count; });
  OnDataStreamAdded();
}

void Transfer::Tell(ControlFrame frame) {
  if (link_.control == nullptr) return;
  parts().metrics->AddOverheadBytes(MessageBytes(frame));
  link_.control->Send(std::move(frame));
}

bool Transfer::CheckPeerEpoch(uint64_t epoch) {
  if (peer_epoch_ != 0 && epoch != peer_epoch_) {
    Fail(PeerRestarted());
    return false;
  }
  peer_epoch_ = epoch;
  return true;
}

void Transfer::Joined() {
  link_.joined = true;
  link_lost_ns_ = 0;
  backoff_ms_ = 0;
  last_break_.clear();
  AddStage(Stage::kQueue, SecondsSinceStart());
  NoteBusy(true);
  Apply(Event::kPeerJoined);
}

void Transfer::NoteBusy(bool busy) {
  if (refines() || busy == busy_) return;
  busy_ = busy;
  setup_.host->OnBusy(busy ? 1 : -1);
}

void Transfer::OnControlFrame(const std::shared_ptr<ControlSession>& session, ControlFrame frame) {
  if (session != link_.session || terminal()) return;
  Heard();
  parts().metrics->AddOverheadBytes(MessageBytes(frame));
  if (std::holds_alternative<HeartbeatFrame>(frame)) return;
  HandleFrame(frame);
}

void Transfer::OnControlClosed(const std::shared_ptr<ControlSession>& session, absl::Status status) {
  if (session != link_.session || terminal()) return;
  LinkBroke(std::move(status));
}

void Transfer::OnDataClosed(uint32_t attempt, absl::Status status) {
  if (terminal() || attempt != attempt_.load() || link_.control == nullptr || status.ok()) return;
  // A peer that ends a transfer closes all its streams; its reason comes on the control stream, perhaps a little later.
  parts().clock->CallAt(NowNs() + kDataGraceMs * kMsToNs, [weak = weak_from_this(), attempt, status] {
    std::shared_ptr<Transfer> self = weak.lock();
    if (self == nullptr) return;
    Transfer* t = self.get();
    t->Post([t, attempt, status] {
      if (attempt == t->attempt_.load() && t->link_.control != nullptr) t->LinkBroke(status);
    });
  });
}

void Transfer::PeerEnded(const CancelFrame& cancel, const std::string& who) {
  const Event event = cancel.cause == TransferState::kCancelled ? Event::kPeerCancelled
                      : cancel.cause == TransferState::kExpired ? Event::kPeerExpired
                                                                : Event::kPeerFailed;
  Apply(event, PeerError(cancel, who));
}

// A transfer that failed over silence, or ended while heartbeats were overdue, leaves no connection for the next.
void Transfer::GiveUpSilentPeer() {
  if (!dials() || link_.control == nullptr || state_ == TransferState::kCommitted) return;
  if (HeartbeatsOverdue()) parts().transport->GiveUp(setup_.peer);
}

bool Transfer::HeartbeatsOverdue() const {
  const int64_t silent_ns = NowNs() - last_heard_ns_.load(std::memory_order_relaxed);
  return silent_ns >= options().progress_timeout_ms * kMsToNs / 3 * 2;
}

// Since when there has been no sign of the peer. A link that breaks is one, unless it broke over silence.
int64_t Transfer::SilentSinceNs() const {
  return std::max(last_heard_ns_.load(std::memory_order_relaxed), link_lost_ns_);
}

void Transfer::DropLink(bool good_order) {
  const absl::Status status = good_order ? absl::OkStatus() : absl::CancelledError("the attempt has ended");
  for (auto& stream : link_.data) stream->Close(status);
  if (link_.control != nullptr) link_.control->Close(absl::OkStatus());
  if (link_.session_id != 0 && !dials()) setup_.host->DropSession(link_.session_id);
  link_ = Link{};
}

void Transfer::LinkBroke(absl::Status why) {
  if (terminal()) return;
  SPECTRUMKV_LOG(kInfo, "transfer", "link broke", {"transfer", id()}, {"why", std::string(why.message())});
  OnLinkLost();
  DropLink(false);
  if (terminal()) return;  // it knew better why
  if (!WorthRedialling(why)) return Fail(std::move(why));  // counted as the end of the transfer
  parts().metrics->CountError(ErrorStage(), why.ok() ? absl::StatusCode::kUnavailable : why.code());
  last_break_ = std::string(why.message());
  const int64_t now = NowNs();
  if (link_lost_ns_ == 0) link_lost_ns_ = HeartbeatsOverdue() ? last_heard_ns_.load(std::memory_order_relaxed) : now;
  // A daemon that comes to listen there later has another epoch, and nothing of this transfer.
  if (peer_epoch_ != 0 && ReasonOf(why) == kNobodyListens) {
    return Fail(MakeError(absl::StatusCode::kUnavailable, "PEER_GONE",
                          absl::StrCat("nobody listens at ", setup_.peer, " any more: ", std::string(why.message())),
                          {{"peer", setup_.peer}}));
  }
  if (now - link_lost_ns_ >= options().progress_timeout_ms * kMsToNs) return FailWithoutLink();
  if (dials()) ScheduleRedial();
  ArmTick();
}

// The link broke, and nothing came after it for the progress timeout.
void Transfer::FailWithoutLink() {
  const std::string patience = absl::StrCat(options().progress_timeout_ms, " ms");
  if (!dials()) {
    return Fail(MakeError(absl::StatusCode::kUnavailable, "PEER_GONE",
                          absl::StrCat("the peer did not come back within ", patience, ": ", last_break_)));
  }
  Fail(MakeError(absl::StatusCode::kUnavailable, peer_epoch_ == 0 ? "PEER_UNREACHABLE" : "PEER_GONE",
                 absl::StrCat("no connection to the peer ", setup_.peer, " for ", patience, ": ", last_break_),
                 {{"peer", setup_.peer}}));
}

void Transfer::ScheduleRedial() {
  backoff_ms_ = backoff_ms_ == 0 ? kFirstBackoffMs : std::min(2 * backoff_ms_, kMaxBackoffMs);
  redial_timer_ = parts().clock->CallAt(NowNs() + backoff_ms_ * kMsToNs, Weakly(&Transfer::Dial));
}

void Transfer::ArmTick() {
  if (terminal()) return;
  if (tick_timer_ != 0) parts().clock->Cancel(tick_timer_);
  const int64_t patience_ns = options().progress_timeout_ms * kMsToNs;
  int64_t at = NowNs() + patience_ns / 3;
  if (link_.control != nullptr) {
    at = std::min(at, SilentSinceNs() + patience_ns);
  } else if (link_lost_ns_ != 0) {
    at = std::min(at, link_lost_ns_ + patience_ns);
  }
  tick_timer_ = parts().clock->CallAt(at, Weakly(&Transfer::Tick));
}

// Every third of the progress timeout, and where it is over: say that we live, and notice that the peer does not.
void Transfer::Tick() {
  if (terminal()) return;
  const int64_t now = NowNs();
  const int64_t patience_ns = options().progress_timeout_ms * kMsToNs;
  if (!link_.joined) NoteBusy(false);  // it waits for its other half, perhaps for long
  if (link_.control == nullptr) {
    if (link_lost_ns_ != 0 && now - link_lost_ns_ >= patience_ns) return FailWithoutLink();
  } else {
    if (now - SilentSinceNs() >= patience_ns) {
      if (link_lost_ns_ > last_heard_ns_.load(std::memory_order_relaxed)) return FailWithoutLink();
      return Fail(MakeError(absl::StatusCode::kUnavailable, "PEER_SILENT",
                            absl::StrCat("the peer has been silent for ", options().progress_timeout_ms, " ms")));
    }
    Tell(HeartbeatFrame{HeartbeatReason()});
  }
  NotifyProgress();
  ArmTick();
}

}  // namespace spectrumkv
