#include "server/base/clock.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "tests/unit/base/fake_clock.h"

namespace spectrumkv {
namespace {

constexpr int64_t kMs = 1'000'000;

TEST(SystemClockTest, TimeDoesNotGoBack) {
  const auto clock = NewSystemClock();
  int64_t last = clock->NowNs();
  for (int i = 0; i < 1000; ++i) {
    const int64_t now = clock->NowNs();
    EXPECT_GE(now, last);
    last = now;
  }
}

TEST(SystemClockTest, TimersRunInOrderOfDeadlineThenOfCalls) {
  const auto clock = NewSystemClock();
  std::vector<int> order;  // written by the clock's thread alone, read after `done`
  std::promise<void> done;
  std::promise<void> gate;
  auto gate_opened = gate.get_future().share();
  clock->CallAt(0, [gate_opened] { gate_opened.wait(); });  // all are due before the first of them can run
  const int64_t base = clock->NowNs();
  clock->CallAt(base + 5, [&] {
    order.push_back(5);
    done.set_value();
  });
  clock->CallAt(base + 1, [&] { order.push_back(1); });
  clock->CallAt(base + 3, [&] { order.push_back(3); });
  clock->CallAt(base + 3, [&] { order.push_back(4); });
  clock->CallAt(std::numeric_limits<int64_t>::min(), [&] { order.push_back(0); });
  gate.set_value();
  done.get_future().wait();
  EXPECT_EQ(order, std::vector<int>({0, 1, 3, 4, 5}));
}

TEST(SystemClockTest, NeverEarly) {
  const auto clock = NewSystemClock();
  const int64_t deadline = clock->NowNs() + 20 * kMs;
  std::promise<int64_t> ran_at;
  clock->CallAt(deadline, [&] { ran_at.set_value(clock->NowNs()); });
  EXPECT_GE(ran_at.get_future().get(), deadline);
}

TEST(SystemClockTest, NoCallbackRunsAfterStop) {
  const auto clock = NewSystemClock();
  std::atomic<bool> running{false}, left{false}, ran{false};
  clock->CallAt(0, [&] {
    running = true;
    running.notify_one();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    left = true;
  });
  clock->CallAt(clock->NowNs() + 10 * kMs, [&] { ran = true; });
  running.wait(false);
  clock->Stop();
  EXPECT_TRUE(left) << "it waits for the callback that runs";
  const TimerId late = clock->CallAt(0, [&] { ran = true; });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(ran);
  EXPECT_TRUE(clock->Cancel(late));
  clock->Stop();  // again is harmless
}

TEST(SystemClockTest, AnEarlierTimerOvertakesTheOneBeingWaitedFor) {
  const auto clock = NewSystemClock();
  const TimerId late = clock->CallAt(clock->NowNs() + 3600'000 * kMs, [] { FAIL(); });
  std::promise<void> ran;
  clock->CallAt(clock->NowNs() + kMs, [&] { ran.set_value(); });
  ran.get_future().wait();
  EXPECT_TRUE(clock->Cancel(late));
}

TEST(SystemClockTest, CancelBeforeDuringAndAfter) {
  const auto clock = NewSystemClock();
  const TimerId before = clock->CallAt(clock->NowNs() + 3600'000 * kMs, [] { FAIL(); });
  EXPECT_NE(before, 0u);
  EXPECT_TRUE(clock->Cancel(before));
  EXPECT_FALSE(clock->Cancel(before));
  EXPECT_FALSE(clock->Cancel(0));
  EXPECT_FALSE(clock->Cancel(123456));

  std::promise<void> entered, leave, left;
  const TimerId running = clock->CallAt(0, [&] {
    entered.set_value();
    leave.get_future().wait();
    left.set_value();
  });
  entered.get_future().wait();
  EXPECT_FALSE(clock->Cancel(running));
  leave.set_value();
  left.get_future().wait();
  EXPECT_FALSE(clock->Cancel(running));
}

TEST(SystemClockTest, ACallbackMayCallTheClock) {
  const auto clock = NewSystemClock();
  std::promise<bool> cancelled_itself, cancelled_other;
  std::promise<void> second;
  const TimerId other = clock->CallAt(std::numeric_limits<int64_t>::max(), [] { FAIL(); });
  std::atomic<TimerId> self{0};
  self = clock->CallAt(clock->NowNs() + 5 * kMs, [&] {
    cancelled_itself.set_value(clock->Cancel(self));
    cancelled_other.set_value(clock->Cancel(other));
    clock->CallAt(0, [&] { second.set_value(); });
  });
  EXPECT_FALSE(cancelled_itself.get_future().get());
  EXPECT_TRUE(cancelled_other.get_future().get());
  second.get_future().wait();
}

// What a cancelled callback captured may call the clock when it is destroyed.
struct CancelsOnDestruction {
  Clock* clock;
  ~CancelsOnDestruction() { clock->Cancel(1); }
};

TEST(SystemClockTest, CancelReleasesWhatWasCapturedAtOnce) {
  const auto clock = NewSystemClock();
  auto held = std::make_shared<CancelsOnDestruction>(CancelsOnDestruction{clock.get()});
  std::weak_ptr<CancelsOnDestruction> watch = held;
  const TimerId timer = clock->CallAt(std::numeric_limits<int64_t>::max(), [held] {});
  held.reset();
  EXPECT_FALSE(watch.expired());
  EXPECT_TRUE(clock->Cancel(timer));
  EXPECT_TRUE(watch.expired());
}

TEST(SystemClockTest, DestructorDropsWhatIsLeft) {
  bool ran = false;
  {
    const auto clock = NewSystemClock();
    clock->CallAt(clock->NowNs() + 3600'000 * kMs, [&] { ran = true; });
  }
  EXPECT_FALSE(ran);
}

TEST(SystemClockTest, EachTimerRunsOrIsCancelledNeverBoth) {
  const auto clock = NewSystemClock();
  constexpr int kThreads = 4;
  constexpr int kEach = 500;
  std::atomic<int> ran{0}, cancelled{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kEach; ++i) {
        const TimerId timer = clock->CallAt(clock->NowNs() + (i % 3) * 20'000, [&] { ran.fetch_add(1); });
        if ((i + t) % 2 == 0 && clock->Cancel(timer)) cancelled.fetch_add(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::promise<void> last;
  clock->CallAt(clock->NowNs() + kMs, [&] { last.set_value(); });
  last.get_future().wait();
  EXPECT_EQ(ran + cancelled, kThreads * kEach);
}

TEST(FakeClockTest, RunsDueTimersInOrderOnTheCaller) {
  FakeClock clock(100);
  std::vector<int64_t> order;
  clock.CallAt(120, [&] { order.push_back(clock.NowNs()); });
  clock.CallAt(110, [&] {
    order.push_back(clock.NowNs());
    clock.CallAt(115, [&] { order.push_back(clock.NowNs()); });  // due within the same advance
    clock.CallAt(121, [&] { order.push_back(clock.NowNs()); });  // not yet
  });
  EXPECT_EQ(clock.AdvanceTo(109), 0u);
  EXPECT_EQ(clock.AdvanceTo(120), 3u);
  EXPECT_EQ(order, std::vector<int64_t>({110, 115, 120}));
  EXPECT_EQ(clock.NowNs(), 120);
  EXPECT_EQ(clock.AdvanceTo(50), 0u);  // never back
  EXPECT_EQ(clock.NowNs(), 120);
  EXPECT_EQ(clock.AdvanceBy(1), 1u);
  EXPECT_EQ(clock.pending(), 0u);
}

TEST(FakeClockTest, CancelFollowsTheContract) {
  FakeClock clock(0);
  TimerId self = 0;
  bool while_running = true;
  const TimerId dropped = clock.CallAt(10, [] { FAIL(); });
  self = clock.CallAt(5, [&] { while_running = clock.Cancel(self); });
  EXPECT_TRUE(clock.Cancel(dropped));
  EXPECT_FALSE(clock.Cancel(dropped));
  EXPECT_EQ(clock.AdvanceMs(1), 1u);
  EXPECT_FALSE(while_running);
  EXPECT_FALSE(clock.Cancel(self));
}

}  // namespace
}  // namespace spectrumkv
