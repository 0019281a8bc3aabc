#include "server/probe/verdicts.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "server/base/status.h"

namespace spectrumkv {
namespace {

namespace fs = std::filesystem;

Verdict Of(const std::string& owner, const std::string& model, Tier tier, bool open, int64_t seconds = 1000) {
  Verdict verdict;
  verdict.key = {owner, model, "r1", 1, tier};
  verdict.open = open;
  verdict.scores = {Score{2, 3}, Score{3, 3}, Score{0, 3}};
  verdict.unix_seconds = seconds;
  return verdict;
}

class VerdictsTest : public testing::Test {
 protected:
  VerdictsTest() {
    char name[] = "/tmp/verdicts-XXXXXX";
    folder_ = mkdtemp(name);
    path_ = folder_ + "/verdicts";
  }
  ~VerdictsTest() override {
    chmod(folder_.c_str(), 0700);
    fs::remove_all(folder_);
  }
  std::string Text() {
    std::ifstream file(path_, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }
  void Write(const std::string& text) { std::ofstream(path_, std::ios::binary) << text; }

  std::string folder_, path_;
};

TEST_F(VerdictsTest, TextAndBack) {
  Verdict odd = Of("uid 1000", "a model/with % and\n\ttabs\xff", Tier::kP4, false, 0);
  odd.key.revision = std::string("\0=", 2);
  Verdict empty = Of("token", "", Tier::kQ2, true, int64_t{1} << 40);
  empty.key.revision.clear();
  const std::vector<Verdict> all = {Of("uid 0", "m", Tier::kQ4, true), odd, empty};
  const auto parsed = ParseVerdicts(FormatVerdicts(all));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, all);
  EXPECT_TRUE(ParseVerdicts(FormatVerdicts({}))->empty());
}

TEST_F(VerdictsTest, EveryByteThatChangesAndEveryCutIsSeen) {
  const std::string text = FormatVerdicts({Of("uid 0", "m", Tier::kQ4, false), Of("uid 0", "m", Tier::kQ3, true)});
  for (size_t at = 0; at < text.size(); ++at) {
    EXPECT_FALSE(ParseVerdicts(text.substr(0, at)).ok()) << "cut at " << at;
    for (const int bit : {1, 4, 0x20}) {
      std::string changed = text;
      changed[at] = static_cast<char>(changed[at] ^ bit);
      EXPECT_EQ(ReasonOf(ParseVerdicts(changed).status()), "VERDICTS_FILE") << "byte " << at;
    }
  }
  EXPECT_FALSE(ParseVerdicts(text + "x").ok());
  EXPECT_FALSE(ParseVerdicts(text + text).ok());
}

TEST_F(VerdictsTest, WhatIsWrongUnderAGoodChecksum) {
  Verdict twice = Of("uid 0", "m", Tier::kQ4, false);
  EXPECT_FALSE(ParseVerdicts(FormatVerdicts({twice, twice})).ok());
  Verdict passed = twice;
  passed.scores[0] = {4, 3};
  EXPECT_FALSE(ParseVerdicts(FormatVerdicts({passed})).ok()) << "more were passed than there were";
  Verdict long_name = twice;
  long_name.key.model.assign(kMaxVerdictNameBytes + 1, 'm');
  EXPECT_FALSE(ParseVerdicts(FormatVerdicts({long_name})).ok());
  Verdict late = twice;
  late.unix_seconds = (int64_t{1} << 40) + 1;
  EXPECT_FALSE(ParseVerdicts(FormatVerdicts({late})).ok());
  std::vector<Verdict> many;
  for (size_t i = 0; i <= kMaxVerdicts; ++i) many.push_back(Of("uid 0", std::to_string(i), Tier::kQ4, true));
  EXPECT_FALSE(ParseVerdicts(FormatVerdicts(many)).ok());
  many.pop_back();
  EXPECT_TRUE(ParseVerdicts(FormatVerdicts(many)).ok());
}

TEST_F(VerdictsTest, ABookKeepsOverARestart) {
  VerdictBook::Counts counts{};
  {
    VerdictBook book([&](const VerdictBook::Counts& now) { counts = now; });
    ASSERT_TRUE(book.Open(path_).ok());
    ASSERT_TRUE(book.Put({Of("uid 1", "m", Tier::kQ4, true), Of("uid 1", "m", Tier::kP4, false)}).ok());
    EXPECT_EQ(counts[static_cast<size_t>(Tier::kQ4)][0], 1u);
    EXPECT_EQ(counts[static_cast<size_t>(Tier::kP4)][1], 1u);
  }
  struct stat info {};
  ASSERT_EQ(stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  VerdictBook book;
  ASSERT_TRUE(book.Open(path_).ok());
  EXPECT_TRUE(book.Find({"uid 1", "m", "r1", 1, Tier::kQ4})->open);
  EXPECT_FALSE(book.Find({"uid 1", "m", "r1", 1, Tier::kP4})->open);
  EXPECT_FALSE(book.Find({"uid 2", "m", "r1", 1, Tier::kQ4}).has_value()) << "another user";
  EXPECT_FALSE(book.Find({"uid 1", "m", "r2", 1, Tier::kQ4}).has_value()) << "another revision";
  EXPECT_FALSE(book.Find({"uid 1", "m", "r1", 2, Tier::kQ4}).has_value()) << "another codec";
  EXPECT_EQ(*book.Delete("uid 1", "m", "r2"), 0u);
  EXPECT_EQ(*book.Delete("uid 1", "m", ""), 2u);
  VerdictBook later;
  ASSERT_TRUE(later.Open(path_).ok());
  EXPECT_TRUE(later.OfOwner("uid 1").empty());
}

TEST_F(VerdictsTest, AFileThatIsNotToBeTrustedIsRefused) {
  const auto reason = [&] { return ReasonOf(VerdictBook().Open(path_)); };
  Write("spectrumkv-verdicts 1\n");
  EXPECT_EQ(reason(), "VERDICTS_FILE") << "cut off";
  Write(FormatVerdicts({}));
  ASSERT_EQ(chmod(path_.c_str(), 0660), 0);
  EXPECT_EQ(reason(), "VERDICTS_FILE") << "others may write it";
  ASSERT_EQ(chmod(path_.c_str(), 0644), 0);
  EXPECT_EQ(reason(), "");
  fs::rename(path_, folder_ + "/elsewhere");
  fs::create_symlink(folder_ + "/elsewhere", path_);
  EXPECT_EQ(reason(), "VERDICTS_FILE") << "a link";
  fs::remove(path_);
  fs::create_directory(path_);
  EXPECT_EQ(reason(), "VERDICTS_FILE") << "a folder";
  fs::remove(path_);
  path_ = folder_ + "/no/such/folder";
  EXPECT_EQ(reason(), "VERDICTS_FILE");
}

TEST_F(VerdictsTest, WhatCannotBeWrittenChangesNothing) {
  VerdictBook book;
  ASSERT_TRUE(book.Open(path_).ok());
  ASSERT_TRUE(book.Put({Of("uid 1", "m", Tier::kQ4, false)}).ok());
  const std::string before = Text();
  fs::create_directory(path_ + ".new");  // in the way of the new text, for root too
  Write(before);
  EXPECT_EQ(ReasonOf(book.Put({Of("uid 1", "m", Tier::kQ4, true)})), "VERDICTS_NOT_WRITTEN");
  EXPECT_FALSE(book.Find({"uid 1", "m", "r1", 1, Tier::kQ4})->open);
  EXPECT_EQ(ReasonOf(book.Delete("uid 1", "m", "").status()), "VERDICTS_NOT_WRITTEN");
  EXPECT_EQ(book.OfOwner("uid 1").size(), 1u);
  EXPECT_EQ(Text(), before);
  fs::remove(path_ + ".new");
  EXPECT_TRUE(book.Put({Of("uid 1", "m", Tier::kQ4, true)}).ok());
}

TEST_F(VerdictsTest, AnOwnersOldestMakeRoomAndNobodyElses) {
  VerdictBook book;
  std::vector<Verdict> verdicts;
  for (size_t i = 0; i < kMaxVerdictsOfOwner; ++i) {
    verdicts.push_back(Of("uid 1", std::to_string(i), Tier::kQ4, true, static_cast<int64_t>(1000 + i)));
  }
  ASSERT_TRUE(book.Put({Of("uid 2", "other", Tier::kQ4, true, 1)}).ok());
  ASSERT_TRUE(book.Put(verdicts).ok());
  ASSERT_TRUE(book.Put({Of("uid 1", "new", Tier::kQ4, true, 9000)}).ok());
  EXPECT_EQ(book.OfOwner("uid 1").size(), kMaxVerdictsOfOwner);
  EXPECT_FALSE(book.Find({"uid 1", "0", "r1", 1, Tier::kQ4}).has_value());
  EXPECT_TRUE(book.Find({"uid 1", "1", "r1", 1, Tier::kQ4}).has_value());
  EXPECT_TRUE(book.Find({"uid 2", "other", "r1", 1, Tier::kQ4}).has_value());
  for (int owner = 3; owner < 6; ++owner) {
    for (Verdict& verdict : verdicts) verdict.key.owner = "uid " + std::to_string(owner);
    const absl::Status put = book.Put(verdicts);
    EXPECT_EQ(ReasonOf(put), owner < 5 ? "" : "VERDICTS_FULL");
  }
}

}  // namespace
}  // namespace spectrumkv
