// PoolRegistry: finds pools, registers them once per request id, keeps the daemon's limits.
#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "server/base/ids.h"
#include "server/base/log.h"
#include "server/base/status.h"
#include "server/pool/pool_core.h"

namespace spectrumkv {
namespace {

constexpr size_t kPoolIdBytes = 16;
constexpr size_t kMaxRequestIdBytes = 256;
constexpr int64_t kRetryMs = 1000;

using Segments = std::vector<std::unique_ptr<Segment>>;

uint64_t OwnedBytes(const PoolSchema& schema) {
  uint64_t bytes = 0;  // cannot wrap: CheckSchema bounds count and sizes
  for (const SegmentSpec& segment : schema.segments) {
    if (segment.kind == SegmentSpec::Kind::kDaemonOwned) bytes += segment.size_bytes;
  }
  return bytes;
}

uint64_t AllBytes(const PoolSchema& schema) {
  uint64_t bytes = 0;
  for (const SegmentSpec& segment : schema.segments) bytes += segment.size_bytes;
  return bytes;
}

absl::StatusOr<std::unique_ptr<DeviceMemory>> MapOnDevice(const SegmentSpec& spec, const Devices* devices) {
  if (devices == nullptr) {
    return MakeError(absl::StatusCode::kUnimplemented, "CUDA_NOT_AVAILABLE", "this daemon uses no GPU");
  }
  auto device = devices->Get(spec.device);
  if (!device.ok()) return device.status();
  return spec.kind == SegmentSpec::Kind::kCudaIpc ? (*device)->Import(spec.name, spec.offset_bytes, spec.size_bytes)
                                                  : (*device)->Allocate(spec.size_bytes);
}

template <typename Memory>
absl::StatusOr<std::unique_ptr<Segment>> AsSegment(absl::StatusOr<std::unique_ptr<Memory>> memory) {
  if (!memory.ok()) return memory.status();
  return std::make_unique<Segment>(*std::move(memory));
}

absl::StatusOr<std::unique_ptr<Mapping>> MapOnHost(const SegmentSpec& spec, const PoolLimits& limits,
                                                   const SegmentOwners& owners) {
  switch (spec.kind) {
    case SegmentSpec::Kind::kPosixShm: return OpenShmSegment(spec.name, limits.shm_prefix, spec.size_bytes, owners);
    case SegmentSpec::Kind::kFile: return OpenFileSegment(limits.shared_dir, spec.name, spec.size_bytes, owners);
    case SegmentSpec::Kind::kDaemonOwned: return AllocateOwned(spec.size_bytes);
    case SegmentSpec::Kind::kCudaIpc: break;
  }
  return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_SCHEMA", "unknown kind of segment");
}

// The error of one segment, with its place in the schema.
absl::Status InSegment(size_t index, const absl::Status& error) {
  Metadata metadata = MetadataOf(error);
  metadata["field"] = "segments[" + std::to_string(index) + "]";
  return MakeError(error.code(), ReasonOf(error), std::string(error.message()), metadata, RetryAfterMsOf(error));
}

// CheckSchema has seen names alone; two names of one object would hide an overlap.
absl::StatusOr<Segments> MapAll(const PoolSchema& schema, const PoolLimits& limits, const SegmentOwners& owners,
                                const Devices* devices) {
  Segments segments;
  std::set<std::pair<uint64_t, uint64_t>> objects;
  for (size_t i = 0; i < schema.segments.size(); ++i) {
    const SegmentSpec& spec = schema.segments[i];
    auto segment = spec.device.empty() ? AsSegment(MapOnHost(spec, limits, owners)) : AsSegment(MapOnDevice(spec, devices));
    if (!segment.ok()) return InSegment(i, segment.status());
    const Mapping* const host = (*segment)->host();
    const bool shared = host != nullptr && spec.kind != SegmentSpec::Kind::kDaemonOwned;
    if (shared && !objects.emplace(host->device, host->inode).second) {
      const std::string field = "segments[" + std::to_string(i) + "]";
      return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_SCHEMA",
                       field + " is the same object as an earlier segment", {{"field", field}});
    }
    segments.push_back(*std::move(segment));
  }
  return segments;
}

class Registry final : public PoolRegistry {
 public:
  Registry(PoolLimits limits, uint64_t epoch, Clock* clock, PoolEvents events, Devices* devices, Executor* unmapper)
      : limits_(std::move(limits)),
        epoch_(epoch),
        clock_(clock),
        events_(std::move(events)),
        devices_(devices),
        unmapper_(unmapper) {}

