// Memory that is not to be had, call by call: a stable reason, and nothing left mapped or open.
#include "tests/unit/memory/failing_memory.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <string>

#include "server/base/status.h"
#include "server/memory/mapping.h"
#include "server/pool/pool.h"
#include "tests/unit/base/fake_clock.h"
#include "tests/unit/pool/segments.h"
#include "tests/unit/transfer/engine_fixture.h"

namespace spectrumkv {
namespace {

constexpr uint64_t kBytes = 3 << 20;

class FailingMemoryTest : public ::testing::Test {
 protected:
  void TearDown() override {
    SetMemoryFault(nullptr);
    EXPECT_EQ(LiveMappings(), 0) << "a mapping was left";
    EXPECT_EQ(OpenFiles(), files_) << "a file was left open";
  }
  // The `nth` (from 0) call of this kind fails, the others do not.
  void FailCall(MemoryCall call, int error, int nth = 0) {
    SetMemoryFault([this, call, error, nth](MemoryCall made) { return made == call && calls_++ == nth ? error : 0; });
    calls_ = 0;
  }
  static void ExpectExhausted(const absl::Status& status, const std::string& reason) {
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_EQ(ReasonOf(status), reason) << status;
  }

  const int files_ = OpenFiles();
  int calls_ = 0;
};

TEST_F(FailingMemoryTest, OwnedMemoryThatCannotBeMappedOrFilledIsRefused) {
  for (const MemoryCall call : {MemoryCall::kMap, MemoryCall::kPopulate}) {
    for (const int error : {ENOMEM, ENOSPC, EAGAIN, EFAULT}) {
      FailCall(call, error);
      const auto memory = AllocateOwned(kBytes);
      ASSERT_FALSE(memory.ok()) << error;
      ExpectExhausted(memory.status(), "OUT_OF_MEMORY");
      EXPECT_NE(memory.status().message().find(std::to_string(kBytes)), std::string::npos) << memory.status();
      EXPECT_EQ(LiveMappings(), 0);
    }
  }
}

TEST_F(FailingMemoryTest, AKernelThatCannotPopulateGetsItsPagesTouched) {
  FailCall(MemoryCall::kPopulate, EINVAL);
  const auto memory = AllocateOwned(kBytes);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ((*memory)->data()[kBytes - 1], 0);
}

TEST_F(FailingMemoryTest, ASegmentThatCannotBeOpenedLookedAtOrMappedIsRefused) {
  ShmObject object(kBytes);
  const int files = OpenFiles();  // the object keeps its own
  for (const MemoryCall call : {MemoryCall::kOpen, MemoryCall::kOpenat2, MemoryCall::kStat, MemoryCall::kMap}) {
    for (const int error : {ENOMEM, EMFILE, ENFILE, ENOSPC, EAGAIN}) {
      // A kernel that says EAGAIN of an openat2 is asked again, eight times.
      SetMemoryFault([call, error](MemoryCall made) { return made == call ? error : 0; });
      const auto segment = OpenShmSegment(object.name(), "/", kBytes, {geteuid()});
      SetMemoryFault(nullptr);
      ASSERT_FALSE(segment.ok()) << error;
      ExpectExhausted(segment.status(), "SEGMENT_MAP_FAILED");
      EXPECT_EQ(OpenFiles(), files);
      EXPECT_EQ(LiveMappings(), 0);
    }
  }
  EXPECT_TRUE(OpenShmSegment(object.name(), "/", kBytes, {geteuid()}).ok());
}

// Kernels before 5.6 have no openat2, and seccomp filters forbid it: the walk is as strict.
TEST_F(FailingMemoryTest, WithoutOpenat2SegmentsAreReachedStepByStep) {
  TempDir dir;
  dir.WriteFile("kv", kBytes);
  ShmObject object(kBytes);
  const std::string link = ShmObject::NewName();
  ASSERT_EQ(symlink(("/dev/shm" + object.name()).c_str(), ("/dev/shm" + link).c_str()), 0);
  for (const int error : {ENOSYS, EPERM}) {
    int refused = 0;
    SetMemoryFault([&](MemoryCall made) { return made == MemoryCall::kOpenat2 ? (++refused, error) : 0; });
    EXPECT_TRUE(OpenShmSegment(object.name(), "/", kBytes, {geteuid()}).ok());
    EXPECT_TRUE(OpenFileSegment(dir.path(), "kv", kBytes, {geteuid()}).ok());
    EXPECT_EQ(ReasonOf(OpenShmSegment(link, "/", kBytes, {geteuid()}).status()), "SEGMENT_OUTSIDE_DIR");
    EXPECT_EQ(refused, 3);
  }
  unlink(("/dev/shm" + link).c_str());
}

// A file that cannot be asked is not trusted.
TEST_F(FailingMemoryTest, AMappedSegmentThatCannotBeLookedAtHasFailed) {
  ShmObject object(kBytes);
  auto segment = OpenShmSegment(object.name(), "/", kBytes, {geteuid()});
  ASSERT_TRUE(segment.ok()) << segment.status();
  EXPECT_TRUE((*segment)->StillWhole());
  FailCall(MemoryCall::kStat, EIO);
  EXPECT_FALSE((*segment)->StillWhole());
  SetMemoryFault(nullptr);
  EXPECT_FALSE((*segment)->StillWhole()) << "for ever";
  EXPECT_TRUE((*segment)->failed());
}

// A pool of several segments, the memory of one of which is not there: all or nothing, and the quota is given back.
TEST_F(FailingMemoryTest, APoolIsRegisteredWholeOrNotAtAll) {
  FakeClock clock;
  PoolLimits limits;
  PoolSchema schema = MakeSchema({});
  const uint64_t bytes = schema.segments[0].size_bytes;
  schema.segments.resize(3, schema.segments[0]);
  limits.max_owned_bytes = 3 * bytes;
  const auto pools = PoolRegistry::Create(limits, 7, &clock, {});
  for (const MemoryCall call : {MemoryCall::kMap, MemoryCall::kPopulate}) {
    for (int nth = 0; nth < 3; ++nth) {
      FailCall(call, ENOMEM, nth);
      ExpectExhausted(pools->Register(kMe, "r", schema, 1000).status(), "OUT_OF_MEMORY");
      EXPECT_EQ(LiveMappings(), 0);
      EXPECT_TRUE(pools->List().empty());
    }
  }
  SetMemoryFault(nullptr);
  const auto pool = pools->Register(kMe, "r", schema, 1000);
  ASSERT_TRUE(pool.ok()) << pool.status() << ": the quota of the attempts that failed is free again";
  EXPECT_EQ(LiveMappings(), 3);
  clock.AdvanceMs(1001);
  EXPECT_EQ(LiveMappings(), 0) << "its lease has ended";
  EXPECT_EQ(clock.pending(), 0u);
}

}  // namespace
}  // namespace spectrumkv
