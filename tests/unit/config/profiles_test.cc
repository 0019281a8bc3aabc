// Model profiles: what a file may say, and how a directory of them is read.
#include "server/config/profiles.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/status.h"

namespace spectrumkv {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr char kWhole[] = R"(model: 'SmolLM2'
revision: main
k_weight: 2.5
k_errors: {Q8: 3e-05, Q4: 0.01, P4: 12}
v_errors: {Q2: 0.13}
layer_weights: [1, 0.5,
  2]
layer_budgets: [1, 1, 3]
measured:
  anything: [1, 2, {deep: yes}]
)";

TEST(ParseProfile, TakesEveryField) {
  const auto profile = ParseProfile("smol", kWhole);
  ASSERT_TRUE(profile.ok()) << profile.status();
  EXPECT_EQ(profile->name, "smol");
  EXPECT_EQ(profile->model, "SmolLM2");
  EXPECT_EQ(profile->revision, "main");
  EXPECT_EQ(profile->k_weight, 2.5);
  EXPECT_EQ(profile->k_errors, (std::map<std::string, double>{{"Q8", 3e-5}, {"Q4", 0.01}, {"P4", 12}}));
  EXPECT_EQ(profile->v_errors, (std::map<std::string, double>{{"Q2", 0.13}}));
  EXPECT_THAT(profile->layer_weights, ElementsAre(1, 0.5, 2));
  EXPECT_THAT(profile->layer_budgets, ElementsAre(1, 1, 3));
}

TEST(ParseProfile, TakesTheLimits) {
  const auto profile =
      ParseProfile("m", "model: m\nk_weight: 0.001\nk_errors: {Q8: 1e-12, Q4: 1000}\nlayer_weights: [0.001, 1000]\n");
  ASSERT_TRUE(profile.ok()) << profile.status();
  EXPECT_EQ(profile->k_weight, 0.001) << "the planner takes it too: CheckPolicy.TakesTheLimits";
  EXPECT_EQ(ParseProfile("m", "model: m\nk_weight: 1000")->k_weight, 1000);
}

TEST(ParseProfile, AModelAloneIsEnough) {
  const auto profile = ParseProfile("m", "model: m");
  ASSERT_TRUE(profile.ok()) << profile.status();
  EXPECT_EQ(profile->k_weight, 0) << "the default";
  EXPECT_EQ(profile->revision, "") << "any";
}

TEST(ParseProfile, NamesThePlaceOfWhatIsWrong) {
  struct Case {
    const char* text;
    const char* says;
  };
  const Case cases[] = {
      {"", "m.yaml:1:1: is no list"},
      {"k_weight: 1", "m.yaml:1:1: names no model"},
      {"model: m\nkweight: 1", "m.yaml:2:1: unknown key \"kweight\""},
      {"model: m\nmodel: n", "m.yaml:2:1: model is there twice"},
      {"model: [m]", "m.yaml:1:8: model must be a text"},
      {"model: m\nk_weight: 0", "m.yaml:2:11: k_weight must be a number in [0.001, 1000]"},
      {"model: m\nk_weight: nan", "k_weight must be"},
      {"model: m\nk_weight: 3x", "k_weight must be"},
      {"model: m\nk_weight: 1001", "k_weight must be"},
      {"model: m\nlayer_weights: 3", "layer_weights must be a list"},
      {"model: m\nlayer_weights: [1, -1]", "m.yaml:2:20: layer_weights must be a number"},
      {"model: m\nk_errors: [1]", "k_errors must name tiers"},
      {"model: m\nk_errors: {Q5: 0.1}", "\"Q5\" is not a tier"},
      {"model: m\nk_errors: {RAW: 0.1}", "\"RAW\" is not a tier"},
      {"model: m\nk_errors: {Q4: 0}", "k_errors must be a number in [1e-12, 1000]"},
      {"model: m\nrevision: !x y", "tags are not supported"},
  };
  for (const Case& c : cases) {
    const auto profile = ParseProfile("m", c.text);
    ASSERT_FALSE(profile.ok()) << c.text;
    EXPECT_EQ(ReasonOf(profile.status()), "INVALID_PROFILE") << c.text;
    EXPECT_THAT(std::string(profile.status().message()), HasSubstr(c.says)) << c.text;
  }
}

class LoadProfilesTest : public testing::Test {
 protected:
  LoadProfilesTest() {
    char name[] = "/tmp/profiles-XXXXXX";
    directory_ = mkdtemp(name);
  }
  ~LoadProfilesTest() override {
    for (const std::string& file : files_) unlink((directory_ + "/" + file).c_str());
    rmdir(directory_.c_str());
  }
  void Write(const std::string& file, const std::string& text) {
    std::ofstream(directory_ + "/" + file) << text;
    files_.push_back(file);
  }
  std::string directory_;
  std::vector<std::string> files_;
};

TEST_F(LoadProfilesTest, ReadsTheYamlFilesOfADirectory) {
  EXPECT_TRUE(LoadProfiles("").value().empty());
  EXPECT_TRUE(LoadProfiles(directory_).value().empty());
  Write("b.yaml", "model: b\nrevision: r1");
  Write("a.yaml", "model: a");
  Write("c.yaml", "model: b");
  Write("notes.txt", "no profile");
  Write(".hidden.yaml", "no profile");
  const auto profiles = LoadProfiles(directory_);
  ASSERT_TRUE(profiles.ok()) << profiles.status();
  ASSERT_EQ(profiles->size(), 3u);
  EXPECT_EQ((*profiles)[0].name, "a");
  EXPECT_EQ(FindProfile(*profiles, "a", "any")->name, "a");
  EXPECT_EQ(FindProfile(*profiles, "b", "r1")->name, "b");
  EXPECT_EQ(FindProfile(*profiles, "b", "r2")->name, "c");
  EXPECT_EQ(FindProfile(*profiles, "B", "r1"), nullptr);
}

TEST_F(LoadProfilesTest, RefusesWhatCannotBeUsed) {
  EXPECT_EQ(ReasonOf(LoadProfiles(directory_ + "/none").status()), "CONFIG_FILE");
  Write("a.yaml", "model: a");
  Write("b.yaml", "model: a");
  EXPECT_THAT(std::string(LoadProfiles(directory_).status().message()), HasSubstr("profiles a and b are of the same model"));
  Write("b.yaml", "model: [");
  EXPECT_EQ(ReasonOf(LoadProfiles(directory_).status()), "INVALID_PROFILE");
  Write("b.yaml", std::string((1 << 20) + 1, '#'));
  EXPECT_EQ(ReasonOf(LoadProfiles(directory_).status()), "CONFIG_FILE");
  unlink((directory_ + "/b.yaml").c_str());
  ASSERT_EQ(mkfifo((directory_ + "/b.yaml").c_str(), 0600), 0);
  EXPECT_THAT(std::string(LoadProfiles(directory_).status().message()), HasSubstr("is not a regular file"));
}

}  // namespace
}  // namespace spectrumkv
