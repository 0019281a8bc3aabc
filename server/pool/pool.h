// Registered pools: their mappings, leases, and who uses which blocks.
//
// A worker registers a pool and keeps its lease alive. The pool is its caller's (server/base/caller.h), and its id, 128 random
// bits that no other worker is told, is the right to use it: both are asked for by every call. Transfers take BlockHolds: sources share blocks, a destination
// has its blocks alone. A pool that is lost (lease expired, worker gone, unregistered with force, segment truncated)
// tells its holds and is unmapped when the last hold is gone (and what the network has on loan has come back). All
// classes here are thread-safe unless said otherwise.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/caller.h"
#include "server/base/clock.h"
#include "server/pool/schema.h"

namespace spectrumkv {

enum class PlaneId { kK, kV };

struct BlockRange {
  uint64_t first = 0;
  uint64_t count = 0;
};
struct GroupBlockList {
  uint32_t group = 0;
  std::vector<BlockRange> runs;
  uint32_t skip_tokens = 0;  // of the first block: not of this request's tokens
};

class Device;
class Devices;
class Executor;

class BlockHold;

// The right of who had a destination to write into its blocks once more, as long as nobody else has had them: no byte
// lands in a block that the daemon has given to another since, or whose generation the worker has moved. It holds
// nothing. Thread-safe.
class BlockTicket {
 public:
  virtual ~BlockTicket() = default;
  // The blocks that are still the request's, exclusive again; see BlockHold::Fresh for the others. Errors:
  // FAILED_PRECONDITION BLOCKS_REUSED (none is), BLOCKS_IN_USE, POOL_CLOSING; NOT_FOUND UNKNOWN_POOL.
  virtual absl::StatusOr<std::unique_ptr<BlockHold>> Reserve() = 0;
};

// Blocks of one request in one pool, held until destroyed. Keeps the pool mapped. Const methods may be called from any
// thread.
class BlockHold {
 public:
  virtual ~BlockHold() = default;
  virtual const PoolSchema& schema() const = 0;
  virtual uint32_t token_count() const = 0;

  // rows[i] = address of (token_first + i, head 0 of the pool, dim 0), i < count; tokens counted in the request.
  // REQUIRES: group/layer_slot (position in groups[group].layers) in range, token_first + count <= token_count(),
  // a V plane where asked for.
  virtual void FillRows(uint32_t group, uint32_t layer_slot, PlaneId plane, uint32_t token_first, uint32_t count,
                        uint8_t** rows) const = 0;

  // The GPU that the rows are on: their addresses are of its memory, not to be read or written by the host. Null: host
  // memory.
  virtual Device* device() const { return nullptr; }

  // Zero-fills what a destination has behind its last `kept_tokens` token in the last used block, and nothing else. On a
  // GPU it has been done when this returns, or it says what went wrong there.
  virtual absl::Status ZeroTail(uint32_t kept_tokens) const = 0;

  // Seqlock generations of the blocks that hold these tokens, appended to `out`; nothing where the schema has none.
  virtual void ReadGenerations(uint32_t group, uint32_t token_first, uint32_t count,
                               std::vector<uint64_t>* out) const = 0;
  virtual bool has_generations() const = 0;

  // Of a destination: see BlockTicket. What the blocks' generations are now is what they must stay. Null: none.
  virtual std::shared_ptr<BlockTicket> Ticket() const { return nullptr; }
  // May the token's block be written? Always, unless the hold came from a ticket.
  virtual bool Fresh(uint32_t group, uint32_t token) const {
    (void)group, (void)token;
    return true;
  }

  // OK, or why the hold's memory must not be trusted any more (FailedPrecondition): SEGMENT_FAILED; of a destination also
  // POOL_LOST. What a source of a lost pool holds stays mapped and good: a transfer whose source was fully written may
  // finish without its worker. OnLost tells those that may not.
  virtual absl::Status Health() const = 0;

  // Keeps the memory that FillRows gave addresses of mapped, also after the hold and its pool are gone: for bytes on loan
  // to the network. It keeps nothing else: blocks are free for others once the hold is gone.
  virtual std::shared_ptr<const void> KeepMapped() const = 0;

