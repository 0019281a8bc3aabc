// The engine end to end in one process: two daemons' managers, pools and codecs, joined by a memory transport.
#include "tests/unit/transfer/engine_fixture.h"

namespace spectrumkv {
namespace {

constexpr uint64_t kEpochA = 0xA1, kEpochB = 0xB1;

class EngineTest : public ::testing::Test {
 protected:
  void Build(EngineSettings settings = {}) {
    settings.options.progress_timeout_ms = 1500;
    a_ = std::make_unique<Engine>("a", network_.get(), settings, kEpochA);
    b_ = std::make_unique<Engine>("b", network_.get(), settings, kEpochB);
  }
  void TearDown() override {
    a_->Stop();
    b_->Stop();
    network_.reset();
  }

  SenderSpec Send(const std::string& id, std::unique_ptr<BlockHold> source, Policy policy = {},
                  const std::string& peer = "b") {
    SenderSpec spec;
    spec.transfer_id = id;
    spec.peer = peer;
    spec.source = std::move(source);
    spec.policy = std::move(policy);
    spec.deadline_ms = 15000;
    spec.fingerprint = "f-" + id;
    return spec;
  }
  ReceiverSpec Expect(const std::string& id, std::unique_ptr<BlockHold> target, const std::string& peer = "") {
    ReceiverSpec spec;
    spec.transfer_id = id;
    spec.peer = peer;
    spec.target = std::move(target);
    spec.deadline_ms = 15000;
    spec.fingerprint = "f-" + id;
    return spec;
  }
  static Policy Raw() {
    Policy policy;
    policy.allocator = Allocator::kRaw;
    policy.budget = 1.1;
    return policy;
  }

  // One source of 5 blocks on a, one destination on b with half the block size and heads first.
  void Prepare() {
    source_layout_.block_tokens = 16;
    target_layout_.block_tokens = 8;
    target_layout_.heads_first = true;
    source_pool_ = a_->AddPool(source_layout_);
    target_pool_ = b_->AddPool(target_layout_);
    sent_ = FillBlocks(*a_, source_pool_, source_layout_, {7, 3, 4, 20, 1}, 1);
  }
  std::unique_ptr<BlockHold> Source(uint32_t tokens = 80) {
    return a_->Source(source_pool_, {{7, 1}, {3, 2}, {20, 1}, {1, 1}}, tokens);
  }
  std::unique_ptr<BlockHold> Target(uint32_t tokens = 80, uint64_t first = 10) {
    return b_->Target(target_pool_, {{first, 10}}, tokens);
  }
  std::vector<std::string> Landed(uint64_t first = 10) {
    std::vector<uint64_t> blocks;
    for (uint64_t i = 0; i < 10; ++i) blocks.push_back(first + i);
    return ReadBlocks(*b_, target_pool_, target_layout_, blocks);
  }

