// Faults of the network in memory: each does what it says, and streams still end once.
#include <gtest/gtest.h>

#include <thread>

#include "server/base/status.h"
#include "server/stream/memory_transport.h"
#include "tests/unit/stream/stream_fixtures.h"

namespace spectrumkv {
namespace {

class MemoryFaults : public testing::Test {
 protected:
  MemoryFaults() {
    network_.AddEnd("decode", &acceptor_);
    transport_ = network_.TransportOf("prefill");
  }
  // Sends six one-byte chunks 0..5 with `fault` on number 2 and returns the first byte of each that arrived.
  std::vector<int> SendSix(const Fault& fault) {
    network_.SetFaultHook([fault](const FaultPoint& point) {
      EXPECT_EQ(point.from, "prefill");
      EXPECT_EQ(point.to, "decode");
      EXPECT_EQ(point.stream, 5u);
      EXPECT_TRUE(point.data);
      return point.index == 2 ? fault : Fault{};
    });
    auto listener = std::make_shared<Recorder>();
    auto data = transport_->OpenData("decode", OpenOf(5), listener);
    for (uint8_t i = 0; i < 6; ++i) {
      Slot slot = pool_.TryAcquire();
      slot.data()[0] = i;
      data->SendChunk({std::move(slot), 1, {}, nullptr}, [this](bool sent) { sent ? ++sent_ : ++unsent_; });
    }
    data->Close(absl::OkStatus());
    executor_.RunAll();
    if (fault.kind == Fault::Kind::kDelay) {
      EXPECT_FALSE(listener->closed());
      for (int i = 0; i < 5000 && !listener->closed(); ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        executor_.RunAll();
      }
    }
    status_ = listener->WaitClosed(0);
    auto accepted = acceptor_.WaitData();
    accepted_status_ = accepted.listener->WaitClosed(0);
    EXPECT_EQ(accepted.listener->faults() + listener->faults(), 0);
    EXPECT_EQ(pool_.used(), 0u);
    std::vector<int> got;
    for (const auto& bytes : accepted.listener->kept()) got.push_back(bytes.at(0));
    return got;
  }
  ManualExecutor executor_;
  std::unique_ptr<Clock> clock_ = NewSystemClock();
  MemoryNetwork network_{&executor_, clock_.get()};
  RecordingAcceptor acceptor_;
  std::unique_ptr<Transport> transport_;
  SlotPool pool_{8, 4096};
  int sent_ = 0, unsent_ = 0;
  absl::Status status_, accepted_status_;
};

using Kind = Fault::Kind;
using Got = std::vector<int>;

TEST_F(MemoryFaults, Pass) {
  EXPECT_EQ(SendSix({}), (Got{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(sent_, 6);
  EXPECT_TRUE(status_.ok() && accepted_status_.ok());
}
TEST_F(MemoryFaults, Drop) {
  EXPECT_EQ(SendSix({Kind::kDrop}), (Got{0, 1, 3, 4, 5}));
  EXPECT_EQ(sent_, 6);
}
TEST_F(MemoryFaults, Duplicate) {
  EXPECT_EQ(SendSix({Kind::kDuplicate}), (Got{0, 1, 2, 2, 3, 4, 5}));
  EXPECT_EQ(sent_, 6);
}
TEST_F(MemoryFaults, Corrupt) {
  Fault fault{Kind::kCorrupt};
  fault.byte = 7;
  fault.mask = 0x40;
  EXPECT_EQ(SendSix(fault), (Got{0, 1, 0x42, 3, 4, 5}));
}
TEST_F(MemoryFaults, Truncate) {
  size_t round = 0;
  for (const size_t left : {0, 1, 3, 9}) {
    network_.SetFaultHook([left](const FaultPoint&) { return Fault{Kind::kTruncate, 0, 1, left}; });
    auto listener = std::make_shared<Recorder>();
    auto data = transport_->OpenData("decode", OpenOf(5), listener);
    Slot slot = pool_.TryAcquire();
    for (uint8_t i = 0; i < 10; ++i) slot.data()[i] = i;
    data->SendChunk({std::move(slot), 10, {}, nullptr}, [this](bool sent) { sent ? ++sent_ : ++unsent_; });
    data->Close(absl::OkStatus());
    executor_.RunAll();
    const auto kept = acceptor_.WaitData(round++).listener->kept();
    ASSERT_EQ(kept.size(), 1u);
    ASSERT_EQ(kept[0].size(), left);
    for (size_t i = 0; i < left; ++i) EXPECT_EQ(kept[0][i], i);
  }
  EXPECT_EQ(sent_, 4) << "the sender believes that all was sent";
  EXPECT_EQ(pool_.used(), 0u);
}
TEST_F(MemoryFaults, HoldReorders) {
  Fault fault{Kind::kHold};
  fault.behind = 2;
  EXPECT_EQ(SendSix(fault), (Got{0, 1, 3, 4, 2, 5}));
}
TEST_F(MemoryFaults, HoldEndsWithTheStream) {
  Fault fault{Kind::kHold};
  fault.behind = 100;
  EXPECT_EQ(SendSix(fault), (Got{0, 1, 3, 4, 5, 2}));
  EXPECT_EQ(sent_, 6);
}
TEST_F(MemoryFaults, DelayKeepsOrder) {
  Fault fault{Kind::kDelay};
  fault.delay_ns = 20'000'000;
  EXPECT_EQ(SendSix(fault), (Got{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(sent_, 6);
}
TEST_F(MemoryFaults, Break) {
  EXPECT_EQ(SendSix({Kind::kBreak}), (Got{0, 1}));
  EXPECT_EQ(sent_, 2);
  EXPECT_EQ(unsent_, 4);
  EXPECT_EQ(ReasonOf(status_), "PEER_GONE");
  EXPECT_EQ(ReasonOf(accepted_status_), "PEER_GONE");
}

TEST_F(MemoryFaults, ACorruptFrameClosesTheStream) {
  network_.SetFaultHook([](const FaultPoint& point) {
    Fault fault;
    if (point.frame != nullptr && point.index == 1) {
      fault.kind = Fault::Kind::kCorrupt;
      fault.byte = 1;  // the length of the credit message
    }
    return fault;
  });
  auto listener = std::make_shared<Recorder>();
  auto stream = transport_->OpenControl("decode", listener);
  for (uint32_t i = 1; i <= 3; ++i) stream->Send(CreditFrame{i});
  executor_.RunAll();
  EXPECT_EQ(ReasonOf(listener->WaitClosed(0)), "MALFORMED_FRAME");
  EXPECT_EQ(acceptor_.WaitControl().listener->frames().size(), 1u);
}

TEST_F(MemoryFaults, ACutFrameClosesTheStream) {
  size_t round = 0;
  for (const size_t left : {0, 1, 2, 3}) {
    network_.SetFaultHook([left](const FaultPoint& point) {
      return point.index == 1 ? Fault{Kind::kTruncate, 0, 1, left} : Fault{};
    });
    auto listener = std::make_shared<Recorder>();
    auto stream = transport_->OpenControl("decode", listener);
    for (uint32_t i = 1; i <= 3; ++i) stream->Send(CreditFrame{i});
    executor_.RunAll();
    EXPECT_EQ(ReasonOf(listener->WaitClosed(0)), "MALFORMED_FRAME") << left;
    EXPECT_EQ(acceptor_.WaitControl(round++).listener->frames().size(), 1u) << left;
  }
}

TEST_F(MemoryFaults, SeveralEndsAndUnknownOnes) {
  RecordingAcceptor other;
  network_.AddEnd("other", &other);
  auto to_other = std::make_shared<Recorder>();
  auto to_nobody = std::make_shared<Recorder>();
  auto stream = transport_->OpenControl("other", to_other);
  auto lost = transport_->OpenControl("nobody", to_nobody);
  stream->Send(HeartbeatFrame{"sending"});
  executor_.RunAll();
  EXPECT_EQ(other.WaitControl().listener->frames().size(), 1u);
  EXPECT_EQ(other.WaitControl().stream->peer(), "prefill");
  EXPECT_EQ(ReasonOf(to_nobody->WaitClosed(0)), kNobodyListens);
  network_.RemoveEnd("other");
  executor_.RunAll();
  EXPECT_EQ(ReasonOf(to_other->WaitClosed(0)), "PEER_GONE");
}

}  // namespace
}  // namespace spectrumkv
