// Registration, leases, streams, unregistering, and what a lost pool does to its holds.
#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <thread>

#include "server/memory/mapping.h"
#include "tests/unit/pool/registry_fixture.h"

namespace spectrumkv {
namespace {

constexpr uint64_t kPage = 4096;

TEST_F(RegistryTest, EveryBadSegmentIsRefusedAndTheNextOneServed) {
  using Kind = SegmentSpec::Kind;
  using Code = absl::StatusCode;
  TempDir dir, outside;
  PoolLimits limits = DefaultLimits();
  limits.shared_dir = dir.path();
  Restart(limits);
  outside.WriteFile("kv", 2 * kPage);
  dir.WriteFile("short", 2 * kPage - 1);
  dir.WriteFile("sparse", kPage);
  std::filesystem::resize_file(dir / "sparse", 2 * kPage);
  std::filesystem::create_symlink(outside / "kv", dir / "link");
  std::filesystem::create_directory(dir / "sub");
  ShmObject little(kPage), hole(kPage);
  hole.Truncate(2 * kPage);
  const std::vector<std::tuple<Kind, std::string, Code, std::string>> cases = {
      {Kind::kFile, "none", Code::kNotFound, "SEGMENT_NOT_FOUND"},
      {Kind::kFile, "short", Code::kInvalidArgument, "SEGMENT_TOO_SHORT"},
      {Kind::kFile, "sparse", Code::kInvalidArgument, "SEGMENT_SPARSE"},
      {Kind::kFile, "link", Code::kInvalidArgument, "SEGMENT_OUTSIDE_DIR"},
      {Kind::kFile, "sub", Code::kInvalidArgument, "SEGMENT_NOT_REGULAR"},
      {Kind::kFile, outside / "kv", Code::kInvalidArgument, "SEGMENT_OUTSIDE_DIR"},
      {Kind::kFile, "../kv", Code::kInvalidArgument, "SEGMENT_OUTSIDE_DIR"},
      {Kind::kPosixShm, "/skvtest-none", Code::kNotFound, "SEGMENT_NOT_FOUND"},
      {Kind::kPosixShm, little.name(), Code::kInvalidArgument, "SEGMENT_TOO_SHORT"},
      {Kind::kPosixShm, hole.name(), Code::kInvalidArgument, "SEGMENT_SPARSE"},
      {Kind::kPosixShm, "/elsewhere", Code::kInvalidArgument, "SEGMENT_OUTSIDE_DIR"},
      {Kind::kPosixShm, "/skvtest-/../x", Code::kInvalidArgument, "SEGMENT_OUTSIDE_DIR"},
  };
  for (const auto& [kind, name, code, reason] : cases) {
    SCOPED_TRACE(name);
    ExpectRefused(Over(kind, name), code, reason);
  }
  PoolSchema overlap = MakeSchema("lpbthd");
  overlap.groups[0].layers[1].k = overlap.groups[0].layers[0].k;
  ExpectRefused(overlap, Code::kInvalidArgument, "OVERLAP");
  PoolSchema range = MakeSchema("lpbthd");
  range.segments[0].size_bytes -= 1;
  ExpectRefused(range, Code::kInvalidArgument, "OUT_OF_RANGE");
  PoolSchema zero = MakeSchema("lpbthd");
  zero.groups[0].head_dim = 0;
  ExpectRefused(zero, Code::kInvalidArgument, "INVALID_SCHEMA");
}

TEST_F(RegistryTest, TwoNamesOfOneObjectAreRefused) {
  TempDir dir;
  PoolLimits limits = DefaultLimits();
  limits.shared_dir = dir.path();
  Restart(limits);
  dir.WriteFile("a", 2 * kPage);
  ASSERT_EQ(link((dir / "a").c_str(), (dir / "b").c_str()), 0);
  PoolSchema schema = Over(SegmentSpec::Kind::kFile, "a");
  schema.segments.push_back(schema.segments[0]);
  schema.segments[1].name = "b";
  ExpectRefused(schema, absl::StatusCode::kInvalidArgument, "INVALID_SCHEMA");
  EXPECT_NE(Register(Over(SegmentSpec::Kind::kFile, "a")), "");
}

TEST_F(RegistryTest, ARepeatedRequestAnswersTheSamePool) {
  const PoolSchema schema = MakeSchema("lpbthd");
  const auto first = registry_->Register(kMe, "r", schema, 5000);
  const auto again = registry_->Register(kMe, "r", schema, 9000);
  ASSERT_TRUE(first.ok() && again.ok());
  EXPECT_EQ(first->pool_id, again->pool_id);
  EXPECT_EQ(first->epoch, kEpoch);
  EXPECT_EQ(again->lease_ttl_ms, 5000);
  const auto other = registry_->Register(kMe, "r", MakeSchema("lbpthd"), 0);
  EXPECT_EQ(other.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(ReasonOf(other.status()), "REQUEST_ID_REUSED");
  EXPECT_NE(Register(schema), Register(schema));  // no id, no repeat
  EXPECT_EQ(registry_->List().size(), 3u);
  EXPECT_EQ(ReasonOf(registry_->Register(kMe, std::string(257, 'r'), schema, 0).status()), "INVALID_REQUEST_ID");
  registry_->StartDraining();
  EXPECT_TRUE(registry_->Register(kMe, "r", schema, 0).ok());  // a repeat is no new pool
}

TEST_F(RegistryTest, ARequestIdIsFreeAgainWithItsPool) {
  const auto first = registry_->Register(kMe, "r", MakeSchema("lpbthd"), 0);
  Unregister(first->pool_id);
  const auto next = registry_->Register(kMe, "r", MakeSchema("lbpthd"), 0);
  ASSERT_TRUE(next.ok());
  EXPECT_NE(next->pool_id, first->pool_id);
}

TEST_F(RegistryTest, LimitsAtTheirEdges) {
  PoolLimits limits = DefaultLimits();
  limits.max_pools = 2;
  limits.max_owned_bytes = 3 * 8192 - 1;
  limits.max_chunk_bytes = 1;
  Restart(limits);
  EXPECT_EQ(ReasonOf(registry_->Register(kMe, "", MakeSchema("lpbthd"), 0).status()), "CHUNK_TOO_LARGE");
  limits.max_chunk_bytes = 0;
  Restart(limits);
  const std::string first = Register(MakeSchema("lpbthd"));
  Register(MakeSchema("lpbthd"));
  const auto full = registry_->Register(kMe, "", MakeSchema("lpbthd"), 0).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(full), "POOLS_FULL");
  EXPECT_GT(RetryAfterMsOf(full), 0);
  limits.max_pools = 9;
  Restart(limits);
  const std::string a = Register(MakeSchema("lpbthd"));
  Register(MakeSchema("lpbthd"));
  const auto quota = registry_->Register(kMe, "", MakeSchema("lpbthd"), 0).status();
  EXPECT_EQ(quota.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(quota), "OWNED_QUOTA");
  registry_->Unregister(kMe, a, kEpoch, 0, [](const absl::Status&) {});
  EXPECT_NE(Register(MakeSchema("lpbthd")), "");  // its bytes came back
}

TEST_F(RegistryTest, LeaseTtlIsBroughtIntoTheLimits) {
  const auto ttl = [this](int64_t asked_ms) {
    auto handle = registry_->Register(kMe, "", MakeSchema("lpbthd"), asked_ms);
    const int64_t ttl_ms = handle->lease_ttl_ms;
    Unregister(handle->pool_id);
    return ttl_ms;
  };
  EXPECT_EQ(ttl(0), 30000);
  EXPECT_EQ(ttl(-5), 30000);
  EXPECT_EQ(ttl(1), 1000);
  EXPECT_EQ(ttl(999), 1000);
  EXPECT_EQ(ttl(1000), 1000);
  EXPECT_EQ(ttl(1001), 1001);
  EXPECT_EQ(ttl(600000), 600000);
  EXPECT_EQ(ttl(600001), 600000);
  EXPECT_EQ(ttl(INT64_MAX), 600000);
}

TEST_F(RegistryTest, UnknownPoolsAndStaleEpochs) {
  const std::string pool = Register(MakeSchema("lpbthd"));
  const auto reasons = [this](const std::string& id, uint64_t epoch) {
    std::set<std::string> all;
    all.insert(ReasonOf(registry_->Renew(kMe, id, epoch).status()));
    all.insert(ReasonOf(registry_->OpenHold(kMe, id, epoch, [](const std::string&) {}).status()));
    all.insert(ReasonOf(registry_->HoldSource(kMe, id, epoch, Blocks({{0, 1}}), 1).status()));
    all.insert(ReasonOf(registry_->ReserveTarget(kMe, id, epoch, Blocks({{0, 1}}), 1).status()));
    all.insert(ReasonOf(registry_->PutBlock(kMe, id, epoch, 0, 0, PlaneId::kK, 0, "")));
    all.insert(ReasonOf(registry_->GetBlock(kMe, id, epoch, 0, 0, PlaneId::kK, 0).status()));
    all.insert(ReasonOf(registry_->SchemaOf(kMe, id, epoch).status()));
    registry_->Unregister(kMe, id, epoch, 0, [&all](const absl::Status& status) { all.insert(ReasonOf(status)); });
    return all;
  };
  EXPECT_EQ(reasons("nope", kEpoch), std::set<std::string>({"UNKNOWN_POOL"}));
  EXPECT_EQ(reasons(pool, kEpoch + 1), std::set<std::string>({"STALE_EPOCH"}));
  EXPECT_EQ(reasons("nope", 0), std::set<std::string>({"STALE_EPOCH"}));
  EXPECT_TRUE(*registry_->SchemaOf(kMe, pool, kEpoch) == MakeSchema("lpbthd"));
}

TEST_F(RegistryTest, EveryCallRefusesAnotherCallersPool) {
  const std::string pool = Register(MakeSchema("lpbthd"));
  for (const Caller& other : {Caller(), Caller::Token(), Caller::Uid(kMe.uid() + 1)}) {
    std::vector<absl::Status> all = {
        registry_->Renew(other, pool, kEpoch).status(),
        registry_->OpenHold(other, pool, kEpoch, [](const std::string&) {}).status(),
        registry_->HoldSource(other, pool, kEpoch, Blocks({{0, 1}}), 1).status(),
        registry_->ReserveTarget(other, pool, kEpoch, Blocks({{0, 1}}), 1).status(),
        registry_->PutBlock(other, pool, kEpoch, 0, 0, PlaneId::kK, 0, ""),
        registry_->GetBlock(other, pool, kEpoch, 0, 0, PlaneId::kK, 0).status(),
        registry_->SchemaOf(other, pool, kEpoch).status()};
    registry_->Unregister(other, pool, kEpoch, 0, [&all](const absl::Status& status) { all.push_back(status); });
    ASSERT_EQ(all.size(), 8u);
    for (const absl::Status& status : all) {
      EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied) << status;
      EXPECT_EQ(ReasonOf(status), "NOT_OWNER") << status;
      EXPECT_EQ(MetadataOf(status)["value"], other.Name()) << status;
    }
  }
  EXPECT_TRUE(registry_->Renew(kMe, pool, kEpoch).ok());
  EXPECT_EQ(registry_->List()[0].owner, kMe);
}

TEST_F(RegistryTest, NobodyRegistersAndRequestIdsAreOfTheirCaller) {
  EXPECT_EQ(ReasonOf(registry_->Register(Caller(), "r", MakeSchema("lpbthd"), 0).status()), "UNKNOWN_CALLER");
  const auto mine = registry_->Register(kMe, "r", MakeSchema("lpbthd"), 0);
  const auto other = registry_->Register(Caller::Token(), "r", MakeSchema("lbpthd"), 0);
  ASSERT_TRUE(mine.ok() && other.ok()) << other.status();
  EXPECT_NE(mine->pool_id, other->pool_id);
}

TEST_F(RegistryTest, SegmentsAreTheCallersOrOfAllowedOwners) {
  const ShmObject object(MakeSchema("lpbthd").segments[0].size_bytes);
  const PoolSchema schema = Over(SegmentSpec::Kind::kPosixShm, object.name());
  const Caller other = Caller::Uid(kMe.uid() + 1);
  const auto refused = [&](const Caller& caller) {
    const absl::Status status = registry_->Register(caller, "", schema, 0).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied) << status;
    EXPECT_EQ(ReasonOf(status), "SEGMENT_NOT_OWNED");
    EXPECT_EQ(MetadataOf(status)["field"], "segments[0]");
    EXPECT_EQ(MetadataOf(status)["value"], std::to_string(kMe.uid()));
  };
  refused(other);
  refused(Caller::Token());  // no owners are set for the token
  EXPECT_TRUE(registry_->Register(kMe, "", schema, 0).ok());
  PoolLimits limits = DefaultLimits();
  limits.token_owners = {kMe.uid()};
  Restart(limits);
  refused(other);
  EXPECT_TRUE(registry_->Register(Caller::Token(), "", schema, 0).ok());
  limits.token_owners.clear();
  limits.allowed_owners = {kMe.uid()};
  Restart(limits);
  EXPECT_TRUE(registry_->Register(other, "", schema, 0).ok());
}

