// State table, gate, coverage and shapes, each alone.
#include <set>
#include <thread>

#include "gtest/gtest.h"
#include "server/base/executor.h"
#include "server/base/status.h"
#include "server/transfer/coverage.h"
#include "server/transfer/gate.h"
#include "server/transfer/part_group.h"
#include "server/transfer/shape.h"
#include "server/transfer/state_table.h"
#include "tests/unit/base/fake_clock.h"

namespace spectrumkv {
namespace {

constexpr TransferState kStates[] = {TransferState::kWaiting,   TransferState::kPlanned,   TransferState::kStreaming,
                                     TransferState::kVerifying, TransferState::kCommitted, TransferState::kFailed,
                                     TransferState::kCancelled, TransferState::kExpired};

TEST(StateTable, EveryPairIsDefinedAndTerminalStatesAreFinal) {
  for (Role role : {Role::kSender, Role::kReceiver}) {
    for (TransferState state : kStates) {
      for (size_t e = 0; e < kEventCount; ++e) {
        const Transition t = NextState(role, state, static_cast<Event>(e));
        SCOPED_TRACE(std::string(StateName(state)) + " " + EventName(static_cast<Event>(e)));
        if (IsTerminal(state)) {
          EXPECT_EQ(t.next, state);
          EXPECT_EQ(t.action, Action::kIgnore);
        } else if (IsTerminal(t.next)) {
          EXPECT_TRUE(t.action == Action::kTerminate || t.action == Action::kOutcomeUnknown);
        } else {
          EXPECT_NE(t.action, Action::kTerminate);
          EXPECT_GE(static_cast<int>(t.next), static_cast<int>(state)) << "a life never goes back";
        }
      }
    }
  }
}

// Two parts that end in the same moment, each by what it met: the deadline of one, the word of the peer to the other.
TEST(PartGroup, PartsOfAReceiverAgreeOnTheFirstEnd) {
  FakeClock clock;
  ManualExecutor control;
  TransferParts engine;
  engine.clock = &clock;
  engine.control = &control;
  const absl::Status first = MakeError(absl::StatusCode::kUnavailable, "PEER_GAVE_UP", "the peer gave up");
  const absl::Status own = MakeError(absl::StatusCode::kDeadlineExceeded, "DEADLINE_EXCEEDED", "too late");
  for (const Role role : {Role::kReceiver, Role::kSender}) {
    const auto group = std::make_shared<PartGroup>(role, "t", 2, &engine, PartGroup::Host{});
    TransferState state = TransferState::kFailed;
    absl::Status why = first;
    EXPECT_EQ(group->OnEnding(1, false, &state, &why), PartGroup::Ruling::kEnds);
    EXPECT_EQ(state, TransferState::kFailed);
    EXPECT_EQ(why, first) << "what it said itself";

    state = TransferState::kExpired;
    why = own;
    EXPECT_EQ(group->OnEnding(0, false, &state, &why), PartGroup::Ruling::kEnds);
    const bool agrees = role == Role::kReceiver;  // a sender's part knows best whether its own outcome is known
    EXPECT_EQ(state, agrees ? TransferState::kFailed : TransferState::kExpired);
    EXPECT_EQ(ReasonOf(why), agrees ? "PEER_GAVE_UP" : "DEADLINE_EXCEEDED");
  }
}

TEST(StateTable, OnlyVerifyingCommits) {
  for (Role role : {Role::kSender, Role::kReceiver}) {
    for (TransferState state : kStates) {
      for (size_t e = 0; e < kEventCount; ++e) {
        const Transition t = NextState(role, state, static_cast<Event>(e));
        if (t.next == TransferState::kCommitted && state != TransferState::kCommitted) {
          EXPECT_EQ(state, TransferState::kVerifying);
          EXPECT_EQ(static_cast<Event>(e), Event::kCommit);
        }
      }
    }
  }
}

TEST(StateTable, ASenderThatSentAllNeverClaimsToKnowTheOutcome) {
  for (Event event : {Event::kFail, Event::kExpire}) {
    const Transition t = NextState(Role::kSender, TransferState::kVerifying, event);
    EXPECT_EQ(t.next, TransferState::kFailed);
    EXPECT_EQ(t.action, Action::kOutcomeUnknown);
  }
  EXPECT_EQ(NextState(Role::kSender, TransferState::kVerifying, Event::kCancel).action, Action::kAskPeer);
}

TEST(StateTable, EveryLiveStateReachesEveryEnding) {
  for (Role role : {Role::kSender, Role::kReceiver}) {
    for (TransferState state : {TransferState::kWaiting, TransferState::kPlanned, TransferState::kStreaming,
                                TransferState::kVerifying}) {
      std::set<TransferState> ends;
      for (size_t e = 0; e < kEventCount; ++e) ends.insert(NextState(role, state, static_cast<Event>(e)).next);
      EXPECT_TRUE(ends.count(TransferState::kFailed) && ends.count(TransferState::kCancelled) &&
                  ends.count(TransferState::kExpired));
    }
  }
}

TEST(Gate, DrainsWhenTheLastOneLeaves) {
  Gate gate;
  ASSERT_TRUE(gate.Enter());
  ASSERT_TRUE(gate.Enter());
  int drained = 0;
  gate.Close([&] { ++drained; });
  EXPECT_FALSE(gate.Enter());
  gate.Leave();
  EXPECT_EQ(drained, 0);
  gate.Leave();
  EXPECT_EQ(drained, 1);
  gate.Close([&] { ++drained; });
  EXPECT_EQ(drained, 1) << "only the first Close counts";
}

TEST(Gate, AnEmptyGateDrainsAtOnce) {
  Gate gate;
  int drained = 0;
  gate.Close([&] { ++drained; });
  EXPECT_EQ(drained, 1);
}

TEST(Gate, NothingIsInsideAfterTheDrain) {
  for (int round = 0; round < 50; ++round) {
    Gate gate;
    std::atomic<int> inside{0};
    std::atomic<bool> drained{false};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        while (gate.Enter()) {
          inside.fetch_add(1);
          EXPECT_FALSE(drained.load());
          inside.fetch_sub(1);
          gate.Leave();
        }
      });
    }
    std::this_thread::yield();
    gate.Close([&] {
      drained = true;
      EXPECT_EQ(inside.load(), 0);
    });
    for (auto& thread : threads) thread.join();
    EXPECT_TRUE(drained.load());
  }
}

