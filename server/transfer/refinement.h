// What is needed to make a committed transfer better: the retained source, at the sender; at the receiver the base, with
// the tier of each of its cells, and the refinement, whose cells wait in staging until they are applied.
//
// A refinement is a transfer of its own (docs/refinement.md): its ReceiverTransfer decodes into a StagedHold, or into the
// destination's blocks themselves, its SenderTransfer encodes from the retained source. What is here outlives both.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/caller.h"
#include "server/decode/decode.h"
#include "server/encode/encode.h"
#include "server/plan/refine.h"
#include "server/pool/hold_bases.h"
#include "server/pool/pool.h"
#include "server/stream/frames.h"
#include "server/transfer/report.h"

namespace spectrumkv {

// A hold that several have: the retention, and each refinement under way. Tells nobody of a lost pool: that is the
// retention's to hear, which ends the refinements.
class SharedHold final : public ForwardingHold {
 public:
  using ForwardingHold::ForwardingHold;
  absl::Status ZeroTail(uint32_t) const override { return absl::OkStatus(); }
  void OnLost(std::function<void(absl::Status)>) override {}
};

// The source of a transfer that has committed, kept for refinements.
struct RetainedSource {
  std::string transfer_id, token, pool_id;
  Caller owner;  // set by the manager
  uint64_t peer_epoch = 0;  // of the daemon that has it all, and may ask again
  std::shared_ptr<BlockHold> hold;
  std::vector<PlanLayer> layers;
  std::vector<LayerPlace> places;
  uint64_t retain_ms = 0;
  uint64_t kv_bytes = 0, wire_bytes = 0;  // of the transfer
  // [token_count] how much each token mattered when it was planned; in this order they are made better. Empty: alike.
  std::shared_ptr<const std::vector<float>> importance;
};

// Bytes for staging that all refinements of a daemon share. Thread-safe.
class StagingRoom {
 public:
  explicit StagingRoom(uint64_t bytes) : limit_(bytes) {}
  bool Take(uint64_t bytes);
  void Give(uint64_t bytes) { used_.fetch_sub(bytes); }
  uint64_t left() const;
  uint64_t limit() const { return limit_; }
  uint64_t used() const { return used_.load(); }

 private:
  const uint64_t limit_;
  std::atomic<uint64_t> used_{0};
};

// A transfer that has committed here and may be refined.
struct RefineBase {
  std::string transfer_id, token, pool_id;
  std::string peer;         // where its source is; empty: not known
  uint64_t peer_epoch = 0;  // of that daemon
  uint64_t retain_ms = 0;
  PoolSchema schema;  // of the destination
  TransferShape shape;
  std::vector<LayerPlace> places;
  std::shared_ptr<BlockTicket> ticket;
  uint64_t kv_bytes = 0, wire_bytes = 0;
  std::optional<Tier> background_tier;
  bool background_direct = false;
  Device* device = nullptr;  // of the destination; null: host memory

  // Whether the daemon itself has begun that refinement.
  bool IsOwn(const std::string& refine_id) const {
    return background_tier.has_value() && refine_id.rfind(transfer_id + ".refine-", 0) == 0;
  }

  std::mutex mutex;  // of what follows
  std::unique_ptr<TierMap> tiers;
};

// One refinement at the receiver. Thread-safe.
class Refinement : public std::enable_shared_from_this<Refinement> {
 public:
  // `room`: null for direct mode. RESOURCE_EXHAUSTED REFINE_STAGING_FULL (retry delay), OUT_OF_MEMORY.
  // `verify`: it makes the destination exact, and is to be sure of it.
  static absl::StatusOr<std::shared_ptr<Refinement>> Create(std::shared_ptr<RefineBase> base, RefineChoice choice,
                                                            Tier tier, std::shared_ptr<StagingRoom> room, bool verify);
  ~Refinement();

  RefineBase& base() const { return *base_; }
  const RefineChoice& choice() const { return choice_; }
  bool staged() const { return room_ != nullptr; }
  RefineFrame Request() const;
  const std::vector<DecodeTarget::Place>& places() const { return places_; }
  // The hold that the receiver decodes into: staging, or the destination's blocks. Errors: those of BlockTicket::Reserve;
  // in direct mode BLOCKS_REUSED also where one block is.
  absl::StatusOr<std::unique_ptr<BlockHold>> NewTarget();

  // A chunk is in its place in NewTarget's memory, with these tier map bytes.
  void Arrived(const ChunkCut& cut, const uint8_t* tier_map);

  // The source's, from its manifest.
  void SetChecksums(std::vector<uint32_t> checksums);
  // All is in place: are the words in `target` those of the source? OK where that was not to be verified, or cannot be.
  // DATA_LOSS NOT_EXACT.
  absl::Status Verify(const BlockHold& target);

