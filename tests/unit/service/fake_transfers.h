// A TransferManager that does what the test says.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/base/status.h"
#include "server/transfer/transfer_manager.h"
#include "tests/unit/base/me.h"

namespace spectrumkv {

// Knows one transfer, "known", a receiver of kMe. Thread-safe.
class FakeTransfers final : public TransferManager {
 public:
  absl::Status StartSender(SenderSpec spec) override {
    std::lock_guard<std::mutex> lock(mutex_);
    senders.push_back(std::move(spec));
    return absl::OkStatus();
  }
  absl::Status StartReceiver(ReceiverSpec spec) override {
    std::lock_guard<std::mutex> lock(mutex_);
    receivers.push_back(std::move(spec));
    return absl::OkStatus();
  }
  std::optional<absl::Status> FindRepeat(const Caller&, const std::string&, Role, PartId, const std::string&) override { return std::nullopt; }
  absl::Status Advance(const Caller& caller, const std::string& id, uint32_t, uint32_t, const LaterImportance&, const std::string&,
                       uint32_t) override {
    return Known(caller, id);
  }
  absl::StatusOr<TransferReport> Get(const Caller& caller, const std::string& id, std::optional<Role>) override {
    if (absl::Status known = Known(caller, id); !known.ok()) return known;
    return Report(TransferState::kStreaming);
  }
  absl::StatusOr<uint64_t> Watch(const Caller& caller, const std::string& id, std::optional<Role>,
                                 std::shared_ptr<TransferWatcher> new_watcher) override {
    if (absl::Status known = Known(caller, id); !known.ok()) return known;
    std::lock_guard<std::mutex> lock(mutex_);
    watcher_ = std::move(new_watcher);
    return 7;
  }
  void Unwatch(const std::string&, Role role, uint64_t watch_id) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (role == Role::kReceiver && watch_id == 7) ++unwatched_;
    watcher_.reset();
  }
  void Cancel(const Caller& caller, const std::string& id, std::optional<Role>,
              std::function<void(absl::StatusOr<TransferReport>)> done) override {
    if (absl::Status known = Known(caller, id); !known.ok()) return done(known);
    std::lock_guard<std::mutex> lock(mutex_);
    cancels_.push_back(std::move(done));
  }
  absl::Status Release(const Caller& caller, const std::string& id, std::optional<Role>) override {
    ++releases;
    return Known(caller, id);
  }
  absl::Status ReportFirstToken(const Caller& caller, const std::string& id, std::optional<Role>, double) override { return Known(caller, id); }
  absl::StatusOr<RefineStarted> Refine(RefineSpec spec) override {
    if (absl::Status known = Known(spec.owner, spec.transfer_id); !known.ok()) return known;
    std::lock_guard<std::mutex> lock(mutex_);
    refinements.push_back(std::move(spec));
    return RefineStarted{7, 3, 1000};
  }
  void ApplyRefinement(ApplySpec spec, std::function<void(absl::StatusOr<RefinementApplied>)> done) override {
    ++applies;
    if (absl::Status known = Known(spec.owner, spec.refine_id); !known.ok()) return done(known);
    done(RefinementApplied{spec.max_bytes, 5, spec.read_event.size(), true});
  }
  absl::Status AwaitExact(const Caller& caller, const std::string& id, Role, uint64_t,
                          std::function<void(const TransferReport&)> done) override {
    if (absl::Status known = Known(caller, id); !known.ok()) return known;
    std::lock_guard<std::mutex> lock(mutex_);
    exact_waiter_ = std::move(done);
    return absl::OkStatus();
  }
  void MoveToCache(const Caller& caller, const std::string& id, std::optional<Role>,
                   std::function<void(absl::StatusOr<bool>)> done) override {
    if (absl::Status known = Known(caller, id); !known.ok()) return done(known);
    done(has_cache);
  }
  RefineMemory refine_memory() const override { return {}; }
  void EndRefinements(const Caller&, const std::string&, std::optional<Role>, std::function<void()> done) override { done(); }
  void EndRefinementsOf(const std::string&) override {}
  void SetPeerPort(uint32_t) override {}
  std::vector<TransferReport> List(uint32_t, bool) override { return {}; }
  std::vector<PeerStatus> ListPeers() override { return {}; }
  Measured MeasuredOf(const std::string&, CodedBy) override { return {}; }
  StageRates StagesOf(CodedBy) override { return {}; }
  uint32_t active() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return active_;
  }
  void StartDraining(std::function<void()> done) override {
    std::lock_guard<std::mutex> lock(mutex_);
    ++drains_;
    drained_ = std::move(done);
  }
  void Shutdown() override {}
  std::shared_ptr<ControlListener> OnControl(std::shared_ptr<ControlStream>) override { return nullptr; }
  std::shared_ptr<DataListener> OnData(std::shared_ptr<DataStream>, const DataOpenFrame&) override { return nullptr; }

  static TransferReport Report(TransferState state) {
    TransferReport report;
    report.transfer_id = "known";
    report.role = Role::kReceiver;
    report.state = state;
    return report;
  }

  // What tests turn.
  std::atomic<bool> has_cache{false};
  std::atomic<int> releases{0}, applies{0};
  // Once somebody waits for it.
  void TellExact(const TransferReport& report) {
    std::function<void(const TransferReport&)> waiter;
    while (waiter == nullptr) {
      std::this_thread::yield();
      std::lock_guard<std::mutex> lock(mutex_);
      waiter = std::exchange(exact_waiter_, nullptr);
    }
    waiter(report);
  }
  std::shared_ptr<TransferWatcher> watcher() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return watcher_;
  }
  int unwatched() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return unwatched_;
  }
  size_t cancels() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return cancels_.size();
  }
  void FinishCancels() {
    std::vector<std::function<void(absl::StatusOr<TransferReport>)>> cancels;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      cancels.swap(cancels_);
    }
    for (auto& done : cancels) done(Report(TransferState::kCancelled));
  }
  void SetActive(uint32_t active) {
    std::lock_guard<std::mutex> lock(mutex_);
    active_ = active;
  }
  int drains() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return drains_;
  }
  void FinishDrain() {
    std::function<void()> done;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      done.swap(drained_);
      active_ = 0;
    }
    if (done) done();
  }

  std::vector<SenderSpec> senders;
  std::vector<ReceiverSpec> receivers;
  std::vector<RefineSpec> refinements;

 private:
  static absl::Status Known(const Caller& caller, const std::string& id) {
    if (id == "known") return CheckOwner(kMe, caller, "transfer_id");
    return MakeError(absl::StatusCode::kNotFound, "UNKNOWN_TRANSFER", "there is no transfer " + id);
  }

  mutable std::mutex mutex_;
  std::shared_ptr<TransferWatcher> watcher_;
  std::function<void(const TransferReport&)> exact_waiter_;
  int unwatched_ = 0;
  std::vector<std::function<void(absl::StatusOr<TransferReport>)>> cancels_;
  uint32_t active_ = 0;
  int drains_ = 0;
  std::function<void()> drained_;
};

}  // namespace spectrumkv
