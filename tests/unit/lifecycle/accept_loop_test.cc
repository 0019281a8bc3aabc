#include "server/lifecycle/accept_loop.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <thread>

#include "gtest/gtest.h"
#include "server/base/status.h"

namespace spectrumkv {
namespace {

constexpr uint32_t kStranger = 54321;

std::string PeerOf(int number) { return "fd:" + std::to_string(number); }

int NewSocket() { return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0); }

// Of async-signal-safe calls alone: a forked child uses it. -1 or a connected socket.
int Connect(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  const int fd = NewSocket();
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) return fd;
  close(fd);
  return -1;
}

// Whether the other side closes it within two seconds.
bool IsClosed(int fd) {
  const timeval patience = {2, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  char byte;
  const ssize_t got = read(fd, &byte, 1);
  return got == 0 || (got < 0 && errno == ECONNRESET);
}

bool Until(const std::function<bool()>& what) {
  for (int i = 0; i < 1000 && !what(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  return what();
}

class AcceptLoopTest : public testing::Test {
 protected:
  AcceptLoopTest() {
    char name[] = "/tmp/skvaccept.XXXXXX";
    folder_ = mkdtemp(name);
    chmod(folder_.c_str(), 0711);
  }
  ~AcceptLoopTest() override {
    loop_.reset();
    for (const int fd : Taken()) close(fd);
    std::filesystem::remove_all(folder_);
  }

  void Start(uint32_t max_connections, std::vector<uint32_t> allowed_uids = {}) {
    callers_ = std::make_shared<CallerTable>(max_connections);
    AcceptLoop::Options options;
    options.socket = folder_ + "/w.sock";
    options.socket_key = "worker.socket";
    options.allowed_uids = std::move(allowed_uids);
    options.callers = callers_;
    options.on_refused = [this](MetricRefusal why) { ++refused_[static_cast<size_t>(why)]; };
    options.retry_ms = 50;
    auto loop = AcceptLoop::Listen(std::move(options));
    ASSERT_TRUE(loop.ok()) << loop.status();
    loop_ = *std::move(loop);
    ASSERT_EQ(chmod(Path().c_str(), 0666), 0);
    loop_->Run([this](int fd) {
      std::lock_guard<std::mutex> lock(mutex_);
      taken_.push_back(fd);
    });
  }
  std::string Path() const { return folder_ + "/w.sock"; }
  std::vector<int> Taken() {
    std::lock_guard<std::mutex> lock(mutex_);
    return taken_;
  }
  bool TakenAre(size_t count) {
    return Until([&] { return Taken().size() == count; });
  }
  int Refused(MetricRefusal why) const { return refused_[static_cast<size_t>(why)]; }

  // What a child process of that user finds: 'c' closed, 'o' open, 'x' it cannot connect.
  char AsUser(uint32_t uid) {
    const pid_t child = fork();
    if (child == 0) {
      if (syscall(SYS_setresuid, uid, uid, uid) != 0) _exit('s');
      const int fd = Connect(Path());
      _exit(fd < 0 ? 'x' : IsClosed(fd) ? 'c' : 'o');
    }
    int status = 0;
    waitpid(child, &status, 0);
    return static_cast<char>(WEXITSTATUS(status));
  }

  std::string folder_;
  std::shared_ptr<CallerTable> callers_;
  std::array<std::atomic<int>, kMetricRefusals> refused_{};
  std::mutex mutex_;
  std::vector<int> taken_;
  std::unique_ptr<AcceptLoop> loop_;
};

TEST(CallerTable, NamesOfConnections) {
  CallerTable callers(8);
  const int number = callers.Add(NewSocket(), 7);
  ASSERT_GE(number, 0);
  EXPECT_EQ(callers.Find(PeerOf(number)), Caller::Uid(7));
  EXPECT_EQ(callers.Find("ipv4:127.0.0.1:1"), Caller::Token());
  EXPECT_EQ(callers.Find("ipv6:%5B::1%5D:1"), Caller::Token());
  for (const std::string& peer : {std::string(), std::string("fd:"), std::string("fd:-1"), PeerOf(number) + "x", PeerOf(number + 1),
                                  "unix:" + PeerOf(number), std::string("unix:"), std::string("fd:99999999999")}) {
    EXPECT_FALSE(callers.Find(peer).known()) << peer;
  }
  close(number);
}

TEST(CallerTable, ANumberThatIsUsedAgainIsNotTheOldUsers) {
  CallerTable callers(8);
  const int number = callers.Add(NewSocket(), 7);
  ASSERT_GE(number, 0);
  close(number);
  EXPECT_FALSE(callers.Find(PeerOf(number)).known()) << "closed";
  // The same number by somebody else: another socket, and a file.
  const int socket = NewSocket();
  ASSERT_EQ(dup2(socket, number), number);
  close(socket);
  EXPECT_FALSE(callers.Find(PeerOf(number)).known()) << "another socket";
  const int file = open("/dev/null", O_RDONLY);
  ASSERT_EQ(dup2(file, number), number);
  close(file);
  EXPECT_FALSE(callers.Find(PeerOf(number)).known()) << "a file";
  close(number);
  EXPECT_EQ(callers.Sweep(), 0u);
}

TEST(CallerTable, NumbersRiseAndNameTheirLastConnection) {
  CallerTable callers(8);
  const int first = callers.Add(NewSocket(), 1);
  close(first);
  const int second = callers.Add(NewSocket(), 2);
  EXPECT_GT(second, first) << "a number just left is not the next one's";
  close(second);
  // Until the numbers begin again: each names its newest user.
  bool again = false;
  for (uint32_t uid = 3; uid < 40000 && !again; ++uid) {
    const int number = callers.Add(NewSocket(), uid);
    ASSERT_GE(number, 0);
    ASSERT_EQ(callers.Find(PeerOf(number)), Caller::Uid(uid));
    again = number == first;
    close(number);
  }
  EXPECT_TRUE(again);
  EXPECT_EQ(callers.Sweep(), 0u);
}

TEST(CallerTable, OneUserLeavesRoomForOthers) {
  CallerTable callers(8);
  std::vector<int> numbers;
  const auto fill = [&](uint32_t uid) {
    size_t count = 0;
    for (; callers.HasRoom(uid); ++count) numbers.push_back(callers.Add(NewSocket(), uid));
    return count;
  };
  EXPECT_EQ(fill(1), 4u);
  EXPECT_EQ(fill(2), 2u);
  EXPECT_EQ(fill(3), 1u);
  close(numbers[0]);
  close(numbers[1]);
  EXPECT_TRUE(callers.HasRoom(3)) << "what is closed is room";
  for (size_t i = 2; i < numbers.size(); ++i) close(numbers[i]);
}

TEST_F(AcceptLoopTest, TellsWhoCalls) {
  Start(8);
  const int fd = Connect(Path());
  ASSERT_GE(fd, 0);
  ASSERT_TRUE(TakenAre(1));
  EXPECT_EQ(callers_->Find(PeerOf(Taken()[0])), Caller::Uid(geteuid()));
  EXPECT_NE(fcntl(Taken()[0], F_GETFL) & O_NONBLOCK, 0);
  EXPECT_NE(fcntl(Taken()[0], F_GETFD) & FD_CLOEXEC, 0);
  close(fd);
}

TEST_F(AcceptLoopTest, RefusesUsersThatAreNotAllowed) {
  if (geteuid() != 0) {
    std::puts("SKIPPED: not root, so no other user can connect");
    return;
  }
  Start(8, {geteuid()});
  EXPECT_EQ(AsUser(kStranger), 'c');
  EXPECT_EQ(AsUser(kStranger), 'c');
  EXPECT_EQ(Refused(MetricRefusal::kUid), 2);
  EXPECT_TRUE(Taken().empty());
  const int own = Connect(Path());
  EXPECT_TRUE(TakenAre(1));
  close(own);
}

TEST_F(AcceptLoopTest, WithoutAListTheOverflowUserAloneIsRefused) {
  if (geteuid() != 0) {
    std::puts("SKIPPED: not root, so no other user can connect");
    return;
  }
  Start(8);
  EXPECT_EQ(AsUser(OverflowUid()), 'c');
  EXPECT_EQ(Refused(MetricRefusal::kUid), 1);
  EXPECT_EQ(AsUser(kStranger), 'o');
  ASSERT_TRUE(TakenAre(1));
  EXPECT_EQ(callers_->Find(PeerOf(Taken()[0])), Caller::Uid(kStranger));
}

TEST_F(AcceptLoopTest, MoreThanItsConnectionsAreClosedAtOnce) {
  Start(4);
  std::array<int, 2> fds = {Connect(Path()), Connect(Path())};
  ASSERT_TRUE(TakenAre(2));
  const int more = Connect(Path());
  EXPECT_TRUE(IsClosed(more));
  EXPECT_EQ(Refused(MetricRefusal::kFull), 1);
  close(more);
  close(Taken()[0]);  // as gRPC does when the client has gone
  const int next = Connect(Path());
  EXPECT_TRUE(TakenAre(3));
  for (const int fd : {fds[0], fds[1], next}) close(fd);
  std::lock_guard<std::mutex> lock(mutex_);
  taken_.erase(taken_.begin());
}

TEST_F(AcceptLoopTest, WithoutDescriptorsItWaitsAndDoesNotSpin) {
  Start(8);
  const int client = NewSocket();
  struct rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const int next = dup(client);
  close(next);
  struct rlimit none = before;
  none.rlim_cur = static_cast<rlim_t>(next);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, Path().data(), Path().size());
  EXPECT_EQ(connect(client, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_TRUE(Until([&] { return Refused(MetricRefusal::kNoDescriptor) >= 2; }));
  const int begin = Refused(MetricRefusal::kNoDescriptor);
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_LE(Refused(MetricRefusal::kNoDescriptor) - begin, 11) << "ten retries fit into that time";
  EXPECT_TRUE(Taken().empty());
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_TRUE(TakenAre(1)) << "the connection has waited";
  close(client);
}

TEST_F(AcceptLoopTest, StopsPromptlyAndLeavesThePath) {
  Start(8);
  const auto begin = std::chrono::steady_clock::now();
  loop_->Stop();
  loop_->Stop();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(1));
  EXPECT_LT(Connect(Path()), 0);
  EXPECT_TRUE(std::filesystem::exists(Path())) << "the path is its guard's";
}

TEST_F(AcceptLoopTest, NamesWhereItCannotListen) {
  AcceptLoop::Options options;
  options.socket = folder_ + "/none/w.sock";
  options.socket_key = "worker.socket";
  options.callers = std::make_shared<CallerTable>(2);
  const auto refused = AcceptLoop::Listen(options).status();
  EXPECT_EQ(ReasonOf(refused), "LISTEN_FAILED");
  EXPECT_EQ(MetadataOf(refused)["key"], "worker.socket");
  EXPECT_EQ(MetadataOf(refused)["cause"], "ENOENT");
}

}  // namespace
}  // namespace spectrumkv