  std::unique_ptr<MemoryNetwork> network_ = std::make_unique<MemoryNetwork>();
  std::unique_ptr<Engine> a_, b_;
  PoolLayout source_layout_, target_layout_;
  std::string source_pool_, target_pool_;
  std::vector<std::string> sent_;
};

TEST_F(EngineTest, RawPushIsBitExactAcrossLayouts) {
  Build();
  Prepare();
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
  ASSERT_TRUE(a_->manager().StartSender(Send("t", Source(), Raw())).ok());
  const TransferReport sent = a_->Watch("t", Role::kSender)->WaitTerminal();
  const TransferReport received = b_->Watch("t", Role::kReceiver)->WaitTerminal();
  ASSERT_EQ(sent.state, TransferState::kCommitted) << sent.error;
  ASSERT_EQ(received.state, TransferState::kCommitted) << received.error;
  EXPECT_EQ(Landed(), sent_);
  EXPECT_EQ(sent.wire_bytes, received.wire_bytes);
  EXPECT_EQ(sent.kv_bytes, received.kv_bytes);
  EXPECT_EQ(received.layers_ready, 3u);
  EXPECT_EQ(sent.chunks, sent.chunks_total);
}

TEST_F(EngineTest, SendBeforeExpectWaitsForIt) {
  Build();
  Prepare();
  ASSERT_TRUE(a_->manager().StartSender(Send("t", Source(), Raw())).ok());
  auto watcher = a_->Watch("t", Role::kSender);
  std::this_thread::sleep_for(std::chrono::milliseconds(1800));  // longer than the progress timeout
  EXPECT_FALSE(watcher->ended());
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
  EXPECT_EQ(watcher->WaitTerminal().state, TransferState::kCommitted);
  EXPECT_EQ(Landed(), sent_);
}

TEST_F(EngineTest, PullInEitherOrder) {
  Build();
  Prepare();
  ASSERT_TRUE(a_->manager().StartSender(Send("t1", Source(), Raw(), "")).ok());
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t1", Target(), "a")).ok());
  EXPECT_EQ(b_->Watch("t1", Role::kReceiver)->WaitTerminal().state, TransferState::kCommitted);
  EXPECT_EQ(a_->Watch("t1", Role::kSender)->WaitTerminal().state, TransferState::kCommitted);
  EXPECT_EQ(Landed(), sent_);

  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t2", Target(80, 21), "a")).ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  ASSERT_TRUE(a_->manager().StartSender(Send("t2", Source(), Raw(), "")).ok());
  EXPECT_EQ(b_->Watch("t2", Role::kReceiver)->WaitTerminal().state, TransferState::kCommitted);
  EXPECT_EQ(Landed(21), sent_);
}

TEST_F(EngineTest, GreedyStaysInsideItsBudgetAndSinksAreExact) {
  Build();
  Prepare();
  Policy policy;
  policy.budget = 0.4;
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
  ASSERT_TRUE(a_->manager().StartSender(Send("t", Source(), policy)).ok());
  const TransferReport report = b_->Watch("t", Role::kReceiver)->WaitTerminal();
  ASSERT_EQ(report.state, TransferState::kCommitted) << report.error;
  EXPECT_LE(report.wire_bytes, 0.4 * report.kv_bytes);
  EXPECT_GT(report.wire_bytes, 0.3 * report.kv_bytes);
  const std::vector<std::string> landed = Landed();
  // The target's blocks are heads first, but GetBlock is dense in token order, so the first four tokens lead.
  const size_t sink_bytes = 4 * 2 * 64 * 2;
  for (size_t plane = 0; plane < landed.size(); ++plane) {
    EXPECT_EQ(landed[plane].substr(0, sink_bytes), sent_[plane].substr(0, sink_bytes));
    EXPECT_NE(landed[plane], sent_[plane]);
  }
}

TEST_F(EngineTest, APageTailIsZeroedAndNothingElse) {
  Build();
  Prepare();
  FillBlocks(*b_, target_pool_, target_layout_, {10, 11, 12, 13, 14, 15, 16, 17, 18, 19}, 9);
  const std::vector<std::string> before = Landed();
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target(61))).ok());
  ASSERT_TRUE(a_->manager().StartSender(Send("t", Source(61), Raw())).ok());
  ASSERT_EQ(b_->Watch("t", Role::kReceiver)->WaitTerminal().state, TransferState::kCommitted);
  const std::vector<std::string> landed = Landed();
  const size_t token = 2 * 64 * 2;
  for (size_t plane = 0; plane < landed.size(); ++plane) {
    EXPECT_EQ(landed[plane].substr(0, 61 * token), sent_[plane].substr(0, 61 * token));
    EXPECT_EQ(landed[plane].substr(61 * token, 3 * token), std::string(3 * token, '\0'));
    EXPECT_EQ(landed[plane].substr(64 * token), before[plane].substr(64 * token)) << "a later block was touched";
  }
}

