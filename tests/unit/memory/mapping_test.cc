#include "server/memory/mapping.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <fstream>
#include <thread>

#include "server/base/status.h"
#include "server/memory/open_beneath.h"
#include "tests/unit/pool/segments.h"

namespace spectrumkv {
namespace {

constexpr size_t kPage = 4096;
const SegmentOwners kMine = {geteuid()};
namespace fs = std::filesystem;

void ExpectRefused(const absl::StatusOr<std::unique_ptr<Mapping>>& mapping, absl::StatusCode code,
                   const std::string& reason) {
  ASSERT_FALSE(mapping.ok());
  EXPECT_EQ(mapping.status().code(), code) << mapping.status();
  EXPECT_EQ(ReasonOf(mapping.status()), reason) << mapping.status();
}

TEST(ShmSegment, MapsWhatTheOwnerSees) {
  ShmObject object(3 * kPage, 7);
  auto a = OpenShmSegment(object.name(), "/skvtest-", 3 * kPage, kMine);
  auto b = OpenShmSegment(object.name(), "/", kPage + 1, kMine);  // the beginning of a larger object is fine
  ASSERT_TRUE(a.ok()) << a.status();
  ASSERT_TRUE(b.ok()) << b.status();
  EXPECT_EQ((*a)->size(), 3 * kPage);
  EXPECT_EQ((*b)->size(), kPage + 1);
  EXPECT_EQ((*a)->data()[3 * kPage - 1], 7);
  (*a)->data()[kPage] = 42;
  EXPECT_EQ((*b)->data()[kPage], 42);
  EXPECT_EQ((*a)->inode, (*b)->inode);
  EXPECT_FALSE((*a)->failed());
}

TEST(ShmSegment, SizeEdges) {
  ShmObject object(2 * kPage);
  EXPECT_TRUE(OpenShmSegment(object.name(), "/", 1, kMine).ok());
  EXPECT_TRUE(OpenShmSegment(object.name(), "/", 2 * kPage - 1, kMine).ok());
  EXPECT_TRUE(OpenShmSegment(object.name(), "/", 2 * kPage, kMine).ok());
  ExpectRefused(OpenShmSegment(object.name(), "/", 2 * kPage + 1, kMine), absl::StatusCode::kInvalidArgument,
                "SEGMENT_TOO_SHORT");
  ExpectRefused(OpenShmSegment(object.name(), "/", 0, kMine), absl::StatusCode::kInvalidArgument, "INVALID_SCHEMA");
  ExpectRefused(OpenShmSegment(object.name(), "/", UINT64_MAX, kMine), absl::StatusCode::kInvalidArgument, "INVALID_SCHEMA");
}

TEST(ShmSegment, RefusesMissingAndForeignNames) {
  ExpectRefused(OpenShmSegment(ShmObject::NewName(), "/", kPage, kMine), absl::StatusCode::kNotFound, "SEGMENT_NOT_FOUND");
  ShmObject object(kPage);
  ASSERT_TRUE(OpenShmSegment(object.name(), "/", kPage, kMine).ok());
  for (const std::string& name : {std::string(), std::string("/"), std::string("/."), std::string("/.."),
                                  std::string("x"), std::string("/a/b"), std::string("//") + object.name().substr(1),
                                  object.name() + "/", "/." + object.name(), std::string("/../etc/passwd"),
                                  std::string("/a\0b", 4), "/" + std::string(300, 'x')}) {
    ExpectRefused(OpenShmSegment(name, "/", kPage, kMine), absl::StatusCode::kInvalidArgument, "SEGMENT_OUTSIDE_DIR");
  }
  ExpectRefused(OpenShmSegment(object.name(), "/other-", kPage, kMine), absl::StatusCode::kInvalidArgument,
                "SEGMENT_OUTSIDE_DIR");
}

TEST(ShmSegment, RefusesWhatIsNoRegularFileOfTheDirectory) {
  TempDir outside;
  outside.WriteFile("secret", kPage);
  ShmObject object(kPage);
  const std::string name = ShmObject::NewName(), path = "/dev/shm" + name;
  for (const std::string& to : {"/dev/shm" + object.name(), object.name().substr(1), outside / "secret", outside.path(),
                                std::string("/proc/self/fd/0"), std::string("nowhere"), name.substr(1)}) {
    ASSERT_EQ(symlink(to.c_str(), path.c_str()), 0);
    ExpectRefused(OpenShmSegment(name, "/", kPage, kMine), absl::StatusCode::kInvalidArgument, "SEGMENT_OUTSIDE_DIR");
    unlink(path.c_str());
  }
  ASSERT_EQ(mkdir(path.c_str(), 0700), 0);
  ExpectRefused(OpenShmSegment(name, "/", kPage, kMine), absl::StatusCode::kInvalidArgument, "SEGMENT_NOT_REGULAR");
  rmdir(path.c_str());
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  ExpectRefused(OpenShmSegment(name, "/", kPage, kMine), absl::StatusCode::kInvalidArgument, "SEGMENT_NOT_REGULAR");
  unlink(path.c_str());
}

TEST(ShmSegment, RefusesHoles) {
  ShmObject object(kPage);
  object.Truncate(2 * kPage);  // the second page has never been written
  ExpectRefused(OpenShmSegment(object.name(), "/", 2 * kPage, kMine), absl::StatusCode::kInvalidArgument, "SEGMENT_SPARSE");
}

TEST(FileSegment, MapsARegularFileBelowTheDirectory) {
  TempDir dir;
  dir.WriteFile("kv", 2 * kPage);
  fs::create_directory(dir / "sub");
  dir.WriteFile("sub/kv", kPage);
  EXPECT_TRUE(OpenFileSegment(dir.path(), "kv", 2 * kPage, kMine).ok());
  EXPECT_TRUE(OpenFileSegment(dir.path(), "./sub//kv", kPage, kMine).ok());
  ExpectRefused(OpenFileSegment(dir.path(), "kv", 2 * kPage + 1, kMine), absl::StatusCode::kInvalidArgument,
                "SEGMENT_TOO_SHORT");
  ExpectRefused(OpenFileSegment(dir.path(), "none", kPage, kMine), absl::StatusCode::kNotFound, "SEGMENT_NOT_FOUND");
  ExpectRefused(OpenFileSegment(dir.path(), "kv/x", kPage, kMine), absl::StatusCode::kNotFound, "SEGMENT_NOT_FOUND");
  ExpectRefused(OpenFileSegment("", "kv", kPage, kMine), absl::StatusCode::kInvalidArgument, "SEGMENT_OUTSIDE_DIR");
}

TEST(FileSegment, RefusesWhatIsNoRegularFile) {
  TempDir dir;
  fs::create_directory(dir / "sub");
  ASSERT_EQ(mkfifo((dir / "fifo").c_str(), 0600), 0);
  for (const char* name : {"sub", "fifo"}) {
    ExpectRefused(OpenFileSegment(dir.path(), name, kPage, kMine), absl::StatusCode::kInvalidArgument, "SEGMENT_NOT_REGULAR");
  }
  dir.WriteFile("sparse", kPage);
  fs::resize_file(dir / "sparse", 64 * kPage);
  ExpectRefused(OpenFileSegment(dir.path(), "sparse", kPage, kMine), absl::StatusCode::kInvalidArgument, "SEGMENT_SPARSE");
}

class Beneath : public ::testing::TestWithParam<BeneathMethod> {};

TEST_P(Beneath, NeverLeavesTheDirectory) {
  TempDir outside, dir;
  outside.WriteFile("secret", kPage);
  dir.WriteFile("kv", kPage);
  fs::create_directory(dir / "sub");
  dir.WriteFile("sub/kv", kPage);
  fs::create_symlink(outside / "secret", dir / "link");
  fs::create_symlink(dir / "kv", dir / "inner");  // inside, and still a symlink
  fs::create_symlink(outside.path(), dir / "dirlink");
  const auto opened = [&](const std::string& path) {
    const int fd = OpenBeneath(dir.path(), path, GetParam());
    if (fd >= 0) close(fd);
    return fd;
  };
  EXPECT_GE(opened("kv"), 0);
  EXPECT_GE(opened("sub/kv"), 0);
  EXPECT_EQ(opened("link"), -ELOOP);
  EXPECT_EQ(opened("inner"), -ELOOP);
  EXPECT_EQ(opened("dirlink/secret"), -ELOOP);
  EXPECT_EQ(opened("../" + fs::path(outside.path()).filename().string() + "/secret"), -EXDEV);
  EXPECT_EQ(opened("sub/../kv"), -EXDEV);
  EXPECT_EQ(opened(outside / "secret"), -EXDEV);
  EXPECT_EQ(opened("."), -EXDEV);
  EXPECT_EQ(opened(""), -EINVAL);
  EXPECT_EQ(opened("none"), -ENOENT);
  EXPECT_EQ(opened(std::string("kv\0x", 4)), -EXDEV);
}
INSTANTIATE_TEST_SUITE_P(Methods, Beneath, ::testing::Values(BeneathMethod::kAuto, BeneathMethod::kWalk));

TEST(Owned, IsZeroedAlignedAndWritable) {
  for (const uint64_t size : {uint64_t{1}, uint64_t{4095}, uint64_t{4096}, uint64_t{(2 << 20) + 1}}) {
    auto memory = AllocateOwned(size);
    ASSERT_TRUE(memory.ok()) << memory.status();
    EXPECT_EQ(reinterpret_cast<uintptr_t>((*memory)->data()) % (2 << 20), 0u);
    EXPECT_EQ((*memory)->data()[0], 0);
    (*memory)->data()[size - 1] = 1;
    EXPECT_FALSE((*memory)->failed());
  }
  EXPECT_FALSE(AllocateOwned(0).ok());
  EXPECT_FALSE(AllocateOwned(uint64_t{1} << 63).ok());
}

// Of this process now.
uint64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  uint64_t pages = 0, resident = 0;
  statm >> pages >> resident;
  return resident * kPage;
}

TEST(Owned, SmallSegmentsTakeNoMoreThanTheyAreCountedFor) {
  for (const uint64_t size : {uint64_t{1}, uint64_t{(2 << 20) + 1}}) {
    const uint64_t before = ResidentBytes();
    std::vector<std::unique_ptr<Mapping>> segments;
    for (int i = 0; i < 32; ++i) segments.push_back(*AllocateOwned(size));
    EXPECT_LT(ResidentBytes() - before, 32 * (size + 16 * kPage)) << size;
  }
}

TEST(Mapping, AsksTheFileWhetherItIsStillWhole) {
  const struct {
    const char* what;
    std::vector<size_t> lengths;  // one after the other
    bool whole;
  } cases[] = {{"nothing", {}, true},
               {"the same length again", {4 * kPage}, true},
               {"longer, with a hole behind", {64 * kPage}, true},
               {"a byte less", {4 * kPage - 1}, false},
               {"the last page", {3 * kPage}, false},
               {"everything", {0}, false},
               {"cut and grown again", {0, 4 * kPage}, false},
               {"cut a little and grown again", {3 * kPage, 4 * kPage}, false}};
  for (const auto& change : cases) {
    SCOPED_TRACE(change.what);
    ShmObject object(4 * kPage, 9);
    auto mapping = OpenShmSegment(object.name(), "/", 4 * kPage, kMine);
    ASSERT_TRUE(mapping.ok());
    EXPECT_TRUE((*mapping)->StillWhole());
    for (const size_t length : change.lengths) object.Truncate(length);
    EXPECT_FALSE((*mapping)->failed()) << "nobody has touched it";
    EXPECT_EQ((*mapping)->StillWhole(), change.whole);
    EXPECT_EQ((*mapping)->failed(), !change.whole);
    object.Truncate(4 * kPage);
    EXPECT_EQ((*mapping)->StillWhole(), change.whole) << "for ever";
  }
  auto owned = AllocateOwned(kPage);
  ASSERT_TRUE(owned.ok());
  EXPECT_TRUE((*owned)->StillWhole());
}

TEST(Mapping, ClosesItsFile) {
  const auto open_files = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
  };
  ShmObject object(kPage);
  const auto before = open_files();
  auto mapping = OpenShmSegment(object.name(), "/", kPage, kMine);
  ASSERT_TRUE(mapping.ok());
  EXPECT_EQ(open_files(), before + 1);
  mapping->reset();
  EXPECT_FALSE(OpenShmSegment(object.name(), "/", 2 * kPage, kMine).ok());
  EXPECT_EQ(open_files(), before);
}

