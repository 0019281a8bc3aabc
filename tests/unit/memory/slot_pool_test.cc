#include "server/memory/slot_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <set>
#include <thread>
#include <vector>

namespace spectrumkv {
namespace {

TEST(SlotPool, GivesEverySlotOnceAtTheExactEdge) {
  for (const size_t count : {size_t{0}, size_t{1}, size_t{2}, size_t{7}}) {
    SlotPool pool(count, 100);
    EXPECT_EQ(pool.count(), count);
    EXPECT_EQ(pool.slot_bytes(), 100u);
    std::vector<Slot> slots;
    std::set<uint8_t*> addresses;
    for (size_t i = 0; i < count; ++i) {
      EXPECT_EQ(pool.used(), i);
      slots.push_back(pool.TryAcquire());
      ASSERT_TRUE(slots.back());
      std::memset(slots.back().data(), static_cast<int>(i), pool.slot_bytes());
      EXPECT_EQ(reinterpret_cast<uintptr_t>(slots.back().data()) % 64, 0u);
      addresses.insert(slots.back().data());
    }
    EXPECT_EQ(addresses.size(), count);
    EXPECT_EQ(pool.used(), count);
    EXPECT_FALSE(pool.TryAcquire());
    for (size_t i = 0; i < count; ++i) {
      for (size_t b = 0; b < 100; ++b) ASSERT_EQ(slots[i].data()[b], i);  // no two overlap
    }
    if (count == 0) continue;
    slots.pop_back();
    EXPECT_EQ(pool.used(), count - 1);
    EXPECT_TRUE(pool.TryAcquire());
    slots.clear();
    EXPECT_EQ(pool.used(), 0u);
  }
}

TEST(SlotPool, WithoutMemoryItStillCounts) {
  SlotPool pool(2, size_t{1} << 40, SlotPool::Backing::kNone);
  EXPECT_EQ(pool.slot_bytes(), size_t{1} << 40);
  Slot first = pool.TryAcquire(), second = pool.TryAcquire();
  EXPECT_TRUE(first && second);
  EXPECT_EQ(first.data(), nullptr);
  EXPECT_FALSE(pool.TryAcquire());
  EXPECT_EQ(pool.used(), 2u);
  bool granted = false;
  EXPECT_NE(pool.Acquire([&](Slot slot) { granted = static_cast<bool>(slot); }), 0u);
  second.Release();
  EXPECT_TRUE(granted);
  EXPECT_EQ(pool.used(), 1u) << "the slot that was granted ended with its callback";
}

TEST(SlotPool, MovesKeepOneOwner) {
  SlotPool pool(2, 64);
  Slot a = pool.TryAcquire();
  Slot b = std::move(a);
  EXPECT_FALSE(a);  // NOLINT: moved from on purpose
  EXPECT_TRUE(b);
  EXPECT_EQ(pool.used(), 1u);
  Slot c = pool.TryAcquire();
  b = std::move(c);  // what b had goes back
  EXPECT_EQ(pool.used(), 1u);
  Slot& same = b;
  b = std::move(same);
  EXPECT_TRUE(b);
  b.Release();
  b.Release();
  EXPECT_EQ(pool.used(), 0u);
}

TEST(SlotPool, ServesWaitersInOrderAndNobodyOvertakes) {
  SlotPool pool(1, 64);
  Slot held = pool.TryAcquire();
  std::vector<int> order;
  std::vector<Slot> got(3);
  for (int i = 0; i < 3; ++i) {
    const SlotPool::WaitId id = pool.Acquire([&order, &got, i](Slot slot) {
      order.push_back(i);
      got[static_cast<size_t>(i)] = std::move(slot);
    });
    EXPECT_NE(id, 0u);
  }
  EXPECT_EQ(pool.waiting(), 3u);
  held.Release();
  EXPECT_EQ(order, std::vector<int>({0}));
  EXPECT_FALSE(pool.TryAcquire());
  got[0].Release();
  got[1].Release();
  EXPECT_EQ(order, std::vector<int>({0, 1, 2}));
  EXPECT_EQ(pool.waiting(), 0u);
  got[2].Release();
  EXPECT_EQ(pool.used(), 0u);
}

TEST(SlotPool, AcquireCallsInsideWhereOneIsFree) {
  SlotPool pool(1, 64);
  Slot slot;
  EXPECT_EQ(pool.Acquire([&slot](Slot got) { slot = std::move(got); }), 0u);
  EXPECT_TRUE(slot);
}

TEST(SlotPool, CancelIsTrueExactlyWhereTheCallWillNotCome) {
  SlotPool pool(1, 64);
  Slot held = pool.TryAcquire();
  bool first = false;
  Slot second;
  const auto a = pool.Acquire([&first](Slot) { first = true; });
  const auto b = pool.Acquire([&second](Slot got) { second = std::move(got); });
  EXPECT_TRUE(pool.Cancel(a));
  EXPECT_FALSE(pool.Cancel(a));
  EXPECT_FALSE(pool.Cancel(0));
  EXPECT_FALSE(pool.Cancel(12345));
  held.Release();
  EXPECT_FALSE(first);
  EXPECT_TRUE(second);
  EXPECT_FALSE(pool.Cancel(b));
}

TEST(SlotPool, ACancelledWaiterMayItselfHoldASlot) {
  SlotPool pool(1, 64);
  auto held = std::make_shared<Slot>(pool.TryAcquire());
  const auto id = pool.Acquire([held](Slot) {});
  held.reset();
  EXPECT_TRUE(pool.Cancel(id));  // destroys the slot inside, which takes the pool's lock
  EXPECT_EQ(pool.used(), 0u);
}

TEST(SlotPool, ThreadsNeverShareASlot) {
  constexpr size_t kSlots = 3;
  SlotPool pool(kSlots, 64);
  std::atomic<int> served{0};
  std::atomic<size_t> busy{0}, most{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 500; ++i) {
        std::atomic<bool> done{false};
        const auto id = pool.Acquire([&](Slot slot) {
          const size_t now = ++busy;
          size_t seen = most.load();
          while (now > seen && !most.compare_exchange_weak(seen, now)) {
          }
          *slot.data() = static_cast<uint8_t>(t);  // a data race if two had it
          --busy;
          ++served;
          slot.Release();
          done = true;
        });
        if (id != 0 && i % 7 == 0 && pool.Cancel(id)) continue;
        while (!done) std::this_thread::yield();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_GT(served.load(), 1000);
  EXPECT_LE(most.load(), kSlots);
  EXPECT_EQ(pool.used(), 0u);
  EXPECT_EQ(pool.waiting(), 0u);
}

}  // namespace
}  // namespace spectrumkv
