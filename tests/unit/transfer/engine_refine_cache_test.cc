// Retained sources in the daemon's cache, the order in which tokens are made better, and who is told that all is exact.
#include <numeric>

#include "tests/unit/transfer/refine_cache_fixture.h"

namespace spectrumkv {
namespace {

TEST_F(RefineCacheTest, TheBlocksAreTheWorkersAndTheWordsStay) {
  for (const bool generations : {false, true}) {
    source_layout_.generations = generations;
    BuildWithCache(kSourceBytes);
    Prepare();
    Commit();
    EXPECT_FALSE(SourceIsFree());
    const auto cached = Move();
    ASSERT_TRUE(cached.ok()) << cached.status();
    EXPECT_TRUE(*cached);
    EXPECT_TRUE(SourceIsFree());
    EXPECT_EQ(a_->manager().refine_memory().cache_bytes, kSourceBytes);
    EXPECT_TRUE(*Move()) << "it is there already";
    FillBlocks(*a_, source_pool_, source_layout_, {7, 3, 4, 20, 1}, 99);  // others' words
    RefineToTheSource();
    EXPECT_TRUE(Eventually([&] { return a_->manager().refine_memory().cache_bytes == 0; })) << "all is exact";
    if (generations) break;
    StartOver();
  }
}

TEST_F(RefineCacheTest, ItOutlivesThePool) {
  BuildWithCache(kSourceBytes);
  Prepare();
  Commit();
  ASSERT_TRUE(*Move());
  std::atomic<bool> gone{false};
  a_->manager().EndRefinementsOf(source_pool_);
  a_->pools().Unregister(kMe, source_pool_, a_->epoch(), 5000, [&](const absl::Status& status) { gone = status.ok(); });
  ASSERT_TRUE(Eventually([&] { return gone.load(); }));
  RefineToTheSource();
}

TEST_F(RefineCacheTest, WithoutRoomNothingIsKeptAndTheBlocksAreFree) {
  for (const uint64_t room : {uint64_t{0}, kSourceBytes - 1}) {
    BuildWithCache(room);
    Prepare();
    Commit();
    const auto cached = Move();
    ASSERT_TRUE(cached.ok()) << cached.status();
    EXPECT_FALSE(*cached);
    EXPECT_TRUE(SourceIsFree());
    EXPECT_EQ(a_->manager().refine_memory().cache_bytes, 0u);
    ASSERT_TRUE(b_->manager().Refine(Ask()).ok());
    EXPECT_EQ(ReasonOf(Await().error), "NOT_RETAINED");
    EXPECT_TRUE(Landed() == base_);
    if (room != 0) break;
    StartOver();
  }
}

TEST_F(RefineCacheTest, WhatWasLongestNotReadGoesFirst) {
  target_layout_.num_blocks = 64;
  BuildWithCache(2 * kSourceBytes);
  Prepare();
  const auto commit = [&](const std::string& id, uint64_t first_block) {
    SenderSpec sender = Send(id, Source(), Coarse());
    sender.retain_ms = 60000;
    ReceiverSpec receiver = Expect(id, Target(80, first_block));
    receiver.refinable = true;
    ASSERT_TRUE(a_->manager().StartSender(std::move(sender)).ok());
    ASSERT_TRUE(b_->manager().StartReceiver(std::move(receiver)).ok());
    ASSERT_EQ(b_->Watch(id, Role::kReceiver)->WaitTerminal().state, TransferState::kCommitted);
    ASSERT_EQ(a_->Watch(id, Role::kSender)->WaitTerminal().state, TransferState::kCommitted);
    ASSERT_TRUE(*Move(id)) << id;
  };
  commit("one", 10);
  commit("two", 20);
  RefineSpec little = Ask("little");
  little.transfer_id = "one";
  little.selection.layers = {0};
  ASSERT_TRUE(b_->manager().Refine(little).ok());
  ASSERT_EQ(Await("little").state, TransferState::kCommitted);
  commit("three", 30);
  EXPECT_GT(Get(*a_, "one", Role::kSender).retained_seconds, 0) << "it was read since";
  EXPECT_EQ(Get(*a_, "two", Role::kSender).retained_seconds, 0) << "it went for three";
  EXPECT_GT(Get(*a_, "three", Role::kSender).retained_seconds, 0);
  EXPECT_EQ(a_->manager().refine_memory().cache_bytes, 2 * kSourceBytes);
}

TEST_F(RefineCacheTest, ARefinementThatReadsTheBlocksEndsAndMayBeAskedForAgain) {
  BuildWithCache(kSourceBytes);
  Prepare();
  Commit();
  Occupy();
  ASSERT_TRUE(b_->manager().Refine(Ask()).ok());
  ASSERT_TRUE(Eventually([&] { return Get(*b_, "r", Role::kReceiver).state >= TransferState::kPlanned; }));
  ASSERT_TRUE(*Move());
  const TransferReport refined = Await();
  EXPECT_EQ(refined.state, TransferState::kFailed);
  EXPECT_EQ(ReasonOf(refined.error), "SOURCE_MOVED");
  EXPECT_TRUE(Landed() == base_);
  Free();
  RefineToTheSource("again");
}

TEST_F(RefineCacheTest, InTheBackgroundItGoesOnFromTheCache) {
  BuildWithCache(kSourceBytes);
  Prepare();
  Occupy();
  Commit(/*pull=*/true, 60000, Coarse(), Tier::kRaw, /*direct=*/true);
  ASSERT_TRUE(Eventually([&] {
    const auto first = b_->manager().Get(kMe, "t.refine-1", Role::kReceiver);
    return first.ok() && first->state >= TransferState::kPlanned;
  }));
  const auto ear = ListenFor(*b_, Role::kReceiver);
  ASSERT_TRUE(*Move());
  EXPECT_EQ(ReasonOf(Await("t.refine-1").error), "SOURCE_MOVED");
  Free();
  ASSERT_TRUE(Eventually([&] { return ear->heard(); }));
  EXPECT_TRUE(ear->told->exact);
  EXPECT_TRUE(Landed() == sent_);
}

TEST_F(RefineCacheTest, OnlyARetainedSourceOfTheCallersMoves) {
  BuildWithCache(kSourceBytes);
  Prepare();
  EXPECT_EQ(ReasonOf(Move().status()), "UNKNOWN_TRANSFER");
  Commit();
  std::optional<absl::StatusOr<bool>> receivers, strangers;
  b_->manager().MoveToCache(kMe, "t", Role::kReceiver, [&](auto answer) { receivers = std::move(answer); });
  EXPECT_EQ(ReasonOf(receivers->status()), "NOT_A_SOURCE");
  a_->manager().MoveToCache(Caller::Uid(77), "t", Role::kSender, [&](auto answer) { strangers = std::move(answer); });
  EXPECT_EQ(ReasonOf(strangers->status()), "NOT_OWNER");
  EXPECT_FALSE(SourceIsFree());
}

TEST_F(RefineCacheTest, ASourceThatIsBeingWrittenIsNotKept) {
  source_layout_.generations = true;
  BuildWithCache(kSourceBytes);
  Prepare();
  Commit();
  const PoolSchema schema = *a_->pools().SchemaOf(kMe, source_pool_, a_->epoch());
  std::vector<uint8_t*> row(1);
  a_->Source(source_pool_, {{0, 1}}, 1)->FillRows(0, 0, PlaneId::kK, 0, 1, row.data());  // where the segment begins
  auto* const generations = reinterpret_cast<uint64_t*>(row[0] + schema.generations->offset_bytes);
  ++generations[20];
  EXPECT_FALSE(*Move());
  EXPECT_TRUE(SourceIsFree());
  ++generations[20];
}

TEST_F(RefineCacheTest, WhoWaitsForExactIsToldOnce) {
  Build();
  Prepare();
  Commit();
  const auto receiver = ListenFor(*b_, Role::kReceiver);
  const auto sender = ListenFor(*a_, Role::kSender);
  const auto gone = ListenFor(*b_, Role::kReceiver, 901);
  b_->manager().Unwatch("t", Role::kReceiver, 901);
  ASSERT_TRUE(b_->manager().Refine(Ask("eight", Tier::kQ8)).ok());
  ASSERT_EQ(Await("eight").state, TransferState::kCommitted);
  ASSERT_TRUE(Apply("eight").ok());
  EXPECT_FALSE(receiver->heard() || sender->heard());
  RefineToTheSource();
  ASSERT_TRUE(Eventually([&] { return receiver->heard() && sender->heard(); }));
  EXPECT_TRUE(receiver->told->exact);
  EXPECT_FALSE(sender->told->exact) << "it knows only that nothing is left to be asked for";
  EXPECT_TRUE(SourceIsFree());
  EXPECT_FALSE(gone->heard());
  EXPECT_TRUE(ListenFor(*b_, Role::kReceiver, 902)->heard()) << "at once: it is exact";
  EXPECT_TRUE(ListenFor(*a_, Role::kSender, 902)->heard()) << "at once: nothing is retained";
}

TEST_F(RefineCacheTest, WhoWaitsForExactHearsThatNothingIsRetained) {
  Build();
  Prepare();
  Commit(false, 1000);
  const auto receiver = ListenFor(*b_, Role::kReceiver);
  const auto sender = ListenFor(*a_, Role::kSender);
  ASSERT_TRUE(Eventually([&] { return receiver->heard() && sender->heard(); }));
  EXPECT_FALSE(receiver->told->exact);
  EXPECT_EQ(receiver->told->state, TransferState::kCommitted);
}

// Of five chunks of each strip the second and the last matter most. After these the network loses everything.
TEST_F(RefineCacheTest, WhatMattersMostComesFirst) {
  constexpr uint32_t kChunk = 512, kTokens = 5 * kChunk;
  source_layout_.num_blocks = 256;
  target_layout_.num_blocks = 512;
  Build();
  Prepare();
  std::vector<uint64_t> from(kTokens / 16), to(kTokens / 8);
  std::iota(from.begin(), from.end(), 40);
  std::iota(to.begin(), to.end(), 40);
  const std::vector<std::string> sent = FillBlocks(*a_, source_pool_, source_layout_, from, 5);
  Policy policy;
  policy.allocator = Allocator::kUniform;
  policy.uniform_tier = Tier::kQ4;
  policy.sinks = 0;
  policy.importance = ImportanceSource::kScores;
  policy.scores.assign(kTokens, 0.01f);
  std::fill_n(policy.scores.begin() + 4 * kChunk, kChunk, 0.5f);
  std::fill_n(policy.scores.begin() + kChunk, kChunk, 1.0f);
  SenderSpec sender = Send("t", a_->Source(source_pool_, {{40, from.size()}}, kTokens), policy);
  sender.retain_ms = 60000;
  ReceiverSpec receiver = Expect("t", b_->Target(target_pool_, {{40, to.size()}}, kTokens));
  receiver.refinable = true;
  ASSERT_TRUE(a_->manager().StartSender(std::move(sender)).ok());
  ASSERT_TRUE(b_->manager().StartReceiver(std::move(receiver)).ok());
  ASSERT_EQ(b_->Watch("t", Role::kReceiver)->WaitTerminal().state, TransferState::kCommitted);
  ASSERT_EQ(a_->Watch("t", Role::kSender)->WaitTerminal().state, TransferState::kCommitted);
  const std::vector<std::string> base = ReadBlocks(*b_, target_pool_, target_layout_, to);

  const auto chunks = std::make_shared<std::atomic<int>>(0);
  network_->SetFaultHook([chunks](const FaultPoint& point) {
    return point.data && ++*chunks > 2 * 6 ? Fault{Fault::Kind::kDrop} : Fault{};
  });
  RefineSpec ask = Ask();
  ask.direct = true;
  ask.deadline_ms = 1000;
  ASSERT_TRUE(b_->manager().Refine(ask).ok());
  EXPECT_NE(Await().state, TransferState::kCommitted);
  network_->SetFaultHook(nullptr);
  const std::vector<std::string> landed = ReadBlocks(*b_, target_pool_, target_layout_, to);
  for (size_t plane = 0; plane < landed.size(); ++plane) {
    for (size_t chunk = 0; chunk < 5; ++chunk) {
      const std::string& want = chunk == 1 || chunk == 4 ? sent[plane] : base[plane];
      const size_t at = chunk * kChunk * kRow, bytes = kChunk * kRow;
      EXPECT_TRUE(landed[plane].compare(at, bytes, want, at, bytes) == 0) << plane << " " << chunk;
    }
  }
}

}  // namespace
}  // namespace spectrumkv
