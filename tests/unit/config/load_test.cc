#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "server/base/status.h"
#include "server/config/config.h"
#include "server/config/keys.h"

namespace spectrumkv {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

ConfigSources Sources(std::map<std::string, std::string> env = {}, std::vector<std::string> sets = {}) {
  return {"", std::move(env), std::move(sets)};
}

// Loads "c.yaml" with plain peers unless the text or the sources say otherwise.
absl::StatusOr<Config> Load(const std::string& yaml, ConfigSources sources = {}) {
  sources.env.emplace("SPECTRUMKV_PEER_SECURITY", "plain");
  return LoadConfigText("c.yaml", yaml, sources);
}

// The lines of the error, or nothing if it loads.
std::vector<std::string> Errors(const std::string& yaml, const ConfigSources& sources = {}) {
  const absl::StatusOr<Config> config = Load(yaml, sources);
  std::vector<std::string> lines;
  if (config.ok()) return lines;
  EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(config.status()), "INVALID_CONFIG");
  std::istringstream message{std::string(config.status().message())};
  for (std::string line; std::getline(message, line);) lines.push_back(line);
  EXPECT_EQ(MetadataOf(config.status()).at("errors"), std::to_string(lines.size()));
  return lines;
}

class TempFile {
 public:
  explicit TempFile(const std::string& text)
      : path_(testing::TempDir() + "config_load_test." + std::to_string(getpid()) + ".yaml") {
    std::ofstream(path_, std::ios::binary) << text;
  }
  ~TempFile() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(ConfigLoadTest, NothingGivesTheDefaults) {
  const auto config = Load("");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->peer.streams, 2u);
  EXPECT_EQ(config->memory.slot_bytes, 2u << 20);
  EXPECT_EQ(config->memory.max_owned_bytes, uint64_t{4} << 30);
  EXPECT_EQ(config->worker.socket_mode, 0660u);
  EXPECT_THAT(config->policy.tiers, ElementsAre("RAW", "Q8", "Q4", "Q3", "Q2"));
}

TEST(ConfigLoadTest, PrecedenceIsDefaultsFileEnvironmentFlags) {
  const std::string yaml = "peer: {streams: 3}\n";
  const std::map<std::string, std::string> env = {{"SPECTRUMKV_PEER_STREAMS", "4"}};
  EXPECT_EQ(Load("")->peer.streams, 2u);
  EXPECT_EQ(Load(yaml)->peer.streams, 3u);
  EXPECT_EQ(Load(yaml, Sources(env))->peer.streams, 4u);
  EXPECT_EQ(Load(yaml, Sources(env, {"peer.streams=5"}))->peer.streams, 5u);
  EXPECT_EQ(Load(yaml, Sources(env, {"peer.streams=5", "peer.streams=6"}))->peer.streams, 6u);
  EXPECT_EQ(Load("", Sources({}, {"peer.streams=5"}))->peer.streams, 5u);
}

