// What transport.h promises, for each transport.
#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "server/base/status.h"
#include "server/stream/grpc_transport.h"
#include "server/stream/memory_transport.h"
#include "server/stream/peer_server.h"
#include "tests/unit/stream/stream_fixtures.h"
#include "tests/unit/stream/test_certificates.h"

namespace spectrumkv {
namespace {

constexpr size_t kSlotBytes = 64 << 10;

// A dialling end and an accepting end.
class Link {
 public:
  virtual ~Link() = default;
  virtual Transport& transport() = 0;
  virtual std::string address() = 0;
  virtual void KillAcceptor() = 0;
  RecordingAcceptor acceptor;
};

class MemoryPair final : public Link {
 public:
  MemoryPair() : transport_(network_.TransportOf("prefill")) { network_.AddEnd("decode", &acceptor); }
  Transport& transport() override { return *transport_; }
  std::string address() override { return "decode"; }
  void KillAcceptor() override { network_.RemoveEnd("decode"); }

 private:
  MemoryNetwork network_;
  std::unique_ptr<Transport> transport_;
};

class GrpcPair final : public Link {
 public:
  explicit GrpcPair(const PeerSecurity& security) {
    PeerServerOptions server_options;
    server_options.security = security;
    server_ = PeerServer::Start(server_options, &acceptor).value();
    address_ = server_->address();
    GrpcTransportOptions options;
    options.security = security;
    transport_ = GrpcTransport::Create(options).value();
  }
  Transport& transport() override { return *transport_; }
  std::string address() override { return address_; }
  void KillAcceptor() override { server_->Shutdown(); }

 private:
  std::unique_ptr<PeerServer> server_;
  std::unique_ptr<GrpcTransport> transport_;
  std::string address_;
};

class TransportTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::string kind = GetParam();
    if (kind == "memory") link_ = std::make_unique<MemoryPair>();
    if (kind == "plain") link_ = std::make_unique<GrpcPair>(PeerSecurity{});
    if (kind == "mtls") {
      ca_ = std::make_unique<TestCa>();
      const PeerSecurity security = ca_->Issue("spectrumkv");
      ASSERT_TRUE(ca_->ok()) << "openssl failed, see " << ca_->folder();
      link_ = std::make_unique<GrpcPair>(security);
    }
  }
  SlotPool pool_{16, kSlotBytes};
  std::unique_ptr<TestCa> ca_;
  std::unique_ptr<Link> link_;
};

TEST_P(TransportTest, FramesArriveInOrderBothWays) {
  auto listener = std::make_shared<Recorder>();
  auto stream = link_->transport().OpenControl(link_->address(), listener);
  for (uint32_t i = 1; i <= 50; ++i) stream->Send(CreditFrame{i});
  auto accepted = link_->acceptor.WaitControl();
  ASSERT_NE(accepted.stream, nullptr);
  for (uint32_t i = 1; i <= 50; ++i) accepted.stream->Send(HeartbeatFrame{std::to_string(i)});
  ASSERT_TRUE(accepted.listener->WaitFrames(50));
  ASSERT_TRUE(listener->WaitFrames(50));
  for (uint32_t i = 1; i <= 50; ++i) {
    EXPECT_EQ(std::get<CreditFrame>(accepted.listener->frames()[i - 1]).credits, i);
    EXPECT_EQ(std::get<HeartbeatFrame>(listener->frames()[i - 1]).reason, std::to_string(i));
  }
  EXPECT_FALSE(accepted.stream->peer().empty());
  stream->Close(absl::OkStatus());
  EXPECT_TRUE(listener->WaitClosed().ok()) << listener->WaitClosed();
  EXPECT_TRUE(accepted.listener->WaitClosed().ok()) << accepted.listener->WaitClosed();
  EXPECT_EQ(listener->faults() + accepted.listener->faults(), 0);
}

TEST_P(TransportTest, AcceptorClosesWithAReasonAfterItsFrames) {
  auto listener = std::make_shared<Recorder>();
  auto stream = link_->transport().OpenControl(link_->address(), listener);
  auto accepted = link_->acceptor.WaitControl();
  ASSERT_NE(accepted.stream, nullptr);
  ReceiptFrame receipt;
  receipt.code = static_cast<int32_t>(absl::StatusCode::kFailedPrecondition);
  receipt.reason = "SCHEMA_MISMATCH";
  accepted.stream->Send(receipt);
  accepted.stream->Close(
      MakeError(absl::StatusCode::kFailedPrecondition, "SCHEMA_MISMATCH", "heads differ", {{"field", "heads"}}, 250));
  const absl::Status seen = listener->WaitClosed();
  EXPECT_EQ(seen.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(seen), "SCHEMA_MISMATCH");
  EXPECT_EQ(MetadataOf(seen).at("field"), "heads");
  EXPECT_EQ(RetryAfterMsOf(seen), 250);
  ASSERT_EQ(listener->frames().size(), 1u) << "the receipt was lost";
  EXPECT_EQ(ReasonOf(accepted.listener->WaitClosed()), "SCHEMA_MISMATCH");
  EXPECT_EQ(listener->faults() + accepted.listener->faults(), 0);
  stream->Send(HeartbeatFrame{"late"});  // ignored
  stream->Close(absl::OkStatus());
}

