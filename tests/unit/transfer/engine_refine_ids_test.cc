// Ids that come again: of refinements, of their bases, of others, at the worst moment. Retention ends, and nothing is read or
// written after the answer.
#include "tests/unit/transfer/refine_cache_fixture.h"

namespace spectrumkv {
namespace {

class RefineIdsTest : public RefineCacheTest {
 protected:
  void ReleaseBoth(const std::string& id) {
    ASSERT_TRUE(a_->manager().Release(kMe, id, Role::kSender).ok());
    ASSERT_TRUE(b_->manager().Release(kMe, id, Role::kReceiver).ok());
  }
  void End(const std::string& id = "t") {
    std::atomic<int> ended{0};
    a_->manager().EndRefinements(kMe, id, Role::kSender, [&] { ++ended; });
    b_->manager().EndRefinements(kMe, id, Role::kReceiver, [&] { ++ended; });
    ASSERT_TRUE(Eventually([&] { return ended == 2; })) << "a retention that does not end";
  }
};

// A peer's stream that goes nowhere.
class DeadEnd final : public ControlStream {
 public:
  void Send(ControlFrame) override {}
  void Close(absl::Status status) override { closed_ = std::move(status); }
  std::string peer() const override { return "ipv4:10.0.0.9:1"; }
  const absl::Status& closed() const { return closed_; }

