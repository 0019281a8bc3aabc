// One user or one lost pool must not stand in the way of all others: shares of what the process has few of, and the
// clock's one thread.
#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "server/base/executor.h"
#include "server/memory/sigbus_guard.h"
#include "tests/unit/pool/registry_fixture.h"

namespace spectrumkv {
namespace {

using Kind = SegmentSpec::Kind;

const Caller kOther = Caller::Uid(kMe.uid() + 1);

// Only the first segment has tensors.
PoolSchema WithSegments(size_t count) {
  PoolSchema schema = MakeSchema("lpbthd");
  schema.segments.resize(count, SegmentSpec{Kind::kDaemonOwned, "", 1});
  return schema;
}

TEST_F(RegistryTest, SegmentsAreAQuotaOfOneCaller) {
  PoolLimits limits = DefaultLimits();
  limits.max_segments_per_user = 5;
  Restart(limits);
  const auto refused = [&](size_t asked, const std::string& value, bool waiting_helps) {
    SCOPED_TRACE(asked);
    quotas_.clear();
    const absl::Status status = registry_->Register(kMe, "", WithSegments(asked), 0).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_EQ(ReasonOf(status), "SEGMENTS_QUOTA") << status;
    EXPECT_EQ(MetadataOf(status)["field"], "quota.segments_per_user");
    EXPECT_EQ(MetadataOf(status)["value"], value);
    EXPECT_EQ(MetadataOf(status)["limit"], "5");
    EXPECT_EQ(RetryAfterMsOf(status) > 0, waiting_helps);
    EXPECT_EQ(quotas_, std::vector<PoolQuota>{PoolQuota::kSegments});
  };
  refused(6, "6", false);
  const std::string first = Register(WithSegments(2));
  refused(4, "6", true);
  const std::string second = Register(WithSegments(3));
  refused(1, "6", true);
  EXPECT_TRUE(registry_->Register(kOther, "", WithSegments(5), 0).ok()) << "another's are not counted";
  registry_->Unregister(kMe, first, kEpoch, 0, [](const absl::Status&) {});
  refused(3, "6", true);
  const std::string third = Register(WithSegments(2));
  EXPECT_NE(third, "") << "released segments come back";
  // Those of a lost pool count as long as it is mapped.
  auto hold = Source(second, Blocks({{0, 1}}), 1);
  clock_.AdvanceMs(30000);
  refused(3, "6", true);
  hold.reset();
  EXPECT_NE(Register(WithSegments(3)), "");
}

TEST_F(RegistryTest, SegmentsThatCouldNotBeMappedAreNotCounted) {
  PoolLimits limits = DefaultLimits();
  limits.max_segments_per_user = 2;
  Restart(limits);
  PoolSchema bad = WithSegments(2);
  bad.segments[1] = SegmentSpec{Kind::kPosixShm, "/skvtest-none", 1};
  for (int i = 0; i < 3; ++i) EXPECT_EQ(ReasonOf(registry_->Register(kMe, "", bad, 0).status()), "SEGMENT_NOT_FOUND");
  EXPECT_NE(Register(WithSegments(2)), "");
}

TEST_F(RegistryTest, WithoutAnyLimitSetOneCallerLeavesGuardsForOthers) {
  PoolLimits limits;
  limits.max_owned_bytes = 1 << 20;
  EXPECT_LE(limits.max_segments_per_user, SigbusGuard::kMaxRanges / 2);
  Restart(limits);
  PoolSchema largest = WithSegments(schema_limits::kSegments);
  largest.segments[1] = SegmentSpec{Kind::kPosixShm, "/skvtest-none", 1};  // ends it when the quotas have been passed
  EXPECT_EQ(ReasonOf(registry_->Register(kMe, "", largest, 0).status()), "SEGMENT_NOT_FOUND");
  Register(WithSegments(1));
  EXPECT_EQ(ReasonOf(registry_->Register(kMe, "", largest, 0).status()), "SEGMENTS_QUOTA");
}

// With an executor for the unmapping, held up until RunAll.
class UnmappingTest : public RegistryTest {
 protected:
  UnmappingTest() {
    PoolLimits limits = DefaultLimits();
    limits.max_pools_per_user = 1;
    registry_ = PoolRegistry::Create(limits, kEpoch, &clock_, PoolEvents(), nullptr, &unmapper_);
  }
  ~UnmappingTest() override { registry_.reset(); }