TEST_P(TransportTest, DiallerBreaksOff) {
  auto listener = std::make_shared<Recorder>();
  auto stream = link_->transport().OpenControl(link_->address(), listener);
  auto accepted = link_->acceptor.WaitControl();
  ASSERT_NE(accepted.stream, nullptr);
  stream->Close(MakeError(absl::StatusCode::kCancelled, "BY_TEST", "enough"));
  stream->Close(absl::OkStatus());
  EXPECT_EQ(ReasonOf(listener->WaitClosed()), "BY_TEST");
  const absl::Status seen = accepted.listener->WaitClosed();
  EXPECT_EQ(seen.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(seen), "PEER_GONE");
  EXPECT_EQ(listener->faults() + accepted.listener->faults(), 0);
}

TEST_P(TransportTest, RefusalsNameTheReason) {
  link_->acceptor.refuse_control = link_->acceptor.refuse_data = true;
  auto control = std::make_shared<Recorder>();
  auto data = std::make_shared<Recorder>();
  auto control_stream = link_->transport().OpenControl(link_->address(), control);
  auto data_stream = link_->transport().OpenData(link_->address(), OpenOf(0), data);
  const absl::Status draining = control->WaitClosed();
  EXPECT_EQ(draining.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(draining), "DRAINING");
  EXPECT_EQ(RetryAfterMsOf(draining), 1000);
  const absl::Status unknown = data->WaitClosed();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReasonOf(unknown), "UNKNOWN_SESSION");
}

TEST_P(TransportTest, ChunksOverTwoStreamsKeepOrderAndContent) {
  constexpr uint32_t kChunks = 5000;  // per stream
  link_->acceptor.prepare = [](Recorder& recorder) {
    recorder.keep_chunks = false;
    auto next = std::make_shared<uint32_t>(0);
    auto bad = std::make_shared<bool>(false);
    recorder.on_chunk = [next, bad](const std::vector<uint8_t>& bytes) {
      if (!ChunkSender::Matches(bytes, (*next)++) && !*bad) {
        *bad = true;
        ADD_FAILURE() << "chunk " << *next - 1 << " differs";
      }
    };
  };
  std::vector<std::thread> senders;
  for (uint32_t stream = 0; stream < 2; ++stream) {
    senders.emplace_back([&, stream] {
      auto listener = std::make_shared<Recorder>();
      auto data = link_->transport().OpenData(link_->address(), OpenOf(stream), listener);
      ChunkSender sender(&pool_, data);
      for (uint32_t i = 0; i < kChunks; ++i) {
        // Sizes around varint and read-buffer edges; most small, so that the test is quick.
        const size_t bytes = i % 500 == 0 ? kSlotBytes : 120 + i % 17;
        ASSERT_TRUE(sender.Send(i, bytes, /*lent_pieces=*/i % 3 == 0 ? i % 11 : 0)) << i;
      }
      data->Close(absl::OkStatus());
      EXPECT_TRUE(listener->WaitClosed().ok()) << listener->WaitClosed();
      EXPECT_TRUE(sender.WaitIdle());
      EXPECT_EQ(sender.sent(), kChunks);
      EXPECT_EQ(sender.twice(), 0u);
      EXPECT_EQ(sender.kept(), 0u) << "memory that the network no longer needs";
    });
  }
  for (auto& sender : senders) sender.join();
  for (size_t n = 0; n < 2; ++n) {
    auto accepted = link_->acceptor.WaitData(n);
    ASSERT_NE(accepted.stream, nullptr);
    EXPECT_TRUE(accepted.listener->WaitClosed().ok());
    EXPECT_EQ(accepted.listener->chunks(), kChunks);
    EXPECT_EQ(accepted.listener->faults(), 0);
    EXPECT_EQ(accepted.open.session, 77u);
    EXPECT_EQ(accepted.open.transfer_id, "transfer-1");
  }
  EXPECT_EQ(pool_.used(), 0u);
}

TEST_P(TransportTest, AcceptorSendsChunksToo) {
  auto listener = std::make_shared<Recorder>();
  auto data = link_->transport().OpenData(link_->address(), OpenOf(3), listener);
  auto accepted = link_->acceptor.WaitData();
  ASSERT_NE(accepted.stream, nullptr);
  ChunkSender sender(&pool_, accepted.stream);
  for (uint32_t i = 0; i < 40; ++i) ASSERT_TRUE(sender.Send(i, 1 + i * 1000));
  accepted.stream->Close(absl::OkStatus());
  EXPECT_TRUE(listener->WaitClosed().ok()) << listener->WaitClosed();
  const auto kept = listener->kept();
  ASSERT_EQ(kept.size(), 40u);
  for (uint32_t i = 0; i < 40; ++i) EXPECT_TRUE(ChunkSender::Matches(kept[i], i)) << i;
  EXPECT_TRUE(sender.WaitIdle());
  EXPECT_EQ(sender.sent(), 40u);
  EXPECT_TRUE(accepted.listener->WaitClosed().ok());
}