  // As Health, but asks the files too: memory that only the network has read may be gone without anybody's notice.
  virtual absl::Status LookAtMemory() const = 0;

  // `lost` is called at most once, from any thread, when the pool is lost (at once if it already is); it must return
  // quickly. Dropped with the hold.
  // A call that has begun may end after the hold is gone: capture what stays alive.
  virtual void OnLost(std::function<void(absl::Status why)> lost) = 0;
};

struct PoolHandle {
  std::string pool_id;
  uint64_t epoch = 0;
  int64_t lease_ttl_ms = 0;
};

struct PoolStatus {
  std::string pool_id, model, revision, state;  // active, draining, lost
  Caller owner;
  uint32_t groups = 0, layers = 0;
  uint64_t kv_bytes = 0, blocks_total = 0, blocks_sending = 0, blocks_receiving = 0;
  int64_t lease_remaining_ms = 0;
};

struct PoolLimits {
  std::string shared_dir;       // for FILE segments
  std::string shm_prefix = "/";  // allowed POSIX_SHM names
  // Users whose segments everybody may register; and those of a caller that has no uid.
  std::vector<uint32_t> allowed_owners, token_owners;
  uint64_t max_owned_bytes = 0;  // of all DAEMON_OWNED segments together
  uint32_t max_pools = 64;
  // Of one caller.
  uint32_t max_pools_per_user = UINT32_MAX, max_holds_per_user = UINT32_MAX;
  uint64_t max_bytes_per_user = UINT64_MAX;  // of segments
  // Bounded also where nobody sets it: each segment takes one of the process's guards (sigbus_guard.h), mappings and
  // descriptors, however small it is. As many as one schema may have.
  uint32_t max_segments_per_user = schema_limits::kSegments;
  uint64_t max_chunk_bytes = 0;  // 0: no such limit
  int64_t lease_default_ttl_ms = 30000, lease_min_ttl_ms = 1000, lease_max_ttl_ms = 600000;
};

// What happens to pools, for metrics. Called from any thread, must return quickly. `kind` of a lease: "pool" once, then
// "source" or "destination" for each hold it took with it.
enum class PoolQuota { kPools, kBytes, kSegments, kHolds };
struct PoolEvents {
  std::function<void(const std::string& kind)> lease_expired = [](const std::string&) {};
  // A caller had as much as one may have.
  std::function<void(PoolQuota quota)> quota_refused = [](PoolQuota) {};
};

class PoolRegistry {
 public:
  // `clock`, `devices` and `unmapper` borrowed. `epoch` is the daemon's. Null devices: segments on GPUs are refused.
  // Pools that a timer ends (lease, failed segment) are unmapped on `unmapper`: large memory takes long, and other timers
  // wait. They are listed as lost and counted until then. What is still queued there when the registry goes needs
  // `devices` alone. Null: on the clock's thread. All other ends unmap inside the call that brings them.
  static std::unique_ptr<PoolRegistry> Create(PoolLimits limits, uint64_t epoch, Clock* clock, PoolEvents events,
                                              Devices* devices = nullptr, Executor* unmapper = nullptr);
  virtual ~PoolRegistry() = default;

  // Every call about a pool: PERMISSION_DENIED NOT_OWNER where it is another caller's.