  ~Registry() override {
    for (const auto& core : All()) core->Shutdown();
  }

  absl::StatusOr<PoolHandle> Register(const Caller& caller, const std::string& request_id, const PoolSchema& schema,
                                      int64_t lease_ttl_ms) override {
    if (request_id.size() > kMaxRequestIdBytes) {
      return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_REQUEST_ID",
                       "request_id has " + std::to_string(request_id.size()) + " bytes, at most " +
                           std::to_string(kMaxRequestIdBytes) + " are allowed");
    }
    if (!caller.known()) {
      return MakeError(absl::StatusCode::kPermissionDenied, "UNKNOWN_CALLER",
                       "the user behind this connection is not known: nothing can be registered for it");
    }
    // One at a time, so that a repeat waits for the first call's answer. Mapping large memory takes seconds.
    std::lock_guard<std::mutex> register_lock(register_mutex_);
    if (const auto core = FindRequest(caller, request_id)) {
      if (core->schema() != schema) {
        return MakeError(absl::StatusCode::kAlreadyExists, "REQUEST_ID_REUSED",
                         "request_id \"" + request_id + "\" registered another schema", {{"field", "request_id"}});
      }
      auto ttl_ms = core->Renew();
      if (ttl_ms.ok()) return PoolHandle{core->id(), epoch_, *ttl_ms};
    }
    if (absl::Status status = Admit(caller, schema); !status.ok()) return status;
    auto segments = MapAll(schema, limits_, OwnersFor(caller), devices_);
    if (!segments.ok()) {
      std::lock_guard<std::mutex> lock(state_->mutex);
      state_->owned_bytes -= OwnedBytes(schema);
      return segments.status();
    }
    return Insert(caller, request_id, schema, *std::move(segments), LeaseTtlMs(lease_ttl_ms));
  }

  absl::StatusOr<int64_t> Renew(const Caller& caller, const std::string& pool_id, uint64_t epoch) override {
    auto core = Find(caller, pool_id, epoch);
    return core.ok() ? (*core)->Renew() : core.status();
  }

  absl::StatusOr<uint64_t> OpenHold(const Caller& caller, const std::string& pool_id, uint64_t epoch,
                                    std::function<void(const std::string&)> on_event) override {
    auto core = Find(caller, pool_id, epoch);
    if (!core.ok()) return core.status();
    absl::StatusOr<uint64_t> hold_id;
    {
      std::lock_guard<std::mutex> hold_lock(hold_mutex_);
      if (absl::Status quota = CheckHoldQuota(caller); !quota.ok()) return quota;
      hold_id = (*core)->OpenHold(on_event);
    }
    bool draining = false;
    {
      std::lock_guard<std::mutex> lock(state_->mutex);
      draining = state_->draining;
    }
    // StartDraining told the streams that were open then; one that opens meanwhile may hear it twice.
    if (hold_id.ok() && draining) on_event("DRAINING");
    return hold_id;
  }

  void CloseHold(const std::string& pool_id, uint64_t hold_id) override {
    if (const auto core = Lookup(pool_id)) core->CloseHold(hold_id);
  }

  void Unregister(const Caller& caller, const std::string& pool_id, uint64_t epoch, int64_t timeout_ms,
                  std::function<void(absl::Status)> done) override {
    auto core = Find(caller, pool_id, epoch);
    if (core.ok()) {
      (*core)->Unregister(timeout_ms, std::move(done));
    } else {
      done(core.status());
    }
  }