TEST_F(RegistryTest, QuotasAreOfOneCaller) {
  const uint64_t bytes = MakeSchema("lpbthd").segments[0].size_bytes;
  const auto quota_of = [&](PoolQuota quota, const std::string& reason, bool waiting_helps) {
    quotas_.clear();
    const absl::Status status = registry_->Register(kMe, "", MakeSchema("lpbthd"), 0).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_EQ(ReasonOf(status), reason);
    EXPECT_EQ(RetryAfterMsOf(status) > 0, waiting_helps);
    EXPECT_EQ(quotas_, std::vector<PoolQuota>{quota});
  };
  PoolLimits limits = DefaultLimits();
  limits.max_pools_per_user = 1;
  limits.max_holds_per_user = 1;
  Restart(limits);
  const std::string pool = Register(MakeSchema("lpbthd"));
  quota_of(PoolQuota::kPools, "POOLS_QUOTA", true);
  EXPECT_TRUE(registry_->Register(Caller::Token(), "", MakeSchema("lpbthd"), 0).ok()) << "another's are not counted";
  const auto on_event = [](const std::string&) {};
  ASSERT_TRUE(registry_->OpenHold(kMe, pool, kEpoch, on_event).ok());
  EXPECT_EQ(ReasonOf(registry_->OpenHold(kMe, pool, kEpoch, on_event).status()), "HOLDS_QUOTA");
  EXPECT_EQ(quotas_.back(), PoolQuota::kHolds);

  limits = DefaultLimits();
  limits.max_bytes_per_user = bytes;
  Restart(limits);
  const std::string whole = Register(MakeSchema("lpbthd"));
  quota_of(PoolQuota::kBytes, "BYTES_QUOTA", true);
  registry_->Unregister(kMe, whole, kEpoch, 0, [](const absl::Status&) {});
  EXPECT_NE(Register(MakeSchema("lpbthd")), "") << "its bytes came back";
  limits.max_bytes_per_user = bytes - 1;
  Restart(limits);
  quota_of(PoolQuota::kBytes, "BYTES_QUOTA", false);
}

