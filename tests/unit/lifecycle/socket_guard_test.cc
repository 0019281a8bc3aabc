#include "server/lifecycle/socket_guard.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "gtest/gtest.h"
#include "server/base/status.h"

namespace spectrumkv {
namespace {

class SocketGuardTest : public testing::Test {
 protected:
  SocketGuardTest() {
    char name[] = "/tmp/skvguard.XXXXXX";
    folder_ = mkdtemp(name);
    path_ = folder_ + "/d.sock";
  }
  ~SocketGuardTest() override { std::filesystem::remove_all(folder_); }

  // As a daemon that was killed leaves it.
  static void LeaveSocket(const std::string& path) {
    const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
    ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    close(fd);
  }

  std::string folder_, path_;
};

TEST_F(SocketGuardTest, OneOwnerAtATime) {
  auto first = SocketGuard::Take(path_);
  ASSERT_TRUE(first.ok()) << first.status();
  LeaveSocket(path_);
  const auto second = SocketGuard::Take(path_);
  EXPECT_EQ(ReasonOf(second.status()), "SOCKET_IN_USE");
  EXPECT_TRUE(std::filesystem::exists(path_)) << "the refused one must not remove the socket";
  first->reset();
  EXPECT_FALSE(std::filesystem::exists(path_));
  EXPECT_TRUE(SocketGuard::Take(path_).ok());
}

TEST_F(SocketGuardTest, RemovesStaleSocketsAndNothingElse) {
  LeaveSocket(path_);
  {
    const auto guard = SocketGuard::Take(path_);
    ASSERT_TRUE(guard.ok()) << guard.status();
    EXPECT_FALSE(std::filesystem::exists(path_));
  }
  std::ofstream(path_) << "a file";
  EXPECT_EQ(ReasonOf(SocketGuard::Take(path_).status()), "INVALID_SOCKET_PATH");
  EXPECT_TRUE(std::filesystem::exists(path_));
  std::filesystem::remove(path_);
  EXPECT_TRUE(SocketGuard::Take(path_).ok()) << "the refusal kept the lock";
}

TEST_F(SocketGuardTest, MakesItsDirectory) {
  const std::string path = folder_ + "/a/b/d.sock";
  const auto guard = SocketGuard::Take(path);
  ASSERT_TRUE(guard.ok()) << guard.status();
  struct stat info {};
  ASSERT_EQ(stat((folder_ + "/a/b").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0750u);
}

TEST_F(SocketGuardTest, PathLengths) {
  EXPECT_EQ(ReasonOf(SocketGuard::Take("").status()), "INVALID_SOCKET_PATH");
  const std::string longest = folder_ + "/" + std::string(107 - folder_.size() - 1, 'x');
  ASSERT_EQ(longest.size(), 107u);
  EXPECT_TRUE(SocketGuard::Take(longest).ok());
  EXPECT_EQ(ReasonOf(SocketGuard::Take(longest + "x").status()), "INVALID_SOCKET_PATH");
}

TEST_F(SocketGuardTest, ModeAndUmask) {
  const auto guard = SocketGuard::Take(path_);
  ASSERT_TRUE(guard.ok());
  {
    const PrivateUmask mask(0640);
    LeaveSocket(path_);
  }
  struct stat info {};
  ASSERT_EQ(stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0137, 0u) << "never open to more, not even before SetMode";
  ASSERT_TRUE((*guard)->SetMode(0600).ok());
  ASSERT_EQ(stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0600u);
}

}  // namespace
}  // namespace spectrumkv
