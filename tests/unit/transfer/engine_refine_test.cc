// Refinement end to end in one process: what has arrived coarse becomes exact, and never more than what was asked for.
#include "tests/unit/transfer/refine_fixture.h"

namespace spectrumkv {
namespace {

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
    }
    EXPECT_GT(Get(*b_, "t", Role::kReceiver).retained_seconds, 0);
    EXPECT_TRUE(Eventually([&] { return Get(*a_, "t", Role::kSender).retained_seconds == 0; }))
        << "there is nothing left for which the source would be needed";
    if (pull) break;
    StartOver();
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
    StartOver();
  }
}

}  // namespace
}  // namespace spectrumkv