TEST_F(EngineTest, LayerwiseSourceGoesLayerByLayer) {
  Build();
  Prepare();
  Policy policy;
  policy.budget = 0.5;
  policy.importance = ImportanceSource::kKeyNorm;
  SenderSpec spec = Send("t", Source(), policy);
  spec.layerwise = true;
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
  ASSERT_TRUE(a_->manager().StartSender(std::move(spec)).ok());
  auto watcher = b_->Watch("t", Role::kReceiver);
  for (uint32_t layer = 1; layer <= 3; ++layer) {
    ASSERT_FALSE(watcher->ended());
    ASSERT_TRUE(a_->manager().Advance("t", layer, 80, {}).ok());
    ASSERT_TRUE(watcher->WaitLayers(layer)) << layer;
  }
  const TransferReport report = watcher->WaitTerminal();
  ASSERT_EQ(report.state, TransferState::kCommitted) << report.error;
  EXPECT_LE(report.wire_bytes, 0.5 * report.kv_bytes);
}

TEST_F(EngineTest, ALayerwiseSourceMayPauseLongerThanTheProgressTimeout) {
  Build();
  Prepare();
  SenderSpec spec = Send("t", Source(), Raw());
  spec.layerwise = true;
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
  ASSERT_TRUE(a_->manager().StartSender(std::move(spec)).ok());
  ASSERT_TRUE(a_->manager().Advance("t", 1, 80, {}).ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(3200));
  ASSERT_TRUE(a_->manager().Advance("t", 3, 80, {}).ok());
  EXPECT_EQ(a_->Watch("t", Role::kSender)->WaitTerminal().state, TransferState::kCommitted);
  EXPECT_EQ(Landed(), sent_);
}

TEST_F(EngineTest, DroppedTokensLandContiguously) {
  Build();
  Prepare();
  Policy policy;
  policy.allocator = Allocator::kPdTrim;
  policy.allow_drop = true;
  policy.budget = 0.5;
  {
    ASSERT_TRUE(b_->manager().StartReceiver(Expect("refused", Target())).ok());
    ASSERT_TRUE(a_->manager().StartSender(Send("refused", Source(), policy)).ok());
    const TransferReport report = a_->Watch("refused", Role::kSender)->WaitTerminal();
    EXPECT_EQ(report.state, TransferState::kFailed);
    EXPECT_EQ(ReasonOf(report.error), "DROP_NOT_ACCEPTED");
    EXPECT_EQ(b_->Watch("refused", Role::kReceiver)->WaitTerminal().state, TransferState::kFailed);
  }
  ReceiverSpec spec = Expect("t", Target());
  spec.accept_dropped = true;
  ASSERT_TRUE(b_->manager().StartReceiver(std::move(spec)).ok());
  ASSERT_TRUE(a_->manager().StartSender(Send("t", Source(), policy)).ok());
  const TransferReport report = b_->Watch("t", Role::kReceiver)->WaitTerminal();
  ASSERT_EQ(report.state, TransferState::kCommitted) << report.error;
  ASSERT_EQ(report.dropped.size(), 1u);
  EXPECT_EQ(report.kept_tokens + report.dropped[0].count, 80u);
  const uint32_t front = report.dropped[0].first;
  const size_t token = 2 * 64 * 2;
  const std::vector<std::string> landed = Landed();
  for (size_t plane = 0; plane < landed.size(); ++plane) {
    const std::string want = sent_[plane].substr(0, front * token) +
                             sent_[plane].substr((report.dropped[0].first + report.dropped[0].count) * token);
    EXPECT_EQ(landed[plane].substr(0, report.kept_tokens * token), want);
  }
}