  absl::StatusOr<std::unique_ptr<BlockHold>> HoldSource(const Caller& caller, const std::string& pool_id, uint64_t epoch,
                                                        const std::vector<GroupBlockList>& blocks,
                                                        uint32_t token_count) override {
    auto core = Find(caller, pool_id, epoch);
    if (!core.ok()) return core.status();
    return (*core)->Hold(blocks, token_count, /*exclusive=*/false);
  }

  absl::StatusOr<std::unique_ptr<BlockHold>> ReserveTarget(const Caller& caller, const std::string& pool_id, uint64_t epoch,
                                                           const std::vector<GroupBlockList>& blocks,
                                                           uint32_t token_count) override {
    auto core = Find(caller, pool_id, epoch);
    if (!core.ok()) return core.status();
    return (*core)->Hold(blocks, token_count, /*exclusive=*/true);
  }

  absl::Status PutBlock(const Caller& caller, const std::string& pool_id, uint64_t epoch, uint32_t group, uint32_t layer, PlaneId plane,
                        uint64_t block, const std::string& data) override {
    auto core = Find(caller, pool_id, epoch);
    return core.ok() ? (*core)->PutBlock(group, layer, plane, block, data) : core.status();
  }

  absl::StatusOr<std::string> GetBlock(const Caller& caller, const std::string& pool_id, uint64_t epoch, uint32_t group, uint32_t layer,
                                       PlaneId plane, uint64_t block) override {
    auto core = Find(caller, pool_id, epoch);
    if (!core.ok()) return core.status();
    return (*core)->GetBlock(group, layer, plane, block);
  }

  absl::StatusOr<PoolSchema> SchemaOf(const Caller& caller, const std::string& pool_id, uint64_t epoch) override {
    auto core = Find(caller, pool_id, epoch);
    if (!core.ok()) return core.status();
    return (*core)->schema();
  }

  std::vector<PoolStatus> List() const override {
    std::vector<PoolStatus> list;
    for (const auto& core : All()) list.push_back(core->Describe());
    return list;
  }

  void StartDraining() override {
    {
      std::lock_guard<std::mutex> lock(state_->mutex);
      if (std::exchange(state_->draining, true)) return;
    }
    for (const auto& core : All()) core->Announce("DRAINING");
  }

 private:
  // Outlives the registry where a hold does.
  struct State {
    std::mutex mutex;
    std::map<std::string, std::shared_ptr<PoolCore>> pools;
    std::map<std::pair<Caller, std::string>, std::string> pool_of_request;
    uint64_t owned_bytes = 0;
    bool draining = false;
  };

  std::vector<std::shared_ptr<PoolCore>> All() const {
    std::vector<std::shared_ptr<PoolCore>> all;
    std::lock_guard<std::mutex> lock(state_->mutex);
    for (const auto& [id, core] : state_->pools) all.push_back(core);
    return all;
  }

  // Also one that is lost; null where there is none.
  std::shared_ptr<PoolCore> Lookup(const std::string& pool_id) const {
    std::lock_guard<std::mutex> lock(state_->mutex);
    const auto found = state_->pools.find(pool_id);
    return found == state_->pools.end() ? nullptr : found->second;
  }

  absl::StatusOr<std::shared_ptr<PoolCore>> Find(const Caller& caller, const std::string& pool_id,
                                                 uint64_t epoch) const {
    // First: to a client of an earlier daemon, "unknown pool" would hide why.
    if (epoch != epoch_) {
      return MakeError(absl::StatusCode::kFailedPrecondition, "STALE_EPOCH",
                       "the daemon was restarted since pool " + pool_id + " was registered: register it again",
                       {{"pool_id", pool_id}, {"epoch", std::to_string(epoch)},
                        {"daemon_epoch", std::to_string(epoch_)}});
    }
    const auto core = Lookup(pool_id);
    if (core == nullptr || !core->alive()) {
      return MakeError(absl::StatusCode::kNotFound, "UNKNOWN_POOL", "pool " + pool_id + " is not registered",
                       {{"pool_id", pool_id}});
    }
    if (absl::Status own = CheckOwner(core->owner(), caller, "pool.pool_id"); !own.ok()) return own;
    return core;
  }