TEST_F(RegistryTest, ATruncatedSegmentFailsItsPoolAlone) {
  ShmObject object(2 * kPage);
  const std::string pool = Register(Over(SegmentSpec::Kind::kPosixShm, object.name()), 1000);
  const std::string other = Register(MakeSchema("lpbthd"), 600000);
  std::vector<std::string> told;
  ASSERT_TRUE(registry_->OpenHold(kMe, pool, kEpoch, [&](const std::string& event) { told.push_back(event); }).ok());
  auto hold = Source(pool, Blocks({{7, 1}}), 4);
  hold->OnLost([&told](const absl::Status& why) { told.push_back("lost " + ReasonOf(why)); });
  object.Truncate(0);
  uint8_t* row = nullptr;
  hold->FillRows(0, 1, PlaneId::kV, 0, 1, &row);
  EXPECT_TRUE(hold->Health().ok());
  EXPECT_EQ(*static_cast<volatile uint8_t*>(row), 0);  // would have ended the process
  EXPECT_EQ(ReasonOf(hold->Health()), "SEGMENT_FAILED");
  EXPECT_TRUE(told.empty());  // not on the caller's stack
  clock_.AdvanceMs(0);
  EXPECT_EQ(told, std::vector<std::string>({"lost SEGMENT_FAILED", "SEGMENT_FAILED"}));
  EXPECT_EQ(ReasonOf(hold->Health()), "SEGMENT_FAILED");
  hold.reset();
  EXPECT_EQ(registry_->List().size(), 1u);
  EXPECT_EQ(ReasonOfSource(other, Blocks({{0, 1}}), 1), "OK");
}

