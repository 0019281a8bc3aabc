// The receiving half: admit, verify, decode, commit. Its commit is the truth.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "server/decode/decode.h"
#include "server/transfer/coverage.h"
#include "server/transfer/refinement.h"
#include "server/transfer/shape.h"
#include "server/transfer/transfer.h"

namespace spectrumkv {

class ReceiverTransfer final : public Transfer {
 public:
  ReceiverTransfer(TransferSetup setup, ReceiverSpec spec);

  void Start() override;
  // Transport thread: takes the slot the credit stood for and passes the chunk to the compute executor.
  void OnChunk(uint32_t attempt, std::unique_ptr<ReceivedChunk> chunk) override;

 private:
  void HandleFrame(ControlFrame& frame) override;
  HelloFrame MakeHello() const override;
  void OnGreeted() override {}
  absl::Status CheckHello(const HelloFrame& hello) override;
  void OnAction(Action action) override;
  void BeginCommit() override {
    if (!terminal()) Commit();
  }
  const char* HeartbeatReason() const override;
  void StopWork() override;
  void SayGoodbye() override;
  void ReleaseAll() override;
  void Conclude() override;

  void OnHelloReply(const HelloReplyFrame& reply);
  void OnManifest(const ManifestFrame& manifest);
  absl::Status AdoptManifest(const ManifestFrame& manifest);
  // Gets the first receive slot (waiting for it), then as many more as are free; then accepts.
  void AdmitWhenThereIsRoom();
  void OnFirstSlot(std::shared_ptr<Slot> slot);
  Slot SpareSlot();
  void Accept();

  // Compute executor.
  struct Decoded {
    uint32_t chunk_index = 0;
    bool duplicate = false;
    uint64_t chunk_bytes = 0, kv_bytes = 0;
    TierCounts counts;
    DecodeResult result;
    double receive_seconds = 0, decode_seconds = 0;
  };
  struct Arrived {
    std::shared_ptr<ReceivedChunk> chunk;
    std::shared_ptr<Slot> slot;
    ChunkView view;
    Decoded decoded;
  };
  void DecodeOne(uint32_t attempt, const std::shared_ptr<ReceivedChunk>& chunk, std::shared_ptr<Slot> slot);
  // Those of arrived_ that are there, up to what one launch takes; on a GPU.
  void DecodeArrived();
  // False: it was refused, and has been told.
  bool VerifyArrived(size_t place, Arrived* arrived);
  void OnDecoded(const Decoded& decoded);
  void GiveCredits();
  void ReturnSlot(std::shared_ptr<Slot> slot);
  ReceiverTimes Times();
  void Commit();
  void LetGoOfSlots();
  // Refinements (receiver_refine.cc). The shape that the manifest describes, or that was asked for.
  absl::StatusOr<TransferShape> ShapeOfPeer(const ManifestFrame& manifest) const;
  void SetPlaces();
  // Any thread: a chunk's cells are where they were to go.
  void NotePlaced(const ChunkView& view);
  void KeepBase();
  std::string SourceAddress() const;

  std::unique_ptr<BlockHold> target_;
  const int64_t deadline_ms_;
  const bool accept_dropped_, exact_conversion_;
  const bool refinable_, refine_direct_;
  const std::shared_ptr<Refinement> refinement_;  // null: this is none
  const uint64_t fence_;
  const bool on_device_;

  // Set by the first manifest, then constant.
  std::optional<ManifestFrame> manifest_;
  TransferShape shape_;
  std::vector<ChunkCut> cuts_;
  DecodeTarget decode_target_;
  std::unique_ptr<Coverage> coverage_;
  std::unique_ptr<TierMap> tiers_;  // of a transfer that may be refined: the tier of each cell, as it arrived
  std::atomic<bool> receiving_{false};

  // Slots that are ours and hold no chunk: each is a credit the sender has, or is about to get.
  std::mutex slots_mutex_;
  std::vector<Slot> free_slots_;
  uint32_t slots_owned_ = 0;
  uint32_t slots_wanted_ = 0;  // strand
  // Chunks for the GPU that no thread has taken yet: while it is busy, several gather. Of the same lock.
  std::vector<Arrived> arrived_;
  // Of the same lock: since when there has been a chunk to decode, and for how long in all.
  uint32_t chunks_held_ = 0;
  int64_t first_chunk_ns_ = 0, held_since_ns_ = 0, last_return_ns_ = 0, busy_ns_ = 0;
  uint32_t credits_owed_ = 0;  // strand
  uint32_t credits_kept_ = 0;  // strand; of the first layer's time, see kFirstCredits
  int64_t slot_asked_ns_ = 0;  // strand
  double slot_seconds_ = 0;    // strand
  SlotPool::WaitId slot_wait_ = 0;
  bool waits_for_slot_ = false;
  uint32_t manifest_attempt_ = 0;  // the last attempt that brought a manifest
};

}  // namespace spectrumkv