  std::shared_ptr<PoolCore> FindRequest(const Caller& caller, const std::string& request_id) const {
    std::lock_guard<std::mutex> lock(state_->mutex);
    const auto found = state_->pool_of_request.find({caller, request_id});
    if (request_id.empty() || found == state_->pool_of_request.end()) return nullptr;
    const auto core = state_->pools.find(found->second);
    return core != state_->pools.end() && core->second->alive() ? core->second : nullptr;
  }

  SegmentOwners OwnersFor(const Caller& caller) const {
    SegmentOwners owners = caller.has_uid() ? SegmentOwners{caller.uid()} : limits_.token_owners;
    owners.insert(owners.end(), limits_.allowed_owners.begin(), limits_.allowed_owners.end());
    return owners;
  }

  absl::Status QuotaError(PoolQuota quota, const std::string& reason, const std::string& key, uint64_t asked,
                          uint64_t used, uint64_t limit) const {
    events_.quota_refused(quota);
    return MakeError(absl::StatusCode::kResourceExhausted, reason,
                     "this user has " + std::to_string(used) + " and asks for " + std::to_string(asked) + " more; " + key +
                         " is " + std::to_string(limit),
                     {{"field", key}, {"value", std::to_string(used + asked)}, {"limit", std::to_string(limit)}},
                     asked <= limit ? kRetryMs : -1);
  }

  // Of the caller's pools; also those that are lost, as long as somebody uses their memory.
  absl::Status CheckQuotas(const Caller& caller, const PoolSchema& schema) const {
    const uint64_t bytes = AllBytes(schema), segments = schema.segments.size();
    uint64_t pools = 0, used_bytes = 0, used_segments = 0;
    for (const auto& core : All()) {
      if (core->owner() != caller) continue;
      ++pools;
      used_bytes += AllBytes(core->schema());
      used_segments += core->schema().segments.size();
    }
    if (pools >= limits_.max_pools_per_user) {
      return QuotaError(PoolQuota::kPools, "POOLS_QUOTA", "quota.pools_per_user", 1, pools, limits_.max_pools_per_user);
    }
    if (used_bytes > limits_.max_bytes_per_user || bytes > limits_.max_bytes_per_user - used_bytes) {
      return QuotaError(PoolQuota::kBytes, "BYTES_QUOTA", "quota.user_bytes", bytes, used_bytes,
                        limits_.max_bytes_per_user);
    }
    if (used_segments + segments > limits_.max_segments_per_user) {
      return QuotaError(PoolQuota::kSegments, "SEGMENTS_QUOTA", "quota.segments_per_user", segments, used_segments,
                        limits_.max_segments_per_user);
    }
    return absl::OkStatus();
  }

  absl::Status CheckHoldQuota(const Caller& caller) const {
    uint64_t holds = 0;
    for (const auto& core : All()) {
      if (core->owner() == caller) holds += core->streams();
    }
    if (holds < limits_.max_holds_per_user) return absl::OkStatus();
    return QuotaError(PoolQuota::kHolds, "HOLDS_QUOTA", "quota.holds_per_user", 1, holds, limits_.max_holds_per_user);
  }