// No page of it is touched: what was cut and grown again would be read as zeros.
TEST_F(RegistryTest, ASegmentThatWasCutWhileIdleIsRefusedAtItsNextUse) {
  using Use = std::function<std::string(const std::string&)>;
  const std::pair<const char*, Use> uses[] = {
      {"source", [&](const std::string& pool) { return ReasonOfSource(pool, Blocks({{0, 1}}), 1); }},
      {"target", [&](const std::string& pool) { return ReasonOfTarget(pool, Blocks({{0, 1}}), 1); }},
      {"get", [&](const std::string& pool) {
         return ReasonOf(registry_->GetBlock(kMe, pool, kEpoch, 0, 0, PlaneId::kK, 0).status());
       }},
      {"put", [&](const std::string& pool) {
         return ReasonOf(registry_->PutBlock(kMe, pool, kEpoch, 0, 0, PlaneId::kK, 0, std::string(256, 'x')));
       }}};
  for (const auto& [name, use] : uses) {
    for (const std::vector<size_t>& lengths : {std::vector<size_t>{kPage}, std::vector<size_t>{0, 2 * kPage}}) {
      SCOPED_TRACE(std::string(name) + (lengths.size() > 1 ? " grown again" : ""));
      ShmObject object(2 * kPage);
      const std::string pool = Register(Over(SegmentSpec::Kind::kPosixShm, object.name()));
      std::vector<std::string> told;
      ASSERT_TRUE(registry_->OpenHold(kMe, pool, kEpoch, [&](const std::string& event) { told.push_back(event); }).ok());
      for (const size_t length : lengths) object.Truncate(length);
      EXPECT_EQ(use(pool), "SEGMENT_FAILED");
      clock_.AdvanceMs(0);
      EXPECT_EQ(told, std::vector<std::string>({"SEGMENT_FAILED"}));
      EXPECT_EQ(use(pool), "UNKNOWN_POOL");
    }
  }
}

