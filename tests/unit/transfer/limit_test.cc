// What took most of a transfer's time.
#include "server/transfer/limit.h"

#include "gtest/gtest.h"

namespace spectrumkv {
namespace {

constexpr int64_t kSecond = 1'000'000'000;

// Seconds spent, by what.
SenderTimes Spent(std::initializer_list<std::pair<Limit, int>> spans) {
  SenderTimes times;
  int64_t now = 5 * kSecond;
  for (const auto& [limit, seconds] : spans) {
    times.waits.Switch(limit, now);
    now += seconds * kSecond;
  }
  times.waits.Switch(Limit::kUnknown, now);
  return times;
}

TEST(WaitClock, AddsUpEachKind) {
  WaitClock clock;
  EXPECT_EQ(clock.Switch(Limit::kPeer, 100 * kSecond), 0) << "nothing was waited for before";
  EXPECT_EQ(clock.Switch(Limit::kEncode, 102 * kSecond), 2);
  EXPECT_EQ(clock.Switch(Limit::kEncode, 103 * kSecond), 1);
  EXPECT_EQ(clock.Switch(Limit::kPeer, 107 * kSecond), 4);
  EXPECT_EQ(clock.Switch(Limit::kUnknown, 108 * kSecond), 1);
  EXPECT_EQ(clock.Switch(Limit::kLink, 200 * kSecond), 0) << "nothing in between either";
  EXPECT_EQ(clock.seconds(Limit::kPeer), 3);
  EXPECT_EQ(clock.seconds(Limit::kEncode), 5);
  EXPECT_EQ(clock.seconds(Limit::kLink), 0);
}

TEST(LimitOfSender, IsWhatTookLongest) {
  EXPECT_EQ(LimitOfSender({}).limit, Limit::kUnknown);
  for (const Limit limit : {Limit::kEncode, Limit::kLink, Limit::kPeer, Limit::kSource, Limit::kStaging}) {
    const LimitShare share = LimitOfSender(Spent({{Limit::kPlan, 1}, {limit, 3}, {Limit::kPlan, 1}}));
    EXPECT_EQ(share.limit, limit) << LimitName(limit);
    EXPECT_EQ(share.seconds, 3);
  }
}

TEST(LimitOfSender, TellsScanFromPlan) {
  SenderTimes times = Spent({{Limit::kPlan, 5}, {Limit::kLink, 1}});
  times.plan_seconds = 3;
  times.scan_seconds = 2;
  EXPECT_EQ(LimitOfSender(times).limit, Limit::kPlan);
  times.scan_seconds = 4;
  EXPECT_EQ(LimitOfSender(times).limit, Limit::kScan);
}

TEST(LimitOfSender, BehindTheEncoderTheReceiptDecides) {
  SenderTimes times = Spent({{Limit::kEncode, 2}, {Limit::kLink, 3}, {Limit::kCredits, 4}});
  EXPECT_EQ(LimitOfSender(times).limit, Limit::kLink) << "the receiver does not tell";
  EXPECT_EQ(LimitOfSender(times).seconds, 7);
  times.span_seconds = 8;
  times.busy_seconds = 7.19;
  EXPECT_EQ(LimitOfSender(times).limit, Limit::kLink);
  times.busy_seconds = 7.2;
  EXPECT_EQ(LimitOfSender(times).limit, Limit::kDecode) << "nine tenths";
  times.busy_seconds = 1;
  times.starved = true;
  EXPECT_EQ(LimitOfSender(times).limit, Limit::kCredits) << "the receiver's room was elsewhere";
  SenderTimes room = Spent({{Limit::kEncode, 2}, {Limit::kLink, 4}, {Limit::kCredits, 3}});
  room.starved = true;
  EXPECT_EQ(LimitOfSender(room).limit, Limit::kLink) << "mostly the network's room";
}

TEST(LimitOfReceiver, DecodesOrWaits) {
  EXPECT_EQ(LimitOfReceiver({}).limit, Limit::kUnknown);
  EXPECT_EQ(LimitOfReceiver({0.1, 0, 1, 0.9}).limit, Limit::kDecode);
  EXPECT_EQ(LimitOfReceiver({0.1, 0, 1, 0.89}).limit, Limit::kPeer) << "waited for chunks";
  EXPECT_EQ(LimitOfReceiver({2, 0, 1, 1}).limit, Limit::kPeer) << "waited for the other half";
  EXPECT_EQ(LimitOfReceiver({0.5, 2, 1, 1}).limit, Limit::kCredits) << "waited for a slot of its own";
}

}  // namespace
}  // namespace spectrumkv