  // On success the schema's owned bytes are counted.
  absl::Status Admit(const Caller& caller, const PoolSchema& schema) {
    {
      std::lock_guard<std::mutex> lock(state_->mutex);
      if (state_->draining) {
        return MakeError(absl::StatusCode::kUnavailable, "DRAINING", "the daemon is draining and takes no new pools");
      }
    }
    if (absl::Status status = CheckSchema(schema, limits_.max_chunk_bytes); !status.ok()) return status;
    if (absl::Status status = CheckQuotas(caller, schema); !status.ok()) return status;
    const uint64_t owned = OwnedBytes(schema);
    std::lock_guard<std::mutex> lock(state_->mutex);
    if (state_->pools.size() >= limits_.max_pools) {
      return MakeError(absl::StatusCode::kResourceExhausted, "POOLS_FULL",
                       std::to_string(state_->pools.size()) + " pools are registered, the most allowed",
                       {{"max_pools", std::to_string(limits_.max_pools)}}, kRetryMs);
    }
    const uint64_t left = limits_.max_owned_bytes - std::min(limits_.max_owned_bytes, state_->owned_bytes);
    if (owned > left) {
      return MakeError(absl::StatusCode::kResourceExhausted, "OWNED_QUOTA",
                       "the schema asks for " + std::to_string(owned) + " daemon-owned bytes, " + std::to_string(left) +
                           " of " + std::to_string(limits_.max_owned_bytes) + " are left",
                       {{"asked_bytes", std::to_string(owned)}, {"left_bytes", std::to_string(left)}}, kRetryMs);
    }
    state_->owned_bytes += owned;
    return absl::OkStatus();
  }

  PoolHandle Insert(const Caller& caller, const std::string& request_id, const PoolSchema& schema, Segments segments,
                    int64_t ttl_ms) {
    PoolCore::Config config;
    config.id = RandomHex(kPoolIdBytes);
    config.owner = caller;
    config.schema = schema;
    config.segments = std::move(segments);
    config.lease_ttl_ms = ttl_ms;
    config.clock = clock_;
    config.unmapper = unmapper_;
    config.events = events_;
    const std::string id = config.id;
    config.on_gone = [state = state_, id, request_key = std::make_pair(caller, request_id), owned = OwnedBytes(schema)] {
      std::shared_ptr<PoolCore> dropped;  // destroyed outside the lock
      std::lock_guard<std::mutex> lock(state->mutex);
      const auto found = state->pools.find(id);
      if (found == state->pools.end()) return;
      dropped = std::move(found->second);
      state->pools.erase(found);
      state->owned_bytes -= owned;
      const auto request = state->pool_of_request.find(request_key);
      if (request != state->pool_of_request.end() && request->second == id) state->pool_of_request.erase(request);
    };
    auto core = std::make_shared<PoolCore>(std::move(config));
    {
      std::lock_guard<std::mutex> lock(state_->mutex);
      state_->pools.emplace(id, core);
      if (!request_id.empty()) state_->pool_of_request[{caller, request_id}] = id;
    }
    core->StartLease();
    SPECTRUMKV_LOG(kInfo, "pool", "registered", {"pool", ShortPoolId(id)}, {"owner", caller.Name()}, {"model", schema.model}, {"lease_ttl_ms", ttl_ms});
    return PoolHandle{id, epoch_, ttl_ms};
  }

  int64_t LeaseTtlMs(int64_t asked_ms) const {
    if (asked_ms <= 0) return limits_.lease_default_ttl_ms;
    return std::clamp(asked_ms, limits_.lease_min_ttl_ms, std::max(limits_.lease_min_ttl_ms, limits_.lease_max_ttl_ms));
  }

  const PoolLimits limits_;
  const uint64_t epoch_;
  Clock* const clock_;
  const PoolEvents events_;
  Devices* const devices_;
  Executor* const unmapper_;
  std::mutex register_mutex_;  // before state_->mutex
  std::mutex hold_mutex_;      // streams are counted and opened in one; before state_->mutex
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace

std::unique_ptr<PoolRegistry> PoolRegistry::Create(PoolLimits limits, uint64_t epoch, Clock* clock, PoolEvents events,
                                                   Devices* devices, Executor* unmapper) {
  return std::make_unique<Registry>(std::move(limits), epoch, clock, std::move(events), devices, unmapper);
}

}  // namespace spectrumkv
