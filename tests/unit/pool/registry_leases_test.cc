// How pools end: leases, streams that break, draining, and unregistering while they are held.
#include <gtest/gtest.h>

#include "server/memory/mapping.h"
#include "tests/unit/pool/registry_fixture.h"

namespace spectrumkv {
namespace {

TEST_F(RegistryTest, ALeaseExpiresWithoutAnyWorkAndNotBefore) {
  const std::string pool = Register(MakeSchema("lpbthd"), 3000);
  clock_.AdvanceMs(2999);
  EXPECT_EQ(registry_->List()[0].lease_remaining_ms, 1);
  EXPECT_EQ(*registry_->Renew(kMe, pool, kEpoch), 3000);
  clock_.AdvanceMs(2999);
  ASSERT_EQ(registry_->List().size(), 1u);
  EXPECT_TRUE(expired_.empty());
  clock_.AdvanceMs(1);
  EXPECT_TRUE(registry_->List().empty());
  EXPECT_EQ(expired_, std::vector<std::string>({"pool"}));
  EXPECT_EQ(ReasonOf(registry_->Renew(kMe, pool, kEpoch).status()), "UNKNOWN_POOL");
  EXPECT_EQ(clock_.pending(), 0u);
}

TEST_F(RegistryTest, AnExpiredLeaseTellsHoldsAndStaysMappedForThem) {
  const std::string pool = Register(MakeSchema("lpbthd"), 1000);
  auto source = Source(pool, Blocks({{0, 1}}), 4);
  auto target = Target(pool, Blocks({{1, 1}}), 4);
  std::vector<std::string> told;
  source->OnLost([&told](const absl::Status& why) { told.push_back("source " + ReasonOf(why)); });
  target->OnLost([&told](const absl::Status& why) { told.push_back("target " + MetadataOf(why)["cause"]); });
  EXPECT_TRUE(source->Health().ok());
  clock_.AdvanceMs(1000);
  EXPECT_EQ(told, std::vector<std::string>({"source POOL_LOST", "target LEASE_EXPIRED"}));
  EXPECT_EQ(expired_, std::vector<std::string>({"pool", "source", "destination"}));
  EXPECT_TRUE(source->Health().ok()) << "fully written, it may be read to its end";
  EXPECT_EQ(ReasonOf(target->Health()), "POOL_LOST");
  EXPECT_EQ(registry_->List()[0].state, "lost");
  EXPECT_EQ(ReasonOfSource(pool, Blocks({{2, 1}}), 1), "UNKNOWN_POOL");
  uint8_t* row = nullptr;
  target->FillRows(0, 0, PlaneId::kK, 3, 1, &row);
  *row = 1;  // a decode that is under way
  target.reset();
  EXPECT_EQ(registry_->List().size(), 1u);
  source.reset();
  EXPECT_TRUE(registry_->List().empty());
}

TEST_F(RegistryTest, OnLostIsToldAtOnceWhenLateAndNeverAfterTheHold) {
  const std::string pool = Register(MakeSchema("lpbthd"), 1000);
  auto late = Source(pool, Blocks({{0, 1}}), 4);
  auto gone = Source(pool, Blocks({{0, 1}}), 4);
  int late_calls = 0, gone_calls = 0;
  gone->OnLost([&gone_calls](const absl::Status&) { ++gone_calls; });
  gone.reset();
  clock_.AdvanceMs(1000);
  late->OnLost([&late_calls](const absl::Status&) { ++late_calls; });
  EXPECT_EQ(late_calls, 1);
  EXPECT_EQ(gone_calls, 0);
}

TEST_F(RegistryTest, TheLastBrokenStreamLosesThePool) {
  const std::string pool = Register(MakeSchema("lpbthd"));
  std::vector<std::string> events;
  const auto on_event = [&events](const std::string& event) { events.push_back(event); };
  const uint64_t a = *registry_->OpenHold(kMe, pool, kEpoch, on_event);
  const uint64_t b = *registry_->OpenHold(kMe, pool, kEpoch, on_event);
  auto hold = Source(pool, Blocks({{0, 1}}), 4);
  std::string cause;
  hold->OnLost([&cause](const absl::Status& why) { cause = MetadataOf(why)["cause"]; });
  registry_->CloseHold(pool, a);
  registry_->CloseHold(pool, a);
  EXPECT_EQ(cause, "");
  registry_->CloseHold(pool, b);
  EXPECT_EQ(cause, "WORKER_GONE");
  EXPECT_TRUE(events.empty());
  hold.reset();
  EXPECT_TRUE(registry_->List().empty());
  registry_->CloseHold(pool, b);
}

TEST_F(RegistryTest, StreamsHearOfTheEnd) {
  std::vector<std::string> events;
  const auto on_event = [&events](const std::string& event) { events.push_back(event); };
  const std::string silent = Register(MakeSchema("lpbthd"), 1000);
  ASSERT_TRUE(registry_->OpenHold(kMe, silent, kEpoch, on_event).ok());
  clock_.AdvanceMs(1000);
  const std::string pool = Register(MakeSchema("lpbthd"));
  for (int i = 0; i < 64; ++i) ASSERT_TRUE(registry_->OpenHold(kMe, pool, kEpoch, on_event).ok());
  EXPECT_EQ(ReasonOf(registry_->OpenHold(kMe, pool, kEpoch, on_event).status()), "HOLDS_FULL");
  Unregister(pool);
  std::vector<std::string> expected(64, "UNREGISTERED");
  expected.insert(expected.begin(), "LEASE_EXPIRED");
  EXPECT_EQ(events, expected);
}

TEST_F(RegistryTest, DrainingRefusesNewPoolsAndServesTheOld) {
  const std::string pool = Register(MakeSchema("lpbthd"));
  std::vector<std::string> events;
  ASSERT_TRUE(registry_->OpenHold(kMe, pool, kEpoch, [&](const std::string& event) { events.push_back(event); }).ok());
  registry_->StartDraining();
  registry_->StartDraining();
  EXPECT_EQ(events, std::vector<std::string>({"DRAINING"}));
  std::vector<std::string> late;  // a worker that connects again
  ASSERT_TRUE(registry_->OpenHold(kMe, pool, kEpoch, [&](const std::string& event) { late.push_back(event); }).ok());
  EXPECT_EQ(late, std::vector<std::string>({"DRAINING"}));
  EXPECT_EQ(events.size(), 1u);
  const auto refused = registry_->Register(kMe, "x", MakeSchema("lpbthd"), 0).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(refused), "DRAINING");
  EXPECT_NE(Source(pool, Blocks({{0, 1}}), 1), nullptr);
  EXPECT_TRUE(registry_->GetBlock(kMe, pool, kEpoch, 0, 0, PlaneId::kK, 0).ok());
}

TEST_F(RegistryTest, UnregisterWaitsForHolds) {
  const std::string pool = Register(MakeSchema("lpbthd"));
  auto a = Source(pool, Blocks({{0, 1}}), 1);
  auto b = Target(pool, Blocks({{1, 1}}), 1);
  std::vector<absl::Status> done;
  const auto on_done = [&done](const absl::Status& status) { done.push_back(status); };
  registry_->Unregister(kMe, pool, kEpoch, 5000, on_done);
  registry_->Unregister(kMe, pool, kEpoch, 9000, on_done);
  EXPECT_EQ(registry_->List()[0].state, "draining");
  EXPECT_EQ(ReasonOfSource(pool, Blocks({{3, 1}}), 1), "POOL_CLOSING");
  a.reset();
  EXPECT_TRUE(done.empty());
  EXPECT_TRUE(b->Health().ok());
  b.reset();
  ASSERT_EQ(done.size(), 2u);
  EXPECT_TRUE(done[0].ok() && done[1].ok());
  EXPECT_TRUE(registry_->List().empty());
  EXPECT_EQ(clock_.pending(), 0u);
}

TEST_F(RegistryTest, MemoryOnLoanToTheNetworkOutlivesThePoolAndHoldsUpNothing) {
  const std::string pool = Register(MakeSchema("lpbthd"));
  auto hold = Source(pool, Blocks({{0, 1}}), 4);
  uint8_t* row = nullptr;
  hold->FillRows(0, 0, PlaneId::kK, 3, 1, &row);
  row[0] = 42;
  const std::shared_ptr<const void> kept = hold->KeepMapped();
  hold.reset();
  EXPECT_NE(Target(pool, Blocks({{0, 1}}), 4), nullptr) << "the block is free";
  bool done = false;
  registry_->Unregister(kMe, pool, kEpoch, 5000, [&done](const absl::Status& status) { done = status.ok(); });
  EXPECT_TRUE(done);
  EXPECT_TRUE(registry_->List().empty());
  EXPECT_EQ(row[0], 42);  // under ASan, and by SIGSEGV, no longer mapped memory would tell
}

TEST_F(RegistryTest, UnregisterGivesUpAndThePoolStays) {
  const std::string pool = Register(MakeSchema("lpbthd"));
  auto hold = Source(pool, Blocks({{0, 1}}), 1);
  std::vector<absl::Status> done;
  registry_->Unregister(kMe, pool, kEpoch, 100, [&done](const absl::Status& status) { done.push_back(status); });
  clock_.AdvanceMs(99);
  EXPECT_TRUE(done.empty());
  clock_.AdvanceMs(1);
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(ReasonOf(done[0]), "POOL_BUSY");
  EXPECT_EQ(registry_->List()[0].state, "active");
  hold.reset();
  EXPECT_EQ(ReasonOfTarget(pool, Blocks({{0, 1}}), 1), "OK");
}

TEST_F(RegistryTest, ALeaseThatEndsWhileUnregisteringEndsBoth) {
  const std::string pool = Register(MakeSchema("lpbthd"), 1000);
  auto hold = Source(pool, Blocks({{0, 1}}), 1);
  std::vector<absl::Status> done;
  registry_->Unregister(kMe, pool, kEpoch, 5000, [&done](const absl::Status& status) { done.push_back(status); });
  hold->OnLost([&hold](const absl::Status&) { hold.reset(); });
  clock_.AdvanceMs(1000);
  ASSERT_EQ(done.size(), 1u);
  EXPECT_TRUE(done[0].ok());
  EXPECT_TRUE(registry_->List().empty());
}

}  // namespace
}  // namespace spectrumkv