PoolSchema TwoLayers() {
  PoolSchema schema;
  schema.model = "m";
  GroupSchema group;
  group.dtype = DType::kFloat16;
  group.heads_total = group.head_count = 2;
  group.head_dim = 64;
  group.block_tokens = 16;
  group.num_blocks = 8;
  group.layers = {LayerSchema{1, {}, TensorSchema{}}, LayerSchema{0, {}, TensorSchema{}}};
  schema.groups = {group};
  return schema;
}

TEST(Coverage, LayersAreReadyInOrderAndClaimsAreOnce) {
  TransferShape shape;
  shape.token_count = 5000;
  shape.kept = {{0, 5000}};
  std::vector<LayerPlace> places;
  shape.layers = PlanLayersOf(TwoLayers(), &places);
  const std::vector<ChunkCut> cuts = CutChunks(shape);
  ASSERT_GE(cuts.size(), 4u);
  Coverage coverage(cuts, 2);
  for (const ChunkCut& cut : cuts) {
    EXPECT_TRUE(coverage.Claim(cut.chunk_index));
    EXPECT_FALSE(coverage.Claim(cut.chunk_index));
  }
  for (auto it = cuts.rbegin(); it != cuts.rend(); ++it) {
    EXPECT_FALSE(coverage.full());
    EXPECT_EQ(coverage.layers_ready(), 0u) << "layer 0 is the last to finish here";
    coverage.Done(*it);
  }
  EXPECT_TRUE(coverage.full());
  EXPECT_EQ(coverage.layers_ready(), 2u);
  ASSERT_EQ(coverage.DoneRuns().size(), 1u);
  EXPECT_EQ(coverage.DoneRuns()[0].count, cuts.size());
}

