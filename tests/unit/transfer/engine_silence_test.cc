// The engine when a peer is silent, comes late, or knows more than this half.
#include "tests/unit/transfer/two_engines.h"

namespace spectrumkv {
namespace {

class SilentReceiverTest : public EngineTest {
 protected:
  // A transfer "t" whose receiver is there, and of whom no word arrives.
  void BeginWithSilentReceiver() {
    Build();
    Prepare();
    network_->SetFaultHook([](const FaultPoint& point) {
      Fault fault;
      if (point.from == "b") fault.kind = Fault::Kind::kDrop;
      return fault;
    });
    ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
    ASSERT_TRUE(a_->manager().StartSender(Send("t", Source(), Raw())).ok());
  }
};

TEST_F(SilentReceiverTest, IsNoticedWithinTheProgressTimeout) {
  BeginWithSilentReceiver();
  const TransferReport report = a_->Watch("t", Role::kSender)->WaitTerminal(6);
  network_->SetFaultHook(nullptr);
  EXPECT_EQ(report.state, TransferState::kFailed);
  EXPECT_EQ(ReasonOf(report.error), "PEER_SILENT");
  EXPECT_EQ(network_->given_up("a", "b"), 1) << "the next transfer must not meet the connections of this one";
}

// Ends of other causes: only where heartbeats are overdue, too, is the connection to blame.
TEST_F(EngineTest, ConnectionsAreGivenUpForSilenceAlone) {
  Build();
  Prepare();
  SenderSpec alone = Send("alone", Source(), Raw());  // b says now and then that its half is not there
  alone.deadline_ms = progress_timeout_ms_ * 5 / 6;
  ASSERT_TRUE(a_->manager().StartSender(std::move(alone)).ok());
  EXPECT_EQ(a_->Watch("alone", Role::kSender)->WaitTerminal(6).state, TransferState::kExpired);
  EXPECT_EQ(network_->given_up("a", "b"), 0);
  // Both ways: b, once greeted, would end the stream itself at the same deadline.
  network_->SetFaultHook([](const FaultPoint&) {
    Fault fault;
    fault.kind = Fault::Kind::kDrop;
    return fault;
  });
  SenderSpec spec = Send("late", Source(), Raw());
  spec.deadline_ms = progress_timeout_ms_ * 5 / 6;
  ASSERT_TRUE(a_->manager().StartSender(std::move(spec)).ok());
  EXPECT_EQ(a_->Watch("late", Role::kSender)->WaitTerminal(6).state, TransferState::kExpired);
  network_->SetFaultHook(nullptr);
  EXPECT_EQ(network_->given_up("a", "b"), 1);
}

// A sender that has no receipt does not know; a receiver that hears so has not committed, and says something else.
TEST_F(EngineTest, AReceiverKnowsWhatItsSenderDoesNot) {
  Build();
  Prepare();
  std::atomic<bool> deaf{false};
  network_->SetFaultHook([&](const FaultPoint& point) {
    Fault fault;
    if (deaf && point.from == "b") fault.kind = Fault::Kind::kDrop;
    return fault;
  });
  b_->backend().SetOpen(false);
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
  ASSERT_TRUE(a_->manager().StartSender(Send("t", Source(), Raw())).ok());
  ASSERT_TRUE(b_->backend().WaitForADecode());
  deaf = true;
  EXPECT_EQ(ReasonOf(a_->Watch("t", Role::kSender)->WaitTerminal(6).error), "OUTCOME_UNKNOWN");
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // the sender's word is heard before the chunk is decoded
  b_->backend().SetOpen(true);
  const TransferReport report = b_->Watch("t", Role::kReceiver)->WaitTerminal(6);
  network_->SetFaultHook(nullptr);
  EXPECT_EQ(report.state, TransferState::kFailed);
  EXPECT_EQ(ReasonOf(report.error), "PEER_GAVE_UP");
}

// A peer's hello and the half it is for may come in the same moment: one manifest is sent all the same.
TEST_F(EngineTest, APublishThatIsFetchedInTheSameMoment) {
  Build();
  Prepare();
  for (int i = 0; i < 300; ++i) {
    const std::string id = "t" + std::to_string(i);
    std::thread fetcher([&] { ASSERT_TRUE(b_->manager().StartReceiver(Expect(id, Target(), "a")).ok()); });
    ASSERT_TRUE(a_->manager().StartSender(Send(id, Source(), Raw(), "")).ok());
    fetcher.join();
    const TransferReport report = b_->Watch(id, Role::kReceiver)->WaitTerminal(10);
    ASSERT_EQ(report.state, TransferState::kCommitted) << i << ": " << report.error;
  }
}

// Whatever the moment of the peer's last word between two heartbeats.
TEST_F(EngineTest, SilenceIsCountedFromTheLastWord) {
  progress_timeout_ms_ = 4500;  // heartbeats every 1500
  Build();
  Prepare();
  network_->SetFaultHook([](const FaultPoint& point) {
    Fault fault;
    if (point.from == "b" && point.index >= 1) fault.kind = Fault::Kind::kDrop;  // its hello reply is heard
    return fault;
  });
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
  ASSERT_TRUE(a_->manager().StartSender(Send("t", Source(), Raw())).ok());
  const TransferReport report = a_->Watch("t", Role::kSender)->WaitTerminal(20);
  network_->SetFaultHook(nullptr);
  EXPECT_EQ(ReasonOf(report.error), "PEER_SILENT");
  EXPECT_GE(report.duration_seconds, 4.5);
  EXPECT_LT(report.duration_seconds, 5.8) << "noticed at the heartbeat after";
}

// A connection that breaks over silence, and another that is silent as well, are no word of the peer's.
TEST_F(SilentReceiverTest, IsCountedThroughABreak) {
  progress_timeout_ms_ = 3000;
  BeginWithSilentReceiver();
  std::this_thread::sleep_for(std::chrono::milliseconds(2400));
  network_->RemoveEnd("b");
  network_->AddEnd("b", &b_->manager());
  const TransferReport report = a_->Watch("t", Role::kSender)->WaitTerminal(20);
  network_->SetFaultHook(nullptr);
  EXPECT_EQ(ReasonOf(report.error), "PEER_SILENT");
  EXPECT_EQ(report.attempts, 2u);
  EXPECT_GE(report.duration_seconds, 3.0);
  EXPECT_LT(report.duration_seconds, 4.0) << "counted from the second dial";
}

// The half that comes after the other one has ended hears of it at once, not when its own deadline has passed.
TEST_F(EngineTest, ASenderThatEndedFirstIsHeardByTheReceiverThatComesLater) {
  Build();
  Prepare();
  SenderSpec spec = Send("t", Source(), Raw());
  spec.layerwise = true;
  ASSERT_TRUE(a_->manager().StartSender(std::move(spec)).ok());
  std::mutex mutex;
  std::condition_variable done;
  bool cancelled = false;
  a_->manager().Cancel(kMe, "t", Role::kSender, [&](absl::StatusOr<TransferReport>) {
    std::lock_guard<std::mutex> lock(mutex);
    cancelled = true;
    done.notify_all();
  });
  {
    std::unique_lock<std::mutex> lock(mutex);
    ASSERT_TRUE(done.wait_for(lock, std::chrono::seconds(10), [&] { return cancelled; }));
  }
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
  EXPECT_EQ(b_->Watch("t", Role::kReceiver)->WaitTerminal(5).state, TransferState::kCancelled);
}

TEST_F(EngineTest, AFetchThatEndedFirstIsHeardByThePublishThatComesLater) {
  Build();
  Prepare();
  ReceiverSpec fetch = Expect("t", Target(), "a");
  fetch.deadline_ms = 300;
  ASSERT_TRUE(b_->manager().StartReceiver(std::move(fetch)).ok());
  EXPECT_EQ(b_->Watch("t", Role::kReceiver)->WaitTerminal().state, TransferState::kExpired);
  ASSERT_TRUE(a_->manager().StartSender(Send("t", Source(), Raw(), "")).ok());
  const TransferState state = a_->Watch("t", Role::kSender)->WaitTerminal(5).state;
  EXPECT_EQ(state, TransferState::kExpired);
}

}  // namespace
}  // namespace spectrumkv
