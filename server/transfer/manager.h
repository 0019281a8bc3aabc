// The TransferManager: finds, starts, remembers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "server/transfer/parking.h"
#include "server/transfer/part_group.h"
#include "server/transfer/refinement.h"
#include "server/transfer/transfer.h"
#include "server/transfer/transfer_manager.h"

namespace spectrumkv {

class TransferManagerImpl final : public TransferManager, public TransferHost {
 public:
  TransferManagerImpl(TransferOptions options, TransferParts parts);
  ~TransferManagerImpl() override;

  absl::Status StartSender(SenderSpec spec) override;
  absl::Status StartReceiver(ReceiverSpec spec) override;
  std::optional<absl::Status> FindRepeat(const Caller& caller, const std::string& transfer_id, Role role,
                                         PartId part, const std::string& fingerprint) override;
  absl::Status Advance(const Caller& caller, const std::string& transfer_id, uint32_t layers, uint32_t tokens,
                       const LaterImportance& importance, const std::string& written_event,
                       uint32_t part_index) override;
  absl::StatusOr<TransferReport> Get(const Caller& caller, const std::string& transfer_id, std::optional<Role> role) override;
  absl::StatusOr<uint64_t> Watch(const Caller& caller, const std::string& transfer_id, std::optional<Role> role,
                                 std::shared_ptr<TransferWatcher> watcher) override;
  void Unwatch(const std::string& transfer_id, Role role, uint64_t watch_id) override;
  void Cancel(const Caller& caller, const std::string& transfer_id, std::optional<Role> role,
              std::function<void(absl::StatusOr<TransferReport>)> done) override;
  absl::Status Release(const Caller& caller, const std::string& transfer_id, std::optional<Role> role) override;
  absl::Status ReportFirstToken(const Caller& caller, const std::string& transfer_id, std::optional<Role> role, double seconds) override;
  std::vector<TransferReport> List(uint32_t limit, bool active_only) override;
  std::vector<PeerStatus> ListPeers() override;
  absl::StatusOr<RefineStarted> Refine(RefineSpec spec) override;
  void ApplyRefinement(ApplySpec spec, std::function<void(absl::StatusOr<RefinementApplied>)> done) override;
  absl::Status AwaitExact(const Caller& caller, const std::string& transfer_id, Role role, uint64_t watch_id,
                          std::function<void(const TransferReport&)> done) override;
  void MoveToCache(const Caller& caller, const std::string& transfer_id, std::optional<Role> role,
                   std::function<void(absl::StatusOr<bool>)> done) override;
  RefineMemory refine_memory() const override { return {staging_->used(), cache_->used()}; }
  void EndRefinements(const Caller& caller, const std::string& transfer_id, std::optional<Role> role,
                      std::function<void()> done) override;
  void EndRefinementsOf(const std::string& pool_id) override;
  void SetPeerPort(uint32_t port) override { peer_port_.store(port); }
  Measured MeasuredOf(const std::string& peer, CodedBy by) override;
  StageRates StagesOf(CodedBy by) override;
  uint32_t active() const override;
  void StartDraining(std::function<void()> done) override;
  void Shutdown() override;

  std::shared_ptr<ControlListener> OnControl(std::shared_ptr<ControlStream> stream) override;
  std::shared_ptr<DataListener> OnData(std::shared_ptr<DataStream> stream, const DataOpenFrame& open) override;
  void OnStranger(const absl::Status& status) override;
  void OnDataRefused(const absl::Status& status) override;

  void OnSettled(const std::shared_ptr<Transfer>& transfer) override;
  void OnDone(const Transfer& transfer) override;
  uint64_t NewSession(const std::shared_ptr<Transfer>& transfer, uint32_t attempt) override;
  void DropSession(uint64_t session) override;
  void CountPeer(const std::string& address, const char* direction, const TransferReport* ended) override;
  RateBook& rates() override { return rates_; }
  bool Retain(RetainedSource source) override;
  bool KeepBase(std::shared_ptr<RefineBase> base) override;
  uint32_t peer_port() const override { return peer_port_.load(); }
  void OnBusy(int delta) override { busy_.fetch_add(delta, std::memory_order_relaxed); }
  int64_t RefinePauseNs() override;
  void CountRefined(uint64_t bytes) override;

  // For tests: transfers that are kept, in either role.
  size_t kept() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return kept_.size();
  }

