// Refinement end to end in one process: what has arrived coarse becomes exact, and never more than what was asked for.
#include <algorithm>
#include <thread>

#include "server/transfer/refinement.h"
#include "tests/unit/transfer/two_engines.h"

namespace spectrumkv {
namespace {

constexpr size_t kRow = 2 * 64 * 2;  // bytes of one token of one plane

class RefineEngineTest : public EngineTest {
 protected:
  static Policy Coarse() {
    Policy policy;
    policy.budget = 0.4;
    return policy;
  }

  // A transfer "t" that is committed on both sides, and whose source is kept.
  void Commit(bool pull = false, int64_t retain_ms = 60000, Policy policy = Coarse(),
              std::optional<Tier> background = std::nullopt, bool direct = false) {
    SenderSpec sender = Send("t", Source(), std::move(policy), pull ? "" : "b");
    sender.retain_ms = retain_ms;
    sender.background_tier = background;
    ReceiverSpec receiver = Expect("t", Target(), pull ? "a" : "");
    receiver.refinable = true;
    receiver.refine_direct = direct;
    ASSERT_TRUE(a_->manager().StartSender(std::move(sender)).ok());
    ASSERT_TRUE(b_->manager().StartReceiver(std::move(receiver)).ok());
    const TransferReport sent = a_->Watch("t", Role::kSender)->WaitTerminal();
    ASSERT_EQ(sent.state, TransferState::kCommitted) << sent.error;
    ASSERT_EQ(b_->Watch("t", Role::kReceiver)->WaitTerminal().state, TransferState::kCommitted);
    if (direct) return;  // the refinement may have the blocks by now
    base_ = Landed();
    ASSERT_FALSE(base_ == sent_);
  }
  static RefineSpec Ask(const std::string& id = "r", Tier tier = Tier::kRaw) {
    RefineSpec spec;
    spec.transfer_id = "t";
    spec.refine_id = id;
    spec.peer = "a";
    spec.owner = kMe;
    spec.tier = tier;
    spec.deadline_ms = 15000;
    spec.fingerprint = "f-" + id;
    return spec;
  }
  TransferReport Await(const std::string& id = "r") { return b_->Watch(id, Role::kReceiver)->WaitTerminal(); }
  std::string ReasonOfRefine(RefineSpec spec) { return ReasonOf(b_->manager().Refine(std::move(spec)).status()); }
  absl::StatusOr<RefinementApplied> Apply(const std::string& id = "r", uint64_t max_bytes = 0) {
    return b_->manager().ApplyRefinement(kMe, id, max_bytes);
  }
  TransferReport Get(Engine& engine, const std::string& id, Role role) {
    const auto report = engine.manager().Get(kMe, id, role);
    EXPECT_TRUE(report.ok()) << report.status();
    return report.ok() ? *report : TransferReport{};
  }
  bool Eventually(const std::function<bool()>& holds) {
    for (int i = 0; i < 500 && !holds(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return holds();
  }
  // A transfer that has joined and moves nothing until it is cancelled.
  void Occupy() {
    SenderSpec spec = Send("busy", a_->Source(source_pool_, {{7, 1}}, 16), Raw());
    spec.layerwise = true;
    ASSERT_TRUE(b_->manager().StartReceiver(Expect("busy", b_->Target(target_pool_, {{25, 2}}, 16))).ok());
    ASSERT_TRUE(a_->manager().StartSender(std::move(spec)).ok());
    ASSERT_TRUE(Eventually([&] { return Get(*a_, "busy", Role::kSender).state == TransferState::kPlanned; }));
  }
  void Free() {
    a_->manager().Cancel(kMe, "busy", Role::kSender, [](const auto&) {});
    a_->Watch("busy", Role::kSender)->WaitTerminal();
  }

  std::vector<std::string> base_;
};

TEST_F(RefineEngineTest, RefinedToRawIsTheSourceBitForBit) {
  for (const bool pull : {false, true}) {
    Build();
    Prepare();
    Commit(pull);
    RefineSpec ask = Ask();
    if (pull) ask.peer.clear();  // known
    const auto started = b_->manager().Refine(ask);
    ASSERT_TRUE(started.ok()) << started.status();
    EXPECT_EQ(started->cells_left, 0u);
    const TransferReport refined = Await();
    ASSERT_EQ(refined.state, TransferState::kCommitted) << refined.error;
    EXPECT_EQ(refined.refines, "t");
    EXPECT_EQ(refined.kv_bytes, started->kv_bytes);
    EXPECT_EQ(refined.saved_bytes(), 0u);
    EXPECT_TRUE(Landed() == base_) << "nothing lands before it is applied";
    EXPECT_EQ(Get(*b_, "r", Role::kReceiver).staged_bytes, started->kv_bytes);
    const auto applied = Apply();
    ASSERT_TRUE(applied.ok()) << applied.status();
    EXPECT_TRUE(applied->complete);
    EXPECT_TRUE(applied->exact);
    EXPECT_TRUE(Get(*b_, "t", Role::kReceiver).exact);
    EXPECT_EQ(applied->applied_bytes, started->kv_bytes);
    EXPECT_EQ(applied->staged_bytes, 0u);
    EXPECT_EQ(applied->stale_cells, 0u);
    EXPECT_TRUE(Landed() == sent_);
    const auto nothing = b_->manager().Refine(Ask("again"));
    ASSERT_TRUE(nothing.ok()) << nothing.status();
    EXPECT_EQ(nothing->cells, 0u) << "all is exact";
    EXPECT_EQ(Apply()->applied_bytes, 0u) << "a second call has nothing to do";
    for (Engine* engine : {a_.get(), b_.get()}) {
      const Role role = engine == a_.get() ? Role::kSender : Role::kReceiver;
      ASSERT_TRUE(Eventually([&] { return Get(*engine, "t", role).refined_wire_bytes > 0; }));
      const TransferReport whole = Get(*engine, "t", role);
      EXPECT_EQ(whole.state, TransferState::kCommitted);
      EXPECT_EQ(whole.refined_wire_bytes, refined.wire_bytes);
      EXPECT_EQ(whole.saved_bytes(), whole.kv_bytes > whole.wire_bytes + refined.wire_bytes
                                         ? whole.kv_bytes - whole.wire_bytes - refined.wire_bytes
                                         : 0);
      EXPECT_GT(whole.retained_seconds, 0);
    }
    if (pull) break;
    TearDown();
    network_ = std::make_unique<MemoryNetwork>();
  }
}

TEST_F(RefineEngineTest, OnlyWhatIsSelectedChanges) {
  Build();
  Prepare();
  Commit();
  RefineSpec ask = Ask();
  ask.selection.tokens = {{20, 10}, {70, 1}};
  ask.selection.layers = {1};
  ASSERT_TRUE(b_->manager().Refine(ask).ok());
  const TransferReport report = Await();
  ASSERT_EQ(report.state, TransferState::kCommitted) << report.error;
  EXPECT_LE(report.wire_bytes, 11 * 2 * kRow + 2 * (64 + 16)) << "cells that are asked for, and headers";
  const auto applied = Apply();
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_FALSE(applied->exact) << "the rest is coarse";
  const std::vector<std::string> landed = Landed();
  for (size_t plane = 0; plane < landed.size(); ++plane) {
    for (size_t token = 0; token < 80; ++token) {
      const bool selected = plane / 2 == 1 && ((token >= 20 && token < 30) || token == 70);
      const std::vector<std::string>& want = selected ? sent_ : base_;
      EXPECT_TRUE(landed[plane].substr(token * kRow, kRow) == want[plane].substr(token * kRow, kRow))
          << plane << " " << token;
    }
  }
}

TEST_F(RefineEngineTest, CellsClimbByStepsAndNeverFall) {
  Build();
  Prepare();
  Commit();
  ASSERT_TRUE(b_->manager().Refine(Ask("eight", Tier::kQ8)).ok());
  ASSERT_TRUE(b_->manager().Refine(Ask("raw")).ok());
  ASSERT_EQ(Await("eight").state, TransferState::kCommitted);
  ASSERT_EQ(Await("raw").state, TransferState::kCommitted);
  ASSERT_TRUE(Apply("raw").ok());
  EXPECT_TRUE(Landed() == sent_);
  const auto late = Apply("eight");
  ASSERT_TRUE(late.ok()) << late.status();
  EXPECT_EQ(late->applied_bytes, 0u) << "what is finer stays";
  EXPECT_TRUE(late->complete);
  EXPECT_TRUE(Landed() == sent_);
}

TEST_F(RefineEngineTest, ValuesThatOnlyRawCanCarryTravelRaw) {
  Build();
  Prepare();
  std::string block(16 * kRow, '\0');
  const _Float16 large = static_cast<_Float16>(5000), infinite = static_cast<_Float16>(1.0 / 0.0);
  std::memcpy(&block[2 * kRow], &large, 2);
  std::memcpy(&block[9 * kRow + 6], &infinite, 2);
  ASSERT_TRUE(a_->pools().PutBlock(kMe, source_pool_, a_->epoch(), 0, 2, PlaneId::kV, 3, block).ok());
  Policy policy;
  policy.allocator = Allocator::kUniform;
  policy.uniform_tier = Tier::kP4;  // carries 5000, Q8 does not
  policy.budget = 0.6;
  Commit(false, 60000, policy);
  ASSERT_TRUE(b_->manager().Refine(Ask("r", Tier::kQ8)).ok());
  const TransferReport report = Await();
  ASSERT_EQ(report.state, TransferState::kCommitted) << report.error;
  EXPECT_GT(report.tiers.k[static_cast<size_t>(Tier::kQ8)], 0u);
  ASSERT_TRUE(Apply().ok());
  const std::vector<std::string> landed = Landed();
  for (const size_t token : {16 + 2, 16 + 9}) {
    EXPECT_TRUE(landed[5].substr(token * kRow, kRow) == block.substr((token - 16) * kRow, kRow)) << token;
  }
}

TEST_F(RefineEngineTest, ApplyTakesAsMuchAsItIsAllowedTo) {
  Build();
  Prepare();
  Commit();
  const auto started = b_->manager().Refine(Ask());
  ASSERT_TRUE(started.ok());
  ASSERT_EQ(Await().state, TransferState::kCommitted);
  uint64_t sum = 0;
  int calls = 0;
  for (bool complete = false; !complete && calls < 100; ++calls) {
    const auto applied = Apply("r", 1);
    ASSERT_TRUE(applied.ok()) << applied.status();
    EXPECT_GT(applied->applied_bytes, 0u);
    sum += applied->applied_bytes;
    EXPECT_EQ(applied->staged_bytes, started->kv_bytes - sum);
    complete = applied->complete;
  }
  EXPECT_EQ(calls, 6) << "a chunk for each K and V";
  EXPECT_EQ(sum, started->kv_bytes);
  EXPECT_TRUE(Landed() == sent_);
}

TEST_F(RefineEngineTest, DirectLandsAsItArrives) {
  Build();
  Prepare();
  Commit();
  RefineSpec ask = Ask();
  ask.direct = true;
  ASSERT_TRUE(b_->manager().Refine(ask).ok());
  const TransferReport report = Await();
  ASSERT_EQ(report.state, TransferState::kCommitted) << report.error;
  EXPECT_TRUE(Landed() == sent_);
  EXPECT_TRUE(report.exact);
  EXPECT_EQ(ReasonOf(Apply().status()), "NOT_STAGED");
}

TEST_F(RefineEngineTest, ABudgetIsKeptAndScoresChoose) {
  Build();
  Prepare();
  Commit();
  RefineSpec ask = Ask();
  ask.budget = 0.25;
  ask.selection.scores.assign(80, 0.5f);
  ask.selection.scores[77] = 1;
  const auto started = b_->manager().Refine(ask);
  ASSERT_TRUE(started.ok()) << started.status();
  EXPECT_GT(started->cells_left, 0u);
  const TransferReport report = Await();
  ASSERT_EQ(report.state, TransferState::kCommitted) << report.error;
  EXPECT_LE(report.wire_bytes, Get(*b_, "t", Role::kReceiver).kv_bytes / 4);
  ASSERT_TRUE(Apply().ok());
  EXPECT_TRUE(Landed()[0].substr(77 * kRow, kRow) == sent_[0].substr(77 * kRow, kRow));
  EXPECT_FALSE(Landed()[0].substr(79 * kRow, kRow) == sent_[0].substr(79 * kRow, kRow));
  ask.refine_id = "tiny";
  ask.budget = 1e-6;
  EXPECT_EQ(ReasonOfRefine(ask), "BUDGET_TOO_SMALL");
}

TEST_F(RefineEngineTest, StagingIsBoundedAndRoundsReachTheEnd) {
  EngineSettings settings;
  settings.options.staging_bytes = 40 * kRow;
  Build(settings);
  Prepare();
  Commit();
  int rounds = 0;
  for (uint64_t left = 1; left > 0 && rounds < 40; ++rounds) {
    const std::string id = "r" + std::to_string(rounds);
    const auto started = b_->manager().Refine(Ask(id));
    ASSERT_TRUE(started.ok()) << started.status();
    EXPECT_LE(started->kv_bytes, 40 * kRow);
    left = started->cells_left;
    ASSERT_EQ(Await(id).state, TransferState::kCommitted);
    if (rounds == 0) {
      EXPECT_EQ(ReasonOfRefine(Ask("full")), "REFINE_STAGING_FULL");
    }
    const auto applied = Apply(id);
    ASSERT_TRUE(applied->complete);
    EXPECT_EQ(applied->exact, left == 0) << "the last round is verified";
  }
  EXPECT_GT(rounds, 5);
  EXPECT_TRUE(Landed() == sent_);
}

TEST_F(RefineEngineTest, InTheBackgroundEverythingBecomesExact) {
  Build();
  Prepare();
  Commit(/*pull=*/true, 60000, Coarse(), Tier::kRaw, /*direct=*/true);
  ASSERT_TRUE(Eventually([&] { return Get(*b_, "t", Role::kReceiver).exact; }));
  EXPECT_TRUE(Landed() == sent_);
  const TransferReport report = Await("t.refine-1");
  EXPECT_EQ(report.state, TransferState::kCommitted);
  EXPECT_TRUE(report.exact);
  EXPECT_EQ(report.cells_left, 0u);
}

TEST_F(RefineEngineTest, InTheBackgroundRoundAfterRoundAsThereIsRoom) {
  EngineSettings settings;
  settings.options.staging_bytes = 120 * kRow;
  Build(settings);
  Prepare();
  Commit(/*pull=*/true, 60000, Coarse(), Tier::kRaw, /*direct=*/false);
  int rounds = 0;
  for (bool exact = false; !exact && rounds < 30;) {
    const std::string id = "t.refine-" + std::to_string(++rounds);
    ASSERT_TRUE(Eventually([&] { return b_->manager().Get(kMe, id, Role::kReceiver).ok(); })) << id;
    ASSERT_EQ(Await(id).state, TransferState::kCommitted);
    const auto applied = Apply(id);
    ASSERT_TRUE(applied.ok()) << applied.status();
    exact = applied->exact;
  }
  EXPECT_GT(rounds, 2);
  EXPECT_TRUE(Landed() == sent_);
  EXPECT_FALSE(b_->manager().Get(kMe, "t.refine-" + std::to_string(rounds + 1), Role::kReceiver).ok());
}

TEST_F(RefineEngineTest, InTheBackgroundToEightBitsIsNotExact) {
  Build();
  Prepare();
  Commit(/*pull=*/true, 60000, Coarse(), Tier::kQ8, /*direct=*/true);
  ASSERT_TRUE(Eventually([&] { return b_->manager().Get(kMe, "t.refine-1", Role::kReceiver).ok(); }));
  const TransferReport report = Await("t.refine-1");
  ASSERT_EQ(report.state, TransferState::kCommitted) << report.error;
  EXPECT_FALSE(report.exact);
  EXPECT_FALSE(Landed() == sent_);
  EXPECT_FALSE(b_->manager().Get(kMe, "t.refine-2", Role::kReceiver).ok());
}

TEST_F(RefineEngineTest, ADestinationThatWasWrittenIsNotExact) {
  for (const bool direct : {false, true}) {
    Build();
    Prepare();
    std::vector<uint8_t*> row(1);
    {
      const auto hold = b_->Target(target_pool_, {{10, 10}}, 80);
      hold->FillRows(0, 1, PlaneId::kK, 2, 1, row.data());  // of a token that is always RAW
    }
    Commit();
    row[0][7] ^= 1;
    RefineSpec ask = Ask();
    ask.direct = direct;
    ASSERT_TRUE(b_->manager().Refine(ask).ok());
    const TransferReport report = Await();
    EXPECT_FALSE(report.exact);
    EXPECT_EQ(direct ? ReasonOf(report.error) : ReasonOf(Apply().status()), "NOT_EXACT");
    EXPECT_FALSE(Get(*b_, "t", Role::kReceiver).exact);
    if (direct) break;
    TearDown();
    network_ = std::make_unique<MemoryNetwork>();
  }
}

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
  EXPECT_EQ(ReasonOf(b_->manager().ApplyRefinement(strangers.owner, "t", 0).status()), "NOT_OWNER");
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
