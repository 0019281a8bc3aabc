// Pools on GPUs that are not there, end to end in one process: engines with a fake device each, whose streams run late
// and in a seeded order, and whose kernels are the real ones on the shim.
#include <map>
#include <set>
#include <tuple>

#include "tests/unit/transfer/device_fixture.h"

namespace spectrumkv {
namespace {

// The same values, block numbers and policies on every way: what lands is equal, bit for bit, to what lands between host
// pools, and so are the bytes on the wire.
TEST_F(DeviceEngineTest, EveryWayLandsTheSameBitsAsBetweenHosts) {
  Build();
  const Way ways[] = {{Where::kHost, Where::kHost},
                      {Where::kDevice, Where::kHost},
                      {Where::kHost, Where::kDevice},
                      {Where::kDevice, Where::kDevice}};
  std::map<std::string, std::vector<std::string>> landed;
  std::map<std::string, uint64_t> wire_bytes;
  std::map<std::string, std::pair<double, double>> errors;
  int number = 0;
  for (const Way& way : ways) {
    Prepare(way.source, way.target);
    for (const auto& [name, policy] : Policies()) {
      SCOPED_TRACE(name + ", way " + std::to_string(number));
      FillBlocks(*b_, target_pool_, target_layout_, {10, 11, 12, 13, 14, 15, 16, 17, 18, 19}, 9);
      const auto told = Reconstruction();
      const TransferReport report = Run(name + std::to_string(number), policy, 77);
      ASSERT_EQ(report.state, TransferState::kCommitted) << report.error;
      EXPECT_EQ(report.layers_ready, 3u);
      EXPECT_EQ(report.path, way.target == Where::kDevice ? "device" : "host");
      EXPECT_EQ(sent_report_.path, way.source == Where::kDevice ? "device" : "host");
      const auto first = landed.emplace(name, Landed()).first;
      EXPECT_TRUE(Landed() == first->second);
      EXPECT_EQ(report.wire_bytes, wire_bytes.emplace(name, report.wire_bytes).first->second);
      // What coding lost is sampled on the GPU as in host memory; the order in which chunks add to the sum is open.
      const auto now = Reconstruction();
      const auto lost = errors.emplace(name, std::pair(now.first - told.first, now.second - told.second)).first->second;
      EXPECT_NEAR(now.first - told.first, lost.first, 1e-9);
      const bool lossy = name != "raw" && name != "recent_drop";
      EXPECT_EQ(lost.first > 0, lossy);
      if (!lossy) continue;  // RAW that a host pool lends is not sampled
      EXPECT_EQ(now.second - told.second, lost.second);
      EXPECT_GT(lost.second, 0);
    }
    ++number;
  }
  EXPECT_GT(runtime_a_->calls()["Encode"], 0);
  EXPECT_GT(runtime_a_->calls()["Scan"], 0);
  EXPECT_GT(runtime_a_->calls()["Spread"], 0);
  EXPECT_GT(runtime_a_->calls()["Attend"], 0);
  EXPECT_GT(runtime_b_->calls()["Decode"], 0);
}

// A transfer of many small chunks: several are coded by one launch. A launch function is four kernels to encode, two to decode.
TEST_F(DeviceEngineTest, SmallChunksShareLaunches) {
  Build(1, /*sampled=*/0, /*slots=*/32);
  source_layout_.layers = target_layout_.layers = 24;
  Prepare(Where::kDevice, Where::kDevice);
  Policy policy;
  policy.budget = 0.4;
  const TransferReport report = Run("t", policy);
  ASSERT_EQ(report.state, TransferState::kCommitted) << report.error;
  const auto sender = runtime_a_->calls(), receiver = runtime_b_->calls();
  std::printf("%d chunks: %d launches to encode, %d to decode; %d kernels, one by one %d\n", static_cast<int>(report.chunks),
              sender.at("Encode"), receiver.at("Decode"), 4 * sender.at("Encode") + 2 * receiver.at("Decode"),
              static_cast<int>(6 * report.chunks));
  EXPECT_EQ(report.chunks, 24u);
  EXPECT_LE(sender.at("Encode"), 12) << "the first 16 credits alone make two full batches";
  EXPECT_LE(receiver.at("Decode"), 24);
}

// What is read before the plan, and what is read back of coded chunks, several chunks in one launch as well.
TEST_F(DeviceEngineTest, SmallChunksAreScannedAndReadBackTogether) {
  Build(1, /*sampled=*/1, /*slots=*/32);
  source_layout_.layers = target_layout_.layers = 24;
  Prepare(Where::kDevice, Where::kHost);
  Policy policy;  // scans and samples
  policy.budget = 0.4;
  policy.allocator = Allocator::kOptimal;
  policy.importance = ImportanceSource::kKeyNorm;
  const auto before = runtime_a_->calls();
  const TransferReport report = Run("t", policy);
  ASSERT_EQ(report.state, TransferState::kCommitted) << report.error;
  EXPECT_EQ(report.chunks, 24u);
  const auto calls = [&, after = runtime_a_->calls()](const std::string& call) {
    return after.at(call) - (before.count(call) == 0 ? 0 : before.at(call));
  };
  std::printf("24 chunks: %d launches to scan, %d to sample; %d to encode and to encode what was sampled, %d to read it back\n",
              calls("Scan"), calls("Spread"), calls("Encode"), calls("Decode"));
  EXPECT_EQ(calls("Scan"), 3) << "16 planes each";
  EXPECT_EQ(calls("Spread"), 3);
  EXPECT_EQ(calls("Encode"), 2 * calls("Decode")) << "each batch is read back by one launch of each";
  EXPECT_LE(calls("Decode"), 12);
  // K and V of 24 chunks, one observation for each tier in them: as many as the same source in host memory gives.
  const double on_device = Reconstruction().second;
  Prepare(Where::kHost, Where::kHost);
  ASSERT_EQ(Run("h", policy).state, TransferState::kCommitted);
  EXPECT_EQ(Reconstruction().second, 2 * on_device);
}

// What a GPU does is no figure of the CPU's, at either side.
TEST_F(DeviceEngineTest, RatesOfAGpuAreItsOwn) {
  Build(1, /*sampled=*/0, /*slots=*/32);
  source_layout_.layers = target_layout_.layers = 24;
  const auto raw = static_cast<size_t>(TierFamily::kRaw);
  const auto known = [&](Engine& engine, CodedBy by) {
    const StageRates rates = engine.manager().StagesOf(by);
    return std::pair(rates.encode[raw].has_value(), rates.own_decode[raw].has_value());
  };
  int number = 0;
  for (const auto& [where, by, other] : {std::tuple(Where::kDevice, CodedBy::kGpu, CodedBy::kCpu),
                                         std::tuple(Where::kHost, CodedBy::kCpu, CodedBy::kGpu)}) {
    EXPECT_EQ(known(*a_, by), std::pair(false, false));
    EXPECT_EQ(known(*b_, by), std::pair(false, false));
    const auto before = a_->manager().StagesOf(other).encode[raw];
    const auto peer_before = a_->manager().MeasuredOf("b", by).peer_decode[raw];
    for (int i = 0; i < 2; ++i) {  // no rate is known before 1 MiB
      Prepare(where, where);
      ASSERT_EQ(Run("t" + std::to_string(++number), Raw()).state, TransferState::kCommitted);
    }
    EXPECT_EQ(known(*a_, by), std::pair(true, false));
    EXPECT_EQ(known(*b_, by), std::pair(false, true));
    EXPECT_EQ(a_->manager().StagesOf(other).encode[raw], before) << "of the other nothing was learnt";
    EXPECT_NE(a_->manager().MeasuredOf("b", by).peer_decode[raw], peer_before);
  }
}

// Some order of streams that run beside each other: no result depends on it.
TEST_F(DeviceEngineTest, SeededOrdersOfStreamsChangeNothing) {
  std::vector<std::string> first;
  uint64_t turns = 0;
  for (uint32_t seed = 1; seed <= 6; ++seed) {
    Build(seed, /*sampled=*/0, /*slots=*/32);
    source_layout_.layers = target_layout_.layers = 20;  // more than one batch
    Prepare(Where::kDevice, Where::kDevice);
    Policy policy;
    policy.budget = 0.4;
    ASSERT_EQ(Run("t", policy).state, TransferState::kCommitted);
    const std::vector<std::string> landed = Landed();
    if (first.empty()) first = landed;
    EXPECT_TRUE(landed == first) << "seed " << seed;
    turns += runtime_a_->turns() + runtime_b_->turns();
    if (seed == 6) break;
    StartOver();
  }
  EXPECT_GT(turns, 0u) << "streams never had work beside each other";
}

TEST_F(DeviceEngineTest, ALayerwiseSourceOnADeviceGoesLayerByLayer) {
  Build();
  Prepare(Where::kDevice, Where::kDevice);
  Policy policy;
  policy.budget = 0.5;
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
  EXPECT_EQ(watcher->WaitTerminal().state, TransferState::kCommitted);
}

class LayerwiseQueriesTest : public DeviceEngineTest {
 protected:
  // A transfer whose layers, and the queries that attend to them, are still to come; its id.
  std::string BeginLayerwise(Where source) {
    Prepare(source, Where::kHost);
    const std::string id = source == Where::kHost ? "host" : "device";
    SenderSpec spec = Send(id, Source(), Policies().at("recent"));
    spec.layerwise = true;
    EXPECT_TRUE(b_->manager().StartReceiver(Expect(id, Target())).ok());
    EXPECT_TRUE(a_->manager().StartSender(std::move(spec)).ok());
    return id;
  }
};

// Queries come with their layers; what is sent is what the same source in host memory sends.
TEST_F(LayerwiseQueriesTest, AttendOnTheDevice) {
  Build();
  std::vector<std::string> landed;
  for (const Where source : {Where::kHost, Where::kDevice}) {
    const std::string id = BeginLayerwise(source);
    auto watcher = b_->Watch(id, Role::kReceiver);
    for (uint32_t layer = 0; layer < 3; ++layer) {
      ASSERT_TRUE(a_->manager().Advance(kMe, id, layer + 1, 80, {{}, Queries({layer})}).ok());
      ASSERT_TRUE(watcher->WaitLayers(layer + 1)) << layer;
    }
    EXPECT_EQ(watcher->WaitTerminal().state, TransferState::kCommitted);
    EXPECT_EQ(a_->Watch(id, Role::kSender)->WaitTerminal().importance, ImportanceSource::kRecentQueries);
    if (landed.empty()) landed = Landed();
    EXPECT_TRUE(Landed() == landed);
  }
  EXPECT_EQ(runtime_a_->calls()["Attend"], 3) << "one launch function for each layer";
}

// They wait for their keys: nothing attends to no token.
TEST_F(LayerwiseQueriesTest, MayComeBeforeTheirLayers) {
  Build();
  std::vector<std::string> landed;
  for (const Where source : {Where::kHost, Where::kDevice}) {
    const std::string id = BeginLayerwise(source);
    ASSERT_TRUE(a_->manager().Advance(kMe, id, 3, 0, {{}, Queries({1, 2})}).ok());
    ASSERT_TRUE(a_->manager().Advance(kMe, id, 1, 80, {{}, Queries({0})}).ok());
    ASSERT_TRUE(a_->manager().Advance(kMe, id, 3, 80, {}).ok());
    EXPECT_EQ(a_->Watch(id, Role::kSender)->WaitTerminal().state, TransferState::kCommitted);
    b_->Watch(id, Role::kReceiver)->WaitTerminal();
    if (landed.empty()) landed = Landed();
    EXPECT_TRUE(Landed() == landed);
  }
  EXPECT_EQ(runtime_a_->calls()["Attend"], 3);
}

// Both workers die while their chunks are coded: the fake device would tell of memory that goes while work on it is queued.
TEST_F(DeviceEngineTest, MemoryStaysUntilWhatIsQueuedOnItHasRun) {
  int failed = 0;
  for (uint32_t seed = 1; seed <= 8; ++seed) {
    Build(seed);
    source_layout_.layers = target_layout_.layers = 6;
    Prepare(Where::kDevice, Where::kDevice);
    const auto held = [](Engine& engine, const std::string& pool) {
      const auto hold = engine.pools().OpenHold(kMe, pool, engine.epoch(), [](const std::string&) {});
      EXPECT_TRUE(hold.ok()) << hold.status();
      return hold.value_or(0);
    };
    const uint64_t source_hold = held(*a_, source_pool_), target_hold = held(*b_, target_pool_);
    ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
    ASSERT_TRUE(a_->manager().StartSender(Send("t", Source(), Policies().at("optimal"))).ok());
    auto receiver = b_->Watch("t", Role::kReceiver), sender = a_->Watch("t", Role::kSender);
    if (seed % 2 == 0) receiver->WaitLayers(1);
    (seed % 4 < 2 ? *a_ : *b_).pools().CloseHold(seed % 4 < 2 ? source_pool_ : target_pool_,
                                                 seed % 4 < 2 ? source_hold : target_hold);
    failed += receiver->WaitTerminal().state != TransferState::kCommitted ? 1 : 0;
    sender->WaitTerminal();
    StartOver();
  }
  std::printf("%d of 8 transfers failed with their worker\n", failed);
  Build();
}

// A decode that was queued but fails when it runs: no layer is told ready, nothing is committed.
TEST_F(DeviceEngineTest, NothingIsReadyBeforeItsStreamHasFinished) {
  Build();
  Prepare(Where::kHost, Where::kDevice);
  runtime_b_->Fail("Decode", gpu::kIllegalInstruction, 0, /*late=*/true);
  const TransferReport report = Run("t", Raw());
  EXPECT_EQ(report.state, TransferState::kFailed);
  EXPECT_EQ(ReasonOf(report.error), "DEVICE_FAILED") << report.error;
  EXPECT_EQ(report.layers_ready, 0u);
  EXPECT_EQ(sent_report_.state, TransferState::kFailed);
}

// Every call of the runtime that a transfer makes, failing with errors of each kind, when made and when run: the transfer
// fails on both sides with a reason, the blocks come back, and the next one succeeds unless the device has failed.
TEST_F(DeviceEngineTest, EveryFailureOfTheRuntimeEndsTheTransferAndNothingElse) {
  struct Case {
    const char* call;
    bool at_sender, late;
  };
  const Case cases[] = {{"CreateStream", true, false},   {"AllocatePinned", true, false}, {"Allocate", true, false},
                        {"Copy", true, false},           {"Copy", true, true},            {"Encode", true, false},
                        {"Encode", true, true},          {"Attend", true, false},        {"Attend", true, true},
                        {"Scan", true, false},           {"Scan", true, true},           {"Spread", true, true},
                        {"Synchronize", true, false},    {"Copy", false, false},          {"Copy", false, true},
                        {"Decode", false, false},        {"Decode", false, true},         {"Synchronize", false, false},
                        {"ZeroRows", false, false},      {"ZeroRows", false, true}};
  const std::map<int, std::string> errors = {{gpu::kOutOfMemory, "OUT_OF_DEVICE_MEMORY"},
                                             {gpu::kInvalidValue, "DEVICE_ERROR"},
                                             {gpu::kNoKernelImage, "DEVICE_TOO_OLD"},
                                             {gpu::kUnknownError, "DEVICE_ERROR"},
                                             {gpu::kIllegalAddress, "DEVICE_FAILED"},
                                             {gpu::kLaunchFailure, "DEVICE_FAILED"}};
  Policy policy;  // scans and samples
  policy.budget = 0.4;
  policy.allocator = Allocator::kOptimal;
  policy.importance = ImportanceSource::kKeyNorm;
  int number = 0;
  for (const auto& [error, reason] : errors) {
    for (const Case& test : cases) {
      const std::string call = test.call;
      // Each kind of error at each call, each error at the kernels.
      const bool kind = error == gpu::kOutOfMemory || error == gpu::kIllegalAddress;
      if (!kind && call != "Encode" && call != "Decode") continue;
      SCOPED_TRACE(call + (test.late ? " late " : " ") + std::to_string(error));
      Build();
      Prepare(Where::kDevice, Where::kDevice);
      FakeRuntime& runtime = test.at_sender ? *runtime_a_ : *runtime_b_;
      // Prepare has made a lane, which may be enough: a second one is made where two threads code at a time.
      const bool second_lane = call == "CreateStream" || call == "AllocatePinned";
      runtime.Fail(call, error, 0, test.late, /*always=*/second_lane);
      Policy asked = policy;
      if (call == "Attend") asked = Policies().at("recent");
      const TransferReport report = Run("t" + std::to_string(++number), asked, 77);
      runtime.ForgetFailures();
      if (!second_lane || report.state != TransferState::kCommitted) {
        EXPECT_EQ(report.state, TransferState::kFailed);
        EXPECT_EQ(ReasonOf(test.at_sender ? sent_report_.error : report.error), reason)
            << sent_report_.error << " / " << report.error;
      }
      if (!gpu::IsSticky(error)) {
        EXPECT_NE(Target(), nullptr) << "the blocks are free again";
        EXPECT_EQ(Run("again" + std::to_string(number), policy, 77).state, TransferState::kCommitted);
      }
      StartOver();
    }
  }
  Build();
}

}  // namespace
}  // namespace spectrumkv
