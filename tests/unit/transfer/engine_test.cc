// The engine end to end in one process: two daemons' managers, pools and codecs, joined by a memory transport.
#include "tests/unit/transfer/two_engines.h"

namespace spectrumkv {
namespace {

TEST_F(EngineTest, RawPushIsBitExactAcrossLayouts) {
  Build();
  Prepare();
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
  ASSERT_TRUE(a_->manager().StartSender(Send("t", Source(), Raw())).ok());
  const TransferReport sent = a_->Watch("t", Role::kSender)->WaitTerminal();
  const TransferReport received = b_->Watch("t", Role::kReceiver)->WaitTerminal();
  ASSERT_EQ(sent.state, TransferState::kCommitted) << sent.error;
  ASSERT_EQ(received.state, TransferState::kCommitted) << received.error;
  EXPECT_TRUE(Landed() == sent_);
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
  EXPECT_TRUE(Landed() == sent_);
}

TEST_F(EngineTest, PullInEitherOrder) {
  Build();
  Prepare();
  ASSERT_TRUE(a_->manager().StartSender(Send("t1", Source(), Raw(), "")).ok());
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t1", Target(), "a")).ok());
  EXPECT_EQ(b_->Watch("t1", Role::kReceiver)->WaitTerminal().state, TransferState::kCommitted);
  EXPECT_EQ(a_->Watch("t1", Role::kSender)->WaitTerminal().state, TransferState::kCommitted);
  EXPECT_TRUE(Landed() == sent_);

  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t2", Target(80, 21), "a")).ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  ASSERT_TRUE(a_->manager().StartSender(Send("t2", Source(), Raw(), "")).ok());
  EXPECT_EQ(b_->Watch("t2", Role::kReceiver)->WaitTerminal().state, TransferState::kCommitted);
  EXPECT_TRUE(Landed(21) == sent_);
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
    EXPECT_TRUE(landed[plane].substr(0, sink_bytes) == sent_[plane].substr(0, sink_bytes));
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
    EXPECT_TRUE(landed[plane].substr(0, 61 * token) == sent_[plane].substr(0, 61 * token));
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
    ASSERT_TRUE(a_->manager().Advance(kMe, "t", layer, 80, {}).ok());
    ASSERT_TRUE(watcher->WaitLayers(layer)) << layer;
  }
  const TransferReport report = watcher->WaitTerminal();
  ASSERT_EQ(report.state, TransferState::kCommitted) << report.error;
  EXPECT_LE(report.wire_bytes, 0.5 * report.kv_bytes);
}

TEST_F(EngineTest, OptimalGoesLayerByLayerAndAsAWhole) {
  Build();
  Prepare();
  Policy policy;
  policy.budget = 0.5;
  policy.allocator = Allocator::kOptimal;
  policy.importance = ImportanceSource::kNone;
  for (const bool layerwise : {true, false}) {
    const std::string id = layerwise ? "layerwise" : "whole";
    SenderSpec spec = Send(id, Source(), policy);
    spec.layerwise = layerwise;
    ASSERT_TRUE(b_->manager().StartReceiver(Expect(id, Target())).ok());
    ASSERT_TRUE(a_->manager().StartSender(std::move(spec)).ok());
    auto watcher = b_->Watch(id, Role::kReceiver);
    for (uint32_t layer = 1; layerwise && layer <= 3; ++layer) {
      ASSERT_TRUE(a_->manager().Advance(kMe, id, layer, 80, {}).ok());
      ASSERT_TRUE(watcher->WaitLayers(layer)) << layer;
    }
    const TransferReport report = watcher->WaitTerminal();
    ASSERT_EQ(report.state, TransferState::kCommitted) << report.error;
    // What was planned is what was sent: a chunk of another size than planned would have failed the transfer.
    EXPECT_LE(report.wire_bytes, 0.5 * report.kv_bytes);
    EXPECT_GT(report.wire_bytes, 0.45 * report.kv_bytes);
  }
}

TEST_F(EngineTest, ALayerwiseSourceMayPauseLongerThanTheProgressTimeout) {
  Build();
  Prepare();
  SenderSpec spec = Send("t", Source(), Raw());
  spec.layerwise = true;
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
  ASSERT_TRUE(a_->manager().StartSender(std::move(spec)).ok());
  ASSERT_TRUE(a_->manager().Advance(kMe, "t", 1, 80, {}).ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(3200));
  ASSERT_TRUE(a_->manager().Advance(kMe, "t", 3, 80, {}).ok());
  EXPECT_EQ(a_->Watch("t", Role::kSender)->WaitTerminal().state, TransferState::kCommitted);
  EXPECT_TRUE(Landed() == sent_);
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

TEST_F(EngineTest, AnIdIsUsedOnce) {
  Build();
  Prepare();
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
  EXPECT_TRUE(b_->manager().FindRepeat(kMe, "t", Role::kReceiver, PartId{}, "f-t").has_value());
  EXPECT_EQ(b_->manager().FindRepeat(kMe, "t", Role::kReceiver, PartId{}, "other").value_or(absl::OkStatus()).code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_FALSE(b_->manager().FindRepeat(kMe, "u", Role::kReceiver, PartId{}, "f-t").has_value());
  EXPECT_EQ(ReasonOf(b_->manager().StartReceiver(Expect("t", Target(80, 21)))), "TRANSFER_EXISTS");
  ASSERT_TRUE(a_->manager().StartSender(Send("t", Source(), Raw())).ok());
  a_->Watch("t", Role::kSender)->WaitTerminal();
  EXPECT_EQ(ReasonOf(a_->manager().StartSender(Send("t", Source(), Raw()))), "TRANSFER_EXISTS");
  EXPECT_TRUE(a_->manager().Release(kMe, "t", std::nullopt).ok());
  EXPECT_EQ(ReasonOf(a_->manager().Get(kMe, "t", std::nullopt).status()), "UNKNOWN_TRANSFER");
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

// The encoder meets values that no coded tier can carry, after some chunks have left: the rest is planned anew, inside
// the same budget, and those values arrive as they are.
TEST_F(EngineTest, EscapesMetWhileEncodingArePlannedAgainWithinTheBudget) {
  Build();
  Prepare();
  for (const auto& [layer, plane] : {std::pair{0u, PlaneId::kV}, {2u, PlaneId::kK}, {2u, PlaneId::kV}}) {
    absl::StatusOr<std::string> data = a_->pools().GetBlock(kMe, source_pool_, kEpochA, 0, layer, plane, 4);
    ASSERT_TRUE(data.ok());
    for (size_t i = 0; i < 6; ++i) {
      const uint16_t word = i % 2 == 0 ? 0x7C00 : 0xFE01;  // infinity, a NaN with a payload
      std::memcpy(&(*data)[(i * 3 * 128 + 5) * 2], &word, 2);
    }
    ASSERT_TRUE(a_->pools().PutBlock(kMe, source_pool_, kEpochA, 0, layer, plane, 4, *data).ok());
  }
  sent_ = ReadBlocks(*a_, source_pool_, source_layout_, {7, 3, 4, 20, 1});
  Policy policy;
  policy.budget = 0.45;
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
  ASSERT_TRUE(a_->manager().StartSender(Send("t", Source(), policy)).ok());
  const TransferReport report = a_->Watch("t", Role::kSender)->WaitTerminal();
  ASSERT_EQ(report.state, TransferState::kCommitted) << report.error;
  EXPECT_LE(static_cast<double>(report.wire_bytes), 0.45 * static_cast<double>(report.kv_bytes));
  uint64_t tokens = 0;
  for (const uint64_t n : report.tiers.k) tokens += n;
  EXPECT_EQ(tokens, 3u * 80) << "each (layer, token) is counted once";
  const std::vector<std::string> landed = Landed();
  for (size_t plane : {1, 4, 5}) {
    for (size_t i = 0; i < 6; ++i) {
      const size_t at = ((32 + i * 3) * 128 + 5) * 2;  // block 4 is the third of the request
      EXPECT_EQ(landed[plane].substr(at, 2), sent_[plane].substr(at, 2)) << plane << " " << i;
    }
  }
}

// Also who begins to watch in the moment of the end.
TEST_F(EngineTest, WhoeverWatchesHearsOfLayersBeforeTheEnd) {
  Build();
  Prepare();
  size_t watched = 0;
  for (int i = 0; i < 60; ++i) {
    const std::string id = "t" + std::to_string(i);
    ASSERT_TRUE(b_->manager().StartReceiver(Expect(id, Target())).ok());
    ASSERT_TRUE(a_->manager().StartSender(Send(id, Source(), Raw())).ok());
    std::vector<std::shared_ptr<RecordingWatcher>> watchers;
    do {
      watchers.push_back(b_->Watch(id, Role::kReceiver));
    } while (!watchers.back()->ended() && watchers.size() < 5000);
    for (const auto& watcher : watchers) {
      ASSERT_EQ(watcher->WaitTerminal().state, TransferState::kCommitted);
      ASSERT_TRUE(watcher->WaitLayers(3, /*seconds=*/0)) << "of " << watchers.size() << " watchers";
    }
    watched += watchers.size();
  }
  EXPECT_GT(watched, 300u);
}

}  // namespace
}  // namespace spectrumkv
