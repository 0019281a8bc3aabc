// What kinds of BlockHold have in common: those that stand in front of another, and those of the daemon's own memory.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "server/pool/pool.h"

namespace spectrumkv {

// Passes everything on but Ticket and Fresh, which are the hold's that a registry gave.
class ForwardingHold : public BlockHold {
 public:
  explicit ForwardingHold(std::shared_ptr<BlockHold> hold) : hold_(std::move(hold)) {}
  const PoolSchema& schema() const override { return hold_->schema(); }
  uint32_t token_count() const override { return hold_->token_count(); }
  void FillRows(uint32_t group, uint32_t layer_slot, PlaneId plane, uint32_t token_first, uint32_t count,
                uint8_t** rows) const override {
    hold_->FillRows(group, layer_slot, plane, token_first, count, rows);
  }
  Device* device() const override { return hold_->device(); }
  absl::Status ZeroTail(uint32_t kept_tokens) const override { return hold_->ZeroTail(kept_tokens); }
  void ReadGenerations(uint32_t group, uint32_t token_first, uint32_t count,
                       std::vector<uint64_t>* out) const override {
    hold_->ReadGenerations(group, token_first, count, out);
  }
  bool has_generations() const override { return hold_->has_generations(); }
  absl::Status Health() const override { return hold_->Health(); }
  std::shared_ptr<const void> KeepMapped() const override { return hold_->KeepMapped(); }
  absl::Status LookAtMemory() const override { return hold_->LookAtMemory(); }
  void OnLost(std::function<void(absl::Status)> lost) override { hold_->OnLost(std::move(lost)); }

 protected:
  const std::shared_ptr<BlockHold> hold_;
};

// Of host memory of the daemon: no worker writes there, nothing of it is lost, and it has no pages whose tail would count.
class OwnMemoryHold : public BlockHold {
 public:
  absl::Status ZeroTail(uint32_t) const final { return absl::OkStatus(); }
  void ReadGenerations(uint32_t, uint32_t, uint32_t, std::vector<uint64_t>*) const final {}
  bool has_generations() const final { return false; }
  absl::Status Health() const final { return absl::OkStatus(); }
  absl::Status LookAtMemory() const final { return absl::OkStatus(); }
  void OnLost(std::function<void(absl::Status)>) final {}
};

}  // namespace spectrumkv
