#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "server/config/config.h"
#include "server/config/keys.h"
#include "server/config/value.h"

namespace spectrumkv {
namespace {

using ::testing::HasSubstr;

const std::string kRoot = SPECTRUMKV_SOURCE_DIR;

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST(ConfigPrintTest, DefaultsAreTheShippedFile) {
  EXPECT_EQ(PrintConfig(Config{}), ReadFile(kRoot + "/config/spectrumkvd.yaml"))
      << "write it again: spectrumkvd --print-config=defaults > config/spectrumkvd.yaml";
}

TEST(ConfigPrintTest, EveryKeyHasReasonAndDefault) {
  std::set<std::string> paths;
  for (const KeySpec& key : AllKeys()) {
    EXPECT_TRUE(paths.insert(key.path).second) << key.path;
    EXPECT_GT(key.reason.size(), 20u) << key.path;
    EXPECT_EQ(key.reason.back(), '.') << key.path;
    EXPECT_EQ(key.allowed.empty(),
              key.kind != KeyKind::kChoice && key.kind != KeyKind::kChoices && key.kind != KeyKind::kMode)
        << key.path;
    EXPECT_THAT(PrintConfig(Config{}), HasSubstr("Default: " + FormatValue(key, Config{}) + "."));
  }
}

TEST(ConfigPrintTest, NamesWithUnitsHaveThoseUnits) {
  for (const KeySpec& key : AllKeys()) {
    const auto ends = [&key](const std::string& suffix) {
      return key.path.size() > suffix.size() && key.path.substr(key.path.size() - suffix.size()) == suffix;
    };
    EXPECT_EQ(ends("_ms"), key.kind == KeyKind::kMilliseconds) << key.path;
    EXPECT_EQ(ends("_seconds"), key.kind == KeyKind::kSeconds) << key.path;
    EXPECT_EQ(ends("_bytes"), key.kind == KeyKind::kBytes) << key.path;
  }
}

TEST(ConfigPrintTest, EveryKeyIsItsOwnMember) {
  std::set<const void*> members;
  Config config;
  for (const KeySpec& key : AllKeys()) {
    const void* member = std::visit([&config](auto get) { return static_cast<const void*>(&get(config)); }, key.field);
    EXPECT_TRUE(members.insert(member).second) << key.path;
  }
}

TEST(ConfigPrintTest, ReadsBackToTheSame) {
  Config config;
  config.peer.security = "plain";
  config.worker.socket = "/tmp/with space: and #\"quotes\"\\";
  config.worker.socket_mode = 0600;
  config.worker.tcp_address = "[::1]:7000";
  config.worker.tcp_token_file = "/token";
  config.peer.identities = {"*.kv.example", "spiffe://prod/ns/*/sa/kv"};
  config.peer.allowed_hosts = {"10.0.0.0/8", "fd00::/8", "*.example", "localhost"};
  config.peer.listen_address = "localhost:1";
  config.peer.tls.ca_file = "/null";
  config.memory.max_owned_bytes = 12345;
  config.memory.slot_bytes = 3 << 20;
  config.memory.allow_host_fallback = false;
  config.memory.shm_prefix = "/true";
  config.policy.budget = 0.1 + 0.2;
  config.policy.decay_lambda = 1e-7;
  config.policy.tiers = {"Q2"};
  config.codec.threads = 3;
  const std::string printed = PrintConfig(config);
  const auto loaded = LoadConfigText("printed", printed, {});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(PrintConfig(*loaded), printed);
  EXPECT_EQ(loaded->worker.socket, config.worker.socket);
  EXPECT_EQ(loaded->worker.tcp_address, config.worker.tcp_address);
  EXPECT_EQ(loaded->policy.budget, config.policy.budget);
  EXPECT_EQ(loaded->policy.decay_lambda, config.policy.decay_lambda);
  EXPECT_EQ(loaded->policy.tiers, config.policy.tiers);
  EXPECT_EQ(loaded->memory.max_owned_bytes, 12345u);
}

TEST(ConfigPrintTest, TheDocumentHoldsTheGeneratedTables) {
  const std::string path = kRoot + "/docs/configuration.md";
  const std::string document = ReadFile(path);
  for (const KeySpec& key : AllKeys()) {
    EXPECT_THAT(document, HasSubstr("| `" + key.path + "` |")) << "docs/configuration.md does not list " << key.path;
  }
  const std::string marker = "a test compares. -->\n\n";
  const size_t at = document.find(marker);
  ASSERT_NE(at, std::string::npos);
  if (std::getenv("SPECTRUMKV_UPDATE_DOCS") != nullptr) {
    std::ofstream(path, std::ios::binary) << document.substr(0, at + marker.size()) << ConfigReference();
    return;
  }
  EXPECT_EQ(document.substr(at + marker.size()), ConfigReference())
      << "write it again: SPECTRUMKV_UPDATE_DOCS=1 config_print_test";
}

}  // namespace
}  // namespace spectrumkv
