// Arguments, .npy files, block id lists and policies of spectrumkvctl.
#include "client/ctl/args.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "client/cpp/blocks.h"
#include "client/cpp/status.h"
#include "client/ctl/npy.h"
#include "client/ctl/output.h"
#include "client/ctl/policy_flags.h"

namespace spectrumkv::ctl {
namespace {

const std::vector<Flag> kFlags = {{"json", "", ""}, {"tokens", "N", ""}, {"blocks", "IDS", ""},
                                  {"x", "F", ""},   {"dtype", "T", ""},  {"token", "HEX", ""}};

Args Parse(const std::vector<std::string>& words) {
  auto args = Args::Parse(words, kFlags);
  EXPECT_TRUE(args.ok()) << args.status();
  return args.ok() ? *args : Args();
}

std::string Refusal(const absl::Status& status) {
  EXPECT_EQ(client::ReasonOf(status), "USAGE");
  return std::string(status.message());
}

TEST(CtlArgs, FlagsValuesAndPositionals) {
  Args args = Parse({"a", "--json", "--tokens", "5", "--x=-1.5", "--", "--b"});
  EXPECT_TRUE(args.Switch("json"));
  EXPECT_EQ(args.Number("tokens", 0, 1, 10), 5u);
  EXPECT_EQ(args.Real("x", 0), -1.5);
  EXPECT_EQ(args.Positional(0, "A"), "a");
  EXPECT_EQ(args.Positional(1, "B"), "--b");
  EXPECT_TRUE(args.Check(2).ok());
  EXPECT_EQ(Refusal(args.Check(1)), "unexpected argument \"--b\"");
  args.Positional(2, "C");
  EXPECT_EQ(Refusal(args.Check(3)), "C is needed");
}

TEST(CtlArgs, RefusesWhatTheTableDoesNotHave) {
  EXPECT_EQ(Refusal(Args::Parse({"--nope"}, kFlags).status()), "unknown flag --nope");
  EXPECT_EQ(Refusal(Args::Parse({"--tokens"}, kFlags).status()), "--tokens needs N");
  EXPECT_EQ(Refusal(Args::Parse({"--json=1"}, kFlags).status()), "--json takes no value");
  EXPECT_EQ(Refusal(Args::Parse({"--x=1", "--x=2"}, kFlags).status()), "--x is given twice");
}

TEST(CtlArgs, NumbersAtTheirLimits) {
  for (const char* good : {"1", "10"}) {
    Args args = Parse({"--tokens", good});
    args.Number("tokens", 0, 1, 10);
    EXPECT_TRUE(args.Check().ok()) << good;
  }
  for (const char* bad : {"0", "11", "", "1x", "-1", "99999999999999999999"}) {
    Args args = Parse({"--tokens=" + std::string(bad)});
    args.Number("tokens", 0, 1, 10);
    EXPECT_FALSE(args.Check().ok()) << bad;
  }
  for (const char* bad : {"", "nan", "inf", "1,5", "x"}) {
    Args args = Parse({"--x=" + std::string(bad)});
    args.Real("x", 0);
    EXPECT_FALSE(args.Check().ok()) << bad;
  }
  Args seconds = Parse({"--x=0.25"});
  EXPECT_EQ(seconds.Milliseconds("x", 7), 250);
  EXPECT_EQ(seconds.Milliseconds("y", 7), 7);
}

TEST(CtlArgs, TheFirstErrorIsKept) {
  Args args = Parse({"--tokens=z", "--x=z"});
  args.Number("tokens", 0, 1, 10);
  args.Real("x", 0);
  args.Needed("blocks");
  EXPECT_NE(Refusal(args.Check()).find("--tokens"), std::string::npos);
}

TEST(CtlArgs, BlockIds) {
  EXPECT_EQ(*ParseIds("3"), (std::vector<uint64_t>{3}));
  EXPECT_EQ(*ParseIds("0-3,9,5-5"), (std::vector<uint64_t>{0, 1, 2, 3, 9, 5}));
  for (const char* bad : {"", "a", "1-", "-1", "3-2", "1,,2", "1-2-3", "0-18446744073709551615", "0-1048576"}) {
    EXPECT_FALSE(ParseIds(bad).ok()) << bad;
  }
  EXPECT_EQ(ParseIds("1-1048576")->size(), size_t{1} << 20);
  EXPECT_EQ(*ParseIds("18446744073709551615"), (std::vector<uint64_t>{UINT64_MAX}));
  EXPECT_EQ(*ParseIds("18446744073709551614-18446744073709551615,0"),
            (std::vector<uint64_t>{UINT64_MAX - 1, UINT64_MAX, 0}));
  for (const char* bad : {"18446744073709551616", "1-18446744073709551616", "18446744073709551615-0"}) {
    EXPECT_FALSE(ParseIds(bad).ok()) << bad;
  }
}

TEST(CtlArgs, IdsHaveALimitWhereTheFieldTheyGoIntoHasOne) {
  const auto ids = [](const std::string& text, uint64_t high) {
    Args args = Parse({"--blocks", text});
    const std::vector<uint64_t> got = args.Ids("blocks", high);
    EXPECT_EQ(got.empty(), !args.Check().ok()) << text;
    return got;
  };
  EXPECT_EQ(ids("4294967294-4294967295", UINT32_MAX).size(), 2u);
  EXPECT_TRUE(ids("0,4294967296", UINT32_MAX).empty());
  EXPECT_TRUE(ids("4294967295-4294967296", UINT32_MAX).empty());
  EXPECT_TRUE(ids("18446744073709551615", UINT64_MAX - 1).empty());
}

// From the last id of all the next one is no neighbour, though its number is one more.
TEST(CtlArgs, RunsOfBlocksDoNotWrap) {
  const v1::GroupBlocks blocks = client::Blocks(0, {UINT64_MAX - 1, UINT64_MAX, 0, 1});
  ASSERT_EQ(blocks.runs_size(), 2);
  EXPECT_EQ(blocks.runs(0).count(), 2u);
  EXPECT_EQ(blocks.runs(1).first(), 0u);
  EXPECT_EQ(blocks.runs(1).count(), 2u);
}

TEST(CtlArgs, HexAndTypes) {
  EXPECT_EQ(Parse({"--token=00ffA1"}).Hex("token"), std::string("\x00\xff\xa1", 3));
  for (const char* bad : {"0", "zz", "0x00"}) {
    Args args = Parse({"--token", bad});
    args.Hex("token");
    EXPECT_FALSE(args.Check().ok()) << bad;
  }
  Args args = Parse({"--dtype", "bfloat16"});
  EXPECT_EQ(args.DataType("dtype", v1::DATA_TYPE_FLOAT16), v1::DATA_TYPE_BFLOAT16);
  Args bad = Parse({"--dtype", "int8"});
  bad.DataType("dtype", v1::DATA_TYPE_FLOAT16);
  EXPECT_FALSE(bad.Check().ok());
}

TEST(CtlNpy, RoundTrip) {
  const Array array{"<f2", {2, 3}, std::string("abcdefghijkl")};
  const std::string file = FormatNpy(array);
  EXPECT_EQ((file.size() - array.data.size()) % 64, 0u);
  const auto parsed = ParseNpy(file);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->descr, "<f2");
  EXPECT_EQ(parsed->shape, array.shape);
  EXPECT_EQ(parsed->data, array.data);
}

TEST(CtlNpy, RefusesWhatDoesNotFit) {
  const std::string good = FormatNpy({"<f4", {2}, "12345678"});
  for (size_t size = 0; size < good.size(); ++size) EXPECT_FALSE(ParseNpy(good.substr(0, size)).ok()) << size;
  EXPECT_FALSE(ParseNpy(good + "x").ok());
  EXPECT_FALSE(ParseNpy(FormatNpy({"<f8", {1}, "12345678"})).ok());
  EXPECT_FALSE(ParseNpy(FormatNpy({"<f4", {uint64_t{1} << 62, 16}, ""})).ok());
  std::string fortran = good;
  fortran.replace(fortran.find("False"), 5, "True ");
  EXPECT_FALSE(ParseNpy(fortran).ok());
}

TEST(CtlOutput, TextOfNumbers) {
  EXPECT_EQ(Bytes(1023), "1023 B");
  EXPECT_EQ(Bytes(1024), "1.00 KiB");
  EXPECT_EQ(Bytes(uint64_t{10} << 20), "10.0 MiB");
  EXPECT_EQ(Bytes(UINT64_MAX), "16384.0 PiB");
  EXPECT_EQ(Seconds(1.5), "1.50 s");
  EXPECT_EQ(Seconds(0.0123), "12.3 ms");
  EXPECT_EQ(Seconds(0.000042), "42 us");
  EXPECT_EQ(Table({{"A", "BB"}, {"ccc", "d"}}), "A    BB\nccc  d\n");
  EXPECT_EQ(Table({{"A", "B"}, {"x\n\x1b[2J", "d"}}), "A       B\nx??[2J  d\n");
  EXPECT_EQ(Lines({{"a", "1"}, {"empty", ""}, {"longer", "2"}}), "a:       1\nlonger:  2\n");
}

TEST(CtlPolicy, ReadsEveryFlag) {
  char path[] = "/tmp/spectrumkv-scores-XXXXXX";
  const int fd = ::mkstemp(path);
  ASSERT_GE(fd, 0);
  ::close(fd);
  const float scores[] = {1, 2, 3, 4};
  ASSERT_TRUE(WriteFile(path, FormatNpy({"<f4", {2, 2}, std::string(reinterpret_cast<const char*>(scores), 16)})).ok());
  auto args =
      Args::Parse({"--budget=0.3", "--allocator", "sink-protect", "--tiers", "RAW,q8", "--importance", "key-norm",
                   "--scores", path, "--decay=0.5", "--sinks=7", "--seed=9", "--strict-budget", "--uniform-tier", "P4"},
                  PolicyFlags());
  ASSERT_TRUE(args.ok());
  const v1::Policy policy = ReadPolicy(&*args);
  ::unlink(path);
  ASSERT_TRUE(args->Check().ok()) << args->Check();
  EXPECT_EQ(policy.budget(), 0.3);
  EXPECT_EQ(policy.allocator(), v1::ALLOCATOR_SINK_PROTECT);
  ASSERT_EQ(policy.tiers_size(), 2);
  EXPECT_EQ(policy.tiers(1), v1::TIER_Q8);
  EXPECT_EQ(policy.uniform_tier(), v1::TIER_P4);
  EXPECT_EQ(policy.random_seed(), 9u);
  EXPECT_EQ(policy.importance().source(), v1::IMPORTANCE_SOURCE_KEY_NORM);
  ASSERT_EQ(policy.importance().scores_size(), 4);
  EXPECT_EQ(policy.importance().scores(3), 4);
  EXPECT_TRUE(policy.importance().scores_per_layer());
  EXPECT_EQ(policy.importance().sinks(), 7u);
  EXPECT_TRUE(policy.strict_budget());

  auto none = Args::Parse({}, PolicyFlags());
  EXPECT_EQ(ReadPolicy(&*none).ByteSizeLong(), 0u) << "defaults are the daemon's";
  for (const std::vector<std::string>& bad : std::vector<std::vector<std::string>>{
           {"--allocator=best"}, {"--tiers=RAW,Q5"}, {"--importance=luck"}, {"--scores=/nonexistent"}}) {
    auto refused = Args::Parse(bad, PolicyFlags());
    ReadPolicy(&*refused);
    EXPECT_FALSE(refused->Check().ok()) << bad[0];
  }
}

}  // namespace
}  // namespace spectrumkv::ctl
