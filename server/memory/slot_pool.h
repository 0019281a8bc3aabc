// Staging: a fixed set of equal slots. The daemon has two pools, one to send from and one to receive by, so that neither
// side can starve the other. Slots to send from have memory, allocated and touched once. A slot to receive by is only
// leave for the network to hold one chunk: chunks are decoded from the buffers they came in.
//
// Who holds a slot: a sender from encode until its bytes left the process; a receiver's slot is reserved by a transfer
// (a credit) from Accept until the chunk is decoded or the transfer ends. Nothing else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace spectrumkv {

class Mapping;
class SlotPool;

// Owns one slot until destroyed. Movable. Must not outlive its pool.
class Slot {
 public:
  Slot() = default;
  Slot(Slot&& other) noexcept { *this = std::move(other); }
  Slot& operator=(Slot&& other) noexcept;
  ~Slot() { Release(); }
  explicit operator bool() const { return pool_ != nullptr; }
  // Null in a pool without memory.
  uint8_t* data() const { return data_; }
  void Release();

 private:
  friend class SlotPool;
  Slot(SlotPool* pool, uint8_t* data) : pool_(pool), data_(data) {}
  SlotPool* pool_ = nullptr;
  uint8_t* data_ = nullptr;
};

// Thread-safe. REQUIRES at destruction: every slot has come back and nobody waits.
class SlotPool {
 public:
  enum class Backing { kMemory, kNone };

  // kMemory: allocates and touches count * slot_bytes, 64-byte aligned (2 MiB aligned and huge pages advised where possible).
  SlotPool(size_t count, size_t slot_bytes, Backing backing = Backing::kMemory);
  ~SlotPool();

  size_t count() const { return count_; }
  size_t slot_bytes() const { return slot_bytes_; }
  // Of all slots, in one piece; 0 bytes in a pool without memory.
  std::pair<uint8_t*, uint64_t> memory() const;
  size_t used() const;
  size_t waiting() const;

  // Empty when no slot is free or somebody waits (no overtaking).
  Slot TryAcquire();

  using WaitId = uint64_t;
  // `ready` gets a slot, in order of asking: inside this call if one is free now (the answer is then 0), else later on
  // the thread that released one. `ready` must return quickly and not call the pool.
  WaitId Acquire(std::function<void(Slot)> ready);
  // True: `ready` will not be called. False: it was, or is being called.
  bool Cancel(WaitId wait);

 private:
  friend class Slot;
  void Return(uint8_t* data);
  const size_t count_;
  const size_t slot_bytes_;
  mutable std::mutex mutex_;
  std::unique_ptr<Mapping> memory_;
  std::vector<uint8_t*> free_;
  struct Waiter {
    WaitId id;
    std::function<void(Slot)> ready;
  };
  std::deque<Waiter> waiters_;
  WaitId next_wait_ = 1;
};

}  // namespace spectrumkv
