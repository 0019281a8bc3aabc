#include "server/base/ids.h"

#include <gtest/gtest.h>

#include <cctype>
#include <set>
#include <string>

namespace spectrumkv {
namespace {

TEST(IdsTest, IdsAreShortAndOfHarmlessCharacters) {
  for (int c = 0; c < 256; ++c) {
    const bool good = std::isalnum(c) != 0 || c == '.' || c == '_' || c == ':' || c == '-';  // in the "C" locale
    EXPECT_EQ(IsId(std::string(1, static_cast<char>(c))), good) << c;
    EXPECT_EQ(IsId(std::string("a") + static_cast<char>(c)), good) << c;
    EXPECT_EQ(IsId(static_cast<char>(c) + std::string("z")), good) << c;
  }
  EXPECT_FALSE(IsId(""));
  EXPECT_TRUE(IsId(std::string(127, 'x')));
  EXPECT_TRUE(IsId(std::string(128, 'x')));
  EXPECT_FALSE(IsId(std::string(129, 'x')));
  EXPECT_EQ(IdRule(), "1 to 128 of A-Z a-z 0-9 . _ : -");
}

TEST(IdsTest, RandomNumbersAreDistinctAndNotZero) {
  std::set<uint64_t> seen;
  uint64_t bits = 0;
  for (int i = 0; i < 1000; ++i) {
    const uint64_t value = RandomU64();
    EXPECT_NE(value, 0u);
    EXPECT_TRUE(seen.insert(value).second);
    bits |= value;
  }
  EXPECT_EQ(bits, ~uint64_t{0});  // every bit is used
}

TEST(IdsTest, HexHasTwoDigitsForEachByte) {
  for (const size_t bytes : {0, 1, 16, 300}) {
    const std::string hex = RandomHex(bytes);
    EXPECT_EQ(hex.size(), 2 * bytes);
    EXPECT_EQ(hex.find_first_not_of("0123456789abcdef"), std::string::npos);
  }
  EXPECT_NE(RandomHex(16), RandomHex(16));
}

TEST(IdsTest, ConstantTimeEqualComparesEveryByte) {
  EXPECT_TRUE(ConstantTimeEqual("", ""));
  EXPECT_FALSE(ConstantTimeEqual("", "a"));
  EXPECT_FALSE(ConstantTimeEqual("ab", "a"));
  const std::string token = RandomHex(16);
  EXPECT_TRUE(ConstantTimeEqual(token, std::string(token)));
  for (size_t i = 0; i < token.size(); ++i) {
    std::string other = token;
    other[i] = static_cast<char>(other[i] ^ 0x80);
    EXPECT_FALSE(ConstantTimeEqual(token, other)) << i;
  }
}

}  // namespace
}  // namespace spectrumkv
