// All transfers of this daemon: what the worker's calls and the peers' streams act on. The only place that decides
// (docs/architecture.md, "Life of a transfer"). Thread-safe. Callbacks come from executor threads and must return
// quickly.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/codec/backend.h"
#include "server/base/caller.h"
#include "server/base/clock.h"
#include "server/base/executor.h"
#include "server/memory/slot_pool.h"
#include "server/metrics/metrics.h"
#include "server/plan/plan.h"
#include "server/plan/refine.h"
#include "server/pool/pool.h"
#include "server/scan/attention.h"
#include "server/stream/transport.h"
#include "server/transfer/report.h"

namespace spectrumkv {

class Refinement;     // refinement.h, as the next
struct RefineSource;

// A worker's half of a push (`peer` set: Send, Fetch; the side that dials) or of a rendezvous (`peer` empty: Publish,
// Expect; the side that waits).
struct SenderSpec {
  std::string transfer_id, transfer_token, peer;
  PartId part;          // one call for each part; `peer`, where set, the same in all
  Caller owner;         // whose transfer it will be
  std::string pool_id;  // of the blocks, for its quota
  std::unique_ptr<BlockHold> source;
  Policy policy;
  std::shared_ptr<const RecentQueries> queries;  // where the policy wants them and the source is there
  std::optional<BudgetChoice> choice;  // set by the manager where the policy leaves the budget to it
  int64_t deadline_ms = 0;
  bool layerwise = false;
  // Of a source on a GPU: the handle of an event behind the writes (DeviceEvents::Add); empty: they have been done.
  std::string written_event;
  // Equal fingerprints of the request make a repeated call idempotent.
  std::string fingerprint;
  int64_t retain_ms = 0;  // after COMMITTED; of one part
  std::optional<Tier> background_tier;  // the destination refines on its own; where it is retained
  // Of a refinement (by the manager alone): the transfer that it makes better, and what of its source.
  std::string refines;
  std::shared_ptr<const RefineSource> refine;
};
struct ReceiverSpec {
  std::string transfer_id, transfer_token, peer;
  PartId part;  // each may come from another peer
  Caller owner;
  std::string pool_id;
  std::unique_ptr<BlockHold> target;
  int64_t deadline_ms = 0;
  bool accept_dropped = false, exact_conversion = false;
  bool refinable = false;  // Refine may follow; of one part
  bool refine_direct = false;  // where a refinement in the background lands
  std::string fingerprint;
  // Of a refinement (by the manager alone).
  std::shared_ptr<Refinement> refinement;
};

// A worker asks for better precision of what has arrived.
struct RefineSpec {
  std::string transfer_id, refine_id, peer;  // peer empty: where the transfer came from
  Caller owner;
  RefineSelection selection;
  Tier tier = Tier::kRaw;
  std::optional<double> budget;  // of the transfer's raw bytes
  bool direct = false;
  int64_t deadline_ms = 0;
  std::string fingerprint;
};
// A worker takes over what a refinement has brought.
struct ApplySpec {
  std::string refine_id;
  Caller owner;
  uint64_t max_bytes = 0;  // 0: all that has arrived
  // As cudaIpcGetEventHandle gave it: behind the worker's last reads of the blocks, which are not written before it has
  // been reached. Empty: nobody reads them.
  std::string read_event;
  std::function<bool()> given_up;  // the caller waits no more: then nothing is copied; empty: it does
};
struct RefineMemory {
  uint64_t staging_bytes = 0, cache_bytes = 0;  // in use
};
struct RefineStarted {
  uint64_t cells = 0, cells_left = 0, kv_bytes = 0;
};
struct RefinementApplied {
  uint64_t applied_bytes = 0, staged_bytes = 0, stale_cells = 0;
  bool complete = false, exact = false;
};

// How much tokens matter, learnt while a source is being written; at most one of them.
struct LaterImportance {
  std::vector<float> scores;  // of tokens 0..n-1
  std::shared_ptr<const RecentQueries> queries;
};

class TransferWatcher {
 public:
  virtual ~TransferWatcher() = default;
  virtual void OnLayersReady(uint32_t layers) = 0;
  virtual void OnProgress(const TransferReport& report) = 0;
  // Last.
  virtual void OnTerminal(const TransferReport& report) = 0;
};

// How long stages took for `kv_bytes` before the first transfer, by one thread (calibrate.h). 0: not measured.
struct StageSpeeds {
  double kv_bytes = 0;
  ByFamily encode_seconds{}, decode_seconds{};
  double scan_seconds = 0;
  double sampled_kv_bytes = 0, sample_seconds = 0;  // what OPTIMAL reads
  double attended_bytes = 0, attend_seconds = 0;    // what RECENT_QUERIES reads: AttendedBytes
};

struct TransferOptions {
  uint64_t epoch = 0;
  int64_t progress_timeout_ms = 5000;
  int64_t max_deadline_ms = 600000;  // of a layer-wise source that has not advanced yet
  uint32_t streams = 2;
  uint32_t credits_per_transfer = 16;
  // Chunks up to this size (KV bytes to encode, wire bytes to decode) are coded where they are met: handing them to the
  // compute executor would take longer than the work.
  uint64_t inline_chunk_bytes = 128 << 10;
  uint32_t compute_threads = 2;  // of TransferParts::compute, for predictions
  StageSpeeds speeds;
  uint32_t max_active = 1024;
  // Of those, of one owner and of one pool.
  uint32_t max_active_per_user = UINT32_MAX, max_active_per_pool = UINT32_MAX;
  uint32_t max_waiting_peers = 1024;
  // Refinement: sources kept after COMMITTED, and destinations that remember their tiers, of each at most so many; memory
  // for staging; what refinements may send in all, 0: no limit; hosts that may be dialled (base/host_rule.h).
  uint32_t max_retained = 64;
  int64_t max_retain_ms = 600000;
  uint64_t staging_bytes = uint64_t{1} << 30;
  uint64_t cache_bytes = 0;  // for the words of retained sources whose workers need the blocks
  uint64_t refine_bytes_per_second = 0;
  std::vector<std::string> allowed_hosts;
  int64_t terminal_memory_ms = 300000;
  uint32_t terminal_memory_count = 10000;
};

// Borrowed; all outlive the manager.
struct TransferParts {
  Clock* clock = nullptr;
  Executor* control = nullptr;  // state machines
  Executor* compute = nullptr;  // scan, plan, encode, decode
  Transport* transport = nullptr;
  SlotPool* send_slots = nullptr;
  SlotPool* receive_slots = nullptr;
  const Backend* backend = nullptr;
  Metrics* metrics = nullptr;
};

struct PeerStatus {
  std::string address, direction, last_error;
  uint64_t sessions_active = 0, sessions_total = 0, wire_bytes_sent = 0, wire_bytes_received = 0;
  Measured measured;
};

class TransferManager : public PeerAcceptor {
 public:
  static std::unique_ptr<TransferManager> Create(TransferOptions options, TransferParts parts);
  // REQUIRES: the transport delivers nothing any more. Fails what is left.
  ~TransferManager() override = default;