TEST(Shape, LayersComeInModelOrderWithTheirPlaces) {
  std::vector<LayerPlace> places;
  const std::vector<PlanLayer> layers = PlanLayersOf(TwoLayers(), &places);
  ASSERT_EQ(layers.size(), 2u);
  EXPECT_EQ(layers[0].layer, 0);
  EXPECT_EQ(places[0].layer_slot, 1u);
  EXPECT_EQ(layers[1].layer, 1);
  EXPECT_EQ(places[1].layer_slot, 0u);
}

TEST(Shape, AMismatchNamesItsField) {
  const PoolShapeFrame good = ShapeOf(TwoLayers());
  EXPECT_TRUE(CompareShapes(good, good, true).ok());
  struct Case {
    const char* field;
    std::function<void(PoolShapeFrame&)> change;
  };
  const Case cases[] = {
      {"model", [](PoolShapeFrame& s) { s.model = "other"; }},
      {"revision", [](PoolShapeFrame& s) { s.revision = "2"; }},
      {"groups", [](PoolShapeFrame& s) { s.groups.clear(); }},
      {"groups[0].kind", [](PoolShapeFrame& s) { s.groups[0].kind = 3; }},
      {"groups[0].heads_total", [](PoolShapeFrame& s) { s.groups[0].heads_total = 9; }},
      {"groups[0].head_first", [](PoolShapeFrame& s) { s.groups[0].head_first = 9; }},
      {"groups[0].head_count", [](PoolShapeFrame& s) { s.groups[0].head_count = 9; }},
      {"groups[0].head_dim", [](PoolShapeFrame& s) { s.groups[0].head_dim = 8; }},
      {"groups[0].has_v", [](PoolShapeFrame& s) { s.groups[0].has_v = false; }},
      {"groups[0].layers", [](PoolShapeFrame& s) { s.groups[0].layers.pop_back(); }},
  };
  for (const Case& c : cases) {
    PoolShapeFrame other = good;
    c.change(other);
    const absl::Status status = CompareShapes(good, other, false);
    EXPECT_EQ(ReasonOf(status), "SCHEMA_MISMATCH");
    EXPECT_EQ(MetadataOf(status)["field"], c.field);
  }
}

TEST(Shape, OnlyExactConversionsAreExact) {
  PoolShapeFrame source = ShapeOf(TwoLayers());
  PoolShapeFrame target = source;
  target.groups[0].data_type = static_cast<int32_t>(DType::kFloat32);
  EXPECT_TRUE(CompareShapes(source, target, true).ok());
  target.groups[0].data_type = static_cast<int32_t>(DType::kBFloat16);
  EXPECT_TRUE(CompareShapes(source, target, false).ok());
  EXPECT_EQ(MetadataOf(CompareShapes(source, target, true))["field"], "groups[0].data_type");
}

TEST(Shape, AManifestOfAPeerIsChecked) {
  const PoolSchema schema = TwoLayers();
  ManifestFrame good;
  good.token_count = 100;
  good.kept_tokens = {{0, 4}, {50, 50}};
  good.shape = ShapeOf(schema);
  absl::StatusOr<TransferShape> shape = ShapeOfManifest(good, schema);
  ASSERT_TRUE(shape.ok());
  EXPECT_EQ(shape->kept_count(), 54u);
  const std::vector<std::vector<FrameRun>> bad = {
      {}, {{0, 0}}, {{0, 101}}, {{4, 4}, {7, 1}}, {{50, 10}, {0, 4}}, {{0xFFFFFFFFu, 0xFFFFFFFFu}}};
  for (const auto& runs : bad) {
    ManifestFrame manifest = good;
    manifest.kept_tokens = runs;
    EXPECT_EQ(ReasonOf(ShapeOfManifest(manifest, schema).status()), "BAD_MANIFEST");
  }
}

}  // namespace
}  // namespace spectrumkv