 private:
  absl::Status closed_;
};

TEST_F(RefineIdsTest, AnotherTransferTakesTheIdOfARefinementThatIsAboutToBegin) {
  Build();
  Prepare();
  const auto hooks = CommitHooked();
  hooks->OnNextSchema([&] {
    SenderSpec other = Send("r", a_->Source(source_pool_, {{7, 1}}, 16), Raw(), "");
    ASSERT_TRUE(a_->manager().StartSender(std::move(other)).ok());
  });
  ASSERT_TRUE(b_->manager().Refine(Ask("r")).ok());
  EXPECT_EQ(ReasonOf(Await("r").error), "TRANSFER_EXISTS");
  a_->manager().Cancel(kMe, "r", Role::kSender, [](const auto&) {});
  a_->Watch("r", Role::kSender)->WaitTerminal();
  End();
  EXPECT_TRUE(SourceIsFree());
}

// Two hellos of one id, of which the later cannot begin: the first is still one that is about to read.
TEST_F(RefineIdsTest, AHelloThatFailsTakesNothingFromAnotherOfItsId) {
  BuildWithCache(1 << 20);
  Prepare();
  const auto hooks = CommitHooked();
  const auto moved = std::make_shared<std::atomic<Moved>>(Moved::kNotYet);
  const auto dead = std::make_shared<DeadEnd>();
  hooks->OnNextSchema([&] {
    HelloFrame hello;
    hello.epoch = kEpochB;
    hello.role = Role::kReceiver;
    hello.transfer_id = "r";
    hello.attempt = 1;
    hello.deadline_ms = 1000;
    hello.refine = RefineFrame{"t", 77, {}, {}, false};
    a_->manager().OnControl(dead)->OnFrame(hello);
    StartMove("t", moved);
    Eventually([&] { return *moved != Moved::kNotYet || hooks->reads() > 0; });
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  });
  ASSERT_TRUE(b_->manager().Refine(Ask()).ok());
  ASSERT_TRUE(Eventually([&] { return *moved != Moved::kNotYet; }));
  const int reads = hooks->reads();
  EXPECT_EQ(ReasonOf(dead->closed()), "BAD_REFINE");
  EXPECT_EQ(*moved, Moved::kCached);
  ASSERT_EQ(Await().state, TransferState::kCommitted) << "it has asked again, by itself";
  EXPECT_EQ(hooks->reads(), reads) << "the blocks were read after the answer";
  ASSERT_TRUE(Apply().ok());
  EXPECT_TRUE(Landed() == sent_);
}

// The end of a refinement, its release, and the next one of its id, at the moment that the retention ends.
TEST_F(RefineIdsTest, ARefinementBeginsWhileAnEarlierOneOfItsIdEnds) {
  Build();
  Prepare();
  for (int round = 0; round < 60; ++round) {
    Commit();
    std::atomic<bool> stop{false};
    std::thread again([&] {
      while (!stop) {
        const bool begun = b_->manager().Refine(Ask()).ok();
        if (begun && round % 2 == 0) (void)Apply("r", kRow * 8);
        for (int i = 0; i < 200 && !stop && !b_->manager().Release(kMe, "r", Role::kReceiver).ok(); ++i) {
          std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
      }
    });
    std::this_thread::sleep_for(std::chrono::microseconds(500 * (round % 7)));
    std::atomic<bool> ended{false};
    std::atomic<size_t> running{0};
    b_->manager().EndRefinements(kMe, "t", Role::kReceiver, [&] {
      running = b_->manager().List(100, /*active_only=*/true).size();
      ended = true;
    });
    EXPECT_TRUE(Eventually([&] { return ended.load(); }));
    stop = true;
    again.join();
    EXPECT_EQ(running, 0u);
    // One that was released before may be on its way out of memory.
    EXPECT_TRUE(Eventually([&] { return b_->manager().refine_memory().staging_bytes == 0; }));
    End();
    for (Engine* engine : {a_.get(), b_.get()}) {
      const Role role = engine == a_.get() ? Role::kSender : Role::kReceiver;
      ASSERT_TRUE(Eventually([&] { return engine->manager().active() == 0; }));
      engine->manager().Release(kMe, "r", role).IgnoreError();
    }
    ReleaseBoth("t");
    FillBlocks(*b_, target_pool_, target_layout_, {10, 11, 12, 13, 14, 15, 16, 17, 18, 19}, 1000 + round);
  }
}

TEST_F(RefineIdsTest, AnIdThatIsUsedAgainIsRefinedAgain) {
  Build();
  Prepare();
  for (int round = 0; round < 3; ++round) {
    Commit(/*pull=*/true, 60000, Coarse(), Tier::kRaw, /*direct=*/true);
    ASSERT_TRUE(Eventually([&] { return Get(*b_, "t", Role::kReceiver).exact; })) << round;
    EXPECT_TRUE(Landed() == sent_);
    End();
    ReleaseBoth("t");  // the rounds of its refinement are remembered still
    FillBlocks(*b_, target_pool_, target_layout_, {10, 11, 12, 13, 14, 15, 16, 17, 18, 19}, 2000 + round);
  }
}

// The pause before another try outlives what it was for.
TEST_F(RefineIdsTest, AnotherTryIsOfWhatItWasFor) {
  EngineSettings settings;
  settings.options.cache_bytes = 1 << 20;
  settings.options.terminal_memory_ms = 0;
  Build(settings);
  Prepare();
  Occupy();
  Commit(/*pull=*/true, 60000, Coarse(), Tier::kRaw, /*direct=*/true);
  ASSERT_TRUE(BackgroundHasBegun());
  ASSERT_TRUE(*Move());  // fails the round, which is to be tried again soon
  End();
  a_->manager().Release(kMe, "t", Role::kSender).IgnoreError();
  b_->manager().Release(kMe, "t", Role::kReceiver).IgnoreError();
  FillBlocks(*b_, target_pool_, target_layout_, {10, 11, 12, 13, 14, 15, 16, 17, 18, 19}, 3000);
  Commit();
  std::this_thread::sleep_for(std::chrono::milliseconds(600));
  EXPECT_FALSE(b_->manager().Get(kMe, "t.refine-1", Role::kReceiver).ok()) << "nobody asked for it";
  EXPECT_EQ(b_->manager().refine_memory().staging_bytes, 0u);
  a_->manager().Cancel(kMe, "busy", Role::kSender, [](const auto&) {});
  EXPECT_TRUE(Eventually([&] { return a_->manager().active() == 0 && b_->manager().active() == 0; }));
}

TEST_F(RefineIdsTest, WhoSeesTheEndMayReleaseAtOnce) {
  Build();
  Prepare();
  for (int round = 0; round < 300; ++round) {
    ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
    ASSERT_TRUE(a_->manager().StartSender(Send("t", Source(), Raw())).ok());
    while (!IsTerminal(Get(*a_, "t", Role::kSender).state)) std::this_thread::yield();
    ASSERT_TRUE(a_->manager().Release(kMe, "t", Role::kSender).ok()) << round;
    while (!IsTerminal(Get(*b_, "t", Role::kReceiver).state)) std::this_thread::yield();
    ASSERT_TRUE(b_->manager().Release(kMe, "t", Role::kReceiver).ok()) << round;
  }
}

// A destination whose blocks, reserved again, hold up whoever writes there.
class HookedTicket final : public BlockTicket {
 public:
  HookedTicket(std::shared_ptr<BlockTicket> ticket, std::shared_ptr<ReadHooks> hooks)
      : ticket_(std::move(ticket)), hooks_(std::move(hooks)) {}
  absl::StatusOr<std::unique_ptr<BlockHold>> Reserve() override {
    auto hold = ticket_->Reserve();
    if (!hold.ok()) return hold.status();
    return std::make_unique<HookedHold>(*std::move(hold), hooks_);
  }

 private:
  const std::shared_ptr<BlockTicket> ticket_;
  const std::shared_ptr<ReadHooks> hooks_;
};

class TargetOfHookedTickets final : public ForwardingHold {
 public:
  TargetOfHookedTickets(std::unique_ptr<BlockHold> hold, std::shared_ptr<ReadHooks> hooks)
      : ForwardingHold(std::move(hold)), hooks_(std::move(hooks)) {}
  std::shared_ptr<BlockTicket> Ticket() const override { return std::make_shared<HookedTicket>(hold_->Ticket(), hooks_); }

 private:
  const std::shared_ptr<ReadHooks> hooks_;
};

TEST_F(RefineIdsTest, ACancelledRefinementIsAnsweredWhenNothingIsAppliedAnyMore) {
  Build();
  Prepare();
  const auto hooks = std::make_shared<ReadHooks>();
  SenderSpec sender = Send("t", Source(), Coarse());
  sender.retain_ms = 60000;
  ReceiverSpec receiver = Expect("t", std::make_unique<TargetOfHookedTickets>(Target(), hooks));
  receiver.refinable = true;
  ASSERT_TRUE(b_->manager().StartReceiver(std::move(receiver)).ok());
  ASSERT_TRUE(a_->manager().StartSender(std::move(sender)).ok());
  ASSERT_EQ(a_->Watch("t", Role::kSender)->WaitTerminal().state, TransferState::kCommitted);
  ASSERT_EQ(b_->Watch("t", Role::kReceiver)->WaitTerminal().state, TransferState::kCommitted);
  const auto chunks = std::make_shared<std::atomic<int>>(0);
  network_->SetFaultHook([this, chunks](const FaultPoint& point) {
    if (point.data && ++*chunks == 4) b_->backend().SetOpen(false);  // some have arrived, the refinement goes on
    return Fault{};
  });
  ASSERT_TRUE(b_->manager().Refine(Ask()).ok());
  ASSERT_TRUE(Eventually([&] { return Get(*b_, "r", Role::kReceiver).staged_bytes > 0; }));
  hooks->HoldUp(true);
  std::thread applies([&] { (void)Apply(); });
  ASSERT_TRUE(hooks->WaitForAReader());
  EXPECT_EQ(ReasonOf(Apply().status()), "APPLY_PENDING") << "it takes no thread to wait";
  std::atomic<bool> answered{false};
  b_->manager().Cancel(kMe, "r", Role::kReceiver, [&](const absl::StatusOr<TransferReport>& report) {
    EXPECT_TRUE(report.ok() && report->state == TransferState::kCancelled);
    answered = true;
  });
  b_->backend().SetOpen(true);
  const auto watcher = b_->Watch("r", Role::kReceiver);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_FALSE(answered || watcher->ended()) << "cells are being written";
  EXPECT_FALSE(IsTerminal(Get(*b_, "r", Role::kReceiver).state));
  hooks->HoldUp(false);
  applies.join();
  EXPECT_EQ(watcher->WaitTerminal().state, TransferState::kCancelled);
  EXPECT_TRUE(Eventually([&] { return answered.load(); }));
  network_->SetFaultHook(nullptr);
}

}  // namespace
}  // namespace spectrumkv
