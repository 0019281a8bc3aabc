#include "server/config/checks.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "server/config/value.h"

namespace spectrumkv {
namespace {

// Room for the frame around a chunk in a message: generous, so that new fields do not move the limit.
constexpr uint64_t kFrameOverheadBytes = 1024;
constexpr uint64_t kMaxStagingBytes = uint64_t{256} << 30;

using Failures = std::vector<CheckFailure>;

void CheckNotAbove(const std::string& low_key, uint64_t low, const std::string& high_key, uint64_t high,
                   Failures* failures) {
  if (low <= high) return;
  failures->push_back({{low_key, high_key},
                       low_key + " " + std::to_string(low) + " is above " + high_key + " " + std::to_string(high)});
}

void CheckPeerSecurity(const Config& config, Failures* failures) {
  if (config.peer.security != "mtls") return;
  const std::pair<const char*, const std::string&> files[] = {
      {"peer.tls.certificate_file", config.peer.tls.certificate_file},
      {"peer.tls.private_key_file", config.peer.tls.private_key_file},
      {"peer.tls.ca_file", config.peer.tls.ca_file}};
  CheckFailure failure;
  failure.keys.push_back("peer.security");
  std::string missing;
  for (const auto& [key, file] : files) {
    if (!file.empty()) continue;
    failure.keys.push_back(key);
    missing += (missing.empty() ? "" : ", ") + std::string(key);
  }
  if (missing.empty()) return;
  failure.message = "peer.security is mtls, but these are empty: " + missing +
                    ". Name the files, or set peer.security: plain explicitly for TCP without encryption or "
                    "authentication";
  failures->push_back(std::move(failure));
}

void CheckMemory(const Config& config, Failures* failures) {
  const Config::Memory& memory = config.memory;
  if (memory.slot_bytes + kFrameOverheadBytes > config.peer.max_message_bytes) {
    failures->push_back({{"memory.slot_bytes", "peer.max_message_bytes"},
                         "memory.slot_bytes " + BytesText(memory.slot_bytes) + " and " +
                             BytesText(kFrameOverheadBytes) + " of framing do not fit peer.max_message_bytes " +
                             BytesText(config.peer.max_message_bytes)});
  }
  const uint64_t staging_bytes = (memory.send_slots + memory.receive_slots) * memory.slot_bytes;
  if (staging_bytes > kMaxStagingBytes) {
    failures->push_back({{"memory.slot_bytes", "memory.send_slots", "memory.receive_slots"},
                         "memory.send_slots and memory.receive_slots times memory.slot_bytes are " +
                             BytesText(staging_bytes) + ", more than " + BytesText(kMaxStagingBytes)});
  }
}

// What every request that leaves its policy open would be refused for.
void CheckPolicyDefaults(const Config& config, Failures* failures) {
  const Config::Policy& policy = config.policy;
  const auto has = [&policy](const char* tier) {
    return std::find(policy.tiers.begin(), policy.tiers.end(), tier) != policy.tiers.end();
  };
  if (std::all_of(policy.tiers.begin(), policy.tiers.end(), [](const std::string& tier) { return tier == "DROP"; })) {
    failures->push_back({{"policy.tiers"}, "policy.tiers has DROP alone: nothing could travel"});
    return;
  }
  if (policy.allocator == "TWO_TIER" && !has("P8") && !has("Q8")) {
    failures->push_back(
        {{"policy.allocator", "policy.tiers"}, "policy.allocator is TWO_TIER, which needs P8 or Q8 in policy.tiers"});
  }
  // They send RAW, which is more than such a budget pays for all tokens.
  const bool drops = policy.allocator == "PDTRIM" || policy.allocator == "SLIDING_WINDOW_SINK";
  if (drops && policy.budget < 1 && !has("DROP")) {
    failures->push_back(
        {{"policy.allocator", "policy.tiers", "policy.budget"},
         "policy.allocator is " + policy.allocator + ", which at a policy.budget below 1 needs DROP in policy.tiers"});
  }
}

void CheckPlaces(const Config& config, Failures* failures) {
  if (!config.worker.tcp_address.empty() && config.worker.tcp_token_file.empty()) {
    failures->push_back({{"worker.tcp_address", "worker.tcp_token_file"},
                         "worker.tcp_address is set, but worker.tcp_token_file is empty: every user of this machine "
                         "could read and write KV caches there"});
  }
  if (config.worker.socket == config.admin.socket) {
    failures->push_back({{"admin.socket", "worker.socket"}, "admin.socket and worker.socket are the same path"});
  }
  const std::pair<const char*, const std::string&> addresses[] = {
      {"peer.listen_address", config.peer.listen_address},
      {"health.listen_address", config.health.listen_address},
      {"metrics.listen_address", config.metrics.listen_address},
      {"worker.tcp_address", config.worker.tcp_address}};
  for (size_t i = 0; i < std::size(addresses); ++i) {
    for (size_t j = 0; j < i; ++j) {
      std::string host[2];
      uint16_t port[2] = {0, 0};
      if (!ParseAddress(addresses[i].second, &host[0], &port[0]).empty()) continue;
      if (!ParseAddress(addresses[j].second, &host[1], &port[1]).empty()) continue;
      if (port[0] == 0 || port[0] != port[1] || host[0] != host[1]) continue;
      failures->push_back(
          {{addresses[i].first, addresses[j].first},
           std::string(addresses[i].first) + " and " + addresses[j].first + " are both " + addresses[i].second});
    }
  }
}

}  // namespace

std::vector<CheckFailure> CheckTogether(const Config& config) {
  Failures failures;
  CheckPeerSecurity(config, &failures);
  CheckMemory(config, &failures);
  CheckPlaces(config, &failures);
  CheckPolicyDefaults(config, &failures);
  const Config::Transfer& transfer = config.transfer;
  CheckNotAbove("transfer.default_deadline_ms", transfer.default_deadline_ms, "transfer.max_deadline_ms",
                transfer.max_deadline_ms, &failures);
  CheckNotAbove("quality.trials_needed", config.quality.trials_needed, "quality.trials", config.quality.trials, &failures);
  const Config::Lease& lease = config.lease;
  CheckNotAbove("lease.min_ttl_ms", lease.min_ttl_ms, "lease.default_ttl_ms", lease.default_ttl_ms, &failures);
  CheckNotAbove("lease.default_ttl_ms", lease.default_ttl_ms, "lease.max_ttl_ms", lease.max_ttl_ms, &failures);
  return failures;
}

}  // namespace spectrumkv
