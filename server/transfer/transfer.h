// What both halves of a transfer share: its strand, state, deadline, link to the peer, watchers and report.
//
// Everything marked "strand" runs on the transfer's strand, one thing at a time. A Transfer is kept alive by its manager,
// its streams and its queued work.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "server/transfer/gate.h"
#include "server/transfer/rates.h"
#include "server/transfer/session.h"
#include "server/transfer/state_table.h"
#include "server/transfer/transfer_manager.h"

namespace spectrumkv {

inline MetricRole MetricRoleOf(Role role) { return role == Role::kSender ? MetricRole::kSender : MetricRole::kReceiver; }

class PartGroup;
class Transfer;
struct RetainedSource;  // refinement.h, as the next
struct RefineBase;

// What transfers ask of their manager. Thread-safe.
class TransferHost {
 public:
  virtual ~TransferHost() = default;
  // The transfer has ended and holds nothing any more; then, when everybody has been told, OnDone.
  virtual void OnSettled(const std::shared_ptr<Transfer>& transfer) = 0;
  virtual void OnDone(const Transfer& transfer) = 0;
  // A number that names one attempt of this transfer on Data streams, until DropSession.
  virtual uint64_t NewSession(const std::shared_ptr<Transfer>& transfer, uint32_t attempt) = 0;
  virtual void DropSession(uint64_t session) = 0;
  virtual void CountPeer(const std::string& address, const char* direction, const TransferReport* ended) = 0;
  virtual RateBook& rates() = 0;
  // A sender or receiver has committed: its source, or its destination, is kept for refinements. False: it is not, there
  // are too many, or the daemon drains.
  virtual bool Retain(RetainedSource source) = 0;
  virtual bool KeepBase(std::shared_ptr<RefineBase> base) = 0;
  virtual uint32_t peer_port() const = 0;
  // Transfers that are no refinements and move bytes: from OnBusy(1) to OnBusy(-1). A refinement sends nothing meanwhile.
  virtual void OnBusy(int delta) = 0;
  // How long a refinement must wait before it may send more; 0: it may now. CountRefined: it has sent.
  virtual int64_t RefinePauseNs() = 0;
  virtual void CountRefined(uint64_t bytes) = 0;
};

struct TransferSetup {
  const TransferOptions* options = nullptr;
  const TransferParts* parts = nullptr;
  TransferHost* host = nullptr;
  Role role = Role::kSender;
  std::string id, token, peer, fingerprint;
  PartId part;
  std::string refines;      // of a refinement: the transfer that it makes better
  uint64_t peer_epoch = 0;  // of the daemon that must answer; 0: any
};

// A peer's last words as a status; codes and reasons that make no sense are replaced.
absl::Status PeerError(const CancelFrame& cancel, const std::string& who);

class Transfer : public std::enable_shared_from_this<Transfer> {
 public:
  explicit Transfer(TransferSetup setup);
  virtual ~Transfer() = default;

  const std::string& id() const { return setup_.id; }
  const std::string& token() const { return setup_.token; }
  const std::string& fingerprint() const { return setup_.fingerprint; }
  Role role() const { return setup_.role; }
  const PartId& part() const { return setup_.part; }
  // Before the first task: this is one of several parts, which end together.
  void JoinParts(std::shared_ptr<PartGroup> group) { group_ = std::move(group); }
  bool is_part() const { return group_ != nullptr; }
  bool refines() const { return !setup_.refines.empty(); }

  // Any thread. The transfer lives until the task has run. Templates, so that a task is one allocation and not two.
  template <typename Task>
  void Post(Task task) {
    strand_.Post([self = shared_from_this(), run = std::move(task)]() mutable { run(); });
  }
  // As Post, but perhaps inside this call (Strand::Dispatch).
  template <typename Task>
  void Dispatch(Task task) {
    strand_.Dispatch([self = shared_from_this(), run = std::move(task)]() mutable { run(); });
  }
  TransferReport Snapshot() const;
  bool settled() const { return settled_.load(std::memory_order_acquire); }
  // A chunk arrived on a data stream of `attempt`.
  virtual void OnChunk(uint32_t attempt, std::unique_ptr<ReceivedChunk> chunk) = 0;

  // Strand.
  virtual void Start() = 0;
  void OnControlFrame(const std::shared_ptr<ControlSession>& session, ControlFrame frame);
  void OnControlClosed(const std::shared_ptr<ControlSession>& session, absl::Status status);
  void OnDataClosed(uint32_t attempt, absl::Status status);
  // A peer dialled and named this transfer.
  void Adopt(const std::shared_ptr<ControlSession>& session, const HelloFrame& hello);
  void AdoptData(uint32_t attempt, std::shared_ptr<DataStream> stream);
  void AddWatcher(uint64_t id, std::shared_ptr<TransferWatcher> watcher);
  void RemoveWatcher(uint64_t id) { watchers_.erase(id); }
  void Cancel(std::function<void(absl::StatusOr<TransferReport>)> done);
  void Fail(absl::Status why) { Apply(Event::kFail, std::move(why)); }
  // From PartGroup. Of a receiver: all parts are complete, now look at this one's memory; all are good, commit. Another
  // part has ended the transfer; `known`: it cannot have committed at the receiver.
  virtual void BeginCommit() {}
  void CommitDecided() { Apply(Event::kCommit); }
  void EndWithPart(TransferState state, const absl::Status& why, bool known);