TEST(ConfigLoadTest, EveryKeyCanBeSetInEveryWay) {
  for (const KeySpec& key : AllKeys()) {
    const bool is_list = IsList(key.kind);
    std::string value = key.path == "worker.max_connections" || key.path == "quality.trials" ? "2" : "1";
    if (key.path == "quality.trials") value = "4";  // not below quality.trials_needed
    if (!key.allowed.empty()) value = key.kind == KeyKind::kMode ? "0600" : key.allowed.back();
    if (key.path == "policy.tiers") value = "RAW, DROP";
    if (key.kind == KeyKind::kBytes) value = key.path == "peer.max_message_bytes" ? "8MiB" : "3MiB";
    if (key.kind == KeyKind::kMilliseconds) value = key.path == "lease.min_ttl_ms" ? "2s" : "31s";
    if (key.kind == KeyKind::kBool) value = "false";
    if (key.kind == KeyKind::kAddress || key.kind == KeyKind::kLoopback) value = "127.0.0.1:1";
    if (key.kind == KeyKind::kIdentities) value = "*.kv.example, spiffe://prod/ns/*/sa/kv";
    if (key.kind == KeyKind::kHosts) value = "10.1.0.0/16, fd00::/8, *.kv.example";
    if (key.kind == KeyKind::kUids) value = "1000, 0, 4294967294";
    if (key.unit == "path" || key.kind == KeyKind::kShmPrefix) value = "/x";
    std::string in_yaml = value;
    if (key.kind == KeyKind::kIdentities) in_yaml = R"("*.kv.example", "spiffe://prod/ns/*/sa/kv")";
    if (key.kind == KeyKind::kHosts) in_yaml = R"(10.1.0.0/16, "fd00::/8", "*.kv.example")";
    std::string yaml;
    std::string indent;
    std::string rest = key.path;
    for (size_t dot = rest.find('.'); dot != std::string::npos; dot = rest.find('.')) {
      yaml += indent + rest.substr(0, dot) + ":\n";
      indent += "  ";
      rest = rest.substr(dot + 1);
    }
    yaml += indent + rest + ": " + (is_list ? "[" + in_yaml + "]" : "\"" + value + "\"") + "\n";
    // A key that takes another one with it.
    std::map<std::string, std::string> env;
    if (key.path == "worker.tcp_address") env["SPECTRUMKV_WORKER_TCP_TOKEN_FILE"] = "/token";
    const auto from_file = Load(yaml, Sources(env));
    const auto from_set = Load("", Sources(env, {key.path + "=" + value}));
    env[EnvironmentName(key.path)] = value;
    const auto from_env = Load("", Sources(env));
    ASSERT_TRUE(from_file.ok()) << key.path << " " << from_file.status();
    ASSERT_TRUE(from_env.ok()) << key.path << " " << from_env.status();
    ASSERT_TRUE(from_set.ok()) << key.path << " " << from_set.status();
    EXPECT_EQ(PrintConfig(*from_file), PrintConfig(*from_env)) << key.path;
    EXPECT_EQ(PrintConfig(*from_file), PrintConfig(*from_set)) << key.path;
    if (key.path == "peer.security") continue;  // what Load sets by itself
    EXPECT_TRUE(PrintConfig(*from_file) != PrintConfig(*Load(""))) << key.path;
  }
}

TEST(ConfigLoadTest, AllErrorsAtOnceWithTheirPlaces) {
  const std::string yaml =
      "peer:\n"
      "  streams: 99\n"
      "  streamz: 3\n"
      "policy:\n"
      "  tiers: [RAW,\n"
      "          Q9]\n"
      "health: {listen_address: nowhere}\n";
  const auto errors = Errors(yaml, Sources({{"SPECTRUMKV_CODEC_THREADS", "-1"}}, {"log.level=loud"}));
  EXPECT_THAT(errors, ElementsAre("c.yaml:2:12: peer.streams \"99\" is outside 1 to 16",
                                  "c.yaml:3:3: unknown key \"peer.streamz\"; did you mean peer.streams?",
                                  "c.yaml:5:10: policy.tiers has \"Q9\", which is none of them: some of RAW, Q8, Q4, "
                                  "Q3, Q2, P8, P4, DROP",
                                  "c.yaml:7:26: health.listen_address \"nowhere\" is not host:port",
                                  "environment SPECTRUMKV_CODEC_THREADS: codec.threads \"-1\" is not a whole number "
                                  "such as 16",
                                  "--set: log.level \"loud\" is not one of debug, info, warning, error"));
}

TEST(ConfigLoadTest, AnErrorStaysAnErrorWhenSomethingStrongerIsRight) {
  EXPECT_EQ(Errors("peer: {streams: 99}\n", Sources({}, {"peer.streams=4"})).size(), 1u);
}

TEST(ConfigLoadTest, DuplicatesAreErrors) {
  EXPECT_THAT(Errors("peer:\n  streams: 3\n  streams: 3\n"),
              ElementsAre("c.yaml:3:3: duplicate key \"peer.streams\", first on line 2"));
  EXPECT_THAT(Errors("log: {level: info}\npeer: {streams: 3}\nlog: {format: json}\n"),
              ElementsAre("c.yaml:3:1: duplicate key \"log\", first on line 1"));
}

