// Commands against a daemon that does not answer: --timeout holds, and the exit code says that it was not done.
#include "tests/unit/client/silent_daemon.h"

#include <gtest/gtest.h>

#include <chrono>
#include <vector>

#include "client/ctl/command.h"
#include "client/ctl/dispatch.h"
#include "client/ctl/npy.h"

namespace spectrumkv::ctl {
namespace {

constexpr std::chrono::seconds kLongest(5);  // of a command that makes some calls of 0.2 s, on a busy machine

TEST(CtlSilentDaemon, EveryCommandKeepsItsTimeout) {
  SilentDaemon daemon;
  char file[] = "/tmp/spectrumkv-kv-XXXXXX";
  const int fd = ::mkstemp(file);
  ASSERT_GE(fd, 0);
  ::close(fd);
  // 64 MiB: more than a connection takes in before somebody reads.
  ASSERT_TRUE(WriteFile(file, std::string(size_t{64} << 20, '\0')).ok());
  const std::string out = std::string(file) + ".out";
  const std::vector<std::string> pool = {"--pool", "p", "--epoch", "1"};
  const std::vector<std::string> shape = {"--layers", "1", "--heads", "8", "--head-dim", "128"};
  const std::vector<std::string> blocks = {"--blocks", "0-3", "--tokens", "64"};
  const std::vector<std::string> peer = {"--peer", "127.0.0.1:1", "--transfer", "t"};
  using Groups = std::vector<std::vector<std::string>>;
  const std::vector<Groups> commands = {
      {{"put", file}, pool, shape},
      {{"put", file}, shape},
      {{"get", "--out", out}, pool, blocks, {"--heads", "8", "--head-dim", "128"}},
      {{"get", "--out", out, "--pool", "p"}, blocks, {"--heads", "8", "--head-dim", "128"}},
      {{"status"}},
      {{"peers"}},
      {{"config"}},
      {{"drain"}},
      {{"log-level", "info"}},
      {{"health"}},
      {{"pools"}},
      {{"pools", "create", "--blocks", "4"}, shape},
      {{"pools", "renew"}, pool},
      {{"transfers"}},
      {{"transfers", "show", "t"}},
      {{"transfers", "cancel", "t"}},
      {{"transfers", "wait", "t"}},
      {{"transfers", "wait", "t", "--exact"}},
      {{"transfers", "release", "t"}},
      {{"transfers", "release", "t", "--keep-in-cache"}},
      {{"transfers", "refine", "t"}},
      {{"transfers", "apply", "t"}},
      {{"first-token", "t", "--seconds", "1"}},
      {{"plan"}, pool, blocks},
      {{"send"}, peer, pool, blocks},
      {{"publish", "--transfer", "t"}, pool, blocks},
      {{"expect", "--transfer", "t"}, pool, blocks},
      {{"fetch"}, peer, pool, blocks},
      {{"top", "--once"}},
      {{"doctor"}},
  };
  for (const Groups& groups : commands) {
    std::vector<std::string> words;
    for (const auto& group : groups) words.insert(words.end(), group.begin(), group.end());
    std::string what;
    for (const std::string& word : words) what += word + " ";
    words.insert(words.end(),
                 {"--timeout", "0.2", "--admin-socket", daemon.socket(), "--worker-socket", daemon.socket()});
    const auto begin = std::chrono::steady_clock::now();
    const int code = Main(words, {});
    EXPECT_NE(code, kOk) << what;
    EXPECT_NE(code, kUsage) << what;
    EXPECT_LT(std::chrono::steady_clock::now() - begin, kLongest) << what;
  }
  ::unlink(file);
}

// Put makes a pool of a block more than the last one named: there is no such number here.
TEST(CtlSilentDaemon, PutRefusesBlocksThatNoPoolOfItsOwnCanHave) {
  SilentDaemon daemon;
  char file[] = "/tmp/spectrumkv-kv-XXXXXX.npy";
  const int fd = ::mkstemps(file, 4);
  ASSERT_GE(fd, 0);
  ::close(fd);
  ASSERT_TRUE(WriteFile(file, FormatNpy({"<f2", {1, 2, 16, 1, 8}, std::string(2 * 16 * 8 * 2, '\0')})).ok());
  const auto put = [&](std::vector<std::string> words) {
    words.insert(words.begin(), {"put", file, "--timeout", "1", "--worker-socket", daemon.socket()});
    return Main(words, {});
  };
  for (const char* blocks :
       {"18446744073709551615", "1-2,18446744073709551614-18446744073709551615", "18446744073709551614"}) {
    EXPECT_EQ(put({"--blocks", blocks}), kUsage) << blocks;
  }
  EXPECT_EQ(put({"--blocks", "18446744073709551615", "--pool", "p", "--epoch", "1"}), kDaemonError)
      << "the daemon's to refuse";
  EXPECT_EQ(put({"--blocks", "7"}), kDaemonError);
  ::unlink(file);
}

// Of the daemon's own time to wait for transfers, as long as --timeout, and --timeout on top.
TEST(CtlSilentDaemon, RemovingAPoolTakesTwiceTheTimeout) {
  SilentDaemon daemon;
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_NE(
      Main({"pools", "remove", "--pool", "p", "--epoch", "1", "--timeout", "1", "--worker-socket", daemon.socket()},
           {}),
      kOk);
  const auto took = std::chrono::steady_clock::now() - begin;
  EXPECT_GT(took, std::chrono::milliseconds(1900));
  EXPECT_LT(took, kLongest);
}

}  // namespace
}  // namespace spectrumkv::ctl