 protected:
  // The way to the peer of one attempt.
  struct Link {
    std::shared_ptr<ControlSession> session;
    std::shared_ptr<ControlStream> control;
    std::vector<std::shared_ptr<DataStream>> data;
    uint64_t session_id = 0;
    bool joined = false;
  };

  // Strand. For the two halves.
  virtual void HandleFrame(ControlFrame& frame) = 0;
  virtual HelloFrame MakeHello() const = 0;
  // After Hello was sent (dialler) or answered (acceptor).
  virtual void OnGreeted() = 0;
  // The peer's hello must fit this half; the answer refuses it.
  virtual absl::Status CheckHello(const HelloFrame& hello) = 0;
  virtual void OnDataStreamAdded() {}
  virtual void OnLinkLost() {}
  virtual void OnAction(Action action) = 0;
  virtual const char* HeartbeatReason() const = 0;
  // Close the gate; then Settle on the strand.
  virtual void StopWork() = 0;
  // Last words to the peer, if there is a link.
  virtual void SayGoodbye() = 0;
  // Let go of blocks and slots.
  virtual void ReleaseAll() = 0;
  // The end has come: what there is to say about how the time was spent.
  virtual void Conclude() = 0;

  const std::string& peer_address() const { return setup_.peer; }  // empty: the peer dials
  bool dials() const { return !setup_.peer.empty(); }
  const TransferOptions& options() const { return *setup_.options; }
  const TransferParts& parts() const { return *setup_.parts; }
  TransferHost& host() const { return *setup_.host; }
  TransferState state() const { return state_; }
  bool terminal() const { return IsTerminal(state_); }
  int64_t NowNs() const { return parts().clock->NowNs(); }
  void Heard() { last_heard_ns_.store(NowNs(), std::memory_order_relaxed); }
  double SecondsSinceStart() const { return static_cast<double>(NowNs() - started_ns_) * 1e-9; }
  int64_t DeadlineLeftMs() const;

  void Apply(Event event, absl::Status why = absl::OkStatus());
  // The other side, `who`, says that it has ended the transfer.
  void PeerEnded(const CancelFrame& cancel, const std::string& who);
  void ArmDeadline(int64_t deadline_ms);
  void Dial();
  void OpenDataStreams(uint32_t count);
  void Tell(ControlFrame frame);
  // The current attempt broke off without a word about the outcome.
  void LinkBroke(absl::Status why);
  void Joined();
  void Settle();
  void NotifyLayers(uint32_t layers);
  void NotifyProgress();
  template <typename Fn>
  void UpdateReport(Fn fn) {
    std::lock_guard<std::mutex> lock(report_mutex_);
    fn(report_);
  }
  void AddStage(Stage stage, double seconds);
  // Chunks are coded on a GPU.
  void ReportDevice() {
    UpdateReport([](TransferReport& r) {
      r.backend = "cuda";
      r.path = "device";
    });
  }
  // The stage an error of now belongs to, for the metric.
  MetricStage ErrorStage() const;
  MetricRole metric_role() const { return MetricRoleOf(role()); }

  std::shared_ptr<PartGroup> group_;  // null: the transfer has one part
  Link link_;
  std::atomic<uint32_t> attempt_{0};
  Gate gate_;
  // Of a lost or ended transfer; the reason others see.
  absl::Status error_;
  bool kept_ = false;  // for refinements: what it has saved is known when they have ended

 private:
  absl::Status CheckAttempt(const HelloFrame& hello) const;
  void HearLastWords(const ControlSession& session, const HelloFrame& hello);
  void DropLink(bool good_order);
  void GiveUpSilentPeer();
  // Two heartbeats of the peer's.
  bool HeartbeatsOverdue() const;
  int64_t SilentSinceNs() const;
  void NoteBusy(bool busy);
  void FailWithoutLink();
  void ScheduleRedial();
  void Tick();
  void ArmTick();
  void Terminate();
  void CountOutcome(const TransferReport& report);
  std::function<void()> Weakly(void (Transfer::*method)());

  const TransferSetup setup_;
  Strand strand_;
  TransferState state_ = TransferState::kWaiting;
  const int64_t started_ns_;
  int64_t deadline_ns_ = 0;
  TimerId deadline_timer_ = 0, tick_timer_ = 0, redial_timer_ = 0;
  std::atomic<int64_t> last_heard_ns_{0};
  int64_t link_lost_ns_ = 0;  // 0: the link is up, or never was
  int64_t backoff_ms_ = 0;
  std::string last_break_;  // why the link broke, until it is up again
  uint64_t peer_epoch_;
  std::atomic<bool> settled_{false};
  std::map<uint64_t, std::shared_ptr<TransferWatcher>> watchers_;
  std::vector<std::function<void(absl::StatusOr<TransferReport>)>> cancel_waiters_;
  uint32_t layers_told_ = 0;
  bool busy_ = false;  // as TransferHost::OnBusy knows

  mutable std::mutex report_mutex_;
  TransferReport report_;

 protected:
  uint64_t peer_epoch() const { return peer_epoch_; }
  // False, and the transfer has failed, if the peer is not the one of an earlier attempt.
  bool CheckPeerEpoch(uint64_t epoch);
};

}  // namespace spectrumkv
