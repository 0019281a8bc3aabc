#include "server/config/value.h"

#include <gtest/gtest.h>

#include <string>

namespace spectrumkv {
namespace {

// Whether the key takes the text, by SplitForKey as from a flag.
bool Takes(const std::string& path, const std::string& text) {
  Config config;
  const KeySpec& key = *FindKey(path);
  return SetValue(key, SplitForKey(key, text), &config).empty();
}

// The number that the text means, or ~0 where it is refused.
uint64_t Bytes(const std::string& text) {
  Config config;
  const bool ok = SetValue(*FindKey("memory.max_owned_bytes"), {false, {text}}, &config).empty();
  return ok ? config.memory.max_owned_bytes : ~uint64_t{0};
}
uint64_t Milliseconds(const std::string& text) {
  Config config;
  const bool ok = SetValue(*FindKey("transfer.max_deadline_ms"), {false, {text}}, &config).empty();
  return ok ? config.transfer.max_deadline_ms : ~uint64_t{0};
}
constexpr uint64_t kRefused = ~uint64_t{0};

TEST(ConfigValueTest, Sizes) {
  EXPECT_EQ(Bytes("0"), 0u);
  EXPECT_EQ(Bytes("12345"), 12345u);
  EXPECT_EQ(Bytes("7B"), 7u);
  EXPECT_EQ(Bytes("3KiB"), 3072u);
  EXPECT_EQ(Bytes("64MiB"), 64u << 20);
  EXPECT_EQ(Bytes("4GiB"), uint64_t{4} << 30);
  EXPECT_EQ(Bytes("1TiB"), uint64_t{1} << 40);
  for (const char* text : {"",
                           " ",
                           "1 MiB",
                           "MiB",
                           "1MB",
                           "1M",
                           "1mib",
                           "-1",
                           "+1",
                           "1.5MiB",
                           "0x10",
                           "1e3",
                           "01",
                           "00",
                           "1MiBx",
                           "18446744073709551615",
                           "18446744073709551616",
                           "16777216TiB",
                           "99999999999999999999999",
                           "1\n"}) {
    EXPECT_EQ(Bytes(text), kRefused) << text;
  }
}

TEST(ConfigValueTest, Times) {
  EXPECT_EQ(Milliseconds("5000"), 5000u);
  EXPECT_EQ(Milliseconds("500ms"), 500u);
  EXPECT_EQ(Milliseconds("5s"), 5000u);
  EXPECT_EQ(Milliseconds("2m"), 120000u);
  EXPECT_EQ(Milliseconds("1h"), 3600000u);
  EXPECT_EQ(Milliseconds("24h"), 86400000u);
  EXPECT_EQ(Milliseconds("86400001"), kRefused);
  EXPECT_EQ(Milliseconds("0"), kRefused);
  for (const char* text : {"1us", "1 s", "0.5s", "5S", "18446744073709551615h"}) {
    EXPECT_EQ(Milliseconds(text), kRefused) << text;
  }
  EXPECT_TRUE(Takes("transfer.terminal_memory_seconds", "5m"));
  EXPECT_FALSE(Takes("transfer.terminal_memory_seconds", "500ms"));
}

TEST(ConfigValueTest, NumbersAtTheirLimits) {
  for (const KeySpec& key : AllKeys()) {
    const bool number = key.kind == KeyKind::kCount || key.kind == KeyKind::kBytes ||
                        key.kind == KeyKind::kMilliseconds || key.kind == KeyKind::kSeconds;
    if (!number) continue;
    const auto low = static_cast<uint64_t>(key.min);
    const auto high = static_cast<uint64_t>(key.max);
    ASSERT_LT(low, high) << key.path;
    EXPECT_TRUE(Takes(key.path, std::to_string(low))) << key.path;
    EXPECT_TRUE(Takes(key.path, std::to_string(high))) << key.path;
    EXPECT_FALSE(Takes(key.path, std::to_string(high + 1))) << key.path;
    if (low == 0) continue;
    EXPECT_FALSE(Takes(key.path, std::to_string(low - 1))) << key.path;
  }
}

TEST(ConfigValueTest, Ratios) {
  for (const char* text : {"0.001", "0.5", "1", "1.1", "5e-1"}) EXPECT_TRUE(Takes("policy.budget", text)) << text;
  for (const char* text : {"0", "-0.5", "1.1001", "nan", "inf", "-inf", "1e999", "0,5", "50%", "", "0.5 ", "0x1p-1"}) {
    EXPECT_FALSE(Takes("policy.budget", text)) << text;
  }
  EXPECT_TRUE(Takes("policy.decay_lambda", "0"));
  EXPECT_TRUE(Takes("policy.decay_lambda", "-0"));
}

TEST(ConfigValueTest, Booleans) {
  EXPECT_TRUE(Takes("codec.self_test", "true"));
  EXPECT_TRUE(Takes("codec.self_test", "false"));
  for (const char* text : {"yes", "no", "on", "1", "0", "True", "", "null"}) {
    EXPECT_FALSE(Takes("codec.self_test", text)) << text;
  }
}

TEST(ConfigValueTest, Modes) {
  Config config;
  EXPECT_EQ(SetValue(*FindKey("worker.socket_mode"), {false, {"0600"}}, &config), "");
  EXPECT_EQ(config.worker.socket_mode, 0600u);
  for (const char* text : {"660", "0666", "432", "0o660", "", "rw"}) EXPECT_FALSE(Takes("worker.socket_mode", text));
}

TEST(ConfigValueTest, Lists) {
  EXPECT_TRUE(Takes("policy.tiers", "RAW,Q4"));
  EXPECT_TRUE(Takes("policy.tiers", "[RAW, Q4]"));
  EXPECT_TRUE(Takes("policy.tiers", " Q4 "));
  for (const char* text : {"", "[]", "RAW,", ",", "RAW,RAW", "raw", "RAW Q4", "[RAW", "INT8"}) {
    EXPECT_FALSE(Takes("policy.tiers", text)) << text;
  }
}

TEST(ConfigValueTest, Addresses) {
  for (const char* text : {"0.0.0.0:7420", "127.0.0.1:0", "host-1.example.com:65535", "[::]:7420", "[::1]:1"}) {
    EXPECT_TRUE(Takes("peer.listen_address", text)) << text;
  }
  for (const char* text : {"", ":7420", "7420", "0.0.0.0", "0.0.0.0:", "0.0.0.0:65536", "0.0.0.0:-1", "0.0.0.0:7420x",
                           "256.0.0.1:1", "1.2.3:1", "::1:7420", "[::1:7420", "[]:1", "[1.2.3.4]:1", "ho st:1",
                           "unix:/x", "http://h:1", "h:+1", "h: 1"}) {
    EXPECT_FALSE(Takes("peer.listen_address", text)) << text;
  }
  std::string host;
  uint16_t port = 0;
  EXPECT_EQ(ParseAddress("[::1]:7420", &host, &port), "");
  EXPECT_EQ(host, "::1");
  EXPECT_EQ(port, 7420);
}

TEST(ConfigValueTest, WorkersByTcpOnlyOnLoopback) {
  for (const char* text : {"", "127.0.0.1:1", "127.255.1.2:0", "[::1]:7420", "localhost:1"}) {
    EXPECT_TRUE(Takes("worker.tcp_address", text)) << text;
  }
  for (const char* text : {"0.0.0.0:1", "10.0.0.1:1", "[::]:1", "example.com:1", "localhost.example.com:1",
                           "127.0.0.1.example.com:1", "128.0.0.1:1", "[::ffff:8.8.8.8]:1", "127.0.0.1"}) {
    EXPECT_FALSE(Takes("worker.tcp_address", text)) << text;
  }
}

TEST(ConfigValueTest, Paths) {
  EXPECT_TRUE(Takes("worker.socket", "/" + std::string(106, 'a')));
  EXPECT_FALSE(Takes("worker.socket", "/" + std::string(107, 'a')));
  for (const char* text : {"", "relative", "./x", "~/x", "/a\nb", "/a\x01"}) {
    EXPECT_FALSE(Takes("worker.socket", text)) << text;
    EXPECT_FALSE(Takes("memory.shared_dir", text)) << text;
    EXPECT_EQ(Takes("peer.tls.ca_file", text), *text == '\0') << text;
  }
  for (const char* text : {"/", "/kv-", "/kv_0.a"}) EXPECT_TRUE(Takes("memory.shm_prefix", text)) << text;
  for (const char* text : {"", "kv", "/a/b", "/../x", "/a b"}) EXPECT_FALSE(Takes("memory.shm_prefix", text)) << text;
}

TEST(ConfigValueTest, WhatIsRefusedChangesNothing) {
  for (const KeySpec& key : AllKeys()) {
    Config config;
    const bool is_list = IsList(key.kind);
    EXPECT_NE(SetValue(key, {is_list, {"\x01 nonsense"}}, &config), "") << key.path;
    EXPECT_NE(SetValue(key, {!is_list, {"RAW"}}, &config), "") << key.path;
    EXPECT_EQ(PrintConfig(config), PrintConfig(Config{})) << key.path;
  }
}

TEST(ConfigValueTest, NumbersAsText) {
  EXPECT_EQ(BytesText(0), "0");
  EXPECT_EQ(BytesText(1023), "1023");
  EXPECT_EQ(BytesText(1024), "1KiB");
  EXPECT_EQ(BytesText(1536 << 10), "1536KiB");
  EXPECT_EQ(BytesText(uint64_t{4} << 30), "4GiB");
  EXPECT_EQ(NumberText(0.5), "0.5");
  EXPECT_EQ(NumberText(0), "0");
  EXPECT_EQ(NumberText(1e7), "10000000");
  EXPECT_EQ(QuoteForMessage(std::string(100, 'a')), "\"" + std::string(80, 'a') + "...\"");
  EXPECT_EQ(QuoteForMessage("a\nb"), "\"a?b\"");
}

}  // namespace
}  // namespace spectrumkv
