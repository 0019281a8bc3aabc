// Transfers of several pools: all arrive or none, whatever happens to one of them.
#include <atomic>

#include "tests/unit/metrics/exposition.h"
#include "tests/unit/transfer/two_engines.h"

namespace spectrumkv {
namespace {

// Part i has pools and blocks of its own on both sides, of its own layout and number of tokens.
struct TestPart {
  PoolLayout layout;
  uint32_t tokens = 0;
  std::vector<uint64_t> from, to;
  std::string source, target;
  std::vector<std::string> sent, before;
};

std::vector<BlockRange> RunsOf(const std::vector<uint64_t>& blocks) {
  std::vector<BlockRange> runs;
  for (const uint64_t block : blocks) runs.push_back({block, 1});
  return runs;
}

class PartsTest : public EngineTest {
 protected:
  void BuildParts(uint32_t count, EngineSettings settings = {}) {
    Build(settings);
    for (uint32_t i = 0; i < count; ++i) AddPart();
  }
  Engine* ThirdEngine() {
    c_ = std::make_unique<Engine>("c", network_.get(), EngineSettings{}, 0xC1);
    return c_.get();
  }
  void TearDown() override {
    if (c_ != nullptr) c_->Stop();
    EngineTest::TearDown();
  }
  void AddPart() {
    const auto i = static_cast<uint32_t>(parts_.size());
    TestPart part;
    part.layout.layers = 2 + i % 2;
    part.layout.heads = 1 + i % 3;
    part.layout.head_dim = i % 2 == 0 ? 64 : 32;
    part.layout.block_tokens = i % 2 == 0 ? 16 : 8;
    part.tokens = 3 * part.layout.block_tokens;
    part.from = {7, 3, 10 + i % 4};
    part.to = {1, 9, 2};
    part.source = a_->AddPool(part.layout);
    part.target = b_->AddPool(part.layout);
    part.sent = FillBlocks(*a_, part.source, part.layout, part.from, 10 + i);
    part.before = FillBlocks(*b_, part.target, part.layout, part.to, 90 + i);
    parts_.push_back(std::move(part));
  }
  PartId Id(uint32_t index) const { return {index, static_cast<uint32_t>(parts_.size())}; }

