#include "server/memory/available.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <limits>

#include "server/base/status.h"
#include "server/memory/mapping.h"

namespace spectrumkv {
namespace {

class AvailableTest : public testing::Test {
 protected:
  // Files with these texts; an empty text is no file.
  MemoryFiles Files(const std::string& meminfo, const std::string& max, const std::string& current) {
    const auto write = [&](const std::string& name, const std::string& text) {
      const std::string path = testing::TempDir() + "/available_" + std::to_string(getpid()) + "_" + name;
      std::filesystem::remove(path);
      if (!text.empty()) std::ofstream(path) << text;
      return path;
    };
    return {write("meminfo", meminfo), write("max", max), write("current", current)};
  }
};

constexpr char kMeminfo[] = "MemTotal:       4000 kB\nMemFree:   100 kB\nMemAvailable:   2000 kB\nBuffers: 1 kB\n";

TEST_F(AvailableTest, TheLeastOfWhatIsSaid) {
  constexpr uint64_t kNone = std::numeric_limits<uint64_t>::max();
  const struct {
    const char *meminfo, *max, *current;
    uint64_t expected;
  } cases[] = {{kMeminfo, "", "", 2048000},
               {kMeminfo, "max\n", "5000\n", 2048000},
               {kMeminfo, "1000000\n", "400000\n", 600000},
               {kMeminfo, "1000000\n", "1000001\n", 0},
               {kMeminfo, "1000000\n", "", 1000000},
               {kMeminfo, "9000000\n", "0\n", 2048000},
               {"", "1000000\n", "0\n", 1000000},
               {"MemAvailable: nonsense", "nonsense", "nonsense", kNone},
               {"MemAvailable: 99999999999999999999 kB", "", "", kNone},
               {"MemAvailable: 18446744073709551615 kB", "", "", kNone},
               {"", "", "", kNone}};
  for (const auto& one : cases) {
    EXPECT_EQ(AvailableMemoryBytes(Files(one.meminfo, one.max, one.current)), one.expected)
        << one.meminfo << "|" << one.max << "|" << one.current;
  }
}

TEST_F(AvailableTest, OneByteTooMuchIsRefused) {
  const MemoryFiles files = Files(kMeminfo, "", "");
  EXPECT_TRUE(CheckMemory("x needs", 0, files).ok());
  EXPECT_TRUE(CheckMemory("x needs", 2048000, files).ok());
  const absl::Status status = CheckMemory("x needs", 2048001, files);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(status), "OUT_OF_MEMORY");
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("x needs 2048001 bytes of memory, 2048000 are"));
}

// Without the check the OOM killer would end this program.
TEST(AllocateOwnedTest, MoreThanTheMachineHasIsRefused) {
  ASSERT_LT(AvailableMemoryBytes(), uint64_t{1} << 46) << "this machine says how much memory it has";
  const auto refused = AllocateOwned(uint64_t{1} << 46);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(refused.status()), "OUT_OF_MEMORY");
}

}  // namespace
}  // namespace spectrumkv
