// Refinement of pools on GPUs that are not there: what is staged on the host lands on the device, behind the worker's reads, and
// both sides' checksums are compared wherever the words lie.
#include <atomic>
#include <optional>
#include <thread>

#include "tests/unit/transfer/device_fixture.h"

namespace spectrumkv {
namespace {

using testing::FakeExport;

class DeviceRefineTest : public DeviceEngineTest {
 protected:
  // A transfer "t" at Q4 that has committed and can be refined.
  void Commit() {
    Policy policy;
    policy.allocator = Allocator::kUniform;
    policy.uniform_tier = Tier::kQ4;
    policy.budget = 0.6;
    SenderSpec sender = Send("t", Source(), policy);
    sender.retain_ms = 60000;
    ReceiverSpec receiver = Expect("t", Target());
    receiver.refinable = true;
    ASSERT_TRUE(b_->manager().StartReceiver(std::move(receiver)).ok());
    ASSERT_TRUE(a_->manager().StartSender(std::move(sender)).ok());
    const TransferReport sent = a_->Watch("t", Role::kSender)->WaitTerminal(60);
    ASSERT_EQ(sent.state, TransferState::kCommitted) << sent.error;
    ASSERT_EQ(b_->Watch("t", Role::kReceiver)->WaitTerminal(60).state, TransferState::kCommitted);
    base_ = Landed();
    ASSERT_FALSE(base_ == sent_);
  }
  TransferReport Refine(const std::string& id, bool direct = false) {
    RefineSpec spec;
    spec.transfer_id = "t";
    spec.refine_id = id;
    spec.peer = "a";
    spec.owner = kMe;
    spec.direct = direct;
    spec.deadline_ms = 30000;
    spec.fingerprint = "f-" + id;
    const auto started = b_->manager().Refine(spec);
    EXPECT_TRUE(started.ok()) << started.status();
    return b_->Watch(id, Role::kReceiver)->WaitTerminal(60);
  }
  // All of it waits in staging, on its way from the host to the device.
  void Stage() {
    Build();
    Prepare(Where::kHost, Where::kDevice);
    Commit();
    ASSERT_EQ(Refine("r").state, TransferState::kCommitted);
  }
  // The answer of one call, when it comes.
  struct Call {
    std::mutex mutex;
    std::optional<absl::StatusOr<RefinementApplied>> answer;
    bool over() {
      std::lock_guard<std::mutex> lock(mutex);
      return answer.has_value();
    }
  };
  std::shared_ptr<Call> Apply(const std::string& id, uint64_t max_bytes = 0, const std::string& read_event = "") {
    auto call = std::make_shared<Call>();
    b_->manager().ApplyRefinement({id, kMe, max_bytes, read_event, {}}, [call](auto applied) {
      std::lock_guard<std::mutex> lock(call->mutex);
      EXPECT_FALSE(call->answer.has_value()) << "answered twice";
      call->answer = std::move(applied);
    });
    return call;
  }
  static bool Eventually(const std::function<bool()>& holds) {
    for (int i = 0; i < 1000 && !holds(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return holds();
  }

  std::vector<std::string> base_;
};

constexpr Way kWays[] = {{Where::kDevice, Where::kHost}, {Where::kHost, Where::kDevice}, {Where::kDevice, Where::kDevice}};

TEST_F(DeviceRefineTest, StagedWordsLandOnEveryWayAndAreExact) {
  uint32_t seed = 1;
  for (const Way& way : kWays) {
    for (const bool heads_first : {true, false}) {
      Build(++seed);
      Prepare(way.source, way.target);
      target_layout_.heads_first = heads_first;
      target_pool_ = b_->AddPool(target_layout_);
      Commit();
      ASSERT_EQ(Refine("r").state, TransferState::kCommitted);
      EXPECT_TRUE(Landed() == base_) << "nothing lands before it is applied";
      int calls = 0;
      for (bool complete = false; !complete && calls < 20; ++calls) {
        const auto call = Apply("r", 1);
        ASSERT_TRUE(call->answer.has_value() && call->answer->ok()) << call->answer->status();
        complete = (*call->answer)->complete;
        EXPECT_EQ((*call->answer)->exact, complete);
      }
      EXPECT_EQ(calls, 6) << "a chunk for each K and V";
      EXPECT_TRUE(Landed() == sent_);
      StartOver();
    }
  }
  Build();
}

TEST_F(DeviceRefineTest, ASourceMovesFromTheDeviceToTheCache) {
  Build();
  Prepare(Where::kDevice, Where::kDevice);
  Commit();
  std::atomic<int> cached{-1};
  a_->manager().MoveToCache(kMe, "t", Role::kSender, [&](const absl::StatusOr<bool>& answer) { cached = answer.ok() && *answer; });
  ASSERT_TRUE(Eventually([&] { return cached >= 0; }));
  EXPECT_EQ(cached, 1);
  FillBlocks(*a_, source_pool_, source_layout_, {7, 3, 4, 20, 1}, 99);  // another request's
  ASSERT_EQ(Refine("r").state, TransferState::kCommitted);
  const auto call = Apply("r");
  ASSERT_TRUE(call->answer->ok()) << call->answer->status();
  EXPECT_TRUE((*call->answer)->exact);
  EXPECT_TRUE(Landed() == sent_);
}

TEST_F(DeviceRefineTest, DirectIsExactToo) {
  Build();
  Prepare(Where::kDevice, Where::kDevice);
  Commit();
  const TransferReport report = Refine("r", /*direct=*/true);
  ASSERT_EQ(report.state, TransferState::kCommitted) << report.error;
  EXPECT_TRUE(report.exact);
  EXPECT_TRUE(Landed() == sent_);
}

TEST_F(DeviceRefineTest, NothingIsWrittenBeforeTheWorkersEvent) {
  Stage();
  FakeExport event = FakeExport::Event(0);
  const auto call = Apply("r", 0, event.handle());
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_FALSE(call->over());
  EXPECT_TRUE(Landed() == base_) << "the worker still reads";
  event.Reach();
  ASSERT_TRUE(Eventually([&] { return call->over(); }));
  ASSERT_TRUE(call->answer->ok()) << call->answer->status();
  EXPECT_TRUE((*call->answer)->exact);
  EXPECT_TRUE(Landed() == sent_);
}

TEST_F(DeviceRefineTest, AnEventThatNeverComesHoldsNothing) {
  Stage();
  FakeExport event = FakeExport::Event(0);
  const auto call = Apply("r", 0, event.handle());
  ASSERT_TRUE(Eventually([&] { return call->over(); }));
  EXPECT_EQ(ReasonOf(call->answer->status()), "EVENT_NOT_REACHED");
  EXPECT_TRUE(Landed() == base_);
  EXPECT_EQ(ReasonOf(Apply("r", 0, "short")->answer->status()), "INVALID_IPC_HANDLE");
  const auto again = Apply("r");
  ASSERT_TRUE(again->answer->ok()) << "it waits in staging as before";
  EXPECT_TRUE(Landed() == sent_);
}

TEST_F(DeviceRefineTest, ADaemonThatStopsAnswersWhoWaitsForAnEvent) {
  Stage();
  FakeExport event = FakeExport::Event(0);
  const auto call = Apply("r", 0, event.handle());
  b_->manager().Shutdown();
  ASSERT_TRUE(call->over());
  EXPECT_EQ(ReasonOf(call->answer->status()), "SHUTTING_DOWN");
}

TEST_F(DeviceRefineTest, NothingIsWrittenAfterAReleaseThatCameBeforeTheEvent) {
  for (const std::string released_id : {"t", "r"}) {
    Stage();
    FakeExport event = FakeExport::Event(0);
    const auto call = Apply("r", 0, event.handle());
    std::atomic<bool> released{false};
    b_->manager().EndRefinements(kMe, released_id, Role::kReceiver, [&] { released = true; });
    ASSERT_TRUE(Eventually([&] { return released.load(); }));
    event.Reach();
    ASSERT_TRUE(Eventually([&] { return call->over(); }));
    EXPECT_EQ(call->answer->status().code(), absl::StatusCode::kFailedPrecondition) << call->answer->status();
    EXPECT_TRUE(Landed() == base_);
    if (released_id == "r") break;
    StartOver();
  }
}

TEST_F(DeviceRefineTest, OneCallWaitsAtATimeAndNoneForWhoHasGone) {
  Stage();
  FakeExport event = FakeExport::Event(0);
  std::optional<absl::StatusOr<RefinementApplied>> answer;
  std::atomic<bool> gone{false}, told{false};
  b_->manager().ApplyRefinement({"r", kMe, 0, event.handle(), [&] { return gone.load(); }}, [&](auto applied) {
    answer = std::move(applied);
    told = true;
  });
  EXPECT_EQ(ReasonOf(Apply("r", 0, event.handle())->answer->status()), "APPLY_PENDING");
  gone = true;
  ASSERT_TRUE(Eventually([&] { return told.load(); }));
  EXPECT_EQ(answer->status().code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(Landed() == base_);
  event.Reach();
  const auto call = Apply("r", 0, event.handle());
  ASSERT_TRUE(Eventually([&] { return call->over(); }));
  ASSERT_TRUE(call->answer->ok()) << call->answer->status();
  EXPECT_TRUE(Landed() == sent_);
}

TEST_F(DeviceRefineTest, HostMemoryHasNoEvents) {
  Build();
  Prepare(Where::kDevice, Where::kHost);
  Commit();
  ASSERT_EQ(Refine("r").state, TransferState::kCommitted);
  FakeExport event = FakeExport::Event(0);
  EXPECT_EQ(ReasonOf(Apply("r", 0, event.handle())->answer->status()), "NOT_ON_DEVICE");
}

TEST_F(DeviceRefineTest, ADeviceThatFailsLeavesTheRestStaged) {
  Stage();
  runtime_b_->Fail("CopyRows", gpu::kOutOfMemory, /*good=*/10);
  const auto call = Apply("r");
  ASSERT_TRUE(call->over());
  EXPECT_FALSE(call->answer->ok());
  runtime_b_->ForgetFailures();
  const auto again = Apply("r");
  ASSERT_TRUE(again->answer->ok()) << again->answer->status();
  EXPECT_TRUE((*again->answer)->complete);
  EXPECT_TRUE(Landed() == sent_);
}

}  // namespace
}  // namespace spectrumkv
