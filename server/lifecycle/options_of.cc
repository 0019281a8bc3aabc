#include "server/lifecycle/options_of.h"

#include <unistd.h>

#include <algorithm>
#include <string>
#include <thread>

#include "server/base/caller.h"
#include "server/memory/available.h"

namespace spectrumkv {
namespace {

size_t Cores() { return std::max(1u, std::thread::hardware_concurrency()); }

}  // namespace

PeerSecurity SecurityOf(const Config& config) {
  PeerSecurity security;
  security.mode = config.peer.security == "plain" ? PeerSecurity::Mode::kPlain : PeerSecurity::Mode::kMtls;
  security.cert_file = config.peer.tls.certificate_file;
  security.key_file = config.peer.tls.private_key_file;
  security.ca_file = config.peer.tls.ca_file;
  security.identities = config.peer.identities;
  return security;
}

PoolLimits PoolLimitsOf(const Config& config) {
  PoolLimits limits;
  limits.shared_dir = config.memory.shared_dir;
  limits.shm_prefix = config.memory.shm_prefix;
  limits.allowed_owners = UidsOf(config.memory.allowed_owners);
  limits.token_owners = {geteuid()};
  limits.max_pools_per_user = static_cast<uint32_t>(config.quota.pools_per_user);
  limits.max_holds_per_user = static_cast<uint32_t>(config.quota.holds_per_user);
  limits.max_bytes_per_user = config.quota.user_bytes;
  limits.max_segments_per_user = static_cast<uint32_t>(config.quota.segments_per_user);
  limits.max_owned_bytes = config.memory.max_owned_bytes;
  limits.max_pools = static_cast<uint32_t>(config.memory.max_pools);
  limits.max_chunk_bytes = kMaxChunkKvBytes;
  limits.lease_default_ttl_ms = static_cast<int64_t>(config.lease.default_ttl_ms);
  limits.lease_min_ttl_ms = static_cast<int64_t>(config.lease.min_ttl_ms);
  limits.lease_max_ttl_ms = static_cast<int64_t>(config.lease.max_ttl_ms);
  return limits;
}

absl::Status CheckStaging(const Config::Memory& memory) {
  return CheckMemory("memory.send_slots (" + std::to_string(memory.send_slots) + ") and memory.receive_slots (" +
                         std::to_string(memory.receive_slots) + ") of memory.slot_bytes (" +
                         std::to_string(memory.slot_bytes) + ") need",
                     (memory.send_slots + memory.receive_slots) * memory.slot_bytes);
}

size_t CodecThreads(const Config& config) {
  return config.codec.threads == 0 ? Cores() : static_cast<size_t>(config.codec.threads);
}

size_t ThreadsNeeded(const Config& config) { return 30 + CodecThreads(config) + std::min<size_t>(4 * Cores(), 64); }

int64_t UndeliveredTimeoutMs(const Config& config) {
  constexpr int64_t kMaxMs = 10'000;
  return std::min(kMaxMs, static_cast<int64_t>(config.transfer.progress_timeout_ms) * 2 / 3);
}

TransferOptions TransferOptionsOf(const Config& config, uint64_t epoch) {
  TransferOptions options;
  options.epoch = epoch;
  options.compute_threads = static_cast<uint32_t>(CodecThreads(config));
  options.progress_timeout_ms = static_cast<int64_t>(config.transfer.progress_timeout_ms);
  options.streams = static_cast<uint32_t>(config.peer.streams);
  options.credits_per_transfer = static_cast<uint32_t>(config.transfer.credits_per_transfer);
  options.max_active = static_cast<uint32_t>(config.transfer.max_active);
  options.max_active_per_user = static_cast<uint32_t>(config.quota.transfers_per_user);
  options.max_active_per_pool = static_cast<uint32_t>(config.quota.transfers_per_pool);
  options.max_waiting_peers = static_cast<uint32_t>(config.peer.max_waiting_transfers);
  options.max_retained = static_cast<uint32_t>(config.refine.max_retained);
  options.max_retain_ms = static_cast<int64_t>(config.refine.max_retain_seconds) * 1000;
  options.staging_bytes = config.refine.staging_bytes;
  options.cache_bytes = config.refine.cache_bytes;
  options.refine_bytes_per_second = config.refine.max_rate_bytes;
  options.allowed_hosts = config.peer.allowed_hosts;
  options.terminal_memory_ms = static_cast<int64_t>(config.transfer.terminal_memory_seconds) * 1000;
  options.terminal_memory_count = static_cast<uint32_t>(config.transfer.terminal_memory_count);
  return options;
}

}  // namespace spectrumkv
