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
  // A host of its own for each unless told otherwise.
  absl::Status Park(const std::shared_ptr<ControlSession>& session, const HelloFrame& hello,
                    const std::string& peer = "") {
    const std::string own = "ipv4:10.0.1." + std::to_string(hosts_++) + ":1";
    return parking_.Park(Role::kReceiver, session, hello, peer.empty() ? own : peer);
  }
  int hosts_ = 0;

  std::unique_ptr<Clock> clock_ = NewSystemClock();
  Parking parking_{clock_.get(), 2, 1000, 600000};
};

TEST_F(ParkingTest, ABrokenConnectionLeavesNothing) {
  auto session = NewSession();
  ASSERT_TRUE(Park(session, Hello(1)).ok());
  session->OnClosed(absl::UnavailableError("gone"));
  EXPECT_EQ(parking_.size(), 0u);
}

TEST_F(ParkingTest, EachPartWaitsForItsOwnHalf) {
  HelloFrame second = Hello(1);
  second.part_index = 1;
  second.part_count = 2;
  ASSERT_TRUE(Park(NewSession(), Hello(1)).ok());
  ASSERT_TRUE(Park(NewSession(), second).ok()) << "not a newer attempt of the first";
  EXPECT_EQ(parking_.size(), 2u);
  EXPECT_EQ(parking_.Take(Role::kReceiver, "t", 1).size(), 1u);
  EXPECT_EQ(parking_.Take(Role::kReceiver, "t", 1).size(), 0u);
  EXPECT_EQ(parking_.Take(Role::kReceiver, "t").size(), 1u);
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

// Each of a host's connections has another port; they share the host's room.
TEST(ParkingShares, NoHostUsesUpTheRoomOfAll) {
  const std::unique_ptr<Clock> clock = NewSystemClock();
  for (const uint32_t max : {1u, 2u, 3u, 4u, 7u, 64u, 1000u}) {
    Parking parking(clock.get(), max, 1000, 600000);
    uint32_t next = 0;
    const auto park = [&](const std::string& host) {
      HelloFrame hello = Hello(1);
      hello.transfer_id = std::to_string(next);
      auto session = std::make_shared<ControlSession>([](std::shared_ptr<ControlSession>, HelloFrame) {},
                                                      [](const ControlSession*, const absl::Status&) {});
      return parking.Park(Role::kReceiver, session, hello, "ipv4:" + host + ":" + std::to_string(10000 + next++));
    };
    const auto fill = [&](const std::string& host) {
      uint32_t taken = 0;
      absl::Status refused;
      while ((refused = park(host)).ok()) ++taken;
      EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
      EXPECT_EQ(ReasonOf(refused), "WAITING_FULL");
      EXPECT_GE(RetryAfterMsOf(refused), 0);
      EXPECT_EQ(MetadataOf(refused)["waiting"], std::to_string(taken));
      EXPECT_EQ(MetadataOf(refused)["host"], "ipv4:" + host);
      return taken;
    };
    EXPECT_EQ(fill("10.0.0.1"), (max + 1) / 2) << max;
    // Whoever comes later still finds room, as long as there is any at all.
    for (int host = 2; parking.size() < max; ++host) EXPECT_GE(fill("10.0.0." + std::to_string(host)), 1u) << max;
    EXPECT_EQ(parking.size(), max);
    EXPECT_EQ(fill("10.0.9.9"), 0u);
    // What one gives back is there for others; an end is no end of the share.
    const size_t taken = parking.Take(Role::kReceiver, "0").size();
    EXPECT_EQ(taken, 1u);
    EXPECT_TRUE(park("10.0.9.9").ok()) << max;
    parking.CloseAll(absl::UnavailableError("over"));
    EXPECT_EQ(parking.size(), 0u);
    EXPECT_EQ(fill("10.0.0.1"), (max + 1) / 2) << "shares outlive a CloseAll";
  }
}

TEST(ParkingShares, IPv6HostsAreToldApart) {
  const std::unique_ptr<Clock> clock = NewSystemClock();
  Parking parking(clock.get(), 4, 1000, 600000);
  int next = 0;
  const auto park = [&](const std::string& peer) {
    HelloFrame hello = Hello(1);
    hello.transfer_id = std::to_string(next++);
    auto session = std::make_shared<ControlSession>([](std::shared_ptr<ControlSession>, HelloFrame) {},
                                                    [](const ControlSession*, const absl::Status&) {});
    return parking.Park(Role::kReceiver, session, hello, peer).ok();
  };
  EXPECT_TRUE(park("ipv6:[::1]:1"));
  EXPECT_TRUE(park("ipv6:[::1]:2"));
  EXPECT_FALSE(park("ipv6:[::1]:3"));
  EXPECT_TRUE(park("ipv6:[::2]:3"));
}

// A peer's stream that remembers how it was closed.
class ClosedStream final : public ControlStream {
 public:
  explicit ClosedStream(std::string peer) : peer_(std::move(peer)) {}
  void Send(ControlFrame) override {}
  void Close(absl::Status status) override { closed = std::move(status); }
  std::string peer() const override { return peer_; }
  absl::Status closed;

 private:
  const std::string peer_;
};

class WaitingFramesTest : public ::testing::Test {
 protected:
  struct Waiting {
    std::shared_ptr<ControlSession> session;
    std::shared_ptr<ClosedStream> stream;
  };
  Waiting Dial(const std::string& host) {
    Waiting waiting;
    waiting.stream = std::make_shared<ClosedStream>("ipv4:" + host + ":" + std::to_string(++ports_));
    waiting.session = std::make_shared<ControlSession>([](std::shared_ptr<ControlSession>, HelloFrame) {},
                                                       [](const ControlSession*, const absl::Status&) {}, room_);
    waiting.session->BindStream(waiting.stream);
    waiting.session->OnFrame(Hello(1));
    return waiting;
  }
  // Of about `runs` times 4 to 12 bytes.
  static ManifestFrame Manifest(uint32_t runs) {
    ManifestFrame manifest;
    for (uint32_t i = 0; i < runs; ++i) manifest.kept_tokens.push_back({3 * i, 1});
    return manifest;
  }
  std::string ReasonAfter(const Waiting& waiting, ControlFrame frame) {
    waiting.session->OnFrame(std::move(frame));
    return ReasonOf(waiting.stream->closed);
  }
  int ports_ = 0;
  std::shared_ptr<FrameRoom> room_ = std::make_shared<FrameRoom>(100000);
};

TEST_F(WaitingFramesTest, AreFew) {
  const Waiting waiting = Dial("10.0.0.1");
  for (int i = 0; i < 100; ++i) EXPECT_EQ(ReasonAfter(waiting, HeartbeatFrame{}), "");
  for (int i = 0; i < 4; ++i) EXPECT_EQ(ReasonAfter(waiting, Manifest(1)), "");
  EXPECT_EQ(ReasonAfter(waiting, Manifest(1)), "TOO_MANY_FRAMES");
}

TEST_F(WaitingFramesTest, AreBoundedInBytesAndNoHostMayHaveThemAll) {
  const size_t large = MessageBytes(ControlFrame(Manifest(3000)));
  ASSERT_GT(large, 10000u);
  std::vector<Waiting> greedy;
  std::string reason;
  while (reason.empty()) {
    greedy.push_back(Dial("10.0.0.1"));
    reason = ReasonAfter(greedy.back(), Manifest(3000));
    ASSERT_LT(greedy.size(), 100u);
  }
  EXPECT_EQ(reason, "WAITING_FULL");
  EXPECT_EQ(ReasonAfter(Dial("10.0.0.2"), Manifest(3000)), "") << "half of it is left to others";
  const size_t held = greedy.size() - 1;
  EXPECT_EQ(ReasonAfter(Dial("10.0.0.1"), Manifest(3000)), "WAITING_FULL");
  greedy.clear();  // streams that ended give all back
  for (size_t i = 0; i < held; ++i) {
    greedy.push_back(Dial("10.0.0.1"));
    EXPECT_EQ(ReasonAfter(greedy.back(), Manifest(3000)), "");
  }
}

}  // namespace
}  // namespace spectrumkv