TEST(ConfigLoadTest, ShapesThatAreWrong) {
  EXPECT_THAT(Errors("peer: 3\n"), ElementsAre("c.yaml:1:7: peer is a section; its keys stand below it, indented"));
  EXPECT_THAT(Errors("peer: {streams: {a: 1}}\n"),
              ElementsAre("c.yaml:1:17: peer.streams takes a value, not a section or a nested list"));
  EXPECT_THAT(Errors("peer: {streams: [1]}\n"),
              ElementsAre("c.yaml:1:17: peer.streams is a list, but takes one value"));
  EXPECT_THAT(Errors("policy: {tiers: RAW}\n"), ElementsAre("c.yaml:1:17: policy.tiers is not a list such as [RAW]"));
  EXPECT_THAT(Errors("policy: {tiers: [[RAW]]}\n"),
              ElementsAre("c.yaml:1:17: policy.tiers takes a value, not a section or a nested list"));
  EXPECT_THAT(Errors("peer:\n  streams:\n"),
              ElementsAre("c.yaml:2:3: peer.streams has no value; leave it out, or write \"\" for empty"));
  EXPECT_THAT(Errors("[1, 2]\n"), ElementsAre("c.yaml:1:1: the file is not a map of sections"));
  EXPECT_THAT(Errors("[1, 2]: 3\n"), ElementsAre("c.yaml:1:1: a key must be a plain word"));
  EXPECT_THAT(Errors("peer.streams: 3\n"),
              ElementsAre("c.yaml:1:1: peer.streams is written with dots; nest it in sections"));
  EXPECT_THAT(Errors("peer:\n  # all keys commented out\nlog:\n"), IsEmpty());
}

TEST(ConfigLoadTest, UnknownEnvironmentOfASectionIsAnErrorTheRestIsNotOurs) {
  EXPECT_THAT(Errors("", Sources({{"SPECTRUMKV_PEER_STREAM", "1"}})),
              ElementsAre("environment \"SPECTRUMKV_PEER_STREAM\": names no key; did you mean "
                          "SPECTRUMKV_PEER_STREAMS?"));
  EXPECT_EQ(Errors("", Sources({{"SPECTRUMKV_MEMORY_NOT_A_KEY", "1"}})).size(), 1u);
  EXPECT_EQ(Errors("", Sources({{"SPECTRUMKV_LOGG_LEVEL", "info"}})).size(), 1u);  // nearly a key
  EXPECT_THAT(Errors("", Sources({{"SPECTRUMKV_CONFIG", "x"},
                                  {"SPECTRUMKV_BUILD_DIR", "x"},
                                  {"PATH", "x"},
                                  // What Kubernetes injects for services.
                                  {"SPECTRUMKV_SERVICE_HOST", "10.0.0.1"},
                                  {"SPECTRUMKV_PORT", "tcp://10.0.0.1:7420"},
                                  {"SPECTRUMKV_PEER_SERVICE_HOST", "10.0.0.1"},
                                  {"SPECTRUMKV_PEER_SERVICE_PORT_GRPC", "7420"},
                                  {"SPECTRUMKV_PEER_PORT", "tcp://10.0.0.1:7420"},
                                  {"SPECTRUMKV_PEER_PORT_7420_TCP", "tcp://10.0.0.1:7420"},
                                  {"SPECTRUMKV_PEER_PORT_7420_TCP_ADDR", "10.0.0.1"}})),
              IsEmpty());
}

TEST(ConfigLoadTest, FlagsThatAreWrong) {
  EXPECT_THAT(Errors("", Sources({}, {"peer.streams"})),
              ElementsAre("--set: needs KEY=VALUE, for example --set peer.streams=4"));
  EXPECT_THAT(Errors("", Sources({}, {"peer=4"})), ElementsAre("--set: peer is a section, not a key"));
  EXPECT_THAT(Errors("", Sources({}, {"a=4", "=", "peer.tls.ca_fil=/x"})),
              ElementsAre("--set: unknown key \"a\"", "--set: unknown key \"\"",
                          "--set: unknown key \"peer.tls.ca_fil\"; did you mean peer.tls.ca_file?"));
}

