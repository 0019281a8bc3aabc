// What a worker hears of one half of a transfer, and what it must not hear.
#pragma once

#include <memory>
#include <utility>

#include "tests/unit/transfer/simulation/simulation.h"

namespace spectrumkv {

class SimWatcher final : public TransferWatcher {
 public:
  SimWatcher(Simulation* simulation, std::shared_ptr<SimTransfer> transfer, Role role)
      : simulation_(simulation), transfer_(std::move(transfer)), role_(role) {}
  void OnLayersReady(uint32_t layers) override {
    EXPECT_FALSE(transfer_->refines) << transfer_->id << ": all layers were ready before";
    EXPECT_GT(layers, layers_) << transfer_->id << ": layers become ready in order, each once";
    EXPECT_FALSE(ended_) << transfer_->id << ": a layer after the end";
    layers_ = layers;
  }
  void OnProgress(const TransferReport& report) override {
    EXPECT_FALSE(ended_) << transfer_->id << ": progress after the end";
    EXPECT_FALSE(IsTerminal(report.state)) << transfer_->id;
  }
  void OnTerminal(const TransferReport& report) override {
    ended_ = true;
    simulation_->OnEnd(transfer_, role_, report);
  }

 private:
  Simulation* const simulation_;
  const std::shared_ptr<SimTransfer> transfer_;
  const Role role_;
  uint32_t layers_ = 0;
  bool ended_ = false;
};

}  // namespace spectrumkv