  // Maps the segments and checks everything. While the pool lives, the caller's same request_id with an equal schema answers it
  // again and renews it; with another schema ALREADY_EXISTS REQUEST_ID_REUSED. An empty request_id is never a repeat.
  // lease_ttl_ms is brought into the limits; 0: the default. Errors: those of CheckSchema; NOT_FOUND SEGMENT_NOT_FOUND;
  // INVALID_ARGUMENT SEGMENT_TOO_SHORT, SEGMENT_SPARSE, SEGMENT_NOT_REGULAR, SEGMENT_OUTSIDE_DIR (symlinks too),
  // INVALID_REQUEST_ID; PERMISSION_DENIED SEGMENT_NO_ACCESS, SEGMENT_NOT_OWNED, UNKNOWN_CALLER; RESOURCE_EXHAUSTED
  // POOLS_FULL, OWNED_QUOTA, POOLS_QUOTA, BYTES_QUOTA, SEGMENTS_QUOTA (retry delay, unless waiting cannot help), SEGMENT_MAP_FAILED, OUT_OF_MEMORY; UNAVAILABLE DRAINING;
  // of segments on GPUs those of Devices::Get, Device::Allocate and Device::Import. Blocks while it maps.
  virtual absl::StatusOr<PoolHandle> Register(const Caller& caller, const std::string& request_id,
                                              const PoolSchema& schema, int64_t lease_ttl_ms) = 0;
  // Extends the lease; answers its TTL. NOT_FOUND UNKNOWN_POOL, FAILED_PRECONDITION STALE_EPOCH.
  virtual absl::StatusOr<int64_t> Renew(const Caller& caller, const std::string& pool_id, uint64_t epoch) = 0;
  // A HoldPool stream opened / broke. While at least one is open, its pings renew; when the last one breaks the pool is
  // lost at once. `on_event` gets the pool's end (LEASE_EXPIRED, UNREGISTERED, SEGMENT_FAILED); and DRAINING (at
  // once, inside this call, where the daemon drains already), after which the pool is still served. RESOURCE_EXHAUSTED HOLDS_FULL above 64 streams, HOLDS_QUOTA. A segment that was cut,
  // also one that was grown again, is noticed by the next use and, by an idle pool, at the end of the lease's period.
  virtual absl::StatusOr<uint64_t> OpenHold(const Caller& caller, const std::string& pool_id, uint64_t epoch,
                                            std::function<void(const std::string&)> on_event) = 0;
  virtual void CloseHold(const std::string& pool_id, uint64_t hold_id) = 0;
  // `done` exactly once: OK when no hold is left and the pool is unmapped; DEADLINE_EXCEEDED POOL_BUSY after timeout_ms
  // (the pool stays). New holds are refused meanwhile (FAILED_PRECONDITION POOL_CLOSING).
  virtual void Unregister(const Caller& caller, const std::string& pool_id, uint64_t epoch, int64_t timeout_ms,
                          std::function<void(absl::Status)> done) = 0;

  // Source blocks, shared. token_count tokens must fit the blocks behind skip_tokens, which stay as they are, blocks
  // exist, one list per group of the schema, none longer than the pool has blocks. All that is listed is held, also what
  // token_count does not need.
  // Errors: NOT_FOUND UNKNOWN_POOL; FAILED_PRECONDITION STALE_EPOCH; NOT_FOUND UNKNOWN_BLOCK; INVALID_ARGUMENT
  // INVALID_BLOCKS; FAILED_PRECONDITION BLOCKS_RESERVED (a destination has them).
  virtual absl::StatusOr<std::unique_ptr<BlockHold>> HoldSource(const Caller& caller, const std::string& pool_id,
                                                                uint64_t epoch,
                                                                const std::vector<GroupBlockList>& blocks,
                                                                uint32_t token_count) = 0;
  // Destination blocks, exclusive: also no block twice. Errors as HoldSource, and BLOCKS_IN_USE.
  virtual absl::StatusOr<std::unique_ptr<BlockHold>> ReserveTarget(const Caller& caller, const std::string& pool_id,
                                                                   uint64_t epoch,
                                                                   const std::vector<GroupBlockList>& blocks,
                                                                   uint32_t token_count) = 0;

  // One block of one tensor, dense [block_tokens, head_count, head_dim]. Errors: as HoldSource, INVALID_ARGUMENT
  // INVALID_BLOCKS (wrong size), FAILED_PRECONDITION BLOCKS_IN_USE (Put into blocks a transfer uses).
  virtual absl::Status PutBlock(const Caller& caller, const std::string& pool_id, uint64_t epoch, uint32_t group,
                                uint32_t layer, PlaneId plane, uint64_t block, const std::string& data) = 0;
  virtual absl::StatusOr<std::string> GetBlock(const Caller& caller, const std::string& pool_id, uint64_t epoch,
                                               uint32_t group, uint32_t layer, PlaneId plane, uint64_t block) = 0;
  virtual absl::StatusOr<PoolSchema> SchemaOf(const Caller& caller, const std::string& pool_id, uint64_t epoch) = 0;

  virtual std::vector<PoolStatus> List() const = 0;
  // No new pools from now on.
  virtual void StartDraining() = 0;
};

}  // namespace spectrumkv
