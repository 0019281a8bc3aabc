// Peers that wait for their other half, and the news that the ended ones leave behind.
#include "server/transfer/parking.h"

#include "gtest/gtest.h"
#include "server/base/status.h"

namespace spectrumkv {
namespace {

HelloFrame Hello(uint32_t attempt, uint64_t epoch = 7) {
  HelloFrame hello;
  hello.role = Role::kSender;
  hello.transfer_id = "t";
  hello.epoch = epoch;
  hello.attempt = attempt;
  hello.deadline_ms = 60000;
  return hello;
}

class ParkingTest : public ::testing::Test {
 protected:
  std::shared_ptr<ControlSession> NewSession() {
    auto session = std::make_shared<ControlSession>(
        [](std::shared_ptr<ControlSession>, HelloFrame) {},
        [this](const ControlSession* s, const absl::Status&) { parking_.Forget(s); });
    session->OnFrame(Hello(1));
    return session;
  }
  static void EndWithCancel(ControlSession& session) {
    session.OnFrame(CancelFrame{TransferState::kCancelled, 1, "CANCELLED", "the worker cancelled"});
    session.OnClosed(absl::OkStatus());
  }
  absl::Status Park(const std::shared_ptr<ControlSession>& session, const HelloFrame& hello) {
    return parking_.Park(Role::kReceiver, session, hello);
  }

  std::unique_ptr<Clock> clock_ = NewSystemClock();
  Parking parking_{clock_.get(), 2, 1000, 600000};
};

TEST_F(ParkingTest, ABrokenConnectionLeavesNothing) {
  auto session = NewSession();
  ASSERT_TRUE(Park(session, Hello(1)).ok());
  session->OnClosed(absl::UnavailableError("gone"));
  EXPECT_EQ(parking_.size(), 0u);
}

TEST_F(ParkingTest, LastWordsStayUntilTheHalfComes) {
  auto session = NewSession();
  ASSERT_TRUE(Park(session, Hello(1)).ok());
  EXPECT_FALSE(session->LastWords().has_value()) << "it has not ended yet";
  EndWithCancel(*session);
  const auto taken = parking_.Take(Role::kReceiver, "t");
  ASSERT_EQ(taken.size(), 1u);
  const auto words = taken[0].session->LastWords();
  ASSERT_TRUE(words.has_value());
  EXPECT_EQ(words->cause, TransferState::kCancelled);
  EXPECT_EQ(parking_.size(), 0u);
}

TEST_F(ParkingTest, AFailedReceiptCountsAsLastWordsACommittedOneDoesNot) {
  for (const TransferState state : {TransferState::kFailed, TransferState::kCommitted}) {
    auto session = NewSession();
    ReceiptFrame receipt;
    receipt.state = state;
    receipt.reason = "DESTINATION_GONE";
    session->OnFrame(receipt);
    session->OnClosed(absl::OkStatus());
    EXPECT_EQ(session->LastWords().has_value(), state == TransferState::kFailed);
  }
}

TEST_F(ParkingTest, ANewHelloReplacesTheWordsOfAnEndedOne) {
  auto ended = NewSession(), fresh = NewSession();
  ASSERT_TRUE(Park(ended, Hello(1)).ok());
  EndWithCancel(*ended);
  ASSERT_TRUE(Park(fresh, Hello(1, 8)).ok());
  const auto taken = parking_.Take(Role::kReceiver, "t");
  ASSERT_EQ(taken.size(), 1u);
  EXPECT_EQ(taken[0].session, fresh);
}

TEST_F(ParkingTest, TheEndedMakeRoomForThoseWhoWait) {
  auto ended = NewSession(), first = NewSession(), second = NewSession(), third = NewSession();
  HelloFrame hello = Hello(1);
  ASSERT_TRUE(Park(ended, hello).ok());
  EndWithCancel(*ended);
  hello.transfer_id = "u";
  ASSERT_TRUE(Park(first, hello).ok());
  hello.transfer_id = "v";
  ASSERT_TRUE(Park(second, hello).ok());
  EXPECT_EQ(parking_.size(), 2u);
  hello.transfer_id = "w";
  EXPECT_EQ(ReasonOf(Park(third, hello)), "WAITING_FULL");
}

}  // namespace
}  // namespace spectrumkv