  SenderSpec SendPart(uint32_t index, const std::string& peer = "b") {
    const TestPart& part = parts_[index];
    SenderSpec spec = Send("t", a_->Source(part.source, RunsOf(part.from), part.tokens), Raw(), peer);
    spec.pool_id = part.source;
    spec.part = Id(index);
    spec.fingerprint = "f" + std::to_string(index);
    return spec;
  }
  ReceiverSpec ExpectPart(uint32_t index, const std::string& peer = "") {
    const TestPart& part = parts_[index];
    ReceiverSpec spec = Expect("t", b_->Target(part.target, RunsOf(part.to), part.tokens), peer);
    spec.pool_id = part.target;
    spec.part = Id(index);
    spec.fingerprint = "f" + std::to_string(index);
    return spec;
  }
  void StartAll(bool pull = false) {
    for (uint32_t i = 0; i < parts_.size(); ++i) {
      ASSERT_TRUE(b_->manager().StartReceiver(ExpectPart(i, pull ? "a" : "")).ok());
      ASSERT_TRUE(a_->manager().StartSender(SendPart(i, pull ? "" : "b")).ok());
    }
  }
  struct Ends {
    TransferReport sent, received;
  };
  Ends WaitBoth() {
    return {a_->Watch("t", Role::kSender)->WaitTerminal(), b_->Watch("t", Role::kReceiver)->WaitTerminal()};
  }
  std::vector<std::string> Landed(uint32_t index) {
    return ReadBlocks(*b_, parts_[index].target, parts_[index].layout, parts_[index].to);
  }
  void ExpectAllLanded() {
    for (uint32_t i = 0; i < parts_.size(); ++i) EXPECT_TRUE(Landed(i) == parts_[i].sent) << "part " << i;
  }
  // Every half, and every part of it, ended so.
  static void ExpectEnd(const Ends& ends, TransferState state, const std::string& reason) {
    for (const TransferReport* report : {&ends.sent, &ends.received}) {
      EXPECT_EQ(report->state, state) << report->error;
      EXPECT_EQ(ReasonOf(report->error), reason) << report->error;
      for (const TransferReport& part : report->parts) {
        EXPECT_EQ(part.state, state) << part.part.index << ": " << part.error;
        EXPECT_EQ(ReasonOf(part.error), reason) << part.part.index << ": " << part.error;
      }
    }
  }
  void ExpectBlocksAreFree() {
    for (const TestPart& part : parts_) {
      EXPECT_NE(b_->Target(part.target, RunsOf(part.to), part.tokens), nullptr);
    }
  }
  // Of the receiver, as it stands.
  TransferReport PartNow(uint32_t index) {
    const auto report = b_->manager().Get(kMe, "t", Role::kReceiver);
    EXPECT_TRUE(report.ok()) << report.status();
    for (const TransferReport& part : report.ok() ? report->parts : std::vector<TransferReport>{}) {
      if (part.part.index == index) return part;
    }
    return {};
  }
  bool ComesTo(uint32_t index, TransferState state) {
    for (int i = 0; i < 1000; ++i) {
      if (PartNow(index).state == state) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return false;
  }
  // A decoder that finds its transfer ended brings its slot back a little later.
  bool SlotsComeBack() {
    for (int i = 0; i < 1000 && b_->receive_slots().used() > 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return b_->receive_slots().used() == 0;
  }
  void LosePool(Engine& engine, const std::string& pool) {
    const auto hold = engine.pools().OpenHold(kMe, pool, engine.epoch(), [](const std::string&) {});
    ASSERT_TRUE(hold.ok());
    engine.pools().CloseHold(pool, *hold);
  }
  static double Metric(Engine& engine, const std::string& name) {
    double sum = 0;
    for (const auto& [series, value] : ParseExposition(engine.metrics().Render())) {
      if (series.rfind(name, 0) == 0) sum += value;
    }
    return sum;
  }

  std::vector<TestPart> parts_;
  std::unique_ptr<Engine> c_;
};

class SeveralPoolsArriveTogetherTest : public PartsTest {
 protected:
  void Run(bool pull);
};

void SeveralPoolsArriveTogetherTest::Run(bool pull) {
  BuildParts(3);
  StartAll(pull);
  const auto watcher = b_->Watch("t", Role::kReceiver);
  const Ends ends = WaitBoth();
  ExpectEnd(ends, TransferState::kCommitted, "");
  ExpectAllLanded();
  EXPECT_TRUE(watcher->WaitLayers(3)) << "part 1 has the most layers";
  for (const TransferReport* whole : {&ends.sent, &ends.received}) {
    ASSERT_EQ(whole->parts.size(), 3u);
    uint64_t kv = 0, wire = 0, chunks = 0;
    for (uint32_t i = 0; i < 3; ++i) {
      const TransferReport& part = whole->parts[i];
      EXPECT_EQ(part.part.index, i);
      EXPECT_EQ(part.part.count, 3u);
      EXPECT_EQ(part.tokens, parts_[i].tokens);
      kv += part.kv_bytes, wire += part.wire_bytes, chunks += part.chunks;
    }
    EXPECT_EQ(whole->kv_bytes, kv);
    EXPECT_EQ(whole->wire_bytes, wire);
    EXPECT_EQ(whole->chunks, chunks);
    EXPECT_GT(kv, 0u);
  }
  EXPECT_EQ(Metric(*b_, "spectrumkv_transfers_total{"), 1) << "one transfer, not three";
  EXPECT_EQ(Metric(*b_, "spectrumkv_inflight_transfers"), 0);
  EXPECT_EQ(b_->manager().active(), 0u);
  ExpectBlocksAreFree();
}
TEST_F(SeveralPoolsArriveTogetherTest, Push) { Run(false); }
TEST_F(SeveralPoolsArriveTogetherTest, Pull) { Run(true); }

TEST_F(PartsTest, NothingIsCommittedWhileAPartIsMissing) {
  BuildParts(2);
  ASSERT_TRUE(b_->manager().StartReceiver(ExpectPart(0)).ok());
  ASSERT_TRUE(b_->manager().StartReceiver(ExpectPart(1)).ok());
  ASSERT_TRUE(a_->manager().StartSender(SendPart(0)).ok());
  ASSERT_TRUE(ComesTo(0, TransferState::kVerifying));
  // Longer than a silent peer is waited for.
  std::this_thread::sleep_for(std::chrono::milliseconds(2 * progress_timeout_ms_));
  EXPECT_EQ(PartNow(0).state, TransferState::kVerifying) << "it waits for the other";
  EXPECT_EQ(b_->manager().Get(kMe, "t", Role::kReceiver)->state, TransferState::kWaiting);
  EXPECT_TRUE(SlotsComeBack()) << "a part that waits leaves the room to others";
  ASSERT_TRUE(a_->manager().StartSender(SendPart(1)).ok());
  ExpectEnd(WaitBoth(), TransferState::kCommitted, "");
  ExpectAllLanded();
}

TEST_F(PartsTest, ALayerIsReadyWhenEveryPartHasIt) {
  BuildParts(2);
  ASSERT_TRUE(b_->manager().StartReceiver(ExpectPart(0)).ok());
  ASSERT_TRUE(b_->manager().StartReceiver(ExpectPart(1)).ok());
  const auto watcher = b_->Watch("t", Role::kReceiver);
  SenderSpec slow = SendPart(1);
  slow.layerwise = true;
  ASSERT_TRUE(a_->manager().StartSender(std::move(slow)).ok());
  ASSERT_TRUE(a_->manager().StartSender(SendPart(0)).ok());
  ASSERT_TRUE(ComesTo(0, TransferState::kVerifying));
  EXPECT_EQ(b_->manager().Get(kMe, "t", Role::kReceiver)->layers_ready, 0u);
  EXPECT_EQ(ReasonOf(a_->manager().Advance(kMe, "t", 1, parts_[1].tokens, {}, {}, 5)), "UNKNOWN_PART");
  ASSERT_TRUE(a_->manager().Advance(kMe, "t", 1, parts_[1].tokens, {}, {}, 1).ok());
  ASSERT_TRUE(watcher->WaitLayers(1));
  EXPECT_EQ(b_->manager().Get(kMe, "t", Role::kReceiver)->layers_ready, 1u);
  ASSERT_TRUE(a_->manager().Advance(kMe, "t", 3, parts_[1].tokens, {}, {}, 1).ok());
  ExpectEnd(WaitBoth(), TransferState::kCommitted, "");
  ExpectAllLanded();
}

TEST_F(PartsTest, APartThatNeverComesEndsAll) {
  BuildParts(2);
  ReceiverSpec brief = ExpectPart(1);
  brief.deadline_ms = 700;
  ASSERT_TRUE(b_->manager().StartReceiver(ExpectPart(0)).ok());
  ASSERT_TRUE(b_->manager().StartReceiver(std::move(brief)).ok());
  ASSERT_TRUE(a_->manager().StartSender(SendPart(0)).ok());
  ExpectEnd(WaitBoth(), TransferState::kExpired, "DEADLINE_EXCEEDED");
  ExpectBlocksAreFree();
  EXPECT_EQ(ReasonOf(a_->manager().StartSender(SendPart(1))), "TRANSFER_TERMINAL") << "it would come too late";
}

TEST_F(PartsTest, ADestinationThatNeverComesEndsAllAndTellsWhoWaitsForIt) {
  BuildParts(2);
  ReceiverSpec brief = ExpectPart(0);
  brief.deadline_ms = 700;
  ASSERT_TRUE(a_->manager().StartSender(SendPart(0)).ok());
  ASSERT_TRUE(a_->manager().StartSender(SendPart(1)).ok());
  ASSERT_TRUE(b_->manager().StartReceiver(std::move(brief)).ok());
  ExpectEnd(WaitBoth(), TransferState::kExpired, "DEADLINE_EXCEEDED");
  EXPECT_EQ(ReasonOf(b_->manager().StartReceiver(ExpectPart(1))), "TRANSFER_TERMINAL");
}

TEST_F(PartsTest, AParkedPartLearnsOfTheEnd) {
  BuildParts(2);
  Engine* const c = ThirdEngine();
  const TestPart& second = parts_[1];
  const std::string pool = c->AddPool(second.layout);
  SenderSpec elsewhere = SendPart(1);
  elsewhere.source = c->Source(pool, RunsOf(second.from), second.tokens);
  elsewhere.pool_id = pool;
  ASSERT_TRUE(c->manager().StartSender(std::move(elsewhere)).ok());
  ReceiverSpec brief = ExpectPart(0);
  brief.deadline_ms = 500;
  ASSERT_TRUE(b_->manager().StartReceiver(std::move(brief)).ok());
  EXPECT_EQ(c->Watch("t", Role::kSender)->WaitTerminal().state, TransferState::kExpired) << "long before its own deadline";
}

class SourcesInTwoDaemonsTest : public PartsTest {
 protected:
  void Run(bool second_fails);
};

void SourcesInTwoDaemonsTest::Run(bool second_fails) {
  BuildParts(2);
  Engine* const c = ThirdEngine();
  TestPart& second = parts_[1];
  const std::string pool = c->AddPool(second.layout);
  second.sent = FillBlocks(*c, pool, second.layout, second.from, 55);
  SenderSpec elsewhere = SendPart(1);
  elsewhere.source = c->Source(pool, RunsOf(second.from), second.tokens);
  elsewhere.pool_id = pool;
  elsewhere.layerwise = second_fails;
  ASSERT_TRUE(b_->manager().StartReceiver(ExpectPart(0)).ok());
  ASSERT_TRUE(b_->manager().StartReceiver(ExpectPart(1)).ok());
  ASSERT_TRUE(a_->manager().StartSender(SendPart(0)).ok());
  ASSERT_TRUE(c->manager().StartSender(std::move(elsewhere)).ok());
  if (second_fails) {
    ASSERT_TRUE(ComesTo(0, TransferState::kVerifying));
    LosePool(*c, pool);
  }
  const Ends ends = WaitBoth();
  const TransferReport other = c->Watch("t", Role::kSender)->WaitTerminal();
  ExpectEnd(ends, second_fails ? TransferState::kFailed : TransferState::kCommitted, second_fails ? "SOURCE_GONE" : "");
  EXPECT_EQ(other.state, ends.received.state) << other.error;
  if (!second_fails) ExpectAllLanded();
  ExpectBlocksAreFree();
}
TEST_F(SourcesInTwoDaemonsTest, Commit) { Run(false); }
TEST_F(SourcesInTwoDaemonsTest, OneFails) { Run(true); }

class APoolThatIsLostTakesAllWithItTest : public PartsTest {
 protected:
  void Run(bool source, const char* reason);
};

void APoolThatIsLostTakesAllWithItTest::Run(bool source, const char* reason) {
  BuildParts(3);
  for (uint32_t i = 0; i < 3; ++i) {
    ASSERT_TRUE(b_->manager().StartReceiver(ExpectPart(i)).ok());
    SenderSpec spec = SendPart(i);
    spec.layerwise = i == 1;  // which is never written
    ASSERT_TRUE(a_->manager().StartSender(std::move(spec)).ok());
  }
  ASSERT_TRUE(ComesTo(0, TransferState::kVerifying));
  ASSERT_TRUE(ComesTo(2, TransferState::kVerifying));
  // Of the destinations one that has everything already.
  LosePool(source ? *a_ : *b_, source ? parts_[1].source : parts_[2].target);
  const Ends ends = WaitBoth();
  ExpectEnd(ends, TransferState::kFailed, reason);
  EXPECT_EQ(Metric(*b_, "spectrumkv_transfers_total{"), 1);
  EXPECT_EQ(Metric(*b_, "spectrumkv_saved_bytes_total"), 0);
}
TEST_F(APoolThatIsLostTakesAllWithItTest, Source) { Run(true, "SOURCE_GONE"); }
TEST_F(APoolThatIsLostTakesAllWithItTest, Destination) { Run(false, "DESTINATION_GONE"); }

TEST_F(PartsTest, ACancelReturnsWhenNoPartCanLandAnyMore) {
  BuildParts(2);
  b_->backend().SetOpen(false);
  StartAll();
  ASSERT_TRUE(b_->backend().WaitForADecode());
  std::atomic<bool> cancelled{false};
  absl::StatusOr<TransferReport> answer = absl::UnknownError("");
  b_->manager().Cancel(kMe, "t", Role::kReceiver, [&](absl::StatusOr<TransferReport> report) {
    answer = std::move(report);
    cancelled = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_FALSE(cancelled.load()) << "a decode is still writing";
  b_->backend().SetOpen(true);
  ExpectEnd(WaitBoth(), TransferState::kCancelled, "CANCELLED");
  for (int i = 0; i < 200 && !cancelled.load(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  ASSERT_TRUE(cancelled.load() && answer.ok());
  EXPECT_EQ(answer->state, TransferState::kCancelled);
  ExpectBlocksAreFree();
}

TEST_F(PartsTest, TheSendersCancelReachesPartsThatAreComplete) {
  BuildParts(2);
  SenderSpec slow = SendPart(1);
  slow.layerwise = true;
  ASSERT_TRUE(b_->manager().StartReceiver(ExpectPart(0)).ok());
  ASSERT_TRUE(b_->manager().StartReceiver(ExpectPart(1)).ok());
  ASSERT_TRUE(a_->manager().StartSender(SendPart(0)).ok());
  ASSERT_TRUE(a_->manager().StartSender(std::move(slow)).ok());
  ASSERT_TRUE(ComesTo(0, TransferState::kVerifying));
  a_->manager().Cancel(kMe, "t", Role::kSender, [](absl::StatusOr<TransferReport>) {});
  ExpectEnd(WaitBoth(), TransferState::kCancelled, "CANCELLED");
}

TEST_F(PartsTest, MorePartsThanSlots) {
  EngineSettings settings;
  settings.slots = 4;
  BuildParts(9, settings);
  // The one that is admitted first is the last to be written.
  SenderSpec last = SendPart(0);
  last.layerwise = true;
  ASSERT_TRUE(b_->manager().StartReceiver(ExpectPart(0)).ok());
  ASSERT_TRUE(a_->manager().StartSender(std::move(last)).ok());
  for (uint32_t i = 1; i < 9; ++i) {
    ASSERT_TRUE(b_->manager().StartReceiver(ExpectPart(i)).ok());
    ASSERT_TRUE(a_->manager().StartSender(SendPart(i)).ok());
  }
  for (uint32_t i = 1; i < 9; ++i) ASSERT_TRUE(ComesTo(i, TransferState::kVerifying)) << i;
  ASSERT_TRUE(a_->manager().Advance(kMe, "t", 2, parts_[0].tokens, {}, {}, 0).ok());
  ExpectEnd(WaitBoth(), TransferState::kCommitted, "");
  ExpectAllLanded();
}

TEST_F(PartsTest, WhatDoesNotFitTheOthersIsRefused) {
  BuildParts(2);
  ASSERT_TRUE(a_->manager().StartSender(SendPart(0)).ok());
  EXPECT_TRUE(a_->manager().FindRepeat(kMe, "t", Role::kSender, {0, 2}, "f0")->ok());
  EXPECT_EQ(ReasonOf(*a_->manager().FindRepeat(kMe, "t", Role::kSender, {0, 2}, "other")), "TRANSFER_EXISTS");
  EXPECT_FALSE(a_->manager().FindRepeat(kMe, "t", Role::kSender, {1, 2}, "f1").has_value());
  EXPECT_EQ(ReasonOf(a_->manager().StartSender(SendPart(0))), "TRANSFER_EXISTS");
  SenderSpec other = SendPart(1);
  other.part.count = 3;
  EXPECT_EQ(ReasonOf(a_->manager().StartSender(std::move(other))), "INVALID_PART");
  other = SendPart(1);
  other.part = PartId{};
  EXPECT_EQ(ReasonOf(a_->manager().StartSender(std::move(other))), "TRANSFER_EXISTS");
  other = SendPart(1, "c");
  EXPECT_EQ(ReasonOf(a_->manager().StartSender(std::move(other))), "INVALID_PART");
  other = SendPart(1);
  other.transfer_token = "0123456789abcdef";
  EXPECT_EQ(ReasonOf(a_->manager().StartSender(std::move(other))), "INVALID_PART");
  a_->manager().StartDraining([] {});
  EXPECT_TRUE(a_->manager().StartSender(SendPart(1)).ok()) << "what has begun gets its other parts";
  ASSERT_TRUE(b_->manager().StartReceiver(ExpectPart(0)).ok());
  ASSERT_TRUE(b_->manager().StartReceiver(ExpectPart(1)).ok());
  ExpectEnd(WaitBoth(), TransferState::kCommitted, "");
}

class NumbersOfPartsThatDifferAreToldToBothTest : public PartsTest {
 protected:
  void Run(bool here_more);
};

void NumbersOfPartsThatDifferAreToldToBothTest::Run(bool here_more) {
  BuildParts(2);
  SenderSpec sender = SendPart(0);
  ReceiverSpec receiver = ExpectPart(0);
  sender.part.count = here_more ? 2 : 1;
  receiver.part.count = here_more ? 1 : 2;
  ASSERT_TRUE(b_->manager().StartReceiver(std::move(receiver)).ok());
  ASSERT_TRUE(a_->manager().StartSender(std::move(sender)).ok());
  const Ends ends = WaitBoth();
  ExpectEnd(ends, TransferState::kFailed, "SCHEMA_MISMATCH");
  for (const TransferReport* report : {&ends.sent, &ends.received}) {
    EXPECT_NE(std::string(report->error.message()).find("part_count"), std::string::npos) << report->error;
  }
}
TEST_F(NumbersOfPartsThatDifferAreToldToBothTest, MoreHere) { Run(true); }
TEST_F(NumbersOfPartsThatDifferAreToldToBothTest, MoreThere) { Run(false); }

TEST_F(PartsTest, APartThatCannotBeIsToldToBothWhoeverComesFirst) {
  BuildParts(2);
  SenderSpec sender = SendPart(1);
  ReceiverSpec receiver = ExpectPart(0);
  receiver.part.count = 1;
  ASSERT_TRUE(a_->manager().StartSender(std::move(sender)).ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  ASSERT_TRUE(b_->manager().StartReceiver(std::move(receiver)).ok());
  ExpectEnd(WaitBoth(), TransferState::kFailed, "SCHEMA_MISMATCH");
}

// The end of one part races with the begin of the next.
TEST_F(PartsTest, AnEndMeetsAPartThatBegins) {
  BuildParts(2);
  for (int round = 0; round < 1500; ++round) {
    ASSERT_TRUE(a_->manager().StartSender(SendPart(0, "")).ok());
    ASSERT_TRUE(b_->manager().StartReceiver(ExpectPart(0)).ok());
    SenderSpec sender = SendPart(1, "");
    ReceiverSpec receiver = ExpectPart(1);
    std::thread canceller([&] {
      const auto heard = [](const absl::StatusOr<TransferReport>&) {};
      a_->manager().Cancel(kMe, "t", Role::kSender, heard);
      b_->manager().Cancel(kMe, "t", Role::kReceiver, heard);
    });
    const absl::Status sends = a_->manager().StartSender(std::move(sender));
    const absl::Status receives = b_->manager().StartReceiver(std::move(receiver));
    canceller.join();
    for (const absl::Status& begun : {sends, receives}) {
      ASSERT_TRUE(begun.ok() || ReasonOf(begun) == "TRANSFER_TERMINAL") << begun;
    }
    ExpectEnd(WaitBoth(), TransferState::kCancelled, "CANCELLED");
    ASSERT_TRUE(a_->manager().Release(kMe, "t", Role::kSender).ok());
    ASSERT_TRUE(b_->manager().Release(kMe, "t", Role::kReceiver).ok());
  }
}

// Each control frame and chunk of two parts meets one fault: both sides end once, all parts alike, and a sender that says
// COMMITTED has a receiver that did.
TEST_F(PartsTest, AFaultAnywhereEndsAllPartsAlike) {
  progress_timeout_ms_ = 600;
  BuildParts(2);
  using Kind = Fault::Kind;
  int tried = 0;
  for (const Kind kind : {Kind::kBreak, Kind::kCorrupt, Kind::kDrop}) {
    for (const bool data : {false, true}) {
      for (const char* from : {"a", "b"}) {
        for (const uint64_t index : {0, 1, 2}) {
          if (data && from[0] == 'b') continue;
          SCOPED_TRACE(std::string(data ? "chunk " : "frame ") + from + std::to_string(index) + " fault " +
                       std::to_string(static_cast<int>(kind)));
          auto done = std::make_shared<std::atomic<bool>>(false);
          network_->SetFaultHook([=](const FaultPoint& point) {
            const bool here = point.data == data && point.from == from && point.index == index;
            return here && !done->exchange(true) ? Fault{kind, 0, 1, 40, 0x10} : Fault{};
          });
          for (uint32_t i = 0; i < 2; ++i) {
            SenderSpec sender = SendPart(i);
            ReceiverSpec receiver = ExpectPart(i);
            sender.deadline_ms = receiver.deadline_ms = 1500;
            for (const absl::Status& started : {b_->manager().StartReceiver(std::move(receiver)),
                                                a_->manager().StartSender(std::move(sender))}) {
              // The first part may have failed meanwhile.
              EXPECT_TRUE(started.ok() || ReasonOf(started) == "TRANSFER_TERMINAL") << started;
            }
          }
          const Ends ends = WaitBoth();
          tried += done->load() ? 1 : 0;
          for (const TransferReport& part : ends.received.parts) EXPECT_EQ(part.state, ends.received.state) << part.error;
          if (ends.received.state == TransferState::kCommitted) ExpectAllLanded();
          EXPECT_TRUE(ends.sent.state != TransferState::kCommitted || ends.received.state == TransferState::kCommitted);
          EXPECT_TRUE(SlotsComeBack());
          for (uint32_t i = 0; i < 2; ++i) FillBlocks(*b_, parts_[i].target, parts_[i].layout, parts_[i].to, 90 + i);
          ASSERT_TRUE(a_->manager().Release(kMe, "t", Role::kSender).ok());
          ASSERT_TRUE(b_->manager().Release(kMe, "t", Role::kReceiver).ok());
        }
      }
    }
  }
  EXPECT_GT(tried, 20);
}

}  // namespace
}  // namespace spectrumkv
