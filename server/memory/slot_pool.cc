#include "server/memory/slot_pool.h"

#include <cassert>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "server/memory/mapping.h"

namespace spectrumkv {
namespace {

constexpr size_t kSlotAlign = 64;

}  // namespace

Slot& Slot::operator=(Slot&& other) noexcept {
  if (this == &other) return *this;
  Release();
  pool_ = std::exchange(other.pool_, nullptr);
  data_ = std::exchange(other.data_, nullptr);
  return *this;
}

void Slot::Release() {
  SlotPool* pool = std::exchange(pool_, nullptr);
  uint8_t* data = std::exchange(data_, nullptr);
  if (pool != nullptr) pool->Return(data);
}

SlotPool::SlotPool(size_t count, size_t slot_bytes, Backing backing) : count_(count), slot_bytes_(slot_bytes) {
  if (backing == Backing::kNone) {
    free_.assign(count, nullptr);
    return;
  }
  const size_t stride = (slot_bytes + kSlotAlign - 1) / kSlotAlign * kSlotAlign;
  free_.reserve(count);
  if (count == 0) return;
  size_t bytes = 0;
  const bool overflow = stride < slot_bytes || __builtin_mul_overflow(count, stride, &bytes);
  auto memory = AllocateOwned(overflow ? 0 : bytes == 0 ? kSlotAlign : bytes);
  if (!memory.ok()) {
    // The daemon cannot work without its staging memory, and nothing is running yet.
    std::fprintf(stderr, "staging: %zu slots of %zu bytes: %s\n", count, slot_bytes,
                 std::string(memory.status().message()).c_str());
    std::abort();
  }
  memory_ = *std::move(memory);
  // The lowest address is on top: few busy slots stay few warm pages.
  for (size_t i = count; i-- > 0;) free_.push_back(memory_->data() + i * stride);
}

SlotPool::~SlotPool() {
  assert(free_.size() == count_);
  assert(waiters_.empty());
}

std::pair<uint8_t*, uint64_t> SlotPool::memory() const {
  return memory_ == nullptr ? std::pair<uint8_t*, uint64_t>() : std::pair(memory_->data(), memory_->size());
}

size_t SlotPool::used() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return count_ - free_.size();
}

size_t SlotPool::waiting() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return waiters_.size();
}

Slot SlotPool::TryAcquire() {
  std::lock_guard<std::mutex> lock(mutex_);
  // Return hands slots to waiters at once, so a free slot means that nobody waits.
  if (free_.empty()) return Slot();
  uint8_t* data = free_.back();
  free_.pop_back();
  return Slot(this, data);
}

SlotPool::WaitId SlotPool::Acquire(std::function<void(Slot)> ready) {
  uint8_t* data = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) {
      const WaitId id = next_wait_++;
      waiters_.push_back(Waiter{id, std::move(ready)});
      return id;
    }
    data = free_.back();
    free_.pop_back();
  }
  ready(Slot(this, data));
  return 0;
}

bool SlotPool::Cancel(WaitId wait) {
  std::function<void(Slot)> dropped;  // destroyed outside the lock: what it captures may hold a slot
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto at = waiters_.begin(); at != waiters_.end(); ++at) {
    if (at->id != wait) continue;
    dropped = std::move(at->ready);
    waiters_.erase(at);
    return true;
  }
  return false;
}

void SlotPool::Return(uint8_t* data) {
  std::function<void(Slot)> ready;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (waiters_.empty()) {
      free_.push_back(data);
      return;
    }
    ready = std::move(waiters_.front().ready);
    waiters_.pop_front();
  }
  ready(Slot(this, data));
}

}  // namespace spectrumkv
