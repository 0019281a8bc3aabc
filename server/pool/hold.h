// A BlockHold over a PoolCore.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "server/pool/pool_core.h"

namespace spectrumkv {

// Token t of the request lies in group g at place p = skip[g] + t: in block ids[g][p / block_tokens].
struct BlockTable {
  std::vector<std::vector<uint32_t>> ids;
  std::vector<uint32_t> skip;
};

// By group and place in BlockTable::ids: the block is somebody else's by now. Empty: none is.
using StaleBlocks = std::vector<std::vector<bool>>;

class PoolHold final : public BlockHold {
 public:
  // Takes over the use of `table.ids`, stale ones aside, that PoolCore::Hold or HoldAgain has counted.
  PoolHold(std::shared_ptr<PoolCore> core, BlockTable table, uint32_t token_count, bool exclusive,
           std::shared_ptr<LostNotice> notice, StaleBlocks stale = {});
  ~PoolHold() override;

  const PoolSchema& schema() const override { return core_->schema(); }
  uint32_t token_count() const override { return token_count_; }
  void FillRows(uint32_t group, uint32_t layer_slot, PlaneId plane, uint32_t token_first, uint32_t count,
                uint8_t** rows) const override;
  Device* device() const override { return core_->device(); }
  absl::Status ZeroTail(uint32_t kept_tokens) const override;
  void ReadGenerations(uint32_t group, uint32_t token_first, uint32_t count,
                       std::vector<uint64_t>* out) const override;
  std::shared_ptr<BlockTicket> Ticket() const override;
  bool Fresh(uint32_t group, uint32_t token) const override;
  bool has_generations() const override { return core_->generations() != nullptr; }
  absl::Status Health() const override { return exclusive_ ? core_->Health() : core_->MemoryHealth(); }
  absl::Status LookAtMemory() const override { return core_->LookAtMemory(); }
  std::shared_ptr<const void> KeepMapped() const override { return core_->KeepMapped(); }
  void OnLost(std::function<void(absl::Status why)> lost) override { notice_->Set(std::move(lost)); }

 private:
  const std::shared_ptr<PoolCore> core_;
  const BlockTable table_;
  const uint32_t token_count_;
  const bool exclusive_;
  const std::shared_ptr<LostNotice> notice_;
  const StaleBlocks stale_;
};

// Of a PoolHold.
class PoolTicket final : public BlockTicket {
 public:
  // `turns`, `generations`: of the blocks of `table`, by group, as they are while the destination is held.
  PoolTicket(std::weak_ptr<PoolCore> core, BlockTable table, uint32_t token_count,
             std::vector<std::vector<uint32_t>> turns, std::vector<std::vector<uint64_t>> generations);
  absl::StatusOr<std::unique_ptr<BlockHold>> Reserve() override;

 private:
  const std::weak_ptr<PoolCore> core_;
  const BlockTable table_;
  const uint32_t token_count_;
  const std::vector<std::vector<uint64_t>> generations_;  // empty where the pool has none
  std::mutex mutex_;
  std::vector<std::vector<uint32_t>> turns_;
};

// The blocks of each group in order, checked against the schema: one list per group, blocks that exist, enough of them
// for token_count tokens behind those that are skipped. Errors: NOT_FOUND UNKNOWN_BLOCK, INVALID_ARGUMENT INVALID_BLOCKS.
absl::StatusOr<BlockTable> ExpandBlocks(const PoolSchema& schema, const std::vector<GroupBlockList>& blocks,
                                        uint32_t token_count);

}  // namespace spectrumkv
