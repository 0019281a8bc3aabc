// A destination whose ticket lies: blocks that others have had since are still the request's. What BlockTicket exists to
// prevent must then happen, and be seen.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "server/pool/hold_bases.h"

namespace spectrumkv {

class LyingHold final : public ForwardingHold {
 public:
  explicit LyingHold(std::unique_ptr<BlockHold> hold) : ForwardingHold(std::move(hold)) {}
  std::shared_ptr<BlockTicket> Ticket() const override { return std::make_shared<LyingTicket>(hold_->Ticket()); }
  bool Fresh(uint32_t, uint32_t) const override { return true; }

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
};

}  // namespace spectrumkv