TEST_F(RegistryTest, ASegmentThatWasCutIsNoticedByAnIdlePoolWhoseLeaseIsRenewed) {
  ShmObject object(2 * kPage);
  const std::string pool = Register(Over(SegmentSpec::Kind::kPosixShm, object.name()), 1000);
  std::vector<std::string> told;
  ASSERT_TRUE(registry_->OpenHold(kMe, pool, kEpoch, [&](const std::string& event) { told.push_back(event); }).ok());
  object.Truncate(0);
  object.Truncate(2 * kPage);
  for (int i = 0; i < 3 && told.empty(); ++i) {
    EXPECT_TRUE(registry_->Renew(kMe, pool, kEpoch).ok());
    clock_.AdvanceMs(500);
  }
  EXPECT_EQ(told, std::vector<std::string>({"SEGMENT_FAILED"}));
}

TEST_F(RegistryTest, GetBlockOfATruncatedSegmentIsAnError) {
  ShmObject object(2 * kPage);
  const std::string pool = Register(Over(SegmentSpec::Kind::kPosixShm, object.name()));
  object.Truncate(0);
  EXPECT_EQ(ReasonOf(registry_->GetBlock(kMe, pool, kEpoch, 0, 0, PlaneId::kK, 0).status()), "SEGMENT_FAILED");
  EXPECT_EQ(ReasonOfSource(pool, Blocks({{0, 1}}), 1), "SEGMENT_FAILED");
  clock_.AdvanceMs(0);
  EXPECT_EQ(ReasonOfSource(pool, Blocks({{0, 1}}), 1), "UNKNOWN_POOL");
  EXPECT_TRUE(registry_->List().empty());
}

