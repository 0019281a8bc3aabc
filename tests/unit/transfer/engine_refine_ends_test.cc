// Refinements that are refused, end early, or meet blocks that are others' by now: the base stays as it is.
#include <numeric>

#include "server/transfer/refinement.h"
#include "tests/unit/transfer/refine_fixture.h"

namespace spectrumkv {
namespace {

TEST_F(RefineEngineTest, WhatIsNotKeptIsRefusedByReason) {
  EngineSettings settings;
  settings.options.max_retained = 1;
  Build(settings);
  Prepare();
  EXPECT_EQ(ReasonOfRefine(Ask()), "UNKNOWN_TRANSFER");
  Commit();
  RefineSpec strangers = Ask();
  strangers.owner = Caller::Uid(kMe.uid() + 1);
  EXPECT_EQ(ReasonOfRefine(strangers), "NOT_OWNER");
  RefineSpec nowhere = Ask();
  nowhere.peer.clear();
  EXPECT_EQ(ReasonOfRefine(nowhere), "PEER_UNKNOWN");
  // A second one is one too many; a third is not refinable.
  for (const std::string id : {"second", "third"}) {
    SenderSpec sender = Send(id, Source(), Coarse());
    sender.retain_ms = 60000;
    ReceiverSpec receiver = Expect(id, b_->Target(target_pool_, {{20, 10}}, 80));
    receiver.refinable = id == "second";
    ASSERT_TRUE(b_->manager().StartReceiver(std::move(receiver)).ok());
    ASSERT_TRUE(a_->manager().StartSender(std::move(sender)).ok());
    ASSERT_EQ(b_->Watch(id, Role::kReceiver)->WaitTerminal().state, TransferState::kCommitted);
    RefineSpec ask = Ask("r-" + id);
    ask.transfer_id = id;
    EXPECT_EQ(ReasonOfRefine(ask), "NOT_RETAINED");
    EXPECT_EQ(Get(*b_, id, Role::kReceiver).retained_seconds, 0);
  }
  EXPECT_EQ(ReasonOf(Apply("t").status()), "NOT_A_REFINEMENT");
  EXPECT_EQ(ReasonOf(Apply("t", 0, strangers.owner).status()), "NOT_OWNER");
  RefineSpec same = Ask("r");
  ASSERT_TRUE(b_->manager().Refine(same).ok());
  EXPECT_TRUE(b_->manager().Refine(same).ok()) << "a repeat";
  same.fingerprint = "other";
  EXPECT_EQ(ReasonOfRefine(same), "TRANSFER_EXISTS");
  EXPECT_EQ(Await().state, TransferState::kCommitted);
}

TEST_F(RefineEngineTest, TheSourceIsFreeWhenItsTimeIsOver) {
  Build();
  Prepare();
  Commit(false, 2000);
  EXPECT_FALSE(a_->pools().ReserveTarget(kMe, source_pool_, a_->epoch(), {{0, {{7, 1}}}}, 16).ok()) << "still held";
  EXPECT_TRUE(Eventually(
      [&] { return a_->pools().ReserveTarget(kMe, source_pool_, a_->epoch(), {{0, {{7, 1}}}}, 16).ok(); }));
  EXPECT_TRUE(Eventually([&] { return Get(*b_, "t", Role::kReceiver).retained_seconds == 0; }));
  EXPECT_EQ(ReasonOfRefine(Ask()), "NOT_RETAINED");
  EXPECT_EQ(Get(*b_, "t", Role::kReceiver).state, TransferState::kCommitted);
}

TEST_F(RefineEngineTest, AReleasedSourceEndsTheRefinementAndLeavesTheBase) {
  Build();
  Prepare();
  Commit();
  Occupy();
  ASSERT_TRUE(b_->manager().Refine(Ask()).ok());
  ASSERT_TRUE(Eventually([&] { return Get(*b_, "r", Role::kReceiver).state >= TransferState::kPlanned; }));
  std::atomic<bool> ended{false};
  a_->manager().EndRefinements(kMe, "t", Role::kSender, [&] { ended = true; });
  EXPECT_TRUE(Eventually([&] { return ended.load(); }));
  EXPECT_TRUE(a_->pools().ReserveTarget(kMe, source_pool_, a_->epoch(), {{0, {{3, 1}}}}, 16).ok())
      << "its blocks are the worker's again";
  const TransferReport refined = Await();
  EXPECT_EQ(refined.state, TransferState::kFailed);
  EXPECT_EQ(ReasonOf(refined.error), "RELEASED");
  EXPECT_EQ(ReasonOf(Apply().status()), "REFINEMENT_DROPPED");
  EXPECT_EQ(Get(*b_, "t", Role::kReceiver).state, TransferState::kCommitted);
  EXPECT_TRUE(Landed() == base_);
  Free();
}

TEST_F(RefineEngineTest, APrefillDaemonThatIsGoneFailsTheRefinementAlone) {
  Build();
  Prepare();
  Commit();
  network_->RemoveEnd("a");
  ASSERT_TRUE(b_->manager().Refine(Ask()).ok());
  const TransferReport refined = Await();
  EXPECT_EQ(refined.state, TransferState::kFailed) << refined.error;
  EXPECT_EQ(Get(*b_, "t", Role::kReceiver).state, TransferState::kCommitted);
  EXPECT_TRUE(Landed() == base_);
}

TEST_F(RefineEngineTest, OtherTransfersGoFirstAndACancelEnds) {
  Build();
  Prepare();
  Commit();
  Occupy();
  ASSERT_TRUE(b_->manager().Refine(Ask("first")).ok());
  ASSERT_TRUE(b_->manager().Refine(Ask("second")).ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_EQ(Get(*b_, "first", Role::kReceiver).wire_bytes, 0u) << "it waits";
  std::atomic<bool> cancelled{false};
  b_->manager().Cancel(kMe, "first", Role::kReceiver, [&](const absl::StatusOr<TransferReport>& report) {
    cancelled = report.ok() && report->state == TransferState::kCancelled;
  });
  EXPECT_TRUE(Eventually([&] { return cancelled.load(); }));
  EXPECT_EQ(ReasonOf(Apply("first").status()), "REFINEMENT_DROPPED");
  Free();
  EXPECT_EQ(Await("second").state, TransferState::kCommitted);
  ASSERT_TRUE(Apply("second").ok());
  EXPECT_TRUE(Landed() == sent_);
}

TEST_F(RefineEngineTest, BlocksOfOthersAreLeftAlone) {
  Build();
  Prepare();
  Commit();
  ASSERT_TRUE(b_->manager().Refine(Ask()).ok());
  ASSERT_EQ(Await().state, TransferState::kCommitted);
  // Blocks 12 and 13 of the destination (8 tokens each) go to another request.
  const std::string others(8 * kRow, '\x5a');
  { b_->Target(target_pool_, {{12, 1}}, 8); }
  for (uint32_t layer = 0; layer < 3; ++layer) {
    for (const PlaneId plane : {PlaneId::kK, PlaneId::kV}) {
      for (const uint64_t block : {12, 13}) {
        ASSERT_TRUE(b_->pools().PutBlock(kMe, target_pool_, b_->epoch(), 0, layer, plane, block, others).ok());
      }
    }
  }
  const auto applied = Apply();
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_GT(applied->stale_cells, 0u);
  const std::vector<std::string> landed = Landed();
  for (size_t plane = 0; plane < landed.size(); ++plane) {
    EXPECT_TRUE(landed[plane].substr(16 * kRow, 8 * kRow) == others);
    EXPECT_TRUE(landed[plane].substr(24 * kRow, 8 * kRow) == others);
    EXPECT_TRUE(landed[plane].substr(0, 16 * kRow) == sent_[plane].substr(0, 16 * kRow));
    EXPECT_TRUE(landed[plane].substr(32 * kRow) == sent_[plane].substr(32 * kRow));
  }
  RefineSpec direct = Ask("direct", Tier::kRaw);
  direct.direct = true;
  EXPECT_EQ(ReasonOfRefine(direct), "BLOCKS_REUSED");
}

TEST_F(RefineEngineTest, ADestinationThatIsAnothersNowTakesNothing) {
  Build();
  Prepare();
  Commit();
  ASSERT_TRUE(b_->manager().Refine(Ask()).ok());
  ASSERT_EQ(Await().state, TransferState::kCommitted);
  {
    auto other = Target();
    EXPECT_EQ(ReasonOf(Apply().status()), "BLOCKS_REUSED") << "while it has them";
  }
  EXPECT_EQ(ReasonOf(Apply().status()), "BLOCKS_REUSED") << "and afterwards";
  EXPECT_TRUE(Landed() == base_);
}

TEST_F(RefineEngineTest, AReleasedDestinationTakesNothing) {
  Build();
  Prepare();
  Commit();
  ASSERT_TRUE(b_->manager().Refine(Ask()).ok());
  ASSERT_EQ(Await().state, TransferState::kCommitted);
  bool ended = false;
  b_->manager().EndRefinements(kMe, "t", Role::kReceiver, [&] { ended = true; });
  EXPECT_TRUE(ended);
  ASSERT_TRUE(b_->manager().Release(kMe, "t", Role::kReceiver).ok());
  EXPECT_EQ(ReasonOf(Apply().status()), "NOT_RETAINED");
  EXPECT_TRUE(Landed() == base_);
}

// A worker that releases uses its blocks for others at once, also while another of its threads still applies.
TEST_F(RefineEngineTest, AReleaseWaitsForAnApplyThatIsUnderWay) {
  constexpr uint32_t kTokens = 2560;
  source_layout_.num_blocks = 256;
  target_layout_.num_blocks = 512;
  Build();
  Prepare();
  std::vector<uint64_t> from(kTokens / 16);
  std::iota(from.begin(), from.end(), 40);
  FillBlocks(*a_, source_pool_, source_layout_, from, 5);
  int met = 0;
  for (int round = 0; round < 30; ++round) {
    const std::string id = "t" + std::to_string(round);
    auto target = b_->Target(target_pool_, {{40, kTokens / 8}}, kTokens);
    std::vector<uint8_t*> rows(kTokens);
    target->FillRows(0, 2, PlaneId::kV, 0, kTokens, rows.data());  // applied last
    SenderSpec sender = Send(id, a_->Source(source_pool_, {{40, from.size()}}, kTokens), Coarse());
    sender.retain_ms = 60000;
    ReceiverSpec receiver = Expect(id, std::move(target));
    receiver.refinable = true;
    ASSERT_TRUE(a_->manager().StartSender(std::move(sender)).ok());
    ASSERT_TRUE(b_->manager().StartReceiver(std::move(receiver)).ok());
    ASSERT_EQ(b_->Watch(id, Role::kReceiver)->WaitTerminal().state, TransferState::kCommitted);
    RefineSpec ask = Ask(id + ".r");
    ask.transfer_id = id;
    ASSERT_TRUE(b_->manager().Refine(ask).ok());
    ASSERT_EQ(Await(id + ".r").state, TransferState::kCommitted);
    std::atomic<bool> begun{false};
    absl::StatusOr<RefinementApplied> applied = absl::InternalError("");
    std::thread applies([&] {
      begun = true;
      applied = Apply(id + ".r");
    });
    while (!begun) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(100 * (round % 10)));
    std::atomic<bool> released{false};
    b_->manager().EndRefinements(kMe, id, Role::kReceiver, [&] { released = true; });
    ASSERT_TRUE(Eventually([&] { return released.load(); }));
    for (uint8_t* const row : rows) row[0] = 0x5A;  // another request's
    applies.join();
    met += applied.ok() ? 1 : 0;
    for (const uint8_t* const row : rows) ASSERT_EQ(row[0], 0x5A) << "written after the release, round " << round;
    EXPECT_EQ(b_->manager().refine_memory().staging_bytes, 0u);
    ASSERT_TRUE(b_->manager().Release(kMe, id, Role::kReceiver).ok());
  }
  EXPECT_GT(met, 0) << "no apply came before the release";
}

TEST_F(RefineEngineTest, ADrainingDaemonKeepsNothing) {
  Build();
  Prepare();
  Commit();
  std::atomic<bool> drained{false};
  a_->manager().StartDraining([&] { drained = true; });
  EXPECT_TRUE(Eventually([&] { return drained.load(); }));
  EXPECT_TRUE(a_->pools().ReserveTarget(kMe, source_pool_, a_->epoch(), {{0, {{3, 1}}}}, 16).ok());
  ASSERT_TRUE(b_->manager().Refine(Ask()).ok());
  EXPECT_EQ(Await().state, TransferState::kFailed);
}

TEST_F(RefineEngineTest, SavedBytesCountWhatReallyCrossed) {
  Build();
  Prepare();
  Commit();
  const auto saved = [](Engine& engine, const std::string& role) {
    const std::string text = engine.metrics().Render();
    const std::string name = "spectrumkv_saved_bytes_total{role=\"" + role + "\"} ";
    const size_t at = text.find(name);
    EXPECT_NE(at, std::string::npos);
    return std::stod(text.substr(at + name.size()));
  };
  EXPECT_EQ(saved(*b_, "receiver"), 0) << "not known yet";
  RefineSpec ask = Ask();
  ask.selection.tokens = {{60, 4}};
  ASSERT_TRUE(b_->manager().Refine(ask).ok());
  ASSERT_EQ(Await().state, TransferState::kCommitted);
  ASSERT_EQ(a_->Watch("r", Role::kSender)->WaitTerminal().state, TransferState::kCommitted);
  const uint64_t want = Get(*b_, "t", Role::kReceiver).saved_bytes();
  EXPECT_GT(want, 0u);
  b_->manager().EndRefinements(kMe, "t", Role::kReceiver, [] {});
  a_->manager().EndRefinements(kMe, "t", Role::kSender, [] {});
  EXPECT_EQ(saved(*b_, "receiver"), static_cast<double>(want));
  EXPECT_EQ(saved(*a_, "sender"), static_cast<double>(want));
}

// Hears why a peer's stream was closed.
class Refusal final : public ControlListener {
 public:
  void OnFrame(ControlFrame) override {}
  void OnClosed(absl::Status status) override {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    status_ = std::move(status);
    changed_.notify_all();
  }
  std::string Reason() {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(20), [this] { return closed_; }) ? ReasonOf(status_) : "none came";
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool closed_ = false;
  absl::Status status_;
};

TEST_F(RefineEngineTest, WhoAsksMustHaveTheRestAndFit) {
  Build();
  Prepare();
  Commit();
  const auto transport = network_->TransportOf("stranger");
  const auto refused = [&](const std::function<void(HelloFrame*)>& change) {
    HelloFrame hello;
    hello.epoch = kEpochB;
    hello.role = Role::kReceiver;
    hello.transfer_id = "s";
    hello.deadline_ms = 5000;
    hello.token_count = 80;
    hello.refine = RefineFrame{"t", 1, {{{0, 80}}}, {{0, false, 0}, {0, true, 0}, {2, true, 0}}};
    change(&hello);
    auto listener = std::make_shared<Refusal>();
    const auto stream = transport->OpenControl("a", listener);
    stream->Send(hello);
    return listener->Reason();
  };
  EXPECT_EQ(refused([](HelloFrame* h) { h->epoch = 1; }), "PEER_RESTARTED");
  EXPECT_EQ(refused([](HelloFrame* h) { h->expected_epoch = 1; }), "PEER_RESTARTED");
  EXPECT_EQ(refused([](HelloFrame* h) { h->transfer_token = std::string(16, 'x'); }), "TOKEN_MISMATCH");
  EXPECT_EQ(refused([](HelloFrame* h) { h->refine->transfer_id = "other"; }), "NOT_RETAINED");
  EXPECT_EQ(refused([](HelloFrame* h) { h->transfer_id = "t"; }), "TRANSFER_EXISTS");
  EXPECT_EQ(refused([](HelloFrame* h) { h->role = Role::kSender; }), "BAD_REFINE");
  EXPECT_EQ(refused([](HelloFrame* h) { h->part_count = 2; }), "BAD_REFINE");
  EXPECT_EQ(refused([](HelloFrame* h) { h->format_version = 2; }), "UNSUPPORTED_VERSION");
  EXPECT_EQ(refused([](HelloFrame* h) { h->refine->strips[0].layer = 3; }), "BAD_REFINE");
  EXPECT_EQ(refused([](HelloFrame* h) { std::swap(h->refine->strips[0], h->refine->strips[1]); }), "BAD_REFINE");
  EXPECT_EQ(refused([](HelloFrame* h) { h->refine->strips[1] = h->refine->strips[0]; }), "BAD_REFINE");
  EXPECT_EQ(refused([](HelloFrame* h) { h->token_count = 81, h->refine->token_sets[0][0].count = 81; }), "BAD_REFINE");
  EXPECT_TRUE(a_->manager().List(10, /*active_only=*/true).empty());
  // And the honest one gets what it asks for.
  ASSERT_TRUE(b_->manager().Refine(Ask()).ok());
  EXPECT_EQ(Await().state, TransferState::kCommitted);
}

TEST_F(RefineEngineTest, EveryFrameAndChunkHitOnce) {
  using Kind = Fault::Kind;
  Build();
  Prepare();
  int tried = 0, committed = 0;
  for (const Kind kind : {Kind::kDrop, Kind::kDuplicate, Kind::kCorrupt, Kind::kBreak}) {
    for (const bool data : {false, true}) {
      for (const std::string from : {"a", "b"}) {
        for (uint64_t index = 0; index < (data ? 3 : 4); ++index) {
          if (data && from == "b") continue;  // a receiver sends no chunks
          SCOPED_TRACE(std::string(data ? "chunk " : "frame ") + from + std::to_string(index) + " fault " +
                       std::to_string(static_cast<int>(kind)));
          Commit(/*pull=*/index % 2 == 1);
          auto done = std::make_shared<std::atomic<bool>>(false);
          network_->SetFaultHook([=](const FaultPoint& point) {
            const bool here = point.data == data && point.from == from && point.index == index;
            return here && !done->exchange(true) ? Fault{kind, 0, 1, 40, 0x10} : Fault{};
          });
          RefineSpec ask = Ask();
          ask.deadline_ms = 1500;
          ASSERT_TRUE(b_->manager().Refine(ask).ok());
          const TransferReport refined = Await();
          network_->SetFaultHook(nullptr);
          tried += done->load() ? 1 : 0;
          EXPECT_EQ(Get(*b_, "t", Role::kReceiver).state, TransferState::kCommitted);
          EXPECT_TRUE(Landed() == base_) << "nothing is applied yet";
          if (refined.state == TransferState::kCommitted) {
            ++committed;
            const auto applied = Apply();
            // A frame that lies is found by the checksums.
            EXPECT_TRUE(applied.ok() ? Landed() == sent_ : ReasonOf(applied.status()) == "NOT_EXACT") << applied.status();
          } else {
            EXPECT_EQ(ReasonOf(Apply().status()), "REFINEMENT_DROPPED");
          }
          for (Engine* engine : {a_.get(), b_.get()}) {
            const Role role = engine == a_.get() ? Role::kSender : Role::kReceiver;
            std::atomic<bool> ended{false};
            engine->manager().EndRefinements(kMe, "t", role, [&] { ended = true; });
            ASSERT_TRUE(Eventually([&] { return ended.load(); }));
            ASSERT_TRUE(engine->manager().Release(kMe, "t", role).ok());
            static_cast<void>(Eventually([&] {
              const absl::Status released = engine->manager().Release(kMe, "r", role);
              return released.ok() || ReasonOf(released) == "UNKNOWN_TRANSFER";
            }));
          }
          EXPECT_TRUE(Eventually([&] { return b_->receive_slots().used() == 0; }));  // a decoder's last comes back late
        }
      }
    }
  }
  EXPECT_GT(tried, 20);
  EXPECT_GT(committed, 20);
}

}  // namespace
}  // namespace spectrumkv
