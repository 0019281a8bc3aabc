#include "server/base/text.h"

#include <gtest/gtest.h>

#include <string>

namespace spectrumkv {
namespace {

TEST(CleanText, KeepsWhatMayBeShownAndNothingElse) {
  const struct {
    std::string text, shown;
  } cases[] = {{"", ""},
               {"plain text, 100 %", "plain text, 100 %"},
               {"h\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80", "h\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"},
               {"a\n2026-01-01T00:00:00Z error forged", "a?2026-01-01T00:00:00Z error forged"},
               {"\x1b[2J\t\r\x7f", "?[2J???"},
               {std::string("a\0b", 3), "a?b"},
               {"\x1f \x20~", "?  ~"},
               {"\xc2\x80\xc2\x9f\xc2\xa0", "??\xc2\xa0"},  // U+0080, U+009F, and U+00A0, which is no control
               {"\xff\xfe", "??"},
               {"\xc3", "?"},
               {"\xe2\x82", "??"},
               {"\xc0\xaf", "??"},             // overlong
               {"\xed\xa0\x80", "???"},        // a surrogate
               {"\xf4\x90\x80\x80", "????"}};  // beyond U+10FFFF
  for (const auto& one : cases) EXPECT_EQ(CleanText(one.text, 1000), one.shown);
}

TEST(CleanText, EndsBetweenCharacters) {
  const std::string text = "ab\xc3\xa9\xe2\x82\xac";
  const std::string ends[] = {"", "a", "ab", "ab", "ab\xc3\xa9", "ab\xc3\xa9", "ab\xc3\xa9", text, text};
  for (size_t most = 0; most < std::size(ends); ++most) EXPECT_EQ(CleanText(text, most), ends[most]) << most;
  EXPECT_EQ(CleanText("\n\n", 1), "?");
}

}  // namespace
}  // namespace spectrumkv