// The receiver stands still with one chunk in its hands; the sender cancels: every slot comes home, nobody is blocked.
TEST_P(TransportTest, CancelWithSlotsOutstandingReturnsThemAll) {
  std::mutex gate_mutex;
  std::condition_variable gate;
  bool open = false;
  link_->acceptor.prepare = [&](Recorder& recorder) {
    recorder.on_chunk = [&](const std::vector<uint8_t>&) {
      std::unique_lock<std::mutex> lock(gate_mutex);
      gate.wait_for(lock, std::chrono::seconds(10), [&] { return open; });
    };
  };
  auto listener = std::make_shared<Recorder>();
  auto data = link_->transport().OpenData(link_->address(), OpenOf(0), listener);
  ChunkSender sender(&pool_, data);
  for (uint32_t i = 0; i < 4; ++i) ASSERT_TRUE(sender.Send(i, kSlotBytes));
  ASSERT_NE(link_->acceptor.WaitData().stream, nullptr);
  data->Close(MakeError(absl::StatusCode::kCancelled, "BY_TEST", "cancelled"));
  if (std::string(GetParam()) != "memory") {
    EXPECT_EQ(ReasonOf(listener->WaitClosed()), "BY_TEST");
    EXPECT_TRUE(sender.WaitIdle());
  }
  {
    std::lock_guard<std::mutex> lock(gate_mutex);
    open = true;
  }
  gate.notify_all();
  EXPECT_EQ(ReasonOf(listener->WaitClosed()), "BY_TEST");
  EXPECT_TRUE(sender.WaitIdle());
  EXPECT_EQ(sender.done(), 4u);
  EXPECT_EQ(sender.twice(), 0u);
  EXPECT_TRUE(WaitUntil([&] { return pool_.used() == 0; }));
  EXPECT_EQ(ReasonOf(link_->acceptor.WaitData().listener->WaitClosed()), "PEER_GONE");
  // A chunk sent after the end comes back at once.
  ASSERT_TRUE(sender.Send(9, 100));
  EXPECT_TRUE(sender.WaitIdle());
  EXPECT_EQ(pool_.used(), 0u);
}

TEST_P(TransportTest, KilledPeerClosesBothEndsOnce) {
  auto control = std::make_shared<Recorder>();
  auto data = std::make_shared<Recorder>();
  auto control_stream = link_->transport().OpenControl(link_->address(), control);
  auto data_stream = link_->transport().OpenData(link_->address(), OpenOf(0), data);
  auto accepted_control = link_->acceptor.WaitControl();
  auto accepted_data = link_->acceptor.WaitData();
  ASSERT_NE(accepted_control.stream, nullptr);
  ASSERT_NE(accepted_data.stream, nullptr);
  ChunkSender sender(&pool_, data_stream);
  ASSERT_TRUE(sender.Send(0, kSlotBytes));
  link_->KillAcceptor();
  for (Recorder* recorder :
       {control.get(), data.get(), accepted_control.listener.get(), accepted_data.listener.get()}) {
    EXPECT_EQ(recorder->WaitClosed().code(), absl::StatusCode::kUnavailable) << recorder->WaitClosed();
    EXPECT_EQ(recorder->faults(), 0);
  }
  EXPECT_TRUE(sender.WaitIdle());
  auto again = std::make_shared<Recorder>();
  auto stream = link_->transport().OpenControl(link_->address(), again);
  const absl::Status refused = again->WaitClosed();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(refused), kNobodyListens) << refused;
}

TEST_P(TransportTest, TooManyQueuedFramesCloseTheStream) {
  auto gate = std::make_shared<std::promise<void>>();
  auto opened = gate->get_future().share();
  link_->acceptor.prepare = [opened](Recorder& recorder) {
    recorder.on_frame = [opened](const ControlFrame&) { opened.wait_for(std::chrono::seconds(10)); };
  };
  auto listener = std::make_shared<Recorder>();
  auto stream = link_->transport().OpenControl(link_->address(), listener);
  ManifestFrame big;
  big.token_count = 0xFFFFFFFF;
  for (uint32_t i = 0; i < 50'000; ++i) big.kept_tokens.push_back({i * 2, 1});
  for (int i = 0; i < 200 && !listener->closed(); ++i) stream->Send(big);
  gate->set_value();
  const absl::Status status = listener->WaitClosed();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(ReasonOf(status), "STREAM_QUEUE_FULL");
}

TEST_P(TransportTest, FramesOutOfBoundsCloseTheStream) {
  auto listener = std::make_shared<Recorder>();
  auto stream = link_->transport().OpenControl(link_->address(), listener);
  stream->Send(CreditFrame{0});
  const absl::Status status = listener->WaitClosed();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_EQ(ReasonOf(status), "MALFORMED_FRAME");
  EXPECT_EQ(MetadataOf(status).at("field"), "credit.credits");
  EXPECT_EQ(ReasonOf(link_->acceptor.WaitControl().listener->WaitClosed()), "MALFORMED_FRAME");
}

INSTANTIATE_TEST_SUITE_P(All, TransportTest, testing::Values("memory", "plain", "mtls"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace spectrumkv
