// Who a peer may be, and which hosts may be dialled.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "server/base/host_port.h"
#include "server/base/host_rule.h"
#include "server/base/identity.h"

namespace spectrumkv {
namespace {

TEST(Identity, PatternsOverNames) {
  const struct {
    const char* pattern;
    PeerNames names;
    bool fits;
  } cases[] = {
      {"spectrumkv", {{"spectrumkv"}, {}}, true},
      {"spectrumkv", {{"other", "SpectrumKV"}, {}}, true},
      {"spectrumkv", {{"spectrumkv.example"}, {}}, false},
      {"spectrumkv", {{}, {"spectrumkv"}}, false},
      {"spectrumkv", {}, false},
      {"*", {{"anything"}, {}}, true},
      {"*", {{"any.thing"}, {}}, false},
      {"*", {{"*"}, {}}, false},
      {"*.example", {{"a.example"}, {}}, true},
      {"*.example", {{".example"}, {}}, false},
      {"*.example", {{"*.example"}, {}}, false},
      {"*.example", {{"example"}, {}}, false},
      {"kv.*.example", {{"kv.b.example"}, {}}, true},
      {"kv.*.example", {{"kv.b.c.example"}, {}}, false},
      {"spiffe://prod/ns/*/sa/kv", {{}, {"spiffe://prod/ns/blue/sa/kv"}}, true},
      {"spiffe://prod/ns/*/sa/kv", {{}, {"spiffe://prod/ns/blue/sa/KV"}}, false},
      {"spiffe://prod/ns/*/sa/kv", {{}, {"spiffe://prod/ns//sa/kv"}}, false},
      {"spiffe://prod/ns/*/sa/kv", {{}, {"spiffe://prod/ns/a/b/sa/kv"}}, false},
      {"spiffe://prod/ns/*/sa/kv", {{}, {"spiffe://evil/ns/blue/sa/kv"}}, false},
      {"spiffe://prod/kv", {{"spiffe://prod/kv"}, {}}, false},
  };
  for (const auto& c : cases) {
    EXPECT_EQ(CheckIdentityPattern(c.pattern), "") << c.pattern;
    EXPECT_EQ(MatchesIdentity({c.pattern}, c.names), c.fits) << c.pattern << " over " << NamesText(c.names);
    EXPECT_EQ(MatchesIdentity({"nothing-of-the-kind", c.pattern}, c.names), c.fits) << c.pattern;
  }
  EXPECT_FALSE(MatchesIdentity({}, {{"spectrumkv"}, {}}));
  EXPECT_EQ(NamesText({}), "nobody");
  EXPECT_LT(NamesText({std::vector<std::string>(1000, std::string(250, 'x')), {}}).size(), 500u);
}

TEST(Identity, WhatIsNoPattern) {
  for (const std::string bad : {"", "a..b", ".a", "a.", "a b", "a*", "*a.example", "pre*.example", "a/b", "a,b", "a:1",
                                "spiffe://prod/a*", "spiffe://prod/[a]", "spiffe://prod/a b", "a\nb"}) {
    EXPECT_NE(CheckIdentityPattern(bad), "") << bad;
  }
  EXPECT_EQ(CheckIdentityPattern(std::string(253, 'a')), "");
  EXPECT_NE(CheckIdentityPattern(std::string(254, 'a')), "");
}

TEST(HostRule, NetworksAddressesAndNames) {
  const struct {
    const char* rule;
    const char* host;
    bool fits;
  } cases[] = {
      {"10.1.0.0/16", "10.1.255.255", true},
      {"10.1.0.0/16", "10.2.0.0", false},
      {"10.1.0.0/16", "10.0.255.255", false},
      {"0.0.0.0/0", "255.1.2.3", true},
      {"0.0.0.0/0", "::1", false},
      {"::/0", "fe80::1", true},
      {"10.1.2.3", "10.1.2.3", true},
      {"10.1.2.3", "10.1.2.4", false},
      {"10.1.2.3/32", "10.1.2.3", true},
      {"10.1.2.2/31", "10.1.2.3", true},
      {"fd00::/8", "[fdff::1]", true},
      {"fd00::/8", "fe00::1", false},
      {"::1", "[::1]", true},
      {"10.1.0.0/16", "::ffff:10.1.2.3", true},
      {"10.1.0.0/16", "::10.1.2.3", false},
      {"decode-0.example", "decode-0.example", true},
      {"decode-0.example", "DECODE-0.example", true},
      {"*.example", "decode-0.example", true},
      {"*.example", "a.b.example", false},
      {"*.example", "10.1.2.3", false},
      // Other ways to write an address are names here: no network lets them in.
      {"127.0.0.0/8", "127.1", false},
      {"127.0.0.0/8", "2130706433", false},
      {"127.0.0.0/8", "localhost", false},
      {"*.*.*.*", "10.1.2.3", false},
  };
  for (const auto& c : cases) {
    EXPECT_EQ(CheckHostRule(c.rule), "") << c.rule;
    EXPECT_EQ(AllowsHost({c.rule}, c.host), c.fits) << c.rule << " and " << c.host;
  }
  EXPECT_TRUE(AllowsHost({}, "anything"));
  EXPECT_TRUE(AllowsHost({"10.0.0.0/8", "localhost"}, "localhost"));
}

TEST(HostRule, WhatIsNone) {
  for (const char* bad :
       {"", "10.1.0.0/33", "10.1.0.0/", "10.1.0.0/-1", "10.1.0.0/1x", "10.1.0.1/16", "fd00::/129", "x/8", "10.1.2",
        "10.1.2.3.4", "300.1.1.1", "fd00::1/8", "a b", "a*.example", "spiffe://a/b"}) {
    EXPECT_NE(CheckHostRule(bad), "") << bad;
  }
}

TEST(HostPortTest, SplitsAtTheLastColonAndTakesBracketsOff) {
  const struct {
    const char *address, *host, *port;
  } cases[] = {{"10.0.0.1:80", "10.0.0.1", "80"},
               {"name:80", "name", "80"},
               {"[::1]:80", "::1", "80"},
               {"name", "name", ""},
               {":80", "", "80"},
               {"[:80", "[", "80"},
               {"[]:1", "", "1"},
               {"", "", ""}};
  for (const auto& one : cases) {
    const HostPort got = SplitHostPort(one.address);
    EXPECT_EQ(got.host, one.host) << one.address;
    EXPECT_EQ(got.port, one.port) << one.address;
  }
  EXPECT_EQ(WithoutBrackets("[::1]"), "::1");
  EXPECT_EQ(WithoutBrackets("["), "[");
}

}  // namespace
}  // namespace spectrumkv
