// One pool: its memory, lease, streams, holds and block use. The registry finds it, holds keep it alive.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/clock.h"
#include "server/base/executor.h"
#include "server/pool/block_copy.h"
#include "server/pool/block_use.h"
#include "server/pool/pool.h"
#include "server/pool/segment.h"

namespace spectrumkv {

struct BlockTable;  // hold.h

// Of an id, for logs: the whole of it is the right to use the pool.
inline std::string ShortPoolId(const std::string& id) { return id.substr(0, 8); }

// Tells one hold, at most once, that its pool is lost. Thread-safe.
class LostNotice {
 public:
  void Set(std::function<void(absl::Status)> callback);
  void Fire(const absl::Status& why);
  // No call begins after this; one that has begun may still be running.
  void Drop();

 private:
  std::mutex mutex_;
  std::function<void(absl::Status)> callback_;
  bool dropped_ = false;
  absl::Status why_;  // not OK once fired
};

// Thread-safe. Callbacks are called outside its lock.
//
// active -> closing (Unregister waits for users; back to active on its timeout) -> gone
//        -> lost (lease, broken stream, truncated segment) -> gone
// gone: unmapped, forgotten by the registry; entered when the last user leaves.
class PoolCore : public std::enable_shared_from_this<PoolCore> {
 public:
  struct Config {
    std::string id;
    Caller owner;
    PoolSchema schema;
    std::vector<std::unique_ptr<Segment>> segments;  // one per segment of the schema
    int64_t lease_ttl_ms = 0;
    Clock* clock = nullptr;
    Executor* unmapper = nullptr;  // PoolRegistry::Create
    PoolEvents events;
    std::function<void()> on_gone;  // once, when it is unmapped; before its streams hear of the end, unless a timer brought that
  };
  explicit PoolCore(Config config);

  const std::string& id() const { return id_; }
  const Caller& owner() const { return owner_; }
  const PoolSchema& schema() const { return schema_; }
  // Open HoldPool streams.
  size_t streams() const;
  const TensorPlace& place(uint32_t group, uint32_t layer_slot, PlaneId plane) const {
    return places_[group][layer_slot][plane == PlaneId::kV ? 1 : 0];
  }
  // Where the tensors are; null: host memory.
  Device* device() const { return device_; }
  // Null where the schema has none.
  const uint64_t* generations() const { return generations_; }
  bool alive() const { return !lost_.load(); }
  // See BlockHold. REQUIRES: a hold.
  std::shared_ptr<const void> KeepMapped() const { return segments_; }
  // OK; SEGMENT_FAILED. A failure seen here first ends the pool, on the clock's thread.
  absl::Status MemoryHealth();
  // Asks the files too.
  absl::Status LookAtMemory();
  // Also POOL_LOST.
  absl::Status Health();

  void StartLease();
  // All of these: NOT_FOUND UNKNOWN_POOL once lost.
  absl::StatusOr<int64_t> Renew();
  absl::StatusOr<uint64_t> OpenHold(std::function<void(const std::string&)> on_event);
  void CloseHold(uint64_t hold_id);
  void Unregister(int64_t timeout_ms, std::function<void(absl::Status)> done);
  // The pool is lost for this cause (LEASE_EXPIRED, SEGMENT_FAILED, WORKER_GONE). It is unmapped on `unmapper` if given.
  void End(const std::string& cause, Executor* unmapper = nullptr);
  void Announce(const std::string& event);
  // The registry and the clock go: no more timers and events.
  void Shutdown();

