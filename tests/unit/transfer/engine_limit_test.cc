// What limited a transfer, and what an engine learns, where a test holds one stage up.
#include <chrono>
#include <thread>

#include "tests/unit/transfer/two_engines.h"

namespace spectrumkv {
namespace {

using namespace std::chrono_literals;

class EngineLimit : public EngineTest {
 protected:
  struct Ends {
    TransferReport sent, received;
  };
  Ends Finish(const std::string& id) {
    auto sent = a_->Watch(id, Role::kSender);
    auto received = b_->Watch(id, Role::kReceiver);
    Ends ends{sent->WaitTerminal(), received->WaitTerminal()};
    EXPECT_EQ(ends.sent.state, TransferState::kCommitted);
    EXPECT_EQ(ends.received.state, TransferState::kCommitted);
    return ends;
  }
};

TEST_F(EngineLimit, ADecoderThatIsHeldUpIsSeenFromBothSides) {
  Build();
  Prepare();
  b_->backend().SetOpen(false);
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
  ASSERT_TRUE(a_->manager().StartSender(Send("t", Source(), Raw())).ok());
  ASSERT_TRUE(b_->backend().WaitForADecode());
  std::this_thread::sleep_for(300ms);  // the time that is to be found again
  b_->backend().SetOpen(true);
  const Ends ends = Finish("t");
  EXPECT_EQ(ends.received.limited_by, Limit::kDecode) << LimitName(ends.received.limited_by);
  EXPECT_EQ(ends.sent.limited_by, Limit::kDecode) << LimitName(ends.sent.limited_by);
  EXPECT_GE(ends.received.limited_seconds, 0.3);
  EXPECT_GE(ends.sent.limited_seconds, 0.29);
  EXPECT_LE(ends.sent.limited_seconds, ends.sent.duration_seconds);
  EXPECT_NE(a_->metrics().Render().find("spectrumkv_transfers_limited_total{role=\"sender\",limited_by=\"decode\"} 1\n"),
            std::string::npos);
}

TEST_F(EngineLimit, AReceiverThatComesLateIsThePeer) {
  Build();
  Prepare();
  ASSERT_TRUE(a_->manager().StartSender(Send("t", Source(), Raw())).ok());
  std::this_thread::sleep_for(300ms);
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
  const Ends ends = Finish("t");
  EXPECT_EQ(ends.sent.limited_by, Limit::kPeer) << LimitName(ends.sent.limited_by);
  EXPECT_GE(ends.sent.limited_seconds, 0.29);
}

TEST_F(EngineLimit, AFailedTransferSaysWhatItWaitedForAndTeachesNothing) {
  progress_timeout_ms_ = 300;
  Build();
  Prepare();
  auto spec = Send("t", Source(), Raw());
  spec.deadline_ms = 200;
  ASSERT_TRUE(a_->manager().StartSender(std::move(spec)).ok());
  const TransferReport report = a_->Watch("t", Role::kSender)->WaitTerminal();
  // Our own deadline, or that of the peer with whom the stream waits for its half: the two are the same moment.
  EXPECT_TRUE(report.state == TransferState::kExpired || report.state == TransferState::kFailed) << report.error;
  EXPECT_EQ(report.limited_by, Limit::kPeer);
  EXPECT_FALSE(report.measured_link.has_value());
  EXPECT_FALSE(a_->manager().MeasuredOf("b", CodedBy::kCpu).link.has_value());
  EXPECT_FALSE(a_->manager().MeasuredOf("b", CodedBy::kCpu).setup_seconds.has_value());
}

TEST_F(EngineLimit, SmallTransfersTeachNoRateAndAnAutomaticBudgetStaysTheDefault) {
  Build();
  Prepare();
  Policy policy;
  policy.budget = 0.45;
  policy.auto_target_seconds = 0.01;
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
  ASSERT_TRUE(a_->manager().StartSender(Send("t", Source(), policy)).ok());
  const Ends ends = Finish("t");
  ASSERT_TRUE(ends.sent.choice.has_value());
  EXPECT_EQ(ends.sent.choice->reason, BudgetReason::kLinkUnknown);
  EXPECT_EQ(ends.sent.budget, 0.45);
  EXPECT_LE(ends.sent.wire_bytes, static_cast<uint64_t>(0.45 * static_cast<double>(ends.sent.kv_bytes)));
  EXPECT_FALSE(ends.received.choice.has_value());
  EXPECT_FALSE(a_->manager().MeasuredOf("b", CodedBy::kCpu).link.has_value()) << "some 50 KB";
  EXPECT_TRUE(a_->manager().MeasuredOf("b", CodedBy::kCpu).setup_seconds.has_value());
  const std::vector<PeerStatus> peers = a_->manager().ListPeers();
  ASSERT_EQ(peers.size(), 1u);
  EXPECT_TRUE(peers[0].measured.setup_seconds.has_value());
}

TEST_F(EngineLimit, AWrongAutomaticBudgetIsRefusedBeforeAnythingStarts) {
  Build();
  Prepare();
  Policy policy = Raw();
  policy.auto_target_seconds = 1;
  const absl::Status refused = a_->manager().StartSender(Send("t", Source(), policy));
  EXPECT_EQ(ReasonOf(refused), "INVALID_POLICY") << refused;
  EXPECT_EQ(a_->manager().active(), 0u);
}

}  // namespace
}  // namespace spectrumkv
