// Which chunks of a transfer have arrived, and how many layers are complete. A chunk is claimed before its first byte is
// written, so that a second copy is never written.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "server/plan/plan.h"
#include "server/stream/frames.h"

namespace spectrumkv {

class Coverage {
 public:
  Coverage(const std::vector<ChunkCut>& cuts, uint32_t layers)
      : claimed_(new std::atomic<uint8_t>[cuts.size()]), done_(cuts.size(), false), left_of_layer_(layers, 0) {
    for (size_t i = 0; i < cuts.size(); ++i) claimed_[i].store(0, std::memory_order_relaxed);
    for (const ChunkCut& cut : cuts) ++left_of_layer_[cut.layer_index];
    left_ = cuts.size();
  }

  // Any thread. True for the first caller.
  [[nodiscard]] bool Claim(uint32_t chunk_index) {
    return claimed_[chunk_index].exchange(1, std::memory_order_acq_rel) == 0;
  }

  // One thread (the transfer's strand): the chunk is in place.
  void Done(const ChunkCut& cut) {
    done_[cut.chunk_index] = true;
    --left_;
    --left_of_layer_[cut.layer_index];
    while (layers_ready_ < left_of_layer_.size() && left_of_layer_[layers_ready_] == 0) ++layers_ready_;
  }

  bool full() const { return left_ == 0; }
  uint64_t done_count() const { return done_.size() - left_; }
  // The first layers_ready() layers are complete.
  uint32_t layers_ready() const { return static_cast<uint32_t>(layers_ready_); }

  std::vector<FrameRun> DoneRuns() const {
    std::vector<FrameRun> runs;
    for (uint32_t i = 0; i < done_.size(); ++i) {
      if (!done_[i]) continue;
      if (!runs.empty() && runs.back().first + runs.back().count == i) ++runs.back().count;
      else runs.push_back({i, 1});
    }
    return runs;
  }

 private:
  std::unique_ptr<std::atomic<uint8_t>[]> claimed_;
  std::vector<bool> done_;
  std::vector<uint32_t> left_of_layer_;
  size_t left_ = 0;
  size_t layers_ready_ = 0;
};

}  // namespace spectrumkv
