// WatchTransfer: events of a transfer as a stream, until its end or, where that is asked for, until it is exact. Layers ready and the ends are never lost; progress is only ever the
// latest. The queue is bounded: a transfer has at most kMaxLayers steps, and later ones imply the earlier.
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "server/service/stream_writer.h"
#include "server/service/worker_calls.h"

namespace spectrumkv {
namespace {

using WatchBase = grpc::ServerWriteReactor<v1::WatchTransferResponse>;

class WatchReactor final : public StreamWriter<WatchBase, v1::WatchTransferResponse>,
                           public TransferWatcher,
                           public std::enable_shared_from_this<WatchReactor> {
 public:
  WatchReactor(const ServiceContext* context, const Caller& caller) : context_(context), caller_(caller) {}

  static WatchReactor* Begin(const ServiceContext* context, const Caller& caller, const v1::WatchTransferRequest& request) {
    auto reactor = std::make_shared<WatchReactor>(context, caller);
    reactor->self_ = reactor;
    const absl::Status status = reactor->Watch(request, reactor);
    if (!status.ok()) {
      {
        std::lock_guard<std::mutex> lock(reactor->mutex_);
        reactor->EndLocked(EndOf(*context, MetricStage::kQueue, status));
      }
      reactor->Pump();
    }
    return reactor.get();
  }

  void OnLayersReady(uint32_t layers) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (layers_.size() >= static_cast<size_t>(kMaxLayers)) layers_.pop_back();
      layers_.push_back(layers);
    }
    Pump();
  }
  void OnProgress(const TransferReport& report) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      progress_ = Progress{report.state, report.chunks, report.chunks_total, report.wire_bytes, report.choice};
    }
    Pump();
  }
  void OnTerminal(const TransferReport& report) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      terminal_ = report;
      committed_ = until_exact_ && report.state == TransferState::kCommitted;
      if (!committed_) EndLocked(grpc::Status::OK);
    }
    Pump();
    AwaitExact();
  }
  // The end of what was retained, or all there is to gain.
  void OnRefined(const TransferReport& report) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      refined_ = report;
      EndLocked(grpc::Status::OK);
    }
    Pump();
  }

  void OnDone() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      gone_ = true;
    }
    if (watch_id_.has_value()) context_->transfers->Unwatch(transfer_id_, role_, *watch_id_);
    // The manager may hold this watcher a little longer; its events then go nowhere.
    const std::shared_ptr<WatchReactor> last = std::move(self_);
  }

 protected:
  bool NextLocked(v1::WatchTransferResponse* next) override {
    if (!layers_.empty()) {
      next->mutable_layers_ready()->set_layers(layers_.front());
      layers_.pop_front();
      return true;
    }
    if (terminal_.has_value()) {
      ReportToProto(*terminal_, next->mutable_terminal());
      terminal_.reset();
      progress_.reset();
      return true;
    }
    if (refined_.has_value()) {
      ReportToProto(*refined_, refined_->exact ? next->mutable_exact() : next->mutable_released());
      refined_.reset();
      return true;
    }
    if (progress_.has_value()) {
      next->mutable_progress()->set_state(StateToProto(progress_->state));
      next->mutable_progress()->set_chunks_done(progress_->chunks_done);
      next->mutable_progress()->set_chunks_total(progress_->chunks_total);
      next->mutable_progress()->set_wire_bytes(progress_->wire_bytes);
      if (progress_->choice.has_value()) {
        BudgetChoiceToProto(*progress_->choice, next->mutable_progress()->mutable_budget_choice());
      }
      progress_.reset();
      return true;
    }
    return false;
  }

 private:
  struct Progress {
    TransferState state;
    uint64_t chunks_done, chunks_total, wire_bytes;
    std::optional<BudgetChoice> choice;
  };

  absl::Status Watch(const v1::WatchTransferRequest& request, const std::shared_ptr<WatchReactor>& self) {
    const auto role = RoleOfKey(request.transfer());
    if (!role.ok()) return role.status();
    transfer_id_ = request.transfer().transfer_id();
    // The role by name: the other half may come later, and Unwatch must still mean this one.
    const auto report = context_->transfers->Get(caller_, transfer_id_, *role);
    if (!report.ok()) return report.status();
    role_ = report->role;
    until_exact_ = request.until_exact();
    const auto watch_id = context_->transfers->Watch(caller_, transfer_id_, role_, self);
    if (!watch_id.ok()) return watch_id.status();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      watch_id_ = *watch_id;
    }
    AwaitExact();
    return absl::OkStatus();
  }

  // Once the transfer has committed and Watch has its id, whichever comes last.
  void AwaitExact() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!committed_ || !watch_id_.has_value() || gone_ || awaiting_) return;
      awaiting_ = true;
    }
    const absl::Status awaited =
        context_->transfers->AwaitExact(caller_, transfer_id_, role_, *watch_id_,
                                        [self = shared_from_this()](const TransferReport& report) { self->OnRefined(report); });
    bool gone = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!awaited.ok()) EndLocked(EndOf(*context_, MetricStage::kQueue, awaited));
      gone = gone_;
    }
    if (gone) context_->transfers->Unwatch(transfer_id_, role_, *watch_id_);  // OnDone came too early
    Pump();
  }

  const ServiceContext* const context_;
  const Caller caller_;
  std::shared_ptr<WatchReactor> self_;
  std::string transfer_id_;
  Role role_ = Role::kSender;
  bool until_exact_ = false;
  // Under mutex_.
  std::optional<uint64_t> watch_id_;  // set once
  bool committed_ = false, awaiting_ = false, gone_ = false;
  std::optional<TransferReport> refined_;
  std::deque<uint32_t> layers_;
  std::optional<Progress> progress_;
  std::optional<TransferReport> terminal_;
};

}  // namespace

WatchBase* WatchTransfer(const ServiceContext* context, CallContext* call, const v1::WatchTransferRequest* request) {
  return WatchReactor::Begin(context, CallerOf(*context, *call), *request);
}

}  // namespace spectrumkv
