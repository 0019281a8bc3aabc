// The engine when something is wrong: cancels, lost peers and pools, broken and lying connections.
#include "tests/unit/transfer/two_engines.h"

namespace spectrumkv {
namespace {

TEST_F(EngineTest, CancelReturnsOnlyWhenNoByteCanLand) {
  Build();
  Prepare();
  b_->backend().SetOpen(false);
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
  ASSERT_TRUE(a_->manager().StartSender(Send("t", Source(), Raw())).ok());
  ASSERT_TRUE(b_->backend().WaitForADecode());
  std::atomic<bool> cancelled{false};
  absl::StatusOr<TransferReport> answer = absl::UnknownError("");
  b_->manager().Cancel(kMe, "t", Role::kReceiver, [&](absl::StatusOr<TransferReport> report) {
    answer = std::move(report);
    cancelled = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_FALSE(cancelled.load()) << "a decode is still writing";
  EXPECT_EQ(ReasonOf(b_->pools().ReserveTarget(kMe, target_pool_, kEpochB, {{0, {{10, 1}}}}, 8).status()), "BLOCKS_IN_USE");
  b_->backend().SetOpen(true);
  for (int i = 0; i < 200 && !cancelled.load(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  ASSERT_TRUE(cancelled.load());
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(answer->state, TransferState::kCancelled);
  EXPECT_EQ(a_->Watch("t", Role::kSender)->WaitTerminal().state, TransferState::kCancelled) << "both sides learn it";
  EXPECT_NE(Target(), nullptr) << "the blocks are free again";
}

TEST_F(EngineTest, SenderCancelReachesTheReceiver) {
  Build();
  Prepare();
  SenderSpec spec = Send("t", Source(), Raw());
  spec.layerwise = true;
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
  ASSERT_TRUE(a_->manager().StartSender(std::move(spec)).ok());
  auto watcher = b_->Watch("t", Role::kReceiver);
  ASSERT_TRUE(a_->manager().Advance(kMe, "t", 1, 80, {}).ok());
  ASSERT_TRUE(watcher->WaitLayers(1));
  a_->manager().Cancel(kMe, "t", Role::kSender, [](absl::StatusOr<TransferReport>) {});
  const TransferReport report = watcher->WaitTerminal();
  EXPECT_EQ(report.state, TransferState::kCancelled);
  EXPECT_EQ(ReasonOf(report.error), "CANCELLED");
}

TEST_F(EngineTest, ACancelAfterTheCommitAnswersCommitted) {
  Build();
  Prepare();
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
  ASSERT_TRUE(a_->manager().StartSender(Send("t", Source(), Raw())).ok());
  a_->Watch("t", Role::kSender)->WaitTerminal();
  absl::StatusOr<TransferReport> answer = absl::UnknownError("");
  a_->manager().Cancel(kMe, "t", std::nullopt, [&](absl::StatusOr<TransferReport> report) { answer = std::move(report); });
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(answer->state, TransferState::kCommitted);
}

TEST_F(EngineTest, AWrongTokenFetchesNothing) {
  Build();
  Prepare();
  ReceiverSpec receiver = Expect("t", Target());
  receiver.transfer_token = "0123456789abcdef";
  ASSERT_TRUE(b_->manager().StartReceiver(std::move(receiver)).ok());
  SenderSpec wrong = Send("t", Source(), Raw());
  wrong.transfer_token = "0123456789abcdeX";
  ASSERT_TRUE(a_->manager().StartSender(std::move(wrong)).ok());
  const TransferReport report = a_->Watch("t", Role::kSender)->WaitTerminal();
  EXPECT_EQ(report.state, TransferState::kFailed);
  EXPECT_EQ(report.error.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(ReasonOf(report.error), "TOKEN_MISMATCH");
  absl::StatusOr<TransferReport> waiting = b_->manager().Get(kMe, "t", std::nullopt);
  ASSERT_TRUE(waiting.ok());
  EXPECT_EQ(waiting->state, TransferState::kWaiting) << "the true sender may still come";
}

TEST_F(EngineTest, ASchemaMismatchNamesTheFieldOnBothSides) {
  Build();
  Prepare();
  PoolSchema other = MakeSchema(target_layout_);
  other.model = "another-model";
  const std::string pool = b_->AddPool(other);
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", b_->Target(pool, {{0, 10}}, 80))).ok());
  ASSERT_TRUE(a_->manager().StartSender(Send("t", Source(), Raw())).ok());
  for (const TransferReport& report : {a_->Watch("t", Role::kSender)->WaitTerminal(),
                                       b_->Watch("t", Role::kReceiver)->WaitTerminal()}) {
    EXPECT_EQ(report.state, TransferState::kFailed);
    EXPECT_EQ(ReasonOf(report.error), "SCHEMA_MISMATCH");
    EXPECT_NE(std::string(report.error.message()).find("another-model"), std::string::npos);
  }
}

TEST_F(EngineTest, AHalfThatNeverComesExpires) {
  Build();
  Prepare();
  ReceiverSpec receiver = Expect("never", Target());
  receiver.deadline_ms = 200;
  ASSERT_TRUE(b_->manager().StartReceiver(std::move(receiver)).ok());
  const TransferReport report = b_->Watch("never", Role::kReceiver)->WaitTerminal();
  EXPECT_EQ(report.state, TransferState::kExpired);
  EXPECT_EQ(report.error.code(), absl::StatusCode::kDeadlineExceeded);
  SenderSpec sender = Send("alone", Source(), Raw());
  sender.deadline_ms = 200;
  ASSERT_TRUE(a_->manager().StartSender(std::move(sender)).ok());
  EXPECT_EQ(a_->Watch("alone", Role::kSender)->WaitTerminal().state, TransferState::kExpired);
}

TEST_F(EngineTest, APeerThatIsNotThereFailsWithinTheProgressTimeout) {
  Build();
  Prepare();
  ASSERT_TRUE(a_->manager().StartSender(Send("t", Source(), Raw(), "nobody")).ok());
  const TransferReport report = a_->Watch("t", Role::kSender)->WaitTerminal(5);
  EXPECT_EQ(report.state, TransferState::kFailed);
  EXPECT_EQ(report.error.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(report.error), "PEER_UNREACHABLE");
  EXPECT_GE(report.duration_seconds, 1.5) << "it may be on its way up";
}

TEST_F(EngineTest, APeerThatComesLateIsMet) {
  Build();
  Prepare();
  network_->RemoveEnd("b");
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
  ASSERT_TRUE(a_->manager().StartSender(Send("t", Source(), Raw())).ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  network_->AddEnd("b", &b_->manager());
  const TransferReport report = a_->Watch("t", Role::kSender)->WaitTerminal();
  EXPECT_EQ(report.state, TransferState::kCommitted) << report.error;
  EXPECT_GT(report.attempts, 1u);
}

// Where a peer was met before and nobody listens now, its process is gone, and all it had of the transfer.
TEST_F(EngineTest, APeerThatDiesIsNoticedAtOnceByTheSideThatDials) {
  progress_timeout_ms_ = 10000;
  Build();
  Prepare();
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
  SenderSpec spec = Send("t", Source(), Raw());
  spec.layerwise = true;
  ASSERT_TRUE(a_->manager().StartSender(std::move(spec)).ok());
  ASSERT_TRUE(a_->manager().Advance(kMe, "t", 1, 80, {}).ok());
  ASSERT_TRUE(b_->Watch("t", Role::kReceiver)->WaitLayers(1));
  network_->RemoveEnd("b");
  const TransferReport report = a_->Watch("t", Role::kSender)->WaitTerminal(5);
  EXPECT_EQ(report.state, TransferState::kFailed);
  EXPECT_EQ(report.error.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(report.error), "PEER_GONE");
  EXPECT_EQ(report.attempts, 2u);
}

TEST_F(EngineTest, ALostPoolEndsItsTransfersOnBothSides) {
  Build();
  Prepare();
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
  SenderSpec spec = Send("t", Source(), Raw());
  spec.layerwise = true;
  ASSERT_TRUE(a_->manager().StartSender(std::move(spec)).ok());
  absl::StatusOr<uint64_t> hold = a_->pools().OpenHold(kMe, source_pool_, kEpochA, [](const std::string&) {});
  ASSERT_TRUE(hold.ok());
  a_->pools().CloseHold(source_pool_, *hold);
  const TransferReport report = a_->Watch("t", Role::kSender)->WaitTerminal();
  EXPECT_EQ(ReasonOf(report.error), "SOURCE_GONE");
  EXPECT_EQ(ReasonOf(b_->Watch("t", Role::kReceiver)->WaitTerminal().error), "SOURCE_GONE");
}

TEST_F(EngineTest, ABrokenConnectionIsResumedAndOnlyWhatIsMissingIsSentAgain) {
  Build();
  source_layout_.num_blocks = 4096;
  source_layout_.heads = 8;
  target_layout_ = source_layout_;
  source_pool_ = a_->AddPool(source_layout_);
  target_pool_ = b_->AddPool(target_layout_);
  std::vector<uint64_t> blocks(512);
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = i;
  sent_ = FillBlocks(*a_, source_pool_, source_layout_, blocks, 3);
  std::atomic<int> chunks{0}, breaks{0};
  network_->SetFaultHook([&](const FaultPoint& point) {
    Fault fault;
    // Each of the first three breaks comes a few chunks further on.
    if (point.data && point.chunk_bytes > 0 && chunks.fetch_add(1) % 7 == 6 && breaks.fetch_add(1) < 3) {
      fault.kind = Fault::Kind::kBreak;
    }
    return fault;
  });
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", b_->Target(target_pool_, {{0, 512}}, 8192))).ok());
  ASSERT_TRUE(a_->manager().StartSender(Send("t", a_->Source(source_pool_, {{0, 512}}, 8192), Raw())).ok());
  const TransferReport sent = a_->Watch("t", Role::kSender)->WaitTerminal();
  const TransferReport received = b_->Watch("t", Role::kReceiver)->WaitTerminal();
  network_->SetFaultHook(nullptr);
  ASSERT_EQ(sent.state, TransferState::kCommitted) << sent.error;
  ASSERT_EQ(received.state, TransferState::kCommitted) << received.error;
  EXPECT_GT(sent.attempts, 1u);
  EXPECT_GT(sent.chunks_resent, 0u);
  EXPECT_EQ(received.chunks, received.chunks_total);
  EXPECT_LE(sent.chunks, received.chunks_total + 3 * 16) << "far more than what was missing was sent again";
  EXPECT_TRUE(ReadBlocks(*b_, target_pool_, target_layout_, blocks) == sent_);
}

// A layer-wise source has credits while it pauses, perhaps for seconds: they are not all the room that the receiver has.
TEST_F(EngineTest, ASourceThatPausesHoldsUpNobody) {
  source_layout_.layers = target_layout_.layers = 40;
  source_layout_.block_tokens = target_layout_.block_tokens = 16;
  EngineSettings settings;
  settings.slots = 8;
  Build(settings);
  source_pool_ = a_->AddPool(source_layout_);
  target_pool_ = b_->AddPool(target_layout_);
  sent_ = FillBlocks(*a_, source_pool_, source_layout_, {7, 3, 4, 20, 1}, 1);
  const auto start = [&](const std::string& id, uint64_t first, bool layerwise) {
    SenderSpec spec = Send(id, Source(), Raw());
    spec.layerwise = layerwise;
    EXPECT_TRUE(b_->manager().StartReceiver(Expect(id, b_->Target(target_pool_, {{first, 5}}, 80))).ok());
    EXPECT_TRUE(a_->manager().StartSender(std::move(spec)).ok());
  };
  const std::string pausing[] = {"pause1", "pause2"};
  for (size_t i = 0; i < 2; ++i) {
    const std::string& id = pausing[i];
    start(id, 5 * i, true);
    ASSERT_TRUE(a_->manager().Advance(kMe, id, 1, 80, {}).ok());
    ASSERT_TRUE(b_->Watch(id, Role::kReceiver)->WaitLayers(1));
  }
  for (int i = 0; i < 5; ++i) {
    const std::string id = "quick" + std::to_string(i);
    start(id, 10, false);
    ASSERT_EQ(b_->Watch(id, Role::kReceiver)->WaitTerminal(10).state, TransferState::kCommitted) << id;
    EXPECT_TRUE(ReadBlocks(*b_, target_pool_, target_layout_, {10, 11, 12, 13, 14}) == sent_);
  }
  for (const std::string& id : pausing) {
    ASSERT_TRUE(a_->manager().Advance(kMe, id, 40, 80, {}).ok());
    EXPECT_EQ(b_->Watch(id, Role::kReceiver)->WaitTerminal().state, TransferState::kCommitted) << id;
  }
}

TEST_F(EngineTest, ACorruptedChunkFailsTheTransferOnBothSidesAndTheNextIsServed) {
  Build();
  Prepare();
  network_->SetFaultHook([](const FaultPoint& point) {
    Fault fault;
    if (point.data && point.chunk_bytes > 1000) {
      fault.kind = Fault::Kind::kCorrupt;
      fault.byte = 777;
      fault.mask = 0x10;
    }
    return fault;
  });
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("bad", Target())).ok());
  ASSERT_TRUE(a_->manager().StartSender(Send("bad", Source(), Raw())).ok());
  for (const TransferReport& report : {a_->Watch("bad", Role::kSender)->WaitTerminal(),
                                       b_->Watch("bad", Role::kReceiver)->WaitTerminal()}) {
    EXPECT_EQ(report.state, TransferState::kFailed);
    EXPECT_EQ(report.error.code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(ReasonOf(report.error), "BAD_CHECKSUM");
  }
  network_->SetFaultHook(nullptr);
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("good", Target())).ok());
  ASSERT_TRUE(a_->manager().StartSender(Send("good", Source(), Raw())).ok());
  EXPECT_EQ(a_->Watch("good", Role::kSender)->WaitTerminal().state, TransferState::kCommitted);
  EXPECT_TRUE(Landed() == sent_);
}

// What a worker does that must not: ThreadSanitizer is not to tell what the test is about.
__attribute__((no_sanitize("thread"))) void FlipBit(const std::vector<uint8_t*>& rows) {
  for (uint8_t* row : rows) row[2000] ^= 0x10;
}

// RAW words are sent from the source's own blocks: a worker that writes there meanwhile does not change tokens silently.
TEST_F(EngineTest, ASourceThatChangesOnItsWayIsRefusedByTheReceiver) {
  source_layout_.heads = target_layout_.heads = 8;
  source_layout_.head_dim = target_layout_.head_dim = 128;
  Build();
  Prepare();
  std::unique_ptr<BlockHold> source = Source();
  std::vector<uint8_t*> rows(source_layout_.layers);
  for (uint32_t layer = 0; layer < rows.size(); ++layer) source->FillRows(0, layer, PlaneId::kV, 79, 1, &rows[layer]);
  std::atomic<bool> flipped{false};
  network_->SetFaultHook([&](const FaultPoint& point) {
    if (point.data && !flipped.exchange(true)) FlipBit(rows);  // this chunk has its checksum already
    return Fault{};
  });
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("bad", Target())).ok());
  ASSERT_TRUE(a_->manager().StartSender(Send("bad", std::move(source), Raw())).ok());
  EXPECT_EQ(ReasonOf(b_->Watch("bad", Role::kReceiver)->WaitTerminal().error), "BAD_CHECKSUM");
  EXPECT_EQ(ReasonOf(a_->Watch("bad", Role::kSender)->WaitTerminal().error), "BAD_CHECKSUM");
  network_->SetFaultHook(nullptr);
  FlipBit(rows);
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("good", Target())).ok());
  ASSERT_TRUE(a_->manager().StartSender(Send("good", Source(), Raw())).ok());
  EXPECT_EQ(a_->Watch("good", Role::kSender)->WaitTerminal().state, TransferState::kCommitted);
  EXPECT_TRUE(Landed() == sent_);
}

// A network that holds on to the first chunk, for three seconds at most.
struct StuckNetwork {
  std::atomic<bool> stuck{false}, open{false};
  Fault operator()(const FaultPoint& point) {
    if (point.data && !stuck.exchange(true)) {
      for (int i = 0; i < 3000 && !open; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return Fault{};
  }
};

// A sender's end is told only when the network has given back what it had on loan of the blocks; or after a second.
TEST_F(EngineTest, AnEndWaitsForWordsOnLoan) {
  source_layout_.heads = target_layout_.heads = 8;
  source_layout_.head_dim = target_layout_.head_dim = 128;
  progress_timeout_ms_ = 6000;
  Build();
  Prepare();
  for (const bool comes_back : {true, false}) {
    const std::string id = comes_back ? "returns" : "stays";
    const auto network = std::make_shared<StuckNetwork>();
    network_->SetFaultHook([network](const FaultPoint& point) { return (*network)(point); });
    ASSERT_TRUE(b_->manager().StartReceiver(Expect(id, Target())).ok());
    SenderSpec spec = Send(id, Source(), Raw());
    spec.layerwise = true;  // so that a cancel does not ask the receiver, who might have everything
    ASSERT_TRUE(a_->manager().StartSender(std::move(spec)).ok());
    ASSERT_TRUE(a_->manager().Advance(kMe, id, 1, 80, {}).ok());
    for (int i = 0; i < 2000 && !network->stuck; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_TRUE(network->stuck);
    const auto answered = std::make_shared<std::atomic<bool>>(false);
    a_->manager().Cancel(kMe, id, Role::kSender, [answered](absl::StatusOr<TransferReport>) { *answered = true; });
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    EXPECT_FALSE(*answered) << "the network may still read the blocks";
    if (comes_back) network->open = true;
    EXPECT_EQ(a_->Watch(id, Role::kSender)->WaitTerminal().state, TransferState::kCancelled);
    for (int i = 0; i < 1000 && !*answered; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_TRUE(*answered);
    EXPECT_EQ(network->open, comes_back);
    network->open = true;
    EXPECT_NE(b_->Watch(id, Role::kReceiver)->WaitTerminal().state, TransferState::kCommitted);
    network_->SetFaultHook(nullptr);
  }
}

TEST_F(EngineTest, ADuplicatedChunkIsWrittenOnce) {
  Build();
  Prepare();
  network_->SetFaultHook([](const FaultPoint& point) {
    Fault fault;
    if (point.data && point.chunk_bytes > 1000 && point.index == 1) fault.kind = Fault::Kind::kDuplicate;
    return fault;
  });
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
  ASSERT_TRUE(a_->manager().StartSender(Send("t", Source(), Raw())).ok());
  const TransferReport report = b_->Watch("t", Role::kReceiver)->WaitTerminal();
  network_->SetFaultHook(nullptr);
  // A copy beyond the credits is a violation and fails; within them it is dropped and counted. Never a wrong byte.
  if (report.state == TransferState::kCommitted) {
    EXPECT_TRUE(Landed() == sent_);
  } else {
    EXPECT_EQ(ReasonOf(report.error), "PROTOCOL_VIOLATION");
  }
}

// A peer's data streams, of which the test knows which were closed.
class CountedStream final : public DataListener {
 public:
  explicit CountedStream(std::atomic<int>* refused) : refused_(refused) {}
  void OnChunk(std::unique_ptr<ReceivedChunk>) override {}
  void OnClosed(absl::Status status) override {
    if (ReasonOf(status) == "PROTOCOL_VIOLATION") ++*refused_;
  }

 private:
  std::atomic<int>* const refused_;
};

// Each stream is worth some of the slots that all transfers share.
TEST_F(EngineTest, APeerGetsNoMoreDataStreamsThanAreOffered) {
  Build();
  Prepare();
  std::atomic<uint64_t> session{0};
  network_->SetFaultHook([&](const FaultPoint& point) {
    const auto* reply = point.frame != nullptr ? std::get_if<HelloReplyFrame>(point.frame) : nullptr;
    if (reply != nullptr) session = reply->session;
    return Fault{};
  });
  SenderSpec published = Send("t", Source(), Raw(), "");
  published.layerwise = true;  // and is not written yet
  ASSERT_TRUE(a_->manager().StartSender(std::move(published)).ok());
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target(), "a")).ok());
  const auto streams = [&] { return a_->manager().Get(kMe, "t", Role::kSender)->streams; };
  for (int i = 0; i < 500 && streams() == 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  ASSERT_GT(streams(), 0u);
  std::atomic<int> refused{0};
  std::vector<std::shared_ptr<DataStream>> more;
  for (uint32_t i = 0; i < 10; ++i) {
    DataOpenFrame open;
    open.transfer_id = "t";
    open.attempt = 1;
    open.session = session;
    open.stream = 10 + i;
    more.push_back(b_->transport().OpenData("a", open, std::make_shared<CountedStream>(&refused)));
  }
  for (int i = 0; i < 500 && refused < 8; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_GE(refused, 8);
  EXPECT_LE(streams(), 2u);
  ASSERT_TRUE(a_->manager().Advance(kMe, "t", 3, 80, {}, {}, 0).ok());
  a_->Watch("t", Role::kSender)->WaitTerminal();
  network_->SetFaultHook(nullptr);
  for (auto& stream : more) stream->Close(absl::CancelledError(""));
}

}  // namespace
}  // namespace spectrumkv