// The heart of it: the daemon lives, this mapping has failed, others have not.
TEST(SigbusGuard, ATruncatedSegmentFailsAloneAndReadsAsZero) {
  ShmObject object(4 * kPage, 9), other(kPage, 5);
  auto victim = OpenShmSegment(object.name(), "/", 4 * kPage, kMine);
  auto neighbour = OpenShmSegment(other.name(), "/", kPage, kMine);
  ASSERT_TRUE(victim.ok() && neighbour.ok());
  object.Truncate(kPage);
  const volatile uint8_t* data = (*victim)->data();
  EXPECT_EQ(data[0], 9);
  EXPECT_FALSE((*victim)->failed());
  EXPECT_EQ(data[2 * kPage + 17], 0);
  EXPECT_TRUE((*victim)->failed());
  EXPECT_EQ(data[3 * kPage], 0);
  EXPECT_EQ(data[kPage], 0);  // before the first fault, and gone as well
  EXPECT_EQ(data[0], 9);
  (*victim)->data()[4 * kPage - 1] = 1;  // writes go nowhere, and kill nobody
  EXPECT_FALSE((*neighbour)->failed());
  EXPECT_EQ((*neighbour)->data()[0], 5);
  // The entry is used again, fresh.
  victim->reset();
  auto next = OpenShmSegment(object.name(), "/", kPage, kMine);
  ASSERT_TRUE(next.ok());
  EXPECT_FALSE((*next)->failed());
}

