#include "server/pool/hold.h"

#include <algorithm>
#include <cassert>
#include <optional>
#include <utility>

#include "server/base/status.h"
#include "server/pool/device_copy.h"

namespace spectrumkv {
namespace {

absl::Status BadBlocks(const std::string& message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_BLOCKS", message);
}

std::vector<std::vector<uint32_t>> WithoutStale(const std::vector<std::vector<uint32_t>>& ids, const StaleBlocks& stale) {
  std::vector<std::vector<uint32_t>> fresh(ids.size());
  for (size_t g = 0; g < ids.size(); ++g) {
    for (size_t i = 0; i < ids[g].size(); ++i) {
      if (!stale[g][i]) fresh[g].push_back(ids[g][i]);
    }
  }
  return fresh;
}

std::string GroupName(size_t group) { return "groups[" + std::to_string(group) + "]"; }

absl::Status UnknownBlock(size_t group, uint64_t block, uint64_t num_blocks) {
  return MakeError(absl::StatusCode::kNotFound, "UNKNOWN_BLOCK",
                   GroupName(group) + " has no block " + std::to_string(block) + ", only 0 to " +
                       std::to_string(num_blocks - 1),
                   {{"group", std::to_string(group)},
                    {"block", std::to_string(block)},
                    {"num_blocks", std::to_string(num_blocks)}});
}

absl::Status ExpandRuns(const GroupSchema& schema, const GroupBlockList& list, uint32_t token_count,
                        std::vector<uint32_t>* ids) {
  uint64_t total = 0;
  for (const BlockRange& run : list.runs) {
    if (run.count == 0) return BadBlocks(GroupName(list.group) + " has a run of no blocks");
    if (run.first >= schema.num_blocks) return UnknownBlock(list.group, run.first, schema.num_blocks);
    if (run.count > schema.num_blocks - run.first) {
      return UnknownBlock(list.group, schema.num_blocks, schema.num_blocks);
    }
    total += run.count;
    // More would only repeat blocks; it also bounds what a request makes the daemon hold.
    if (total > schema.num_blocks) {
      return BadBlocks(GroupName(list.group) + " lists more than its " + std::to_string(schema.num_blocks) + " blocks");
    }
  }
  if (list.skip_tokens >= schema.block_tokens) {
    return BadBlocks(GroupName(list.group) + " skips " + std::to_string(list.skip_tokens) +
                     " tokens: blocks without any token of the request are not listed, and a block has " +
                     std::to_string(schema.block_tokens));
  }
  const uint64_t needed =
      (uint64_t{list.skip_tokens} + token_count + schema.block_tokens - 1) / schema.block_tokens;
  if (total < needed) {
    return BadBlocks(GroupName(list.group) + " lists " + std::to_string(total) + " blocks of " +
                     std::to_string(schema.block_tokens) + " tokens, " + std::to_string(token_count) + " tokens behind " +
                     std::to_string(list.skip_tokens) + " need " +
                     std::to_string(needed));
  }
  ids->reserve(total);
  for (const BlockRange& run : list.runs) {
    for (uint64_t i = 0; i < run.count; ++i) ids->push_back(static_cast<uint32_t>(run.first + i));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<BlockTable> ExpandBlocks(const PoolSchema& schema, const std::vector<GroupBlockList>& blocks,
                                        uint32_t token_count) {
  if (token_count == 0) return BadBlocks("token_count is 0, it must be positive");
  if (blocks.size() != schema.groups.size()) {
    return BadBlocks(std::to_string(blocks.size()) + " block lists for " + std::to_string(schema.groups.size()) +
                     " groups");
  }
  BlockTable table;
  table.ids.resize(schema.groups.size());
  table.skip.resize(schema.groups.size());
  for (const GroupBlockList& list : blocks) {
    if (list.group >= schema.groups.size()) {
      return BadBlocks(GroupName(list.group) + " is not one of the pool's " + std::to_string(schema.groups.size()));
    }
    if (!table.ids[list.group].empty()) return BadBlocks(GroupName(list.group) + " has two block lists");
    absl::Status status = ExpandRuns(schema.groups[list.group], list, token_count, &table.ids[list.group]);
    if (!status.ok()) return status;
    table.skip[list.group] = list.skip_tokens;
  }
  return table;
}

PoolHold::PoolHold(std::shared_ptr<PoolCore> core, BlockTable table, uint32_t token_count, bool exclusive,
                   std::shared_ptr<LostNotice> notice, StaleBlocks stale)
    : core_(std::move(core)),
      table_(std::move(table)),
      token_count_(token_count),
      exclusive_(exclusive),
      notice_(std::move(notice)),
      stale_(std::move(stale)) {}

PoolHold::~PoolHold() {
  notice_->Drop();
  core_->ReleaseHold(stale_.empty() ? table_.ids : WithoutStale(table_.ids, stale_), exclusive_, notice_);
}

bool PoolHold::Fresh(uint32_t group, uint32_t token) const {
  return stale_.empty() || !stale_[group][(table_.skip[group] + token) / schema().groups[group].block_tokens];
}

std::shared_ptr<BlockTicket> PoolHold::Ticket() const {
  if (!exclusive_ || !stale_.empty()) return nullptr;
  std::vector<std::vector<uint64_t>> generations;
  if (has_generations()) generations = core_->GenerationsOf(table_.ids);
  return std::make_shared<PoolTicket>(core_, table_, token_count_, core_->TurnsOf(table_.ids), std::move(generations));
}

PoolTicket::PoolTicket(std::weak_ptr<PoolCore> core, BlockTable table, uint32_t token_count,
                       std::vector<std::vector<uint32_t>> turns, std::vector<std::vector<uint64_t>> generations)
    : core_(std::move(core)),
      table_(std::move(table)),
      token_count_(token_count),
      generations_(std::move(generations)),
      turns_(std::move(turns)) {}

absl::StatusOr<std::unique_ptr<BlockHold>> PoolTicket::Reserve() {
  const std::shared_ptr<PoolCore> core = core_.lock();
  if (core == nullptr) {
    return MakeError(absl::StatusCode::kNotFound, "UNKNOWN_POOL", "the pool of the destination is gone");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  return core->HoldAgain(table_, token_count_, generations_, &turns_);
}

void PoolHold::FillRows(uint32_t group, uint32_t layer_slot, PlaneId plane, uint32_t token_first, uint32_t count,
                        uint8_t** rows) const {
  assert(uint64_t{token_first} + count <= token_count_);
  if (count == 0) return;
  const TensorPlace& place = core_->place(group, layer_slot, plane);
  const uint32_t at_first = table_.skip[group] + token_first;
  const uint32_t* block = table_.ids[group].data() + at_first / place.block_tokens;
  uint32_t token = at_first % place.block_tokens;
  const uint64_t stride = place.token_stride;
  uint8_t** const end = rows + count;
  while (rows != end) {
    uint8_t* at = place.Block(*block++) + token * stride;
    const size_t in_block = std::min<size_t>(place.block_tokens - token, static_cast<size_t>(end - rows));
    uint8_t** const block_end = rows + in_block;
    for (; rows != block_end; at += stride) *rows++ = at;
    token = 0;
  }
}

absl::Status PoolHold::ZeroTail(uint32_t kept_tokens) const {
  assert(kept_tokens <= token_count_);
  if (kept_tokens == 0) return absl::OkStatus();
  std::optional<DeviceLane> lane;
  const auto zero = [&lane](const TensorPlace& place, uint32_t block, uint32_t first_token) {
    lane.has_value() ? QueueZero(place, block, first_token, &*lane) : ZeroTokens(place, block, first_token);
  };
  if (device() != nullptr) {
    auto taken = device()->TakeLane();
    if (!taken.ok()) return taken.status();
    lane.emplace(*std::move(taken));
  }
  const PoolSchema& pool = schema();
  for (uint32_t g = 0; g < pool.groups.size(); ++g) {
    const uint32_t block_tokens = pool.groups[g].block_tokens;
    const uint32_t end = table_.skip[g] + kept_tokens;
    const uint32_t used = end % block_tokens;
    if (used == 0) continue;
    const uint32_t block = table_.ids[g][end / block_tokens];
    for (uint32_t l = 0; l < pool.groups[g].layers.size(); ++l) {
      zero(core_->place(g, l, PlaneId::kK), block, used);
      if (pool.groups[g].layers[l].v) zero(core_->place(g, l, PlaneId::kV), block, used);
    }
  }
  return lane.has_value() ? lane->Finish() : absl::OkStatus();
}

void PoolHold::ReadGenerations(uint32_t group, uint32_t token_first, uint32_t count,
                               std::vector<uint64_t>* out) const {
  const uint64_t* table = core_->generations();
  if (table == nullptr || count == 0) return;
  const uint32_t block_tokens = schema().groups[group].block_tokens;
  const uint32_t first = table_.skip[group] + token_first;
  const uint32_t last = (first + (count - 1)) / block_tokens;
  for (uint32_t i = first / block_tokens; i <= last; ++i) {
    // The order a seqlock needs: what the caller read before is not newer (fence), what it reads after not older (load).
#if !defined(__SANITIZE_THREAD__)  // knows no fences; it sees one process of the two anyway
    std::atomic_thread_fence(std::memory_order_acquire);
#endif
    out->push_back(__atomic_load_n(table + table_.ids[group][i], __ATOMIC_ACQUIRE));
  }
}

}  // namespace spectrumkv
