// The daemon's configuration: one value, never changed after the start.
//
// The initialisers below are the defaults. What each key means, its unit, limits and reason are in one table,
// server/config/keys*.cc, which drives parsing, validation, config/spectrumkvd.yaml and docs/configuration.md. A key's
// name is its path here: Config::peer.tls.ca_file is `peer.tls.ca_file` in YAML and in --set, and
// SPECTRUMKV_PEER_TLS_CA_FILE in the environment.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace spectrumkv {

struct Config {
  struct Worker {
    std::string socket = "/run/spectrumkv/worker.sock";
    uint64_t socket_mode = 0660;  // 0600 or 0660
    std::vector<std::string> allowed_uids;  // none: whoever socket_mode lets in
    uint64_t max_connections = 512;
    std::string tcp_address;  // "": off; loopback only
    std::string tcp_token_file;
  } worker;

  // Of one user of the workers' socket.
  struct Quota {
    uint64_t pools_per_user = 32;
    uint64_t user_bytes = uint64_t{1} << 40;  // of segments
    uint64_t segments_per_user = 4096;
    uint64_t holds_per_user = 256;
    uint64_t transfers_per_user = 512;
    uint64_t transfers_per_pool = 512;
  } quota;

  struct Peer {
    std::string listen_address = "0.0.0.0:7420";
    std::string security = "mtls";  // mtls or plain
    struct Tls {
      std::string certificate_file;
      std::string private_key_file;
      std::string ca_file;
      uint64_t reload_interval_ms = 10000;
    } tls;
    std::vector<std::string> identities = {"spectrumkv"};
    std::vector<std::string> allowed_hosts;  // to dial; none: all
    uint64_t streams = 2;                    // data streams of one transfer
    uint64_t max_message_bytes = 4 << 20;
    uint64_t max_waiting_transfers = 1024;  // of all peers
    uint64_t connect_timeout_ms = 5000;
  } peer;

  struct Admin {
    std::string socket = "/run/spectrumkv/admin.sock";
  } admin;

  struct Health {
    std::string listen_address = "0.0.0.0:7421";
  } health;

  struct MetricsServer {
    std::string listen_address = "0.0.0.0:7422";
    uint64_t reconstruction_sample_chunks = 64;  // one in so many; 0: none
  } metrics;

  struct Memory {
    std::string shared_dir = "/dev/shm/spectrumkv";  // of FILE segments
    std::string shm_prefix = "/";                    // of POSIX_SHM names
    std::vector<std::string> allowed_owners;         // uids, of segments
    uint64_t send_slots = 32;
    uint64_t receive_slots = 64;
    uint64_t slot_bytes = 2 << 20;
    uint64_t max_owned_bytes = uint64_t{4} << 30;  // of all DAEMON_OWNED segments
    uint64_t max_pools = 64;
    bool allow_host_fallback = true;
  } memory;

  struct Codec {
    std::string backend = "auto";  // auto, scalar, avx2, avx512
    uint64_t threads = 0;          // 0: one for each core
    bool self_test = true;
  } codec;

  struct Transfer {
    uint64_t default_deadline_ms = 30000;
    uint64_t max_deadline_ms = 600000;
    uint64_t progress_timeout_ms = 5000;
    uint64_t max_active = 1024;
    uint64_t credits_per_transfer = 32;
    uint64_t terminal_memory_seconds = 300;
    uint64_t terminal_memory_count = 10000;
    uint64_t max_tokens = 4194304;
  } transfer;

  struct Lease {
    uint64_t default_ttl_ms = 30000;
    uint64_t min_ttl_ms = 1000;
    uint64_t max_ttl_ms = 600000;
  } lease;

  // Defaults of requests that leave the field open. Names as in proto/spectrumkv/v1/policy.proto, without prefix.
  struct Policy {
    double budget = 0.5;           // of raw KV bytes
    double auto_min_budget = 0.2;  // the smallest the daemon chooses itself
    std::string allocator = "OPTIMAL";
    std::vector<std::string> tiers = {"RAW", "Q8", "Q4", "Q3", "Q2"};
    uint64_t sinks = 4;
    double decay_lambda = 0;
    std::string profile_dir;  // "": none
  } policy;

  // Which tiers a model may use (server/probe).
  struct Quality {
    std::string gate = "warn";  // off, warn, enforce
    std::vector<std::string> gated_tiers = {"Q4", "Q3", "Q2", "P4"};
    std::string verdicts_file;  // "": in memory alone
    uint64_t trials = 3;        // of each kind
    uint64_t trials_needed = 2;
    double min_agreement = 0.9;
  } quality;

  // Better precision for what has arrived (docs/refinement.md).
  struct Refine {
    uint64_t max_retained = 64;  // transfers; of each role
    uint64_t max_retain_seconds = 600;
    uint64_t staging_bytes = uint64_t{1} << 30;
    uint64_t max_rate_bytes = 0;  // 0: no limit
    uint64_t cache_bytes = 0;     // 0: no cache
  } refine;

  struct Log {
    std::string level = "info";   // debug, info, warning, error
    std::string format = "text";  // text or json
  } log;

  struct Drain {
    uint64_t timeout_ms = 60000;
  } drain;
};

// Where values come from, weakest first; the defaults are weaker than all of these.
struct ConfigSources {
  std::string file;                        // "": none
  std::map<std::string, std::string> env;  // all of the process's variables; those of no key are ignored
  std::vector<std::string> sets;           // "peer.streams=4", later ones win
};

// Reads, merges and validates. InvalidArgument, reason INVALID_CONFIG: every error, one a line, each with its place
// (file:line:column, the variable, or the flag). NotFound / InvalidArgument, reason CONFIG_FILE: a file that is not
// there, is not a regular file or is larger than 1 MiB.
// A variable SPECTRUMKV_<SECTION>_... that names no key is an error, so is one that is nearly a key; others are
// ignored.
absl::StatusOr<Config> LoadConfig(const ConfigSources& sources);

// The same from text in place of a file; `name` stands in messages.
absl::StatusOr<Config> LoadConfigText(const std::string& name, const std::string& yaml, const ConfigSources& sources);

// YAML with every key, its value, default, unit, limits and reason. LoadConfigText reads it back to the same Config.
// No secret is ever in it: the configuration holds names of files, not their content.
std::string PrintConfig(const Config& config);

// Markdown tables of every key: the body of docs/configuration.md.
std::string ConfigReference();

}  // namespace spectrumkv