 private:
  using Key = std::pair<Role, std::string>;
  // A transfer of this daemon: running (one of the first two set), or remembered for late callers.
  struct Entry {
    std::shared_ptr<Transfer> transfer;  // the only part
    std::shared_ptr<PartGroup> group;    // several
    uint32_t part_count = 1;
    std::map<uint32_t, std::string> fingerprints;  // of the requests, by part
    std::string token, peer;
    Caller owner;
    bool dials = false;
    TransferReport report;
    int64_t ended_ns = 0;
    bool first_token_reported = false;
    std::shared_ptr<Refinement> refinement;  // a refinement's receiver
    std::vector<std::weak_ptr<Refinement>> refinements;  // of it, at the receiver

    bool live() const { return transfer != nullptr || group != nullptr; }
    TransferReport Now() const;
    std::shared_ptr<Transfer> Find(uint32_t part_index) const;  // null: not here, or settled
  };
  struct Session {
    std::weak_ptr<Transfer> transfer;
    uint32_t attempt = 0;
  };

  // What a worker's call says of the transfer, or part, that it begins.
  struct NewHalf {
    Caller owner;
    std::string pool_id, token, peer, fingerprint;
    PartId part;
    std::vector<uint32_t> layers;  // of its pool, ascending
    std::string refines;
    std::shared_ptr<Refinement> refinement;
  };
  // Is told of the end of a retention, and what had been refined of it until then.
  using Closer = std::function<void(const std::vector<std::shared_ptr<Refinement>>&)>;
  // What is kept of a transfer after its commit, so that it can be refined.
  struct Kept {
    std::shared_ptr<RetainedSource> source;  // a sender's
    std::shared_ptr<RefineBase> base;        // a receiver's
    std::string pool_id;
    int64_t until_ns = 0;
    TimerId timer = 0;
    uint64_t kv_bytes = 0, wire_bytes = 0, refined_wire_bytes = 0;
    // Refinements that run, and those that are about to: each is in it once for itself, whatever ids others have.
    std::multiset<std::string> children;
    bool ended = false;
    std::shared_ptr<std::atomic<bool>> over = std::make_shared<std::atomic<bool>>(false);  // ended, without the lock
    uint32_t rounds = 0, failures = 0;  // of refinement in the background; the latter one after another
    std::vector<Closer> waiters;  // for its end
    std::map<uint64_t, std::function<void(const TransferReport&)>> exact_waiters;  // for that, or the end; by watch
    int64_t used_ns = 0;  // when a refinement last began to read it
    bool cached = false;  // its words are in cache_
    // It is on its way there: waits for its turn, then is read, then the copy is there; and who waits for that.
    bool moving = false, copying = false;
    std::shared_ptr<BlockHold> copy;
    std::vector<std::function<void(bool cached)>> movers;
  };
  // A step of ApplyRefinement: its worker's event has been reached, or is asked for again.
  struct Applying;
  // How a pool's last word finds the manager, or that it is gone.
  struct Door {
    std::mutex mutex;
    TransferManagerImpl* manager = nullptr;
  };
  template <typename Spec>
  static NewHalf HalfOf(const Spec& spec, const PoolSchema& schema);
  absl::Status CheckNew(const Key& key, const NewHalf& half);  // REQUIRES mutex_
  absl::Status CheckQuotas(const NewHalf& half) const;          // REQUIRES mutex_
  // manager_parts.cc. REQUIRE mutex_, all but OnPartsOver, Welcome and CheckPartOf.
  std::optional<absl::Status> FindPart(const Entry& entry, const Key& key, PartId part,
                                       const std::string& fingerprint) const;
  absl::Status CheckJoins(const Entry& entry, const Key& key, const NewHalf& half) const;
  std::shared_ptr<PartGroup> NewGroup(const Key& key, uint32_t count);
  void OnPartsOver(const std::shared_ptr<PartGroup>& group, const TransferReport& whole);
  void Remember(const Key& key, const TransferReport& report);
  static std::optional<TransferReport> LateAnswer(const Entry& entry, uint32_t part_index);
  // Hears those who came before, of one part or of any.
  void Welcome(const Key& key, std::optional<uint32_t> part_index = std::nullopt);
  static absl::Status CheckPartOf(const HelloFrame& hello);
  absl::Status CheckPartCount(const Entry& entry, Role ours, const HelloFrame& hello) const;
  // One of untold_ has been told.
  void Told();
  // manager_refine.cc.
  bool AddKept(const Key& key, Kept kept, uint64_t retain_ms);
  // of_pool: only where it still is in that pool.
  void EndKept(const Key& key, const absl::Status& why, Closer done = nullptr, const std::string* of_pool = nullptr);
  // Those of it at the receiver, and what it is itself if it is over. REQUIRES mutex_
  std::vector<std::shared_ptr<Refinement>> RefinementsOf(const Key& key) const;
  void FinishKept(const Key& key);
  void EndAllKept(const std::string& pool_id, const absl::Status& why);  // of any pool where that is empty
  // Refinements of it that run. REQUIRES mutex_
  std::vector<std::shared_ptr<Transfer>> ChildrenOf(const Key& key, const Kept& kept) const;
  void CallEnded();
  static void CloseAll(const std::vector<std::shared_ptr<Refinement>>& refinements, std::function<void()> done);
  static void EraseOne(const std::string& child, Kept* kept);
  void OnRefined(const Key& child, const TransferReport& report, const std::shared_ptr<Refinement>& refinement);
  // What the daemon has begun itself has ended so.
  void TryAgain(const Key& base, const TransferReport& report);
  void ApplyWhenReached(std::shared_ptr<Applying> applying);
  absl::StatusOr<RefinementApplied> ApplyNow(const std::string& refine_id, uint64_t max_bytes, Refinement* refinement);
  absl::StatusOr<std::shared_ptr<Refinement>> RefinementOf(const ApplySpec& spec) const;
  // manager_cache.cc.
  bool MakeRoomInCache(uint64_t bytes);
  void RunMoves();
  void CopyToCache(const Key& key, std::shared_ptr<const RetainedSource> source, const std::atomic<bool>& over);
  void FinishMove(const Key& key);
  // The next round of a refinement in the background, where there is one to do.
  // `of`: only where that is still what is retained.
  void RefineInBackground(const std::string& transfer_id, const std::optional<std::weak_ptr<RefineBase>>& of = std::nullopt);
  void NoteExact(const Key& base, const Refinement& refinement);
  static bool MakesExact(const RefineSpec& spec, const RefineChoice& choice, RefineBase* base);
  void FillRefinement(const Key& key, const Entry& entry, TransferReport* report) const;  // REQUIRES mutex_
  absl::StatusOr<std::shared_ptr<RefineBase>> BaseOf(const RefineSpec& spec) const;
  absl::StatusOr<RefineChoice> ChooseFor(const RefineSpec& spec, RefineBase* base);
  absl::StatusOr<std::shared_ptr<RetainedSource>> RetainedFor(const HelloFrame& hello);  // REQUIRES mutex_
  void ForgetChild(const Key& base, const std::string& child);
  void OnRefineHello(std::shared_ptr<ControlSession> session, HelloFrame hello);
  absl::Status CheckRefineHello(const HelloFrame& hello) const;
  absl::Status StartRefining(const RetainedSource& source, const HelloFrame& hello);
  // manager_peers.cc.
  void LearnSpeeds();
  absl::Status ChooseBudgetOf(SenderSpec* spec);
  absl::Status Insert(const std::shared_ptr<Transfer>& transfer, bool dials, const NewHalf& half);
  absl::StatusOr<Key> KeyOf(const Caller& caller, const std::string& transfer_id,
                            std::optional<Role> role) const;  // REQUIRES mutex_
  void OnHello(std::shared_ptr<ControlSession> session, HelloFrame hello);
  void AnswerLate(const TransferReport& report, Role role, ControlSession* session) const;
  void Forget();  // REQUIRES mutex_
  template <typename Spec>  // SenderSpec or ReceiverSpec
  TransferSetup SetupOf(Role role, const Spec& spec);

