#include "tests/bench/bench_util.h"

#include <unistd.h>

#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace spectrumkv::bench {
namespace {

TEST(PercentileTest, IsAValueThatTheShareDoesNotExceed) {
  EXPECT_EQ(Percentile({3, 1, 2}, 0.5), 2);
  EXPECT_EQ(Percentile({4, 1, 3, 2}, 0.5), 2);
  EXPECT_EQ(Percentile({4, 1, 3, 2}, 0.51), 3);
  EXPECT_EQ(Percentile({7}, 0), 7);
  EXPECT_EQ(Percentile({7, 8}, 1), 8);
  std::vector<double> hundred;
  for (int i = 100; i > 0; --i) hundred.push_back(i);
  EXPECT_EQ(Percentile(hundred, 0.99), 99);
}

TEST(SummarizeTest, HasMedianAndEnds) {
  const Summary s = Summarize({5, 1, 9});
  EXPECT_EQ(s.median, 5);
  EXPECT_EQ(s.min, 1);
  EXPECT_EQ(s.max, 9);
}

TEST(SplitCommasTest, LeavesEmptyPartsOut) {
  EXPECT_EQ(SplitCommas("a,b=0.3"), (std::vector<std::string>{"a", "b=0.3"}));
  EXPECT_EQ(SplitCommas(",a,,"), (std::vector<std::string>{"a"}));
  EXPECT_TRUE(SplitCommas("").empty());
}

TEST(FlagsTest, TakesValuesWithinTheLimitsOnly) {
  struct Case {
    std::vector<const char*> args;
    bool good;
  };
  for (const Case& c : {Case{{"--n", "1"}, true}, Case{{"--n", "10"}, true}, Case{{"--n", "0"}, false}, Case{{"--n", "11"}, false},
                        Case{{"--n", "-1"}, false}, Case{{"--n", "4294967297"}, false}, Case{{"--n", "2x"}, false},
                        Case{{"--n", ""}, false}, Case{{"--n"}, false}, Case{{"--m"}, false}, Case{{"--on"}, true}}) {
    uint32_t n = 5;
    bool on = false;
    Flags flags("usage\n");
    flags.Add("--n", &n, 1, 10);
    flags.Add("--on", &on);
    std::vector<char*> argv;
    for (const char* arg : c.args) argv.push_back(const_cast<char*>(arg));
    EXPECT_EQ(flags.Parse(static_cast<int>(argv.size()), argv.data()), c.good) << testing::PrintToString(c.args);
    EXPECT_TRUE(c.good || n == 5) << n;
  }
}

TEST(FlagsTest, AListGoesOnWhenGivenAgain) {
  std::vector<std::string> list;
  Flags flags("usage\n");
  flags.Add("--set", &list);
  const char* args[] = {"--set", "a=1,b=2", "--set", "c=3"};
  EXPECT_TRUE(flags.Parse(4, const_cast<char**>(args)));
  EXPECT_EQ(list, (std::vector<std::string>{"a=1", "b=2", "c=3"}));
}

TEST(ProcessTest, SeesItsOwnCpuTimeAndMemory) {
  const double before = ProcessCpuSeconds(getpid());
  for (const double until = Now() + 0.02; Now() < until;) {
  }
  EXPECT_GT(ProcessCpuSeconds(getpid()), before);
  EXPECT_GT(ProcessOwnBytes(getpid()), 4096u);
  EXPECT_EQ(ProcessOwnBytes(-1), 0u);
  EXPECT_EQ(ProcessCpuSeconds(0x7ffffff0), 0);
}

TEST(JsonRowTest, IsOneObjectOnALine) {
  JsonRow row;
  row.Add("name", "b=0.3").Add("gb", 0.25).Add("pages", uint64_t{8192}).Add("on", true).Add("ms", Summary{2, 1, 3});
  testing::internal::CaptureStdout();
  row.Print();
  EXPECT_EQ(testing::internal::GetCapturedStdout(),
            "{\"name\": \"b=0.3\", \"gb\": 0.25, \"pages\": 8192, \"on\": true, "
            "\"ms_median\": 2, \"ms_min\": 1, \"ms_max\": 3}\n");
}

}  // namespace
}  // namespace spectrumkv::bench
