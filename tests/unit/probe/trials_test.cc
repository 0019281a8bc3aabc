#include "server/probe/trials.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <iterator>
#include <set>

namespace spectrumkv {
namespace {

std::vector<Trial> OfKind(const std::vector<Trial>& trials, TrialKind kind) {
  std::vector<Trial> out;
  std::copy_if(trials.begin(), trials.end(), std::back_inserter(out), [&](const Trial& t) { return t.kind == kind; });
  return out;
}

TEST(TrialsTest, EachKindHasItsNumberAtEveryLength) {
  for (const uint32_t characters : {kMinPromptCharacters, kMinPromptCharacters + 1, 3000u, kMaxPromptCharacters}) {
    for (const uint32_t each : {1u, 3u, 20u}) {
      const std::vector<Trial> trials = MakeTrials(7, each, characters);
      std::set<std::string> ids;
      for (const Trial& trial : trials) {
        EXPECT_TRUE(ids.insert(trial.id).second);
        EXPECT_GE(trial.prompt.size(), characters - 5);
        EXPECT_LE(trial.prompt.size(), characters + 400) << "a sentence more at most, in two places";
        EXPECT_FALSE(trial.suffix.empty());
      }
      for (const TrialKind kind : kTrialKinds) EXPECT_EQ(OfKind(trials, kind).size(), each);
    }
  }
}

TEST(TrialsTest, TheSameSeedGivesTheSameTrialsAnotherOneOthers) {
  const auto first = MakeTrials(1, 3, 3000), again = MakeTrials(1, 3, 3000), other = MakeTrials(2, 3, 3000);
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_EQ(first[i].prompt, again[i].prompt);
    EXPECT_EQ(first[i].expected, again[i].expected);
    EXPECT_NE(first[i].prompt, other[i].prompt);
  }
}

TEST(TrialsTest, ANeedleIsWhereItSaysAndNowhereElse) {
  for (uint64_t seed = 1; seed < 50; ++seed) {
    for (const Trial& trial : OfKind(MakeTrials(seed, 5, 4000), TrialKind::kNeedle)) {
      ASSERT_EQ(trial.expected.size(), 5u);
      const size_t at = trial.prompt.find(trial.expected);
      ASSERT_NE(at, std::string::npos);
      EXPECT_NEAR(static_cast<double>(at) / 4000, trial.depth, 0.08);
      const auto digits =
          std::count_if(trial.prompt.begin(), trial.prompt.end(), [](unsigned char c) { return std::isdigit(c); });
      EXPECT_EQ(digits, 5) << "no other number that could be taken for it";
      EXPECT_EQ(trial.suffix.find(trial.expected), std::string::npos) << "the question gives it away";
    }
  }
}

TEST(TrialsTest, TextsAreComparedOnWhatIsNotInThePrompt) {
  for (const TrialKind kind : {TrialKind::kContinuation, TrialKind::kCode}) {
    for (const Trial& trial : OfKind(MakeTrials(3, 4, 1500), kind)) {
      EXPECT_TRUE(trial.expected.empty());
      EXPECT_EQ(trial.prompt.find(trial.suffix), std::string::npos);
      EXPECT_GT(trial.suffix.size(), 250u) << "long enough for kMinAgreementPositions with any tokenizer";
    }
  }
}

TEST(TrialsTest, AnAnswerIsTheNumberAndNoLongerOne) {
  Trial trial;
  trial.expected = "48213";
  for (const char* right : {"48213", " 48213.", "It is 48213, I believe", "148213 or 48213", "x48213x"}) {
    EXPECT_TRUE(AnswersNeedle(trial, right)) << right;
  }
  for (const char* wrong : {"", "4821", "48214", "148213", "482130", "4 8213", "48 213", "no"}) {
    EXPECT_FALSE(AnswersNeedle(trial, wrong)) << wrong;
  }
}

TEST(TrialsTest, AgreementAtItsEdge) {
  EXPECT_TRUE(Agrees(100, 90, 0.9));
  EXPECT_FALSE(Agrees(100, 89, 0.9));
  EXPECT_TRUE(Agrees(20, 20, 1));
  EXPECT_FALSE(Agrees(20, 19, 1));
}

}  // namespace
}  // namespace spectrumkv
