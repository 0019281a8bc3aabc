// The sending half: scan, plan, encode, hand to the network, learn the outcome.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "server/encode/encode.h"
#include "server/memory/device_events.h"
#include "server/transfer/attend.h"
#include "server/transfer/refinement.h"
#include "server/transfer/shape.h"
#include "server/transfer/transfer.h"

namespace spectrumkv {

class SenderTransfer final : public Transfer {
 public:
  // Errors: those of Planner::Create.
  static absl::StatusOr<std::shared_ptr<SenderTransfer>> Create(TransferSetup setup, SenderSpec spec);

  void Start() override;
  // Nobody sends chunks to a sender.
  void OnChunk(uint32_t attempt, std::unique_ptr<ReceivedChunk> chunk) override;
  // Any thread; see TransferManager.
  absl::Status Advance(uint32_t layers, uint32_t tokens, const LaterImportance& importance,
                       const std::string& written_event);

  SenderTransfer(TransferSetup setup, SenderSpec spec);

 private:
  static constexpr uint32_t kMaxOutstandingPerStream = 3;
  // Of one chunk, in this order; a broken attempt brings kHanded back to kReady.
  enum class ChunkState : uint8_t { kUnwritten, kPlanning, kReady, kEncoding, kHanded, kReceived };

  void HandleFrame(ControlFrame& frame) override;
  HelloFrame MakeHello() const override;
  void OnGreeted() override;
  absl::Status CheckHello(const HelloFrame& hello) override;
  void OnDataStreamAdded() override { Pump(); }
  void OnLinkLost() override;
  void OnAction(Action action) override;
  const char* HeartbeatReason() const override;
  void StopWork() override;
  void SayGoodbye() override;
  void ReleaseAll() override;
  void Conclude() override;

  void OnHelloReply(const HelloReplyFrame& reply);
  void OnAccept(const AcceptFrame& accept);
  void OnReceipt(const ReceiptFrame& receipt);
  void OnCancelFrame(const CancelFrame& cancel);

  // The end of a worker's writes to a GPU (empty: they have been done).
  absl::Status AwaitWritten(const std::string& written_event);
  // Whether all of them have come to their end; where not, `then` is called when it is time to ask again.
  bool EventsReached(void (SenderTransfer::*then)());

  // Planning (sender_plan.cc).
  absl::Status AdoptPlanner(absl::StatusOr<Planner> planner);
  void OnPlannerReady();
  void StartFullScan();
  void MaybePlan();
  void ScanBatch(std::shared_ptr<std::vector<uint32_t>> batch);
  struct ScanWork;
  void RunScan(const std::shared_ptr<ScanWork>& work);
  void PlanBatchNow(const std::vector<uint32_t>& batch, AttentionWork* attention);
  absl::Status CheckLater(uint32_t layers, uint32_t tokens, uint32_t token_count,
                          const LaterImportance& importance) const;
  std::shared_ptr<AttentionWork> TakeQueries();
  void OnPlanned(const std::vector<uint32_t>& batch, absl::StatusOr<PlanBatch> plan);
  bool NeedsScan() const { return scans_ || samples_; }
  void MakeRoomForScan();
  absl::Status ScanSome(const uint32_t* chunks, size_t count);
  // A chunk was found to have escapes that nobody had looked for: what is not sent yet is scanned and planned again, once
  // no encoder reads the old plan.
  void PlanAgainWhenStill();
  std::vector<uint32_t> WrittenChunks();

  // Sending.
  void Pump();
  void TakeSlots();
  size_t InWorkMax() const;
  // What limits it (sender_rates.cc): to be called where that may have changed.
  void NoteWait();
  Limit WaitNow() const;
  bool NetworkHasChunks() const;
  void OnSlot(Slot slot);
  // One chunk on its way into a slot.
  struct EncodeJob {
    uint32_t chunk_index;
    uint32_t attempt;
    uint64_t fence;
    std::shared_ptr<Slot> slot;
    std::vector<Piece> lent;
    // Until it is encoded: the transfer has ended. Without words, which would be an allocation for each chunk.
    absl::StatusOr<EncodeResult> result = absl::Status(absl::StatusCode::kCancelled, "");
    double seconds = 0;
  };
  // On the compute executor, or at once if the chunk is small; on a GPU together with others, by PostBatch.
  void StartEncode(uint32_t chunk_index, Slot slot);
  void Encode(EncodeJob* job);
  // What StartEncode has gathered for the GPU goes there: when it is full, or else when nothing is being coded, so that
  // nothing waits for company while the GPU is idle.
  void PostBatch(bool full);
  void EncodeBatch(std::vector<EncodeJob>* jobs);
  uint64_t KvBytesOfChunk(uint32_t chunk_index) const;
  void TakeEncoded(EncodeJob& job);
  void HandToNetwork();
  void OnSent(uint32_t attempt, uint32_t stream, bool sent, double seconds);
  void PutBack(uint32_t chunk_index);
  uint32_t StreamsWanted() const;