  // One part, or the whole of a transfer that has one. Errors: INVALID_ARGUMENT INVALID_TRANSFER_ID, INVALID_PART (it does
  // not fit the parts that are here), and those of Planner::Create; ALREADY_EXISTS TRANSFER_EXISTS (same id,
  // other request, also a remembered one); FAILED_PRECONDITION TRANSFER_TERMINAL (other parts have ended it); RESOURCE_EXHAUSTED TRANSFERS_FULL, TRANSFERS_QUOTA, POOL_TRANSFERS_QUOTA + retry delay;
  // UNAVAILABLE DRAINING.
  virtual absl::Status StartSender(SenderSpec spec) = 0;
  virtual absl::Status StartReceiver(ReceiverSpec spec) = 0;
  // What to answer a call whose transfer_id is known in this role: OK to a repeat of the request that runs, else
  // ALREADY_EXISTS TRANSFER_EXISTS, also where it is another caller's. Nothing: the id is free. Ask before taking a BlockHold, whose blocks the known
  // transfer may have.
  virtual std::optional<absl::Status> FindRepeat(const Caller& caller, const std::string& transfer_id, Role role,
                                                 PartId part, const std::string& fingerprint) = 0;

  // This one and those below: PERMISSION_DENIED NOT_OWNER where the transfer is another caller's.
  // NOT_FOUND UNKNOWN_TRANSFER; INVALID_ARGUMENT NOT_LAYERWISE, OUT_OF_RANGE, INVALID_SCORES, INVALID_QUERIES;
  // FAILED_PRECONDITION TRANSFER_TERMINAL. `written_event` as in SenderSpec, with the errors of DeviceEvents::Add;
  // INVALID_ARGUMENT NOT_ON_DEVICE; NOT_FOUND UNKNOWN_PART.
  virtual absl::Status Advance(const Caller& caller, const std::string& transfer_id, uint32_t layers, uint32_t tokens,
                               const LaterImportance& importance, const std::string& written_event = {},
                               uint32_t part_index = 0) = 0;