TEST(ConfigLoadTest, MutualTlsNeedsItsFilesAndPlainIsExplicit) {
  const auto none = LoadConfigText("c.yaml", "", {});
  ASSERT_FALSE(none.ok());
  EXPECT_THAT(std::string(none.status().message()), HasSubstr("set peer.security: plain explicitly"));
  const std::string two = "peer:\n  security: mtls\n  tls: {certificate_file: /c, private_key_file: /k}\n";
  const auto one_missing = LoadConfigText("c.yaml", two, {});
  ASSERT_FALSE(one_missing.ok());
  EXPECT_THAT(std::string(one_missing.status().message()),
              HasSubstr("c.yaml:2:13: peer.security is mtls, but these are empty: peer.tls.ca_file."));
  EXPECT_TRUE(LoadConfigText("c.yaml", two, Sources({{"SPECTRUMKV_PEER_TLS_CA_FILE", "/ca"}})).ok());
}

TEST(ConfigLoadTest, RulesBetweenKeysAtTheirEdges) {
  EXPECT_THAT(Errors("lease: {min_ttl_ms: 5000, default_ttl_ms: 5000, max_ttl_ms: 5000}\n"), IsEmpty());
  EXPECT_THAT(Errors("lease: {min_ttl_ms: 5001, default_ttl_ms: 5s, max_ttl_ms: 4999}\n"),
              ElementsAre("c.yaml:1:21: lease.min_ttl_ms 5001 is above lease.default_ttl_ms 5000",
                          "c.yaml:1:43: lease.default_ttl_ms 5000 is above lease.max_ttl_ms 4999"));
  EXPECT_THAT(Errors("transfer: {default_deadline_ms: 600000}\n"), IsEmpty());
  EXPECT_THAT(Errors("transfer: {default_deadline_ms: 600001}\n"),
              ElementsAre("c.yaml:1:33: transfer.default_deadline_ms 600001 is above transfer.max_deadline_ms 600000"));
  EXPECT_THAT(Errors("memory: {slot_bytes: 4095KiB}\n"), IsEmpty());
  EXPECT_THAT(Errors("memory: {slot_bytes: 4193281}\n"),
              ElementsAre("c.yaml:1:22: memory.slot_bytes 4193281 and 1KiB of framing do not fit "
                          "peer.max_message_bytes 4MiB"));
  EXPECT_THAT(Errors("memory: {send_slots: 65536, receive_slots: 65536}\n"), IsEmpty());
  EXPECT_EQ(Errors("memory: {send_slots: 65536, receive_slots: 65536, slot_bytes: 2049KiB}\n").size(), 1u);
}

TEST(ConfigLoadTest, APolicyThatNoRequestCouldTravelBy) {
  EXPECT_THAT(Errors("policy: {tiers: [DROP]}\n"),
              ElementsAre("c.yaml:1:17: policy.tiers has DROP alone: nothing could travel"));
  EXPECT_THAT(Errors("policy: {tiers: [RAW, DROP]}\n"), IsEmpty());
  const std::string two_tier = "policy: {allocator: TWO_TIER, tiers: ";
  EXPECT_THAT(Errors(two_tier + "[RAW, Q4, DROP]}\n"),
              ElementsAre("c.yaml:1:21: policy.allocator is TWO_TIER, which needs P8 or Q8 in policy.tiers"));
  EXPECT_THAT(Errors(two_tier + "[RAW, Q8]}\n"), IsEmpty());
  EXPECT_THAT(Errors(two_tier + "[P8]}\n"), IsEmpty());
  for (const std::string allocator : {"PDTRIM", "SLIDING_WINDOW_SINK"}) {
    EXPECT_THAT(Errors("policy: {allocator: " + allocator + ", budget: 0.99}\n"),
                ElementsAre("c.yaml:1:21: policy.allocator is " + allocator +
                            ", which at a policy.budget below 1 needs DROP in policy.tiers"));
    EXPECT_THAT(Errors("policy: {allocator: " + allocator + ", tiers: [RAW, DROP]}\n"), IsEmpty());
    EXPECT_THAT(Errors("policy: {allocator: " + allocator + ", budget: 1}\n"), IsEmpty());
  }
}

