// Retention, releases and moves to the cache at the worst moment: no block is read or written after the answer, nobody is told
// twice, and the background goes on.
#include <variant>

#include "tests/unit/transfer/refine_cache_fixture.h"

namespace spectrumkv {
namespace {

class RefineRacesTest : public RefineCacheTest {};

TEST_F(RefineRacesTest, AReleaseWaitsForTheCopy) {
  BuildWithCache(1 << 20);
  Prepare();
  const auto hooks = CommitHooked();
  hooks->HoldUp(true);
  const auto moved = StartMove();
  ASSERT_TRUE(hooks->WaitForAReader());
  std::atomic<bool> released{false}, was_free{false};
  a_->manager().EndRefinements(kMe, "t", Role::kSender, [&] {
    was_free = SourceIsFree();
    released = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_FALSE(released || *moved != Moved::kNotYet) << "a reader is inside the blocks";
  hooks->HoldUp(false);
  ASSERT_TRUE(Eventually([&] { return released.load(); }));
  EXPECT_EQ(*moved, Moved::kReleased);
  EXPECT_TRUE(was_free);
  const int reads = hooks->reads();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(hooks->reads(), reads);
  EXPECT_EQ(a_->manager().refine_memory().cache_bytes, 0u);
}

TEST_F(RefineRacesTest, TheBlocksAreFreeWhenTheAnswerComes) {
  for (const uint64_t room : {uint64_t{1} << 20, uint64_t{0}}) {
    BuildWithCache(room);
    Prepare();
    CommitHooked();
    std::atomic<int> told{0};
    std::atomic<bool> was_free{false};
    a_->manager().MoveToCache(kMe, "t", Role::kSender, [&](absl::StatusOr<bool> cached) {
      EXPECT_EQ(*cached, room != 0);
      was_free = SourceIsFree();
      ++told;
    });
    ASSERT_TRUE(Eventually([&] { return told == 1; }));
    EXPECT_TRUE(was_free) << room;
    if (room == 0) break;
    StartOver();
  }
}

// A hello has looked the source up, and it moves before the refinement has begun.
TEST_F(RefineRacesTest, ARefinementThatIsAboutToBeginReadsNothingAfterTheMove) {
  BuildWithCache(1 << 20);
  Prepare();
  const auto hooks = CommitHooked();
  const auto moved = std::make_shared<std::atomic<Moved>>(Moved::kNotYet);
  std::atomic<int> reads{-1};
  hooks->OnNextSchema([&] {
    StartMove("t", moved);
    Eventually([&] { return *moved != Moved::kNotYet || hooks->reads() > 0; });
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  });
  ASSERT_TRUE(b_->manager().Refine(Ask()).ok());
  ASSERT_TRUE(Eventually([&] { return *moved != Moved::kNotYet; }));
  EXPECT_EQ(*moved, Moved::kCached);
  reads = hooks->reads();
  ASSERT_EQ(Await().state, TransferState::kCommitted) << "it has asked again, by itself";
  EXPECT_EQ(hooks->reads(), reads);
  ASSERT_TRUE(Apply().ok());
  EXPECT_TRUE(Landed() == sent_);
}

TEST_F(RefineRacesTest, StaleCellsAreCountedOnce) {
  Build();
  Prepare();
  Commit();
  const auto started = b_->manager().Refine(Ask());
  ASSERT_TRUE(started.ok());
  ASSERT_EQ(Await().state, TransferState::kCommitted);
  FillBlocks(*b_, target_pool_, target_layout_, {12}, 5);  // others': 8 tokens of 6 planes
  const auto applied = Apply();
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_EQ(applied->stale_cells, 48u);
  EXPECT_EQ(applied->applied_bytes / kRow + applied->stale_cells, started->cells);
}

TEST_F(RefineRacesTest, TheBackgroundGoesOnWhenTheLinkWasDownMeanwhile) {
  BuildWithCache(1 << 20);
  Prepare();
  Occupy();
  Commit(/*pull=*/true, 60000, Coarse(), Tier::kRaw, /*direct=*/true);
  ASSERT_TRUE(BackgroundHasBegun());
  const auto down = std::make_shared<std::atomic<bool>>(true);
  network_->SetFaultHook([down](const FaultPoint& point) {
    const bool last_word = point.frame != nullptr && std::holds_alternative<CancelFrame>(*point.frame);
    return *down && !point.data && (point.from == "b" || last_word) ? Fault{Fault::Kind::kBreak} : Fault{};
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(700));  // a heartbeat is broken
  ASSERT_TRUE(*Move());
  *down = false;
  network_->SetFaultHook(nullptr);
  Free();
  EXPECT_TRUE(Eventually([&] { return Get(*b_, "t", Role::kReceiver).exact; }));
}

TEST_F(RefineRacesTest, TheBackgroundGoesOnAfterAMoveThatTakesLong) {
  BuildWithCache(1 << 20);
  Prepare();
  Occupy();
  const auto hooks = CommitHooked("t", 10, Tier::kRaw);
  ASSERT_TRUE(BackgroundHasBegun());
  hooks->HoldUp(true);
  const auto moved = StartMove();
  std::this_thread::sleep_for(std::chrono::milliseconds(progress_timeout_ms_ + 1000));
  hooks->HoldUp(false);
  Free();
  ASSERT_TRUE(Eventually([&] { return *moved == Moved::kCached; }));
  EXPECT_TRUE(Eventually([&] { return Get(*b_, "t", Role::kReceiver).exact; }));
}

TEST_F(RefineRacesTest, TheBackgroundGoesOnWhereItsSenderWaitsForTheReceipt) {
  BuildWithCache(1 << 20);
  Prepare();
  Occupy();
  Commit(/*pull=*/true, 60000, Coarse(), Tier::kRaw, /*direct=*/true);
  const auto chunks = std::make_shared<std::atomic<int>>(0);
  network_->SetFaultHook([this, chunks](const FaultPoint& point) {
    if (point.data && ++*chunks == 6) b_->backend().SetOpen(false);  // the last: all others have been let through
    return Fault{};
  });
  Free();
  ASSERT_TRUE(Eventually([&] {
    const auto first = a_->manager().Get(kMe, "t.refine-1", Role::kSender);
    return first.ok() && first->state == TransferState::kVerifying;
  }));
  const auto ear = ListenFor(*b_, Role::kReceiver);
  ASSERT_TRUE(*Move());
  network_->SetFaultHook(nullptr);
  b_->backend().SetOpen(true);
  // What is decoded meanwhile lands all the same; then there is nothing to ask for, and nobody compares checksums.
  ASSERT_TRUE(Eventually([&] { return ear->heard(); }));
  EXPECT_TRUE(Landed() == sent_);
}

TEST_F(RefineRacesTest, NothingIsEvictedWhereThatWouldNotBeEnough) {
  target_layout_.num_blocks = source_layout_.num_blocks = 64;
  BuildWithCache(2 * kSourceBytes + kSourceBytes / 2);
  Prepare();
  CommitHooked("one", 10);
  CommitHooked("two", 20);
  ASSERT_TRUE(*Move("one"));
  ASSERT_TRUE(*Move("two"));
  Occupy();
  RefineSpec ask = Ask("r1");  // "one" is being read, and must stay
  ask.transfer_id = "one";
  ASSERT_TRUE(b_->manager().Refine(ask).ok());
  ASSERT_TRUE(Eventually([&] {
    const auto reads = a_->manager().Get(kMe, "r1", Role::kSender);
    return reads.ok() && reads->state >= TransferState::kPlanned;
  }));
  FillBlocks(*a_, source_pool_, source_layout_, {22, 23, 24, 25, 26, 27, 28, 29, 30, 31}, 4);
  SenderSpec sender = Send("big", a_->Source(source_pool_, {{22, 10}}, 160), Coarse());
  sender.retain_ms = 60000;
  ReceiverSpec receiver = Expect("big", b_->Target(target_pool_, {{40, 20}}, 160));
  receiver.refinable = true;
  ASSERT_TRUE(a_->manager().StartSender(std::move(sender)).ok());
  ASSERT_TRUE(b_->manager().StartReceiver(std::move(receiver)).ok());
  ASSERT_EQ(a_->Watch("big", Role::kSender)->WaitTerminal().state, TransferState::kCommitted);
  EXPECT_FALSE(*Move("big"));
  EXPECT_GT(Get(*a_, "two", Role::kSender).retained_seconds, 0);
  Free();
}

TEST_F(RefineRacesTest, ABaseThatCameRawIsNotRetained) {
  Build();
  Prepare();
  SenderSpec sender = Send("t", Source(), Raw(), "");
  sender.retain_ms = 60000;
  sender.background_tier = Tier::kRaw;
  ReceiverSpec receiver = Expect("t", Target(), "a");
  receiver.refinable = true;
  ASSERT_TRUE(a_->manager().StartSender(std::move(sender)).ok());
  ASSERT_TRUE(b_->manager().StartReceiver(std::move(receiver)).ok());
  ASSERT_EQ(a_->Watch("t", Role::kSender)->WaitTerminal().state, TransferState::kCommitted);
  ASSERT_EQ(b_->Watch("t", Role::kReceiver)->WaitTerminal().state, TransferState::kCommitted);
  EXPECT_TRUE(ListenFor(*b_, Role::kReceiver)->heard()) << "at once: there is nothing to wait for";
  EXPECT_TRUE(SourceIsFree());
}

TEST_F(RefineRacesTest, WhoWaitsAtTheReceiverHearsThatTheSourceWasReleased) {
  Build();
  Prepare();
  Occupy();
  Commit(/*pull=*/true, 60000, Coarse(), Tier::kRaw, /*direct=*/true);
  ASSERT_TRUE(BackgroundHasBegun());
  const auto ear = ListenFor(*b_, Role::kReceiver);
  a_->manager().EndRefinements(kMe, "t", Role::kSender, [] {});
  EXPECT_EQ(ReasonOf(Await("t.refine-1").error), "RELEASED");
  ASSERT_TRUE(Eventually([&] { return ear->heard(); }));
  EXPECT_FALSE(ear->told->exact);
  Free();
}

// Between the two halves of a ReleaseTransfer the transfer commits.
TEST_F(RefineRacesTest, WhatIsRetainedIsNotForgotten) {
  Build();
  Prepare();
  Commit();
  EXPECT_EQ(ReasonOf(b_->manager().Release(kMe, "t", Role::kReceiver)), "STILL_RETAINED");
  EXPECT_EQ(ReasonOf(a_->manager().Release(kMe, "t", Role::kSender)), "STILL_RETAINED");
  RefineToTheSource();
}

TEST_F(RefineRacesTest, RefinementsMayBeReleasedTheMomentTheyAreOver) {
  Build();
  Prepare();
  Commit();
  for (int i = 0; i < 300; ++i) {
    const std::string id = "r" + std::to_string(i);
    RefineSpec ask = Ask(id);
    ask.selection.layers = {0};
    ASSERT_TRUE(b_->manager().Refine(ask).ok());
    std::atomic<bool> over{false};
    std::thread sender([&] {
      while (!over) static_cast<void>(a_->manager().Release(kMe, id, Role::kSender));
    });
    for (;;) {
      const absl::Status released = b_->manager().Release(kMe, id, Role::kReceiver);
      if (released.ok() || ReasonOf(released) == "UNKNOWN_TRANSFER") break;
    }
    over = true;
    sender.join();
  }
}

}  // namespace
}  // namespace spectrumkv
