#include "server/base/executor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace spectrumkv {
namespace {

TEST(ThreadPoolTest, DestructorRunsAllThatIsQueuedAndWhatItPosts) {
  std::atomic<int> ran{0};
  {
    ThreadPool pool(2);
    for (int i = 0; i < 1000; ++i) {
      pool.Post([&] {
        ran.fetch_add(1);
        pool.Post([&ran] { ran.fetch_add(1); });
      });
    }
  }
  EXPECT_EQ(ran.load(), 2000);
}

// ThreadSanitizer and AddressSanitizer see a Post that still uses the pool its own task let go.
TEST(ThreadPoolTest, ATaskMayTellWhoDestroysThePoolBeforePostReturns) {
  for (int round = 0; round < 200; ++round) {
    auto pool = std::make_unique<ThreadPool>(1);
    std::promise<void> ran;
    std::thread poster([&ran, target = pool.get()] { target->Post([&ran] { ran.set_value(); }); });
    ran.get_future().wait();
    pool.reset();
    poster.join();
  }
}

TEST(ThreadPoolTest, OneThreadKeepsTheOrder) {
  std::vector<int> order;
  {
    ThreadPool pool(1);
    for (int i = 0; i < 100; ++i) pool.Post([&order, i] { order.push_back(i); });
  }
  ASSERT_EQ(order.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[i], i);
}

TEST(ThreadPoolTest, ZeroThreadsStillWorks) {
  std::atomic<bool> ran{false};
  {
    ThreadPool(0).Post([&] { ran = true; });
  }
  EXPECT_TRUE(ran);
}

TEST(ThreadPoolTest, TasksRunAtTheSameTime) {
  ThreadPool pool(2);
  std::promise<void> a, b;
  std::promise<void> done_a, done_b;
  pool.Post([&] {
    a.set_value();
    b.get_future().wait();
    done_a.set_value();
  });
  pool.Post([&] {
    b.set_value();
    a.get_future().wait();
    done_b.set_value();
  });
  done_a.get_future().wait();
  done_b.get_future().wait();
}

TEST(ThreadPoolTest, WhatATaskCapturedIsDestroyedAfterIt) {
  auto held = std::make_shared<int>(1);
  std::weak_ptr<int> watch = held;
  ThreadPool pool(1);
  pool.Post([held] {});
  held.reset();
  std::promise<bool> expired;
  pool.Post([&] { expired.set_value(watch.expired()); });
  EXPECT_TRUE(expired.get_future().get());
}

TEST(ManualExecutorTest, RunsOnlyWhenAsked) {
  ManualExecutor executor;
  int ran = 0;
  EXPECT_FALSE(executor.RunOne());
  executor.Post([&] {
    ++ran;
    executor.Post([&] { ran += 10; });
  });
  EXPECT_EQ(ran, 0);
  EXPECT_TRUE(executor.RunOne());
  EXPECT_EQ(ran, 1);
  EXPECT_EQ(executor.RunAll(), 1u);
  EXPECT_EQ(ran, 11);
  EXPECT_EQ(executor.RunAll(), 0u);
}

TEST(StrandTest, SerialisesTasksOfManyThreadsOverFourThreads) {
  constexpr int kThreads = 4;
  constexpr int kEach = 2000;
  std::vector<std::vector<int>> order(kThreads);
  int unguarded = 0;  // a data race for ThreadSanitizer if two tasks ever overlap
  std::atomic<int> inside{0};
  std::atomic<bool> overlapped{false};
  {
    ThreadPool pool(4);
    Strand strand(&pool);
    std::vector<std::thread> posters;
    for (int t = 0; t < kThreads; ++t) {
      posters.emplace_back([&, t] {
        for (int i = 0; i < kEach; ++i) {
          strand.Post([&, t, i] {
            if (inside.fetch_add(1) != 0) overlapped = true;
            ++unguarded;
            order[t].push_back(i);
            inside.fetch_sub(1);
          });
        }
      });
    }
    for (std::thread& poster : posters) poster.join();
  }
  EXPECT_FALSE(overlapped);
  EXPECT_EQ(unguarded, kThreads * kEach);
  for (const auto& each : order) {
    ASSERT_EQ(each.size(), static_cast<size_t>(kEach));
    EXPECT_TRUE(std::is_sorted(each.begin(), each.end()));
  }
}

TEST(StrandTest, TasksRunAfterTheStrandIsGone) {
  ManualExecutor executor;
  std::vector<int> order;
  {
    Strand strand(&executor);
    for (int i = 0; i < 3; ++i) strand.Post([&order, i] { order.push_back(i); });
  }
  EXPECT_TRUE(executor.RunOne());
  EXPECT_EQ(order, std::vector<int>({0}));
  executor.RunAll();
  EXPECT_EQ(order, std::vector<int>({0, 1, 2}));
}

TEST(StrandTest, ATaskMayPostToItsStrandAndNeverRunsInsidePost) {
  ManualExecutor executor;
  Strand strand(&executor);
  std::vector<int> order;
  strand.Post([&] {
    strand.Post([&] { order.push_back(2); });
    order.push_back(1);
  });
  EXPECT_TRUE(order.empty());
  executor.RunAll();
  EXPECT_EQ(order, std::vector<int>({1, 2}));
  strand.Post([&] { order.push_back(3); });  // idle, then used again
  executor.RunAll();
  EXPECT_EQ(order.back(), 3);
}

TEST(StrandTest, StrandsTakeTurns) {
  ManualExecutor executor;
  Strand a(&executor), b(&executor);
  std::string order;
  for (int i = 0; i < 3; ++i) a.Post([&] { order += 'a'; });
  for (int i = 0; i < 3; ++i) b.Post([&] { order += 'b'; });
  executor.RunAll();
  EXPECT_EQ(order, "ababab");
}

}  // namespace
}  // namespace spectrumkv
