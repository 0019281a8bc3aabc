#include "server/base/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "server/base/status.h"

namespace spectrumkv {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;

class LogTest : public ::testing::Test {
 protected:
  void SetUp() override {
    SetLogSinkForTest([this](const std::string& line) { lines_.push_back(line); });
    ASSERT_TRUE(SetLogLevel("info").ok());
    ASSERT_TRUE(SetLogFormat("text").ok());
  }
  void TearDown() override {
    SetLogSinkForTest(nullptr);
    ASSERT_TRUE(SetLogLevel("info").ok());
    ASSERT_TRUE(SetLogFormat("text").ok());
  }
  std::vector<std::string> lines_;
};

TEST_F(LogTest, WritesOneLineOfText) {
  SPECTRUMKV_LOG(kInfo, "transfer", "committed", {"transfer", std::string("ab12")}, {"wire_bytes", uint64_t{73114}},
                 {"ratio", 0.25}, {"retried", false}, {"backend", "avx2"});
  ASSERT_EQ(lines_.size(), 1u);
  EXPECT_THAT(lines_[0], MatchesRegex("[0-9]+-[0-9]+-[0-9]+T[0-9]+:[0-9]+:[0-9]+\\.[0-9]+Z info transfer committed "
                                      "transfer=ab12 wire_bytes=73114 ratio=0.25 retried=false backend=avx2"));
}

TEST_F(LogTest, NoFieldsIsFine) {
  SPECTRUMKV_LOG(kError, "m", "plain words");
  ASSERT_EQ(lines_.size(), 1u);
  EXPECT_THAT(lines_[0], EndsWith(" error m plain words"));
}

TEST_F(LogTest, ArgumentsAreNotEvaluatedWhenOff) {
  int evaluated = 0;
  const auto costly = [&evaluated] { return ++evaluated; };
  SPECTRUMKV_LOG(kDebug, "m", "x", {"n", costly()});
  EXPECT_EQ(evaluated, 0);
  EXPECT_TRUE(lines_.empty());
  ASSERT_TRUE(SetLogLevel("debug").ok());
  SPECTRUMKV_LOG(kDebug, "m", "x", {"n", costly()});
  EXPECT_EQ(evaluated, 1);
  EXPECT_EQ(lines_.size(), 1u);
}

TEST_F(LogTest, LevelsAreOrdered) {
  const std::vector<std::string> names = {"debug", "info", "warning", "error"};
  for (size_t level = 0; level < names.size(); ++level) {
    ASSERT_TRUE(SetLogLevel(names[level]).ok());
    EXPECT_EQ(GetLogLevel(), names[level]);
    for (size_t other = 0; other < names.size(); ++other) {
      EXPECT_EQ(LogEnabled(static_cast<LogLevel>(other)), other >= level);
    }
  }
}

TEST_F(LogTest, UnknownNamesChangeNothing) {
  const absl::Status level = SetLogLevel("loud");
  EXPECT_EQ(level.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(level), "INVALID_LOG_LEVEL");
  EXPECT_EQ(GetLogLevel(), "info");
  EXPECT_EQ(ReasonOf(SetLogFormat("xml")), "INVALID_LOG_FORMAT");
}

TEST_F(LogTest, TextFromOutsideCannotStartALine) {
  SPECTRUMKV_LOG(kInfo, "m", "bad\nmessage", {"id", std::string("x\" y\n2026 error forged\x01\xff")}, {"empty", ""});
  ASSERT_EQ(lines_.size(), 1u);
  EXPECT_THAT(lines_[0], Not(HasSubstr("\n")));
  EXPECT_THAT(lines_[0], EndsWith(R"(m bad\nmessage id="x\" y\n2026 error forged\u0001\u00ff" empty="")"));
}

TEST_F(LogTest, LongValuesAreCut) {
  SPECTRUMKV_LOG(kInfo, "m", "x", {"id", std::string(100000, 'a')});
  EXPECT_LT(lines_.at(0).size(), 5000u);
  EXPECT_THAT(lines_[0], EndsWith("aaa...\""));
}

TEST_F(LogTest, Json) {
  ASSERT_TRUE(SetLogFormat("json").ok());
  SPECTRUMKV_LOG(kWarning, "peer", "a \"b\"", {"n", -5}, {"ok", true}, {"text", "1"},
                 {"nan", std::numeric_limits<double>::quiet_NaN()}, {"max", std::numeric_limits<uint64_t>::max()});
  EXPECT_THAT(lines_.at(0), HasSubstr(R"("level":"warning","module":"peer","message":"a \"b\"","n":-5,"ok":true,)"
                                      R"("text":"1","nan":"nan","max":18446744073709551615})"));
}

TEST_F(LogTest, ThreadsDoNotMixLines) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 200; ++i) SPECTRUMKV_LOG(kInfo, "m", "event", {"i", i});
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_EQ(lines_.size(), 800u);
  for (const std::string& line : lines_) EXPECT_THAT(line, MatchesRegex(".*Z info m event i=[0-9]+"));
}

TEST(LogStderrTest, GoesToStderr) {
  testing::internal::CaptureStderr();
  SPECTRUMKV_LOG(kInfo, "m", "to stderr", {"a", 1});
  EXPECT_THAT(testing::internal::GetCapturedStderr(), EndsWith("info m to stderr a=1\n"));
}

}  // namespace
}  // namespace spectrumkv