TEST(SigbusGuard, ManyThreadsMayFaultAtOnce) {
  ShmObject object(16 * kPage, 9);
  auto victim = OpenShmSegment(object.name(), "/", 16 * kPage, kMine);
  ASSERT_TRUE(victim.ok());
  object.Truncate(0);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const volatile uint8_t* data = (*victim)->data();
      for (size_t page = 0; page < 16; ++page) EXPECT_EQ(data[(page + 4 * t) % 16 * kPage], 0);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_TRUE((*victim)->failed());
}

void FaultOutsideEveryGuard() {
  ShmObject guarded(kPage), loose(2 * kPage);
  auto mapping = OpenShmSegment(guarded.name(), "/", kPage, kMine);  // installs the handler
  const int fd = shm_open(loose.name().c_str(), O_RDWR, 0);
  void* at = mmap(nullptr, 2 * kPage, PROT_READ, MAP_SHARED, fd, 0);
  loose.Truncate(0);
  shm_unlink(guarded.name().c_str());
  shm_unlink(loose.name().c_str());
  exit(*static_cast<volatile uint8_t*>(at) == 0 && mapping.ok() ? 0 : 1);
}

void RaiseSigbus() {
  ShmObject guarded(kPage);
  auto mapping = OpenShmSegment(guarded.name(), "/", kPage, kMine);
  shm_unlink(guarded.name().c_str());
  raise(SIGBUS);
  exit(mapping.ok() ? 0 : 1);
}

TEST(SigbusGuardDeathTest, AnyOtherSigbusStillKills) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(FaultOutsideEveryGuard(), ::testing::KilledBySignal(SIGBUS), "");
  EXPECT_EXIT(RaiseSigbus(), ::testing::KilledBySignal(SIGBUS), "");
}

}  // namespace
}  // namespace spectrumkv
