// What the client does without a daemon: statuses, block tables, schemas, shared memory.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "client/cpp/blocks.h"
#include "client/cpp/client.h"
#include "client/cpp/schema.h"
#include "client/cpp/shared_memory.h"
#include "client/cpp/status.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace spectrumkv::client {
namespace {

std::string Name(const std::string& what) { return "/spectrumkv-test-" + what + "-" + std::to_string(::getpid()); }

TEST(ClientStatus, DelaysAreWithinReason) {
  const auto delay_of = [](int64_t seconds, int32_t nanos) {
    google::rpc::Status details;
    google::rpc::RetryInfo retry;
    retry.mutable_retry_delay()->set_seconds(seconds);
    retry.mutable_retry_delay()->set_nanos(nanos);
    details.add_details()->PackFrom(retry);
    return RetryAfterMsOf(FromGrpc(grpc::Status(grpc::StatusCode::UNAVAILABLE, "", details.SerializeAsString())));
  };
  EXPECT_EQ(delay_of(0, 0), 0);
  EXPECT_EQ(delay_of(0, 999'999), 0);
  EXPECT_EQ(delay_of(2, 1'000'000), 2001);
  EXPECT_EQ(delay_of(INT64_MAX, INT32_MAX), 86'400'999);
  EXPECT_EQ(delay_of(INT64_MIN, INT32_MIN), 0);
}

TEST(ClientStatus, CarriesReasonMetadataAndDelay) {
  google::rpc::Status details;
  google::rpc::ErrorInfo info;
  info.set_reason("POOL_FULL");
  (*info.mutable_metadata())["blocks"] = "17";
  details.add_details()->PackFrom(info);
  google::rpc::RetryInfo retry;
  retry.mutable_retry_delay()->set_seconds(1);
  retry.mutable_retry_delay()->set_nanos(250 * 1000 * 1000);
  details.add_details()->PackFrom(retry);
  const absl::Status status =
      FromGrpc(grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "full", details.SerializeAsString()));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(), "full");
  EXPECT_EQ(ReasonOf(status), "POOL_FULL");
  EXPECT_EQ(MetadataOf(status).at("blocks"), "17");
  EXPECT_EQ(RetryAfterMsOf(status), 1250);
}

TEST(ClientStatus, SurvivesWhatHasNoDetails) {
  EXPECT_TRUE(FromGrpc(grpc::Status::OK).ok());
  for (const char* details : {"", "\xff\xff garbage"}) {
    const absl::Status status = FromGrpc(grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone", details));
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(ReasonOf(status), "");
    EXPECT_TRUE(MetadataOf(status).empty());
    EXPECT_EQ(RetryAfterMsOf(status), -1);
  }
}

TEST(ClientStatus, OutcomeOfReport) {
  v1::TransferReport report;
  report.set_transfer_id("t");
  report.set_state(v1::TRANSFER_STATE_COMMITTED);
  EXPECT_TRUE(OutcomeOf(report).ok());
  report.set_state(v1::TRANSFER_STATE_EXPIRED);
  report.set_code(static_cast<int>(absl::StatusCode::kDeadlineExceeded));
  report.set_reason("DEADLINE");
  EXPECT_EQ(OutcomeOf(report).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(ReasonOf(OutcomeOf(report)), "DEADLINE");
  report.set_code(0);
  EXPECT_EQ(OutcomeOf(report).code(), absl::StatusCode::kUnknown);
}

TEST(ClientBlocks, JoinsNeighboursInOrder) {
  EXPECT_EQ(Blocks(3, {}).runs_size(), 0);
  const v1::GroupBlocks blocks = Blocks(3, {7, 8, 9, 2, 1, 5});
  EXPECT_EQ(blocks.group(), 3u);
  ASSERT_EQ(blocks.runs_size(), 4);
  EXPECT_EQ(blocks.runs(0).first(), 7u);
  EXPECT_EQ(blocks.runs(0).count(), 3u);
  EXPECT_EQ(blocks.runs(1).first(), 2u);
  EXPECT_EQ(blocks.runs(2).first(), 1u);
  EXPECT_EQ(blocks.runs(3).first(), 5u);
  EXPECT_EQ(BlocksFor(0, 16), 0u);
  EXPECT_EQ(BlocksFor(1, 16), 1u);
  EXPECT_EQ(BlocksFor(16, 16), 1u);
  EXPECT_EQ(BlocksFor(17, 16), 2u);
}

DenseLayout SmallLayout() {
  DenseLayout layout;
  layout.layers = 2;
  layout.heads = 3;
  layout.head_dim = 8;
  layout.block_tokens = 4;
  layout.num_blocks = 5;
  return layout;
}

// Address of element (b, t, h, d) of a view.
uint64_t At(const v1::TensorView& view, uint64_t b, uint64_t t, uint64_t h, uint64_t d) {
  return view.offset_bytes() + b * view.block_stride_bytes() + t * view.token_stride_bytes() +
         h * view.head_stride_bytes() + d * view.dim_stride_bytes();
}

TEST(ClientSchema, ViewsCoverTheSegmentOnce) {
  for (const bool heads_first : {false, true}) {
    DenseLayout layout = SmallLayout();
    layout.heads_first = heads_first;
    const uint64_t bytes = *BytesOf(layout);
    EXPECT_EQ(bytes, 2u * 2 * 5 * 4 * 3 * 8 * 2);
    const auto schema = DenseSchema(layout, DaemonOwned(bytes));
    ASSERT_TRUE(schema.ok());
    EXPECT_EQ(schema->segments(0).daemon_owned().size_bytes(), bytes);
    std::vector<int> covered(bytes / 2);
    for (const v1::LayerTensors& layer : schema->groups(0).layers()) {
      for (const v1::TensorView* view : {&layer.k(), &layer.v()}) {
        for (uint64_t i = 0; i < 5 * 4 * 3 * 8; ++i) {
          ++covered.at(At(*view, i / 96, i / 24 % 4, i / 8 % 3, i % 8) / 2);
        }
      }
    }
    EXPECT_EQ(covered, std::vector<int>(bytes / 2, 1));
    EXPECT_EQ(OffsetOf(layout, 1, 1, 4, 3), At(schema->groups(0).layers(1).v(), 4, 3, 0, 0));
  }
}

TEST(ClientSchema, RefusesNothingAndTooMuch) {
  DenseLayout layout = SmallLayout();
  layout.heads = 0;
  EXPECT_EQ(ReasonOf(BytesOf(layout).status()), "INVALID_SCHEMA");
  layout = SmallLayout();
  layout.num_blocks = uint64_t{1} << 63;
  EXPECT_EQ(ReasonOf(DenseSchema(layout, DaemonOwned(1)).status()), "INVALID_SCHEMA");
  layout = SmallLayout();
  layout.data_type = v1::DATA_TYPE_UNSPECIFIED;
  EXPECT_FALSE(BytesOf(layout).ok());
}

TEST(ClientSharedMemory, IsOpenToTheGroupAndPopulated) {
  const std::string name = Name("populated");
  constexpr size_t kBytes = 3 * 4096 + 1;
  {
    const auto memory = SharedMemory::Create(name, kBytes);
    ASSERT_TRUE(memory.ok()) << memory.status();
    struct stat file, directory;
    ASSERT_EQ(::stat(("/dev/shm" + name).c_str(), &file), 0);
    ASSERT_EQ(::stat("/dev/shm", &directory), 0);
    EXPECT_EQ(file.st_mode & 0777, 0660u);
    if (::geteuid() == 0) {
      EXPECT_EQ(file.st_gid, directory.st_gid);
    } else {
      std::puts("SKIPPED: group of a segment: only root may give any group");
    }
    EXPECT_EQ(static_cast<size_t>(file.st_size), kBytes);
    EXPECT_GE(static_cast<size_t>(file.st_blocks) * 512, kBytes) << "the segment has holes";
    for (size_t i = 0; i < kBytes; ++i) ASSERT_EQ(memory->data()[i], 0);
    memory->data()[kBytes - 1] = 7;
    EXPECT_EQ(memory->ToProto().posix_shm().name(), name);
    EXPECT_EQ(memory->ToProto().posix_shm().size_bytes(), kBytes);
    EXPECT_EQ(ReasonOf(SharedMemory::Create(name, 1).status()), "SEGMENT_EXISTS");
  }
  EXPECT_LT(::shm_open(name.c_str(), O_RDONLY, 0), 0) << "the name is left behind";
}

TEST(ClientSharedMemory, MovesOwnership) {
  auto first = SharedMemory::Create(Name("a"), 16);
  auto second = SharedMemory::Create(Name("b"), 32);
  ASSERT_TRUE(first.ok() && second.ok());
  *first = *std::move(second);
  EXPECT_EQ(first->name(), Name("b"));
  EXPECT_EQ(first->size_bytes(), 32u);
  EXPECT_LT(::shm_open(Name("a").c_str(), O_RDONLY, 0), 0);
  const SharedMemory third = *std::move(first);
  EXPECT_EQ(third.size_bytes(), 32u);
}

TEST(ClientSharedMemory, RefusesBadNamesAndSizes) {
  for (const char* name : {"/", "noslash", "/a/b"}) {
    EXPECT_EQ(SharedMemory::Create(name, 1).status().code(), absl::StatusCode::kInvalidArgument) << name;
  }
  EXPECT_EQ(SharedMemory::Create(Name("empty"), 0).status().code(), absl::StatusCode::kInvalidArgument);
  const auto huge = SharedMemory::Create(Name("huge"), size_t{1} << 60);
  EXPECT_FALSE(huge.ok());
  EXPECT_LT(::shm_open(Name("huge").c_str(), O_RDONLY, 0), 0) << "a failed segment is left behind";
}

TEST(ClientSharedMemory, SegmentsOfTheDeadAreSweptAndNoOthers) {
  const auto exists = [](const std::string& name) { return ::access(("/dev/shm" + name).c_str(), F_OK) == 0; };
  // A process that makes a segment of a free name, tells it, and is killed.
  int names[2];
  ASSERT_EQ(::pipe(names), 0);
  const pid_t owner = ::fork();
  if (owner == 0) {
    const auto memory = SharedMemory::Create("", 4096);
    if (!memory.ok() || ::write(names[1], memory->name().c_str(), memory->name().size() + 1) < 0) ::_exit(1);
    ::pause();
  }
  char name[256] = {};
  ASSERT_GT(::read(names[0], name, sizeof(name) - 1), 0);
  EXPECT_EQ(std::string(name).rfind(std::string("/") + kStalePrefix, 0), 0u) << name;
  const auto contains = [&](const std::vector<std::string>& swept) {
    return std::find(swept.begin(), swept.end(), name + 1) != swept.end();
  };
  EXPECT_FALSE(contains(SweepStaleSegments())) << "its owner lives";
  EXPECT_TRUE(exists(name));
  const auto mine = SharedMemory::Create(Name("sweep"), 4096);
  ASSERT_TRUE(mine.ok()) << mine.status();
  ::kill(owner, SIGKILL);
  ::waitpid(owner, nullptr, 0);
  EXPECT_TRUE(contains(SweepStaleSegments("/dev/shm", kStalePrefix, /*remove=*/false)));
  EXPECT_TRUE(exists(name)) << "it was only asked";
  const auto fresh = SharedMemory::Create("", 4096);  // sweeps first
  ASSERT_TRUE(fresh.ok()) << fresh.status();
  EXPECT_FALSE(exists(name));
  EXPECT_TRUE(SweepStaleSegments("/dev/shm", Name("sweep").substr(1)).empty()) << "it is ours, and alive";
  EXPECT_TRUE(exists(mine->name()) && exists(fresh->name()));
  EXPECT_TRUE(SweepStaleSegments("/nonexistent").empty());
  ::close(names[0]);
  ::close(names[1]);
}

TEST(ClientConnect, SaysWhereNobodyAnswers) {
  Client::Options options;
  options.address = "/nonexistent/worker.sock";
  options.connect_timeout_ms = 50;
  const auto client = Client::Connect(options);
  EXPECT_EQ(client.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(client.status()), "");
  EXPECT_NE(std::string(client.status().message()).find("/nonexistent/worker.sock"), std::string::npos);
  EXPECT_EQ(TargetOf("/a/b"), "unix:/a/b");
  EXPECT_EQ(TargetOf("127.0.0.1:80"), "127.0.0.1:80");
}

}  // namespace
}  // namespace spectrumkv::client