  struct Encoded {
    uint32_t chunk_index;
    uint64_t bytes;
    std::shared_ptr<Slot> slot;
    std::vector<Piece> lent;
  };
  OutgoingChunk ToSend(Encoded encoded);
  // SEGMENT_FAILED where blocks were lent to the network and their memory has gone: the true cause of what the link or
  // the receiver reports.
  absl::Status LookAtLent() const;
  void AwaitLent();
  void SettleOnce();

  // Refinements (sender_refine.cc).
  // Whether a refinement has to let others go first, or has sent enough for now; Pump comes again.
  bool MustPause();
  // True: the manifest waits for the checksums of the source, which are on their way.
  bool AwaitChecksums();
  void OrderByImportance();
  static bool CameCoarse(const TransferReport& report);
  void KeepSource();
  RetentionFrame Offer() const;

  std::unique_ptr<BlockHold> source_;
  std::unique_ptr<DeviceEvents> written_events_;  // of a source on a GPU
  TimerId event_timer_ = 0;
  const Policy policy_;
  const int64_t deadline_ms_;
  const bool layerwise_;
  const int64_t retain_ms_;
  const std::optional<Tier> background_tier_;
  bool peer_refines_ = false;  // the receiver wants the source retained
  std::shared_ptr<const RefineSource> refine_;
  TimerId pause_timer_ = 0;
  enum class Checksums : uint8_t { kNone, kComing, kThere } checksums_state_ = Checksums::kNone;
  std::vector<uint32_t> checksums_;
  std::atomic<bool> advanced_{false};
  std::vector<LayerPlace> places_;
  std::vector<PlanLayer> layers_;
  EncodeSource encode_source_;

  // Open while the network may read the source's blocks.
  Gate lent_gate_;
  bool lends_ = false;
  TimerId lent_timer_ = 0;

  // Written set: tokens [0, written_tokens_[i]) of layer i. Guarded by advance_mutex_ with the scores.
  std::mutex advance_mutex_;
  std::vector<uint32_t> written_tokens_;
  std::vector<float> next_scores_;
  // Queries that came and were not attended yet, by layer index. One of these two is empty.
  std::map<uint32_t, QueriesOfLayer> next_queries_;
  AttentionScores attention_;  // of whoever plans
  std::atomic<bool> attended_{false};
  double attended_bytes_ = 0;  // by the queries of the spec
  CodedBy peer_decoded_by_ = CodedBy::kCpu;  // of the receipt

  std::optional<Planner> planner_;
  std::vector<LayerScan> scan_;
  // Looks at all values before it plans: where importance or a strict bound needs it, or escapes have turned up. Else the
  // encoder, which sees every value anyway, is the first to read the source.
  bool scans_ = false;
  bool samples_ = false;  // OPTIMAL: reads a sample of the values
  bool plan_again_ = false;
  bool planning_ = false;
  std::vector<ChunkState> chunk_state_;
  std::vector<PlannedChunk> planned_;
  std::vector<uint32_t> last_position_;  // of the last token of each chunk
  std::deque<uint32_t> ready_;
  std::deque<Encoded> encoded_;
  std::vector<EncodeJob> batch_;  // see PostBatch
  uint64_t batch_kv_bytes_ = 0;
  uint32_t batches_coding_ = 0;
  std::vector<uint32_t> outstanding_;  // by stream
  uint32_t next_stream_ = 0;
  uint64_t handed_ = 0;
  uint64_t fence_ = 0;
  uint32_t credits_ = 0;
  uint32_t encoding_ = 0;
  SlotPool::WaitId slot_wait_ = 0;
  bool wants_slot_ = false;
  bool accepted_ = false;

  SenderTimes times_;
  std::string peer_key_;  // PeerKey of who receives; empty until it is known
  bool network_busy_ = false;
  double network_seconds_ = 0;
  int64_t first_handed_ns_ = 0, receipt_ns_ = 0;
};

}  // namespace spectrumkv