TEST(ConfigLoadTest, RulesBetweenListeners) {
  EXPECT_THAT(Errors("metrics: {listen_address: '0.0.0.0:7421'}\n"),
              ElementsAre("c.yaml:1:27: metrics.listen_address and health.listen_address are both 0.0.0.0:7421"));
  EXPECT_THAT(Errors("metrics: {listen_address: '1.1.1.1:0'}\nhealth: {listen_address: '1.1.1.1:0'}\n"), IsEmpty());
  EXPECT_THAT(Errors("metrics: {listen_address: '127.0.0.2:7421'}\n"), IsEmpty());
  EXPECT_THAT(Errors("admin: {socket: /a}\nworker: {socket: /a}\n"),
              ElementsAre("c.yaml:1:17: admin.socket and worker.socket are the same path"));
}

TEST(ConfigLoadTest, WhatWasRefusedIsNotReportedTwice) {
  EXPECT_EQ(Errors("lease: {min_ttl_ms: nonsense, default_ttl_ms: 1}\n").size(), 1u);
}

TEST(ConfigLoadTest, KeysPastedInPlaceOfFileNamesAreNotEchoed) {
  const std::string key = "-----BEGIN PRIVATE KEY-----MIIEvQIBADAN";
  const std::string yaml = "peer: {tls: {private_key_file: \"" + key + "\"}}\n";
  for (const auto& config : {Load(yaml), Load("", Sources({}, {"peer.tls.private_key_file=" + key})),
                             Load("", Sources({{"SPECTRUMKV_PEER_TLS_PRIVATE_KEY_FILE", key}}))}) {
    ASSERT_FALSE(config.ok());
    EXPECT_THAT(std::string(config.status().message()), Not(HasSubstr("MIIE")));
    EXPECT_THAT(std::string(config.status().message()), HasSubstr("peer.tls.private_key_file is not an absolute path"));
  }
}

TEST(ConfigLoadTest, ManyErrorsAreCutButCounted) {
  std::string yaml;
  for (int i = 0; i < 250; ++i) yaml += "unknown_section_" + std::to_string(i) + ": 1\n";
  const auto config = Load(yaml);
  ASSERT_FALSE(config.ok());
  EXPECT_EQ(MetadataOf(config.status()).at("errors"), "250");
  EXPECT_THAT(std::string(config.status().message()), HasSubstr("and 150 more"));
}

TEST(ConfigLoadTest, ReadsAFile) {
  const TempFile file("peer:\n  security: plain\n  streams: 7\n");
  ConfigSources sources;
  sources.file = file.path();
  const auto config = LoadConfig(sources);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->peer.streams, 7u);
  sources.sets = {"peer.streams=0"};
  EXPECT_THAT(std::string(LoadConfig(sources).status().message()), HasSubstr("--set: peer.streams \"0\" is outside"));
}

TEST(ConfigLoadTest, FilesThatCannotBe) {
  ConfigSources sources;
  sources.file = "/nonexistent/spectrumkvd.yaml";
  EXPECT_EQ(LoadConfig(sources).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReasonOf(LoadConfig(sources).status()), "CONFIG_FILE");
  sources.file = testing::TempDir();
  EXPECT_EQ(LoadConfig(sources).status().code(), absl::StatusCode::kInvalidArgument);
  const std::string fifo = testing::TempDir() + "config_fifo." + std::to_string(getpid());
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  sources.file = fifo;  // must not wait for a writer
  EXPECT_EQ(ReasonOf(LoadConfig(sources).status()), "CONFIG_FILE");
  std::remove(fifo.c_str());
}

TEST(ConfigLoadTest, FileSizeHasALimit) {
  const std::string start = "peer: {security: plain}\n#";
  ConfigSources sources;
  {
    const TempFile file(start + std::string((1 << 20) - start.size(), 'x'));
    sources.file = file.path();
    EXPECT_TRUE(LoadConfig(sources).ok()) << LoadConfig(sources).status();
  }
  const TempFile file(start + std::string((1 << 20) - start.size() + 1, 'x'));
  sources.file = file.path();
  EXPECT_EQ(ReasonOf(LoadConfig(sources).status()), "CONFIG_FILE");
}

}  // namespace
}  // namespace spectrumkv
