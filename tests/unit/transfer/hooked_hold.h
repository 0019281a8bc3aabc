// A source that a test looks into: it holds up whoever reads, and counts.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "server/pool/hold_bases.h"

namespace spectrumkv {

// What a test knows and decides of a HookedHold. Thread-safe.
class ReadHooks {
 public:
  void HoldUp(bool held) {
    std::lock_guard<std::mutex> lock(mutex_);
    held_ = held;
    changed_.notify_all();
  }
  // Somebody is inside a read, held up.
  bool WaitForAReader() {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(10), [&] { return reading_ > 0; });
  }
  int reading() {
    std::lock_guard<std::mutex> lock(mutex_);
    return reading_;
  }
  int reads() {
    std::lock_guard<std::mutex> lock(mutex_);
    return reads_;
  }
  // Called once, by whoever asks for the schema next: before a transfer of it is made.
  void OnNextSchema(std::function<void()> call) {
    std::lock_guard<std::mutex> lock(mutex_);
    on_schema_ = std::move(call);
  }

 private:
  friend class HookedHold;
  void Read() {
    std::unique_lock<std::mutex> lock(mutex_);
    ++reads_;
    ++reading_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return !held_; });
    --reading_;
    changed_.notify_all();
  }
  void Schema() {
    std::function<void()> call;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      call.swap(on_schema_);
    }
    if (call) call();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool held_ = false;
  int reading_ = 0, reads_ = 0;
  std::function<void()> on_schema_;
};

class HookedHold final : public ForwardingHold {
 public:
  HookedHold(std::unique_ptr<BlockHold> hold, std::shared_ptr<ReadHooks> hooks)
      : ForwardingHold(std::move(hold)), hooks_(std::move(hooks)) {}
  const PoolSchema& schema() const override {
    hooks_->Schema();
    return hold_->schema();
  }
  void FillRows(uint32_t group, uint32_t layer_slot, PlaneId plane, uint32_t token_first, uint32_t count,
                uint8_t** rows) const override {
    hooks_->Read();
    hold_->FillRows(group, layer_slot, plane, token_first, count, rows);
  }

 private:
  const std::shared_ptr<ReadHooks> hooks_;
};

}  // namespace spectrumkv
