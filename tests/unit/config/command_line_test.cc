#include "server/config/command_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "server/base/status.h"

namespace spectrumkv {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Action = CommandLine::Action;

TEST(CommandLineTest, NothingServes) {
  const auto line = ParseCommandLine({}, {});
  ASSERT_TRUE(line.ok());
  EXPECT_EQ(line->action, Action::kServe);
  EXPECT_EQ(line->sources.file, "");
  EXPECT_TRUE(line->sources.sets.empty());
}

TEST(CommandLineTest, FilesAndSets) {
  const auto line = ParseCommandLine({"--config", "/a", "--set", "a.b=1", "--set=c=2=3", "--config=/b"}, {});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->sources.file, "/b");
  EXPECT_THAT(line->sources.sets, ElementsAre("a.b=1", "c=2=3"));
}

TEST(CommandLineTest, TheFlagWinsOverTheEnvironment) {
  const std::map<std::string, std::string> env = {{"SPECTRUMKV_CONFIG", "/env"}};
  EXPECT_EQ(ParseCommandLine({}, env)->sources.file, "/env");
  EXPECT_EQ(ParseCommandLine({"--config", "/flag"}, env)->sources.file, "/flag");
  EXPECT_EQ(ParseCommandLine({}, env)->sources.env, env);
}

TEST(CommandLineTest, Actions) {
  EXPECT_EQ(ParseCommandLine({"--validate"}, {})->action, Action::kValidate);
  EXPECT_EQ(ParseCommandLine({"--print-config"}, {})->action, Action::kPrintEffective);
  EXPECT_EQ(ParseCommandLine({"--print-config=effective"}, {})->action, Action::kPrintEffective);
  EXPECT_EQ(ParseCommandLine({"--print-config=defaults"}, {})->action, Action::kPrintDefaults);
  EXPECT_EQ(ParseCommandLine({"--version"}, {})->action, Action::kVersion);
  EXPECT_EQ(ParseCommandLine({"--help"}, {})->action, Action::kHelp);
  EXPECT_EQ(ParseCommandLine({"--validate", "--validate"}, {})->action, Action::kValidate);
}

TEST(CommandLineTest, WhatIsWrongNamesTheFlag) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"--nonsense"}, "--nonsense: unknown flag"},
      {{"file.yaml"}, "file.yaml: unknown flag"},
      {{"--config"}, "--config: needs a file"},
      {{"--config="}, "--config: needs a file"},
      {{"--set"}, "--set: needs KEY=VALUE"},
      {{"--print-config=all"}, "--print-config: takes effective or defaults"},
      {{"--validate", "--version"}, "--version: only one of"}};
  for (const auto& [args, message] : cases) {
    const auto line = ParseCommandLine(args, {});
    ASSERT_FALSE(line.ok()) << message;
    EXPECT_EQ(line.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ReasonOf(line.status()), "INVALID_FLAG");
    EXPECT_THAT(std::string(line.status().message()), HasSubstr(message));
    EXPECT_THAT(std::string(line.status().message()), HasSubstr("usage: spectrumkvd"));
  }
}

TEST(CommandLineTest, TheEnvironmentOfThisProcess) {
  ASSERT_EQ(setenv("SPECTRUMKV_PEER_STREAMS", "4=5", 1), 0);
  EXPECT_EQ(ProcessEnvironment().at("SPECTRUMKV_PEER_STREAMS"), "4=5");
  ASSERT_EQ(unsetenv("SPECTRUMKV_PEER_STREAMS"), 0);
  EXPECT_EQ(ProcessEnvironment().count("SPECTRUMKV_PEER_STREAMS"), 0u);
}

}  // namespace
}  // namespace spectrumkv
