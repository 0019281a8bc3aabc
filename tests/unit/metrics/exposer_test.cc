#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "server/base/status.h"
#include "server/metrics/metrics.h"
#include "tests/unit/metrics/exposition.h"

namespace spectrumkv {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// A connection to loopback; -1 if nobody answers.
int Dial(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) return fd;
  close(fd);
  return -1;
}

// The whole answer of an HTTP GET; "" if nobody answers.
std::string Get(int port, const std::string& path) {
  const int fd = Dial(port);
  std::string answer;
  if (fd >= 0) {
    const std::string request = "GET " + path + " HTTP/1.0\r\n\r\n";
    EXPECT_EQ(send(fd, request.data(), request.size(), MSG_NOSIGNAL), static_cast<ssize_t>(request.size()));
    char buffer[4096];
    for (ssize_t got; (got = recv(fd, buffer, sizeof(buffer), 0)) > 0;) answer.append(buffer, static_cast<size_t>(got));
    close(fd);
  }
  return answer;
}

TEST(MetricsExposerTest, ServesWhatRenderSays) {
  Metrics metrics({"1", "r", "scalar"});
  const auto exposer = MetricsExposer::Start("127.0.0.1:0", metrics);
  ASSERT_TRUE(exposer.ok()) << exposer.status();
  ASSERT_GT((*exposer)->port(), 0);
  metrics.CountChunk(MetricRole::kSender, 100, 40);
  const std::string answer = Get((*exposer)->port(), "/metrics");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200"));
  const auto served = ParseExposition(answer);
  for (const auto& [series, value] : ParseExposition(metrics.Render())) {
    ASSERT_EQ(served.count(series), 1u) << series;
    EXPECT_EQ(served.at(series), value) << series;
  }
}

TEST(MetricsExposerTest, ServesNothingElse) {
  Metrics metrics;
  const auto exposer = MetricsExposer::Start("localhost:0", metrics);
  ASSERT_TRUE(exposer.ok()) << exposer.status();
  for (const char* path : {"/", "/etc/passwd", "/../etc/passwd", "/other"}) {
    const std::string answer = Get((*exposer)->port(), path);
    EXPECT_THAT(answer, AllOf(StartsWith("HTTP/1."), HasSubstr(" 404 "))) << path;
    EXPECT_THAT(answer, Not(HasSubstr("root:"))) << path;
  }
}

TEST(MetricsExposerTest, ATakenPortIsAnErrorAndTheFirstGoesOn) {
  Metrics metrics;
  const auto first = MetricsExposer::Start("127.0.0.1:0", metrics);
  ASSERT_TRUE(first.ok()) << first.status();
  const std::string address = "127.0.0.1:" + std::to_string((*first)->port());
  const auto second = MetricsExposer::Start(address, metrics);
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(second.status()), "LISTEN_FAILED");
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(address));
  EXPECT_THAT(Get((*first)->port(), "/metrics"), StartsWith("HTTP/1.1 200"));
}

TEST(MetricsExposerTest, NonsenseIsAnError) {
  Metrics metrics;
  for (const char* address : {"", "nonsense", "127.0.0.1:99999", "256.1.1.1:0"}) {
    EXPECT_EQ(ReasonOf(MetricsExposer::Start(address, metrics).status()), "LISTEN_FAILED") << address;
  }
}

TEST(MetricsExposerTest, OutlivesTheMetricsAndStopsWhenDestroyed) {
  std::optional<Metrics> metrics(std::in_place);
  auto exposer = MetricsExposer::Start("127.0.0.1:0", *metrics);
  ASSERT_TRUE(exposer.ok()) << exposer.status();
  const int port = (*exposer)->port();
  metrics.reset();
  EXPECT_THAT(Get(port, "/metrics"), HasSubstr("spectrumkv_draining 0"));
  exposer->reset();
  EXPECT_EQ(Get(port, "/metrics"), "");
}

TEST(MetricsExposerTest, ClientsThatSayNothingHoldScrapesUpForSecondsOnly) {
  Metrics metrics;
  const auto exposer = MetricsExposer::Start("127.0.0.1:0", metrics);
  ASSERT_TRUE(exposer.ok()) << exposer.status();
  std::vector<int> silent;
  for (int i = 0; i < 24; ++i) {
    silent.push_back(Dial((*exposer)->port()));
    ASSERT_GE(silent.back(), 0);
    ASSERT_EQ(send(silent.back(), "GET /metr", 9, MSG_NOSIGNAL), 9);
  }
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THAT(Get((*exposer)->port(), "/metrics"), StartsWith("HTTP/1.1 200"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));  // Prometheus waits so long
  for (const int fd : silent) close(fd);
}

// civetweb alone looks every two seconds whether it shall stop, and a daemon would end so much later.
TEST(MetricsExposerTest, StopsAtOnce) {
  Metrics metrics;
  for (const char* address : {"127.0.0.1:0", "0.0.0.0:0", "localhost:0", "[::1]:0", "[::]:0"}) {
    auto exposer = MetricsExposer::Start(address, metrics);
    if (!exposer.ok() && address[0] == '[') {
      std::printf("SKIPPED: %s: no IPv6 on this machine\n", address);
      continue;
    }
    ASSERT_TRUE(exposer.ok()) << exposer.status();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // let it go into its wait
    const auto start = std::chrono::steady_clock::now();
    exposer->reset();
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(1000)) << address;
  }
}

}  // namespace
}  // namespace spectrumkv
