// Two engines, one source pool on `a`, one destination pool on `b` with other blocks: what the engine tests start from.
#pragma once

#include "tests/unit/transfer/engine_fixture.h"

namespace spectrumkv {

inline constexpr uint64_t kEpochA = 0xA1, kEpochB = 0xB1;

class EngineTest : public ::testing::Test {
 protected:
  void Build(EngineSettings settings = {}) {
    settings.options.progress_timeout_ms = progress_timeout_ms_;
    settings.options.inline_chunk_bytes = inline_chunk_bytes_;
    a_ = std::make_unique<Engine>("a", network_.get(), settings, kEpochA);
    b_ = std::make_unique<Engine>("b", network_.get(), settings, kEpochB);
  }
  void TearDown() override {
    a_->Stop();
    b_->Stop();
    network_.reset();
  }

  // Ends this round of a test; Build begins the next.
  void StartOver() {
    TearDown();
    network_ = std::make_unique<MemoryNetwork>();
  }

  SenderSpec Send(const std::string& id, std::unique_ptr<BlockHold> source, Policy policy = {},
                  const std::string& peer = "b") {
    SenderSpec spec;
    spec.owner = kMe;
    spec.pool_id = source_pool_;
    spec.transfer_id = id;
    spec.peer = peer;
    spec.source = std::move(source);
    spec.policy = std::move(policy);
    spec.deadline_ms = 15000;
    spec.fingerprint = "f-" + id;
    return spec;
  }
  ReceiverSpec Expect(const std::string& id, std::unique_ptr<BlockHold> target, const std::string& peer = "") {
    ReceiverSpec spec;
    spec.owner = kMe;
    spec.pool_id = target_pool_;
    spec.transfer_id = id;
    spec.peer = peer;
    spec.target = std::move(target);
    spec.deadline_ms = 15000;
    spec.fingerprint = "f-" + id;
    return spec;
  }
  static Policy Raw() {
    Policy policy;
    policy.allocator = Allocator::kRaw;
    policy.budget = 1.1;
    return policy;
  }

  // One source of 5 blocks on a, one destination on b with half the block size and heads first.
  void Prepare() {
    source_layout_.block_tokens = 16;
    target_layout_.block_tokens = 8;
    target_layout_.heads_first = true;
    source_pool_ = a_->AddPool(source_layout_);
    target_pool_ = b_->AddPool(target_layout_);
    sent_ = FillBlocks(*a_, source_pool_, source_layout_, {7, 3, 4, 20, 1}, 1);
  }
  std::unique_ptr<BlockHold> Source(uint32_t tokens = 80) {
    return a_->Source(source_pool_, {{7, 1}, {3, 2}, {20, 1}, {1, 1}}, tokens);
  }
  std::unique_ptr<BlockHold> Target(uint32_t tokens = 80, uint64_t first = 10) {
    return b_->Target(target_pool_, {{first, 10}}, tokens);
  }
  std::vector<std::string> Landed(uint64_t first = 10) {
    std::vector<uint64_t> blocks;
    for (uint64_t i = 0; i < 10; ++i) blocks.push_back(first + i);
    return ReadBlocks(*b_, target_pool_, target_layout_, blocks);
  }

  int64_t progress_timeout_ms_ = 1500;
  // 0: every chunk takes the way over the compute executor, as large ones do.
  uint64_t inline_chunk_bytes_ = 0;
  std::unique_ptr<MemoryNetwork> network_ = std::make_unique<MemoryNetwork>();
  std::unique_ptr<Engine> a_, b_;
  PoolLayout source_layout_, target_layout_;
  std::string source_pool_, target_pool_;
  std::vector<std::string> sent_;
};

}  // namespace spectrumkv