  absl::StatusOr<std::unique_ptr<BlockHold>> Hold(const std::vector<GroupBlockList>& blocks, uint32_t token_count,
                                                  bool exclusive);
  // For a ticket (hold.h): `turns` and `generations` of when the blocks were the request's; turns are brought up to date.
  absl::StatusOr<std::unique_ptr<BlockHold>> HoldAgain(const BlockTable& table, uint32_t token_count,
                                                       const std::vector<std::vector<uint64_t>>& generations,
                                                       std::vector<std::vector<uint32_t>>* turns);
  std::vector<std::vector<uint32_t>> TurnsOf(const std::vector<std::vector<uint32_t>>& ids) const;
  std::vector<std::vector<uint64_t>> GenerationsOf(const std::vector<std::vector<uint32_t>>& ids) const;
  absl::Status PutBlock(uint32_t group, uint32_t layer, PlaneId plane, uint64_t block, const std::string& data);
  absl::StatusOr<std::string> GetBlock(uint32_t group, uint32_t layer, PlaneId plane, uint64_t block);
  PoolStatus Describe() const;

 private:
  friend class PoolHold;
  enum class State { kActive, kClosing, kLost };
  using BlockIds = std::vector<std::vector<uint32_t>>;  // by group
  struct Closer {
    std::function<void(absl::Status)> done;
    TimerId timer = 0;
  };

  void PlaceTensors();
  // A flag of what was noticed; LookAtSegments asks the files.
  bool SegmentFailed() const;
  bool LookAtSegmentsLocked(std::optional<uint32_t> only);
  // The same as a status; ends the pool where it is not OK.
  absl::Status CheckSegmentsLocked(std::optional<uint32_t> only);
  // Ends the pool on the clock's thread: the caller may hold locks that the pool's listeners take.
  void EndLaterLocked();
  absl::Status LostStatus(const std::string& cause) const;
  // Looks at the files of all segments, or of one.
  absl::Status CheckUsableLocked(std::optional<uint32_t> only = std::nullopt);
  absl::Status TakeLocked(const BlockIds& ids, bool exclusive);
  void GiveBackLocked(const BlockIds& ids, bool exclusive);
  void ReleaseHold(const BlockIds& ids, bool exclusive, const std::shared_ptr<LostNotice>& notice);
  // Becomes gone if it should and nobody uses it. Unlocks `lock`. What takes long, and what comes after it, runs on
  // `unmapper` if given.
  void FinishIfIdle(std::unique_lock<std::mutex> lock, Executor* unmapper = nullptr);
  void ArmLeaseLocked();
  void OnLeaseTimer();
  void OnCloseTimeout(uint64_t closer_id);
  // One block to or from dense memory, wherever it lies. REQUIRES: its use is counted.
  absl::Status WriteBlock(const TensorPlace& place, uint64_t block, const std::string& data);
  absl::Status ReadBlock(const TensorPlace& place, uint64_t block, std::string* data);
  absl::StatusOr<const TensorPlace*> FindPlace(uint32_t group, uint32_t layer, PlaneId plane, uint64_t block) const;

  const std::string id_;
  const Caller owner_;
  const PoolSchema schema_;
  using Segments = std::vector<std::unique_ptr<Segment>>;
  std::shared_ptr<const Segments> segments_;  // empty when gone
  std::vector<std::vector<std::array<TensorPlace, 2>>> places_;
  Device* device_ = nullptr;
  const uint64_t* generations_ = nullptr;
  const int64_t lease_ttl_ms_;
  Executor* const unmapper_;  // not used after Shutdown
  const PoolEvents events_;
  std::function<void()> on_gone_;
  std::atomic<bool> lost_{false};
  std::atomic<bool> end_scheduled_{false};
  std::mutex io_mutex_;  // PutBlock and GetBlock one at a time: they take the block's use; before mutex_

  mutable std::mutex mutex_;
  Clock* clock_;  // null after Shutdown
  State state_ = State::kActive;
  bool gone_ = false;
  std::string lost_cause_;
  int64_t lease_deadline_ns_ = 0;
  TimerId lease_timer_ = 0;
  uint64_t next_id_ = 1;
  std::map<uint64_t, std::function<void(const std::string&)>> streams_;
  std::map<uint64_t, Closer> closers_;
  std::unordered_set<std::shared_ptr<LostNotice>> source_notices_, target_notices_;
  std::vector<BlockUse> use_;  // by group
  uint64_t users_ = 0;         // holds and copies in progress: the mappings stay
};

}  // namespace spectrumkv
