#include "server/lifecycle/drain.h"

#include <optional>

#include "gtest/gtest.h"
#include "server/base/status.h"
#include "tests/unit/base/fake_clock.h"
#include "tests/unit/service/fake_transfers.h"

namespace spectrumkv {
namespace {

class Drain : public testing::Test {
 protected:
  void Start(int64_t timeout_ms, std::optional<DrainOutcome>* outcome) {
    drain_.Drain(timeout_ms, [outcome](const DrainOutcome& o) {
      EXPECT_FALSE(outcome->has_value()) << "done came twice";
      *outcome = o;
    });
  }

  FakeClock clock_;
  FakeTransfers transfers_;
  int starts_ = 0;
  DrainController drain_{&clock_, &transfers_, 1000, [this] { ++starts_; }};
};

TEST_F(Drain, WaitsForTheLastTransfer) {
  transfers_.SetActive(3);
  EXPECT_FALSE(drain_.draining());
  std::optional<DrainOutcome> outcome;
  Start(500, &outcome);
  EXPECT_TRUE(drain_.draining());
  EXPECT_EQ(starts_, 1);
  clock_.AdvanceMs(499);
  EXPECT_FALSE(outcome.has_value());
  transfers_.FinishDrain();
  ASSERT_TRUE(outcome.has_value());
  EXPECT_TRUE(outcome->status.ok());
  EXPECT_EQ(outcome->finished, 3u);
  EXPECT_EQ(outcome->left, 0u);
  EXPECT_EQ(clock_.pending(), 0u);
}

TEST_F(Drain, TimesOutAndStaysDraining) {
  transfers_.SetActive(3);
  std::optional<DrainOutcome> outcome;
  Start(500, &outcome);
  transfers_.SetActive(2);
  clock_.AdvanceMs(500);
  ASSERT_TRUE(outcome.has_value());
  EXPECT_EQ(outcome->status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(ReasonOf(outcome->status), "DRAIN_TIMEOUT");
  EXPECT_EQ(outcome->finished, 1u);
  EXPECT_EQ(outcome->left, 2u);
  EXPECT_TRUE(drain_.draining());
  transfers_.FinishDrain();
}

TEST_F(Drain, ManyWaitersOneStart) {
  transfers_.SetActive(1);
  std::optional<DrainOutcome> short_wait, default_wait, long_wait, late;
  Start(100, &short_wait);
  Start(0, &default_wait);
  Start(5000, &long_wait);
  EXPECT_EQ(starts_, 1);
  EXPECT_EQ(transfers_.drains(), 1);
  clock_.AdvanceMs(100);
  EXPECT_TRUE(short_wait.has_value());
  clock_.AdvanceMs(899);
  EXPECT_FALSE(default_wait.has_value());
  clock_.AdvanceMs(1);
  EXPECT_TRUE(default_wait.has_value());
  EXPECT_FALSE(long_wait.has_value());
  transfers_.FinishDrain();
  ASSERT_TRUE(long_wait.has_value());
  EXPECT_TRUE(long_wait->status.ok());
  Start(100, &late);
  ASSERT_TRUE(late.has_value()) << "already drained: at once";
  EXPECT_TRUE(late->status.ok());
}

}  // namespace
}  // namespace spectrumkv