TEST_F(RegistryTest, AHoldMayOutliveTheRegistry) {
  auto hold = Source(Register(MakeSchema("lpbthd")), Blocks({{0, 1}}), 1);
  int calls = 0;
  hold->OnLost([&calls](const absl::Status&) { ++calls; });
  registry_.reset();
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(hold->Health().ok());
  EXPECT_TRUE(hold->ZeroTail(1).ok());
}

TEST_F(RegistryTest, DescribesPools) {
  PoolSchema schema = MakeSchema("lpbthd");
  schema.revision = "r1";
  Register(schema);
  const PoolStatus status = registry_->List()[0];
  EXPECT_EQ(status.model, "m");
  EXPECT_EQ(status.revision, "r1");
  EXPECT_EQ(status.state, "active");
  EXPECT_EQ(status.groups, 1u);
  EXPECT_EQ(status.layers, 2u);
  EXPECT_EQ(status.kv_bytes, 8192u);
  EXPECT_EQ(status.blocks_total, 8u);
  EXPECT_EQ(status.lease_remaining_ms, 30000);
}

// For the thread sanitizer: everything at once on a real clock; at the end nothing is left.
TEST(RegistryThreads, NothingIsLeftAfterARush) {
  auto clock = NewSystemClock();
  PoolLimits limits;
  limits.max_owned_bytes = 1 << 20;
  auto registry = PoolRegistry::Create(limits, 1, clock.get(), {});
  std::atomic<int> held{0}, done{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 40; ++i) {
        const std::string request = "r" + std::to_string(i % 4);
        auto handle = registry->Register(kMe, request, MakeSchema("lpbthd"), 1000);
        if (!handle.ok()) continue;
        const uint64_t first = static_cast<uint64_t>(t * 2);
        auto hold = t == 0 ? registry->ReserveTarget(kMe, handle->pool_id, 1, Blocks({{first, 2}}), 8)
                           : registry->HoldSource(kMe, handle->pool_id, 1, Blocks({{first, 2}}), 8);
        if (hold.ok()) {
          ++held;
          (*hold)->OnLost([](const absl::Status&) {});
          if (t == 0) {
            EXPECT_TRUE((*hold)->ZeroTail(7).ok());
          }
          (void)(*hold)->Health();
        }
        auto stream = registry->OpenHold(kMe, handle->pool_id, 1, [](const std::string&) {});
        (void)registry->Renew(kMe, handle->pool_id, 1);
        (void)registry->GetBlock(kMe, handle->pool_id, 1, 0, 0, PlaneId::kK, 7);
        (void)registry->List();
        if (i % 3 == 0) registry->Unregister(kMe, handle->pool_id, 1, 1, [&done](const absl::Status&) { ++done; });
        if (stream.ok() && i % 2 == 0) registry->CloseHold(handle->pool_id, *stream);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_GT(held.load(), 0);
  for (const PoolStatus& status : registry->List()) {
    EXPECT_EQ(status.blocks_sending + status.blocks_receiving, 0u);
  }
  registry.reset();
  clock.reset();
  EXPECT_GT(done.load(), 0);
}

}  // namespace
}  // namespace spectrumkv