  struct Applied {
    uint64_t bytes = 0, stale_cells = 0;  // by this call
  };
  // Copies arrived chunks into the destination, at most `max_bytes` (0: all), but at least one chunk. Errors: those of
  // BlockTicket::Reserve; FAILED_PRECONDITION REFINEMENT_DROPPED (also once closed), NOT_STAGED; RESOURCE_EXHAUSTED
  // APPLY_PENDING (another call is writing; retry delay); those of WriteRows, after which what was due
  // waits for the next call.
  absl::StatusOr<Applied> Apply(uint64_t max_bytes);
  // REQUIRES: nothing decodes into NewTarget's memory any more.
  // Nothing is applied any more, and what is staged is lost; `done` once no Apply writes any more, at once where none does.
  void Close(std::function<void()> done);
  bool closed() const;
  // Are all of its cells still coarser than what it brings? For direct mode, once its blocks are reserved.
  bool StillGains() const;
  // True once, when all is in place.
  bool TakeCompletion();
  // One call at a time may wait for a worker's event: false where one does.
  bool BeginWaiting() { return !waiting_.exchange(true); }
  void EndWaiting() { waiting_ = false; }

  // What has become of the cells so far.
  void AddTo(TransferReport* report) const;
  bool complete() const;
  bool exact() const;

 private:
  class StagedHold;
  enum class ChunkPlace : uint8_t { kComing, kStaged, kApplied };

  Refinement(std::shared_ptr<RefineBase> base, RefineChoice choice, Tier tier, std::shared_ptr<StagingRoom> room,
             bool verify);
  absl::Status TakeMemory();
  size_t Remaining() const;  // chunks that are not in the destination
  uint64_t BytesOf(const ChunkCut& cut) const;  // in the destination's data type
  absl::Status CopyChunk(const ChunkCut& cut, const BlockHold& to, Applied* applied);
  void MarkTiers(const ChunkCut& cut);  // all its cells are in the destination
  void GiveBackLocked();
  absl::StatusOr<Applied> ApplyStaged(uint64_t max_bytes);

  const std::shared_ptr<RefineBase> base_;
  const RefineChoice choice_;
  const Tier tier_;
  const std::shared_ptr<StagingRoom> room_;
  const bool verify_;
  std::atomic<bool> waiting_{false};
  std::vector<ChunkCut> cuts_;
  std::vector<DecodeTarget::Place> places_;
  std::vector<uint32_t> strip_first_;  // tokens of the strips before
  std::vector<uint8_t> tiers_;         // of each token of each strip, as it arrived
  // Staging: the rows of each strip, dense, one strip after the other.
  std::vector<uint64_t> strip_offset_;
  std::vector<std::vector<uint32_t>> rows_before_;  // by strip and run of choice_.rows: how many rows lie in front of it
  std::unique_ptr<uint8_t[]> memory_;
  uint64_t memory_bytes_ = 0;

  std::mutex apply_mutex_;  // one Apply at a time; before the next
  mutable std::mutex mutex_;
  std::vector<ChunkPlace> chunks_;
  uint64_t staged_bytes_ = 0, applied_bytes_ = 0, stale_cells_ = 0;
  size_t applied_chunks_ = 0;
  bool dropped_ = false, closed_ = false, exact_ = false;
  bool completion_taken_ = false;
  uint32_t applying_ = 0;  // calls of Apply
  std::vector<std::function<void()>> closers_;
  std::vector<uint32_t> checksums_;
};

// The source of a refinement as the sender needs it: strips of the retained layers. INVALID_ARGUMENT BAD_REFINE, naming
// what a peer's request does not fit.
struct RefineSource {
  TransferShape shape;
  std::vector<LayerPlace> places;
  Tier tier = Tier::kRaw;
  bool verify = false;
  std::vector<PlanLayer> base_layers;  // of all that is retained, for the checksums
  std::vector<LayerPlace> base_places;
  std::shared_ptr<const std::vector<float>> importance;  // as of RetainedSource
};
// CRC32C of all words of each K and V, in the order of `layers`, K before V. CANCELLED where `stopped`.
// Errors: those of ReadRows.
absl::StatusOr<std::vector<uint32_t>> ChecksumsOf(const BlockHold& hold, const std::vector<PlanLayer>& layers,
                                                  const std::vector<LayerPlace>& places, const std::function<bool()>& stopped);
absl::StatusOr<RefineSource> SourceOfRequest(const RefineFrame& request, const std::vector<PlanLayer>& layers,
                                             const std::vector<LayerPlace>& places, uint32_t token_count);

}  // namespace spectrumkv