TEST_F(EngineTest, CancelReturnsOnlyWhenNoByteCanLand) {
  Build();
  Prepare();
  b_->backend().SetOpen(false);
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
  ASSERT_TRUE(a_->manager().StartSender(Send("t", Source(), Raw())).ok());
  ASSERT_TRUE(b_->backend().WaitForADecode());
  std::atomic<bool> cancelled{false};
  absl::StatusOr<TransferReport> answer = absl::UnknownError("");
  b_->manager().Cancel("t", Role::kReceiver, [&](absl::StatusOr<TransferReport> report) {
    answer = std::move(report);
    cancelled = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_FALSE(cancelled.load()) << "a decode is still writing";
  EXPECT_EQ(ReasonOf(b_->pools().ReserveTarget(target_pool_, kEpochB, {{0, {{10, 1}}}}, 8).status()), "BLOCKS_IN_USE");
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
  ASSERT_TRUE(a_->manager().Advance("t", 1, 80, {}).ok());
  ASSERT_TRUE(watcher->WaitLayers(1));
  a_->manager().Cancel("t", Role::kSender, [](absl::StatusOr<TransferReport>) {});
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
  a_->manager().Cancel("t", std::nullopt, [&](absl::StatusOr<TransferReport> report) { answer = std::move(report); });
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
  absl::StatusOr<TransferReport> waiting = b_->manager().Get("t", std::nullopt);
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
}

TEST_F(EngineTest, AnIdIsUsedOnce) {
  Build();
  Prepare();
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
  EXPECT_TRUE(b_->manager().FindRepeat("t", Role::kReceiver, "f-t").has_value());
  EXPECT_EQ(b_->manager().FindRepeat("t", Role::kReceiver, "other").value_or(absl::OkStatus()).code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_FALSE(b_->manager().FindRepeat("u", Role::kReceiver, "f-t").has_value());
  EXPECT_EQ(ReasonOf(b_->manager().StartReceiver(Expect("t", Target(80, 21)))), "TRANSFER_EXISTS");
  ASSERT_TRUE(a_->manager().StartSender(Send("t", Source(), Raw())).ok());
  a_->Watch("t", Role::kSender)->WaitTerminal();
  EXPECT_EQ(ReasonOf(a_->manager().StartSender(Send("t", Source(), Raw()))), "TRANSFER_EXISTS");
  EXPECT_TRUE(a_->manager().Release("t", std::nullopt).ok());
  EXPECT_EQ(ReasonOf(a_->manager().Get("t", std::nullopt).status()), "UNKNOWN_TRANSFER");
}

TEST_F(EngineTest, ALostPoolEndsItsTransfersOnBothSides) {
  Build();
  Prepare();
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
  SenderSpec spec = Send("t", Source(), Raw());
  spec.layerwise = true;
  ASSERT_TRUE(a_->manager().StartSender(std::move(spec)).ok());
  // A sender that ends before the halves have met can tell nobody.
  for (int i = 0; i < 2000 && b_->manager().Get("t", std::nullopt)->state == TransferState::kWaiting; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  absl::StatusOr<uint64_t> hold = a_->pools().OpenHold(source_pool_, kEpochA, [](const std::string&) {});
  ASSERT_TRUE(hold.ok());
  a_->pools().CloseHold(source_pool_, *hold);
  const TransferReport report = a_->Watch("t", Role::kSender)->WaitTerminal();
  EXPECT_EQ(ReasonOf(report.error), "SOURCE_GONE");
  EXPECT_EQ(ReasonOf(b_->Watch("t", Role::kReceiver)->WaitTerminal().error), "SOURCE_GONE");
}

TEST_F(EngineTest, BudgetTooSmallIsSaidAtOnce) {
  Build();
  Prepare();
  Policy policy;
  policy.budget = 0.05;
  const absl::Status status = a_->manager().StartSender(Send("t", Source(), policy));
  EXPECT_EQ(ReasonOf(status), "BUDGET_TOO_SMALL");
  EXPECT_FALSE(MetadataOf(status)["least_budget"].empty());
}

TEST_F(EngineTest, AShortPromptTravelsUnderTheDefaultPolicy) {
  Build();
  Prepare();
  for (const uint32_t tokens : {1u, 2u, 5u}) {
    const std::string id = "short-" + std::to_string(tokens);
    Policy policy;
    policy.soft_budget = true;
    ASSERT_TRUE(b_->manager().StartReceiver(Expect(id, Target(tokens))).ok());
    ASSERT_TRUE(a_->manager().StartSender(Send(id, Source(tokens), policy)).ok());
    const TransferReport report = a_->Watch(id, Role::kSender)->WaitTerminal();
    ASSERT_EQ(report.state, TransferState::kCommitted) << report.error;
    EXPECT_GE(report.budget, 0.5) << "the report says what the budget was raised to";
  }
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
  EXPECT_EQ(ReadBlocks(*b_, target_pool_, target_layout_, blocks), sent_);
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
  EXPECT_EQ(Landed(), sent_);
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
    EXPECT_EQ(Landed(), sent_);
  } else {
    EXPECT_EQ(ReasonOf(report.error), "PROTOCOL_VIOLATION");
  }
}

TEST_F(EngineTest, ASilentPeerIsNoticedWithinTheProgressTimeout) {
  Build();
  Prepare();
  network_->SetFaultHook([](const FaultPoint& point) {
    Fault fault;
    if (point.from == "b") fault.kind = Fault::Kind::kDrop;
    return fault;
  });
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
  ASSERT_TRUE(a_->manager().StartSender(Send("t", Source(), Raw())).ok());
  const TransferReport report = a_->Watch("t", Role::kSender)->WaitTerminal(6);
  network_->SetFaultHook(nullptr);
  EXPECT_EQ(report.state, TransferState::kFailed);
  EXPECT_EQ(ReasonOf(report.error), "PEER_SILENT");
}

TEST_F(EngineTest, ManyTransfersBothWaysShareFourSlots) {
  EngineSettings settings;
  settings.slots = 4;
  Build(settings);
  Prepare();
  const std::string back_source = b_->AddPool(source_layout_);
  PoolLayout wide = target_layout_;
  wide.num_blocks = 600;
  const std::string there = b_->AddPool(wide);
  const std::string back = a_->AddPool(wide);
  FillBlocks(*b_, back_source, source_layout_, {7, 3, 4, 20, 1}, 2);
  constexpr int kTransfers = 50;
  for (int i = 0; i < kTransfers; ++i) {
    const std::string id = "t" + std::to_string(i);
    const uint64_t first = static_cast<uint64_t>(i) * 10;
    ASSERT_TRUE(a_->manager().StartSender(Send("there" + id, Source(), Raw())).ok());
    ASSERT_TRUE(b_->manager().StartSender(
        Send("back" + id, b_->Source(back_source, {{7, 1}, {3, 2}, {20, 1}, {1, 1}}, 80), Raw(), "a")).ok());
    ASSERT_TRUE(b_->manager().StartReceiver(Expect("there" + id, b_->Target(there, {{first, 10}}, 80))).ok());
    ASSERT_TRUE(a_->manager().StartReceiver(Expect("back" + id, a_->Target(back, {{first, 10}}, 80))).ok());
  }
  for (int i = 0; i < kTransfers; ++i) {
    const std::string id = "t" + std::to_string(i);
    const TransferReport there_report = b_->Watch("there" + id, Role::kReceiver)->WaitTerminal(60);
    EXPECT_EQ(there_report.state, TransferState::kCommitted) << there_report.error;
    EXPECT_EQ(a_->Watch("back" + id, Role::kReceiver)->WaitTerminal(60).state, TransferState::kCommitted);
    EXPECT_EQ(a_->Watch("there" + id, Role::kSender)->WaitTerminal(60).state, TransferState::kCommitted);
  }
}

TEST_F(EngineTest, AChangedSourceIsNoticed) {
  Build();
  source_layout_.generations = true;
  Prepare();
  // An odd generation: block 7 is being written. The table is not reachable through PutBlock, so write through a hold.
  std::unique_ptr<BlockHold> hold = Source();
  std::vector<uint64_t> generations;
  hold->ReadGenerations(0, 0, 80, &generations);
  EXPECT_FALSE(generations.empty());
  EXPECT_TRUE(hold->has_generations());
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
  ASSERT_TRUE(a_->manager().StartSender(Send("t", std::move(hold), Raw())).ok());
  const TransferReport report = a_->Watch("t", Role::kSender)->WaitTerminal();
  EXPECT_EQ(report.state, TransferState::kCommitted) << report.error;
  EXPECT_EQ(report.source_guard, "generations");
}

}  // namespace
}  // namespace spectrumkv