  // Of several parts: what they have come to together. role empty: the only one of that id; INVALID_ARGUMENT AMBIGUOUS_ROLE where both are here and the caller's. NOT_FOUND
  // UNKNOWN_TRANSFER. The same for the calls below.
  virtual absl::StatusOr<TransferReport> Get(const Caller& caller, const std::string& transfer_id, std::optional<Role> role) = 0;
  // Layers ready so far are told at once; a terminal transfer gives its terminal event at once. The watcher is kept until
  // OnTerminal or Unwatch.
  virtual absl::StatusOr<uint64_t> Watch(const Caller& caller, const std::string& transfer_id, std::optional<Role> role,
                                         std::shared_ptr<TransferWatcher> watcher) = 0;
  virtual void Unwatch(const std::string& transfer_id, Role role, uint64_t watch_id) = 0;
  // `done` exactly once, when no byte can land or be read any more.
  virtual void Cancel(const Caller& caller, const std::string& transfer_id, std::optional<Role> role,
                      std::function<void(absl::StatusOr<TransferReport>)> done) = 0;
  // Cancels a Publish nobody fetched; forgets a terminal transfer. FAILED_PRECONDITION TRANSFER_ACTIVE otherwise;
  // STILL_RETAINED: EndRefinements first.
  virtual absl::Status Release(const Caller& caller, const std::string& transfer_id, std::optional<Role> role) = 0;
  // docs/refinement.md. A refinement is a transfer `refine_id` of this daemon, a receiver. OK without cells: there is none to
  // gain, nothing was started. Errors: NOT_FOUND UNKNOWN_TRANSFER; PERMISSION_DENIED NOT_OWNER, PEER_NOT_ALLOWED;
  // FAILED_PRECONDITION NOT_COMMITTED, NOT_RETAINED, PEER_UNKNOWN; INVALID_ARGUMENT INVALID_SELECTION, BUDGET_TOO_SMALL;
  // RESOURCE_EXHAUSTED REFINE_STAGING_FULL; those of StartReceiver and, in direct mode, of BlockTicket::Reserve.
  virtual absl::StatusOr<RefineStarted> Refine(RefineSpec spec) = 0;
  // `done` exactly once. Without read_event it copies on the calling thread. NOT_FOUND UNKNOWN_TRANSFER; FAILED_PRECONDITION
  // NOT_A_REFINEMENT, NOT_RETAINED; INVALID_ARGUMENT NOT_ON_DEVICE; DEADLINE_EXCEEDED EVENT_NOT_REACHED (after the progress
  // timeout); RESOURCE_EXHAUSTED APPLY_PENDING (another call waits for its event, or writes); those of DeviceEvents and of Refinement::Apply.
  virtual void ApplyRefinement(ApplySpec spec, std::function<void(absl::StatusOr<RefinementApplied>)> done) = 0;
  // After OnTerminal of a watch: `done` at most once, with the report when the destination has become exact, or when nothing
  // is retained any more, at once where that is so; not after Unwatch. NOT_FOUND UNKNOWN_TRANSFER.
  virtual absl::Status AwaitExact(const Caller& caller, const std::string& transfer_id, Role role, uint64_t watch_id,
                                  std::function<void(const TransferReport&)> done) = 0;
  // A sender's retained source moves into the daemon's cache; `done` exactly once, when its blocks are not read any more: true,
  // it is there, refinements go on; false: nothing is retained, for there was no room, or never was. Refinements that
  // read it end UNAVAILABLE SOURCE_MOVED. Errors: NOT_FOUND UNKNOWN_TRANSFER, INVALID_ARGUMENT NOT_A_SOURCE.
  virtual void MoveToCache(const Caller& caller, const std::string& transfer_id, std::optional<Role> role,
                           std::function<void(absl::StatusOr<bool>)> done) = 0;
  virtual RefineMemory refine_memory() const = 0;
  // Ends what is kept of a transfer for refinements, and those under way; `done` once no byte of it is read or written any
  // more, at once where nothing is kept. Before Release.
  virtual void EndRefinements(const Caller& caller, const std::string& transfer_id, std::optional<Role> role,
                              std::function<void()> done) = 0;
  // The same of all transfers of a pool that is about to go.
  virtual void EndRefinementsOf(const std::string& pool_id) = 0;
  // Where this daemon's PeerService listens, for peers that shall ask for refinements.
  virtual void SetPeerPort(uint32_t port) = 0;
  virtual absl::Status ReportFirstToken(const Caller& caller, const std::string& transfer_id, std::optional<Role> role, double seconds) = 0;

  virtual std::vector<TransferReport> List(uint32_t limit, bool active_only) = 0;
  virtual std::vector<PeerStatus> ListPeers() = 0;
  // What is known of the way to a peer, named as in Send, and of this daemon's stages for a source that is read so.
  virtual Measured MeasuredOf(const std::string& peer, CodedBy by) = 0;
  // What was measured of this daemon's stages.
  virtual StageRates StagesOf(CodedBy by) = 0;
  virtual uint32_t active() const = 0;
  // No new transfers from now on; `done` once, when none is active.
  virtual void StartDraining(std::function<void()> done) = 0;
  // Fails everything that is left (UNAVAILABLE SHUTTING_DOWN); returns when all is settled.
  virtual void Shutdown() = 0;
};

}  // namespace spectrumkv
