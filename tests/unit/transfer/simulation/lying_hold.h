// A destination whose ticket lies: blocks that others have had since are still the request's. What BlockTicket exists to
// prevent must then happen, and be seen.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "server/pool/pool.h"

namespace spectrumkv {

class LyingHold final : public BlockHold {
 public:
  explicit LyingHold(std::unique_ptr<BlockHold> hold) : hold_(std::move(hold)) {}
  const PoolSchema& schema() const override { return hold_->schema(); }
  uint32_t token_count() const override { return hold_->token_count(); }
  void FillRows(uint32_t group, uint32_t layer_slot, PlaneId plane, uint32_t token_first, uint32_t count,
                uint8_t** rows) const override {
    hold_->FillRows(group, layer_slot, plane, token_first, count, rows);
  }
  absl::Status ZeroTail(uint32_t kept_tokens) const override { return hold_->ZeroTail(kept_tokens); }
  void ReadGenerations(uint32_t group, uint32_t token_first, uint32_t count,
                       std::vector<uint64_t>* out) const override {
    hold_->ReadGenerations(group, token_first, count, out);
  }
  bool has_generations() const override { return hold_->has_generations(); }
  std::shared_ptr<BlockTicket> Ticket() const override { return std::make_shared<LyingTicket>(hold_->Ticket()); }
  bool Fresh(uint32_t, uint32_t) const override { return true; }
  absl::Status Health() const override { return hold_->Health(); }
  std::shared_ptr<const void> KeepMapped() const override { return hold_->KeepMapped(); }
  absl::Status LookAtMemory() const override { return hold_->LookAtMemory(); }
  void OnLost(std::function<void(absl::Status)> lost) override { hold_->OnLost(std::move(lost)); }

 private:
  class LyingTicket final : public BlockTicket {
   public:
    explicit LyingTicket(std::shared_ptr<BlockTicket> ticket) : ticket_(std::move(ticket)) {}
    absl::StatusOr<std::unique_ptr<BlockHold>> Reserve() override {
      auto hold = ticket_->Reserve();
      if (!hold.ok()) return hold.status();
      return std::unique_ptr<BlockHold>(std::make_unique<LyingHold>(*std::move(hold)));
    }

   private:
    const std::shared_ptr<BlockTicket> ticket_;
  };

  const std::unique_ptr<BlockHold> hold_;
};

}  // namespace spectrumkv