  const TransferOptions options_;
  const TransferParts parts_;
  Parking parking_;
  const std::shared_ptr<FrameRoom> frame_room_ = std::make_shared<FrameRoom>(kWaitingFrameBytes);
  RateBook rates_;
  const std::shared_ptr<StagingRoom> staging_, cache_;
  const std::shared_ptr<Door> door_ = std::make_shared<Door>();
  std::atomic<uint32_t> peer_port_{0};
  std::atomic<int> busy_{0};  // transfers that move bytes and are no refinements
  std::atomic<int64_t> refine_free_ns_{0};
  std::atomic<bool> stopping_{false};

  mutable std::mutex mutex_;
  std::condition_variable idle_;
  std::map<Key, Entry> entries_;
  std::deque<Key> ended_;  // oldest first
  std::map<Key, Kept> kept_;
  std::deque<Key> moves_;  // to the cache, one at a time
  bool moves_run_ = false;
  std::unordered_map<uint64_t, Session> sessions_;
  std::map<std::string, PeerStatus> peers_;
  uint32_t active_ = 0;
  std::map<Caller, uint32_t> active_of_owner_;  // only above 0, as the next
  std::unordered_map<std::string, uint32_t> active_of_pool_;
  uint32_t untold_ = 0;  // active, or ended with somebody still to be told
  uint32_t calls_ = 0;  // of workers, that are answered later: MoveToCache, ApplyRefinement
  uint64_t next_watch_ = 1;
  bool draining_ = false;
  std::vector<std::function<void()>> drained_;
};

}  // namespace spectrumkv