  std::string RegisterObject() {
    const std::string pool = Register(Over(Kind::kPosixShm, object_.name()), 1000);
    const auto listen = [this](const std::string& event) { told_.push_back(event); };
    hold_id_ = *registry_->OpenHold(kMe, pool, kEpoch, listen);
    EXPECT_TRUE(Mapped());
    return pool;
  }
  bool Mapped() const {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      if (line.find(object_.name()) != std::string::npos) return true;
    }
    return false;
  }
  // A timer that is due with, or after, the one that ends the pool.
  void ExpectTimersGoOn(int64_t after_ms) {
    bool fired = false;
    clock_.CallAt(clock_.NowNs() + after_ms * 1'000'000, [&fired] { fired = true; });
    clock_.AdvanceMs(after_ms);
    EXPECT_TRUE(fired);
  }
  // The pool has been ended by a timer.
  void ExpectUnmappedLater(const std::string& cause) {
    EXPECT_EQ(told_, std::vector<std::string>({cause})) << "told without delay";
    EXPECT_TRUE(Mapped()) << "unmapped on the clock's thread";
    ASSERT_EQ(registry_->List().size(), 1u);
    EXPECT_EQ(registry_->List()[0].state, "lost");
    EXPECT_EQ(ReasonOf(registry_->Register(kMe, "", MakeSchema("lpbthd"), 0).status()), "POOLS_QUOTA");
    EXPECT_EQ(unmapper_.RunAll(), 1u);
    EXPECT_FALSE(Mapped());
    EXPECT_TRUE(registry_->List().empty());
    EXPECT_NE(Register(MakeSchema("lpbthd")), "");
  }

  ManualExecutor unmapper_;
  ShmObject object_{8192};
  std::vector<std::string> told_;
  uint64_t hold_id_ = 0;
};

TEST_F(UnmappingTest, AnExpiredLeaseHoldsUpNoTimer) {
  RegisterObject();
  ExpectTimersGoOn(1000);
  ExpectUnmappedLater("LEASE_EXPIRED");
}

TEST_F(UnmappingTest, AFailedSegmentHoldsUpNoTimer) {
  const std::string pool = RegisterObject();
  object_.Truncate(0);
  EXPECT_EQ(ReasonOfSource(pool, Blocks({{0, 1}}), 1), "SEGMENT_FAILED");
  ExpectTimersGoOn(0);
  ExpectUnmappedLater("SEGMENT_FAILED");
}

TEST_F(UnmappingTest, AFailedSegmentThatTheLeaseFindsHoldsUpNoTimer) {
  RegisterObject();
  object_.Truncate(0);
  ExpectTimersGoOn(1000);
  ExpectUnmappedLater("SEGMENT_FAILED");
}

TEST_F(UnmappingTest, OtherEndsUnmapBeforeTheyReturn) {
  std::string pool = RegisterObject();
  bool done = false;
  registry_->Unregister(kMe, pool, kEpoch, 0, [&](const absl::Status& status) {
    done = true;
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_FALSE(Mapped());
  });
  EXPECT_TRUE(done);
  pool = RegisterObject();
  registry_->CloseHold(pool, hold_id_);
  EXPECT_FALSE(Mapped());
  pool = RegisterObject();
  auto hold = Source(pool, Blocks({{0, 1}}), 1);
  clock_.AdvanceMs(1000);
  EXPECT_TRUE(Mapped());
  hold.reset();
  EXPECT_FALSE(Mapped());
  EXPECT_TRUE(registry_->List().empty());
  EXPECT_EQ(unmapper_.RunAll(), 0u);
}

TEST_F(UnmappingTest, WhatIsQueuedOutlivesTheRegistryAndNothingComesAfterIt) {
  RegisterObject();
  clock_.AdvanceMs(1000);
  registry_.reset();
  EXPECT_TRUE(Mapped());
  EXPECT_EQ(unmapper_.RunAll(), 1u);
  EXPECT_FALSE(Mapped());
}

TEST_F(UnmappingTest, ARegistryThatGoesUnmapsItsPoolsItself) {
  RegisterObject();
  registry_.reset();
  EXPECT_FALSE(Mapped());
  clock_.AdvanceMs(1000);
  EXPECT_EQ(unmapper_.RunAll(), 0u);
}

}  // namespace
}  // namespace spectrumkv
