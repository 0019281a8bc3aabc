#include "server/config/keys.h"

#include <cctype>
#include <utility>

#include "server/config/value.h"

namespace spectrumkv {
namespace {

constexpr double kKiB = 1024;
constexpr double kMiB = 1024 * kKiB;
constexpr double kGiB = 1024 * kMiB;
constexpr double kTiB = 1024 * kGiB;
constexpr double kHourMs = 3600 * 1000;

// The member of Config that a key sets.
#define FIELD(member) [](Config& config) -> decltype((config.member)) { return config.member; }

// Lambdas convert to the function pointers of FieldRef only when told which one.
template <typename Lambda>
FieldRef Ref(Lambda lambda) {
  return FieldRef(+lambda);
}

std::vector<KeySpec> MakeServerKeys() {
  return {
      {"worker.socket",
       KeyKind::kSocket,
       Ref(FIELD(worker.socket)),
       "path",
       0,
       0,
       {},
       "Where inference workers reach WorkerService. Everyone who may open it may read and write KV caches."},
      {"worker.socket_mode",
       KeyKind::kMode,
       Ref(FIELD(worker.socket_mode)),
       "octal",
       0,
       0,
       {"0600", "0660"},
       "Permission bits of worker.socket. 0660 lets workers of the socket's group in, 0600 this user alone."},
      {"worker.tcp_address",
       KeyKind::kLoopback,
       Ref(FIELD(worker.tcp_address)),
       "host:port",
       0,
       0,
       {},
       "A second way to WorkerService for clients that cannot use Unix sockets. Off when empty; loopback only, because "
       "it has no authentication."},
      {"peer.listen_address",
       KeyKind::kAddress,
       Ref(FIELD(peer.listen_address)),
       "host:port",
       0,
       0,
       {},
       "Where other daemons reach PeerService. Port 0 takes a free one."},
      {"peer.security",
       KeyKind::kChoice,
       Ref(FIELD(peer.security)),
       "",
       0,
       0,
       {"mtls", "plain"},
       "mtls checks the certificates of both sides. plain has neither encryption nor authentication: only for tests "
       "and "
       "networks that nobody else can enter, and never chosen silently."},
      {"peer.tls.certificate_file",
       KeyKind::kFile,
       Ref(FIELD(peer.tls.certificate_file)),
       "path",
       0,
       0,
       {},
       "This daemon's certificate chain, PEM. Needed for mtls. The first must be for the DNS name spectrumkv."},
      {"peer.tls.private_key_file",
       KeyKind::kFile,
       Ref(FIELD(peer.tls.private_key_file)),
       "path",
       0,
       0,
       {},
       "Its private key, PEM. Needed for mtls. Only the name is kept here; the key itself is never printed."},
      {"peer.tls.ca_file",
       KeyKind::kFile,
       Ref(FIELD(peer.tls.ca_file)),
       "path",
       0,
       0,
       {},
       "The authorities whose certificates peers must present, PEM. Needed for mtls. They must be for the DNS name "
       "spectrumkv, too, whatever the peer's address."},
      {"peer.streams",
       KeyKind::kCount,
       Ref(FIELD(peer.streams)),
       "streams",
       1,
       16,
       {},
       "Data streams, each a TCP connection, that one transfer uses at most: one for each 4 MiB of KV. More help where "
       "one connection cannot fill the link."},
      {"peer.max_message_bytes",
       KeyKind::kBytes,
       Ref(FIELD(peer.max_message_bytes)),
       "bytes",
       kMiB,
       256 * kMiB,
       {},
       "Largest message taken from a peer. A coded chunk must fit: at least memory.slot_bytes and 1 KiB."},
      {"peer.max_waiting_transfers",
       KeyKind::kCount,
       Ref(FIELD(peer.max_waiting_transfers)),
       "transfers",
       1,
       1e6,
       {},
       "Transfers of all peers together that may wait here for their other half. More are refused at once, so that "
       "peers cannot use up memory by opening."},
      {"peer.connect_timeout_ms",
       KeyKind::kMilliseconds,
       Ref(FIELD(peer.connect_timeout_ms)),
       "ms",
       1,
       kHourMs,
       {},
       "How long to try to reach a peer before the attempt counts as failed."},
      {"admin.socket",
       KeyKind::kSocket,
       Ref(FIELD(admin.socket)),
       "path",
       0,
       0,
       {},
       "Where spectrumkvctl reaches AdminService. Always mode 0600."},
      {"health.listen_address",
       KeyKind::kAddress,
       Ref(FIELD(health.listen_address)),
       "host:port",
       0,
       0,
       {},
       "gRPC health checks for the kubelet, without TLS. Serves nothing else. Port 0 takes a free one."},
      {"metrics.listen_address",
       KeyKind::kAddress,
       Ref(FIELD(metrics.listen_address)),
       "host:port",
       0,
       0,
       {},
       "HTTP for Prometheus at /metrics. Numbers and fixed labels only. Port 0 takes a free one."},
      {"metrics.reconstruction_sample_chunks",
       KeyKind::kCount,
       Ref(FIELD(metrics.reconstruction_sample_chunks)),
       "chunks",
       0,
       1e9,
       {},
       "One chunk in so many is decoded again by the sender, to measure what coding lost "
       "(spectrumkv_reconstruction_error_ratio). Each costs about as long as a slow encode. 0: none."},
  };
}

std::vector<KeySpec> MakeMemoryKeys() {
  return {
      {"memory.shared_dir",
       KeyKind::kDirectory,
       Ref(FIELD(memory.shared_dir)),
       "path",
       0,
       0,
       {},
       "The only directory whose files workers may register as FILE segments. Links that lead out of it are refused."},
      {"memory.shm_prefix",
       KeyKind::kShmPrefix,
       Ref(FIELD(memory.shm_prefix)),
       "",
       0,
       0,
       {},
       "Names of POSIX_SHM segments must start with this. A longer one keeps daemons on one host apart."},
      {"memory.send_slots",
       KeyKind::kCount,
       Ref(FIELD(memory.send_slots)),
       "slots",
       1,
       65536,
       {},
       "Staging slots for coded chunks on their way out, all transfers together. Each transfer being sent owns at "
       "least "
       "one, so this also bounds how many send at a time."},
      {"memory.receive_slots",
       KeyKind::kCount,
       Ref(FIELD(memory.receive_slots)),
       "slots",
       1,
       65536,
       {},
       "The same for chunks that came in and are not decoded yet. Apart from memory.send_slots, so that two daemons "
       "that "
       "send to each other cannot block each other."},
      {"memory.slot_bytes",
       KeyKind::kBytes,
       Ref(FIELD(memory.slot_bytes)),
       "bytes",
       1088 * kKiB,
       64 * kMiB,
       {},
       "Room of a staging slot. The largest coded chunk must fit: 1 MiB of KV, header, tier map and scales."},
      {"memory.max_owned_bytes",
       KeyKind::kBytes,
       Ref(FIELD(memory.max_owned_bytes)),
       "bytes",
       0,
       16 * kTiB,
       {},
       "Quota of memory that the daemon allocates for pools of kind DAEMON_OWNED, all pools together. 0 forbids them."},
      {"memory.max_pools",
       KeyKind::kCount,
       Ref(FIELD(memory.max_pools)),
       "pools",
       1,
       65536,
       {},
       "Pools that may be registered at a time."},
      {"memory.allow_host_fallback",
       KeyKind::kBool,
       Ref(FIELD(memory.allow_host_fallback)),
       "",
       0,
       0,
       {},
       "Whether a transfer that cannot use a faster path may be coded on the host. Where false it fails instead: no "
       "silent loss of speed."},
      {"codec.backend",
       KeyKind::kChoice,
       Ref(FIELD(codec.backend)),
       "",
       0,
       0,
       {"auto", "scalar", "avx2", "avx512"},
       "auto takes the fastest that this machine has. All give the same bytes; naming one is for tests and "
       "comparisons, "
       "and the start fails where the machine lacks it."},
      {"codec.threads",
       KeyKind::kCount,
       Ref(FIELD(codec.threads)),
       "threads",
       0,
       1024,
       {},
       "Threads that encode and decode. 0: one for each core the process may use. Fewer leave cores to the workers."},
      {"codec.self_test",
       KeyKind::kBool,
       Ref(FIELD(codec.self_test)),
       "",
       0,
       0,
       {},
       "Whether the backend codes a golden vector before the daemon reports ready. A few milliseconds against a "
       "machine "
       "that computes wrongly."},
  };
}

std::vector<KeySpec> MakeTransferKeys() {
  return {
      {"transfer.default_deadline_ms",
       KeyKind::kMilliseconds,
       Ref(FIELD(transfer.default_deadline_ms)),
       "ms",
       1,
       24 * kHourMs,
       {},
       "Deadline of a transfer whose request names none. It ends EXPIRED then."},
      {"transfer.max_deadline_ms",
       KeyKind::kMilliseconds,
       Ref(FIELD(transfer.max_deadline_ms)),
       "ms",
       1,
       24 * kHourMs,
       {},
       "Longest deadline a request may ask for: bounds how long blocks can stay reserved."},
      {"transfer.progress_timeout_ms",
       KeyKind::kMilliseconds,
       Ref(FIELD(transfer.progress_timeout_ms)),
       "ms",
       100,
       kHourMs,
       {},
       "A peer that is silent for so long fails the transfer. Heartbeats are sent every third of it, so a slow prefill "
       "does not."},
      {"transfer.max_active",
       KeyKind::kCount,
       Ref(FIELD(transfer.max_active)),
       "transfers",
       1,
       1e6,
       {},
       "Transfers that are not terminal, both roles together. More are refused at once with a retry delay."},
      {"transfer.credits_per_transfer",
       KeyKind::kCount,
       Ref(FIELD(transfer.credits_per_transfer)),
       "chunks",
       1,
       4096,
       {},
       "Most chunks of one transfer that a receiver lets be under way. More hide a longer round trip, and let one "
       "transfer take more of memory.receive_slots."},
      {"transfer.terminal_memory_seconds",
       KeyKind::kSeconds,
       Ref(FIELD(transfer.terminal_memory_seconds)),
       "s",
       0,
       86400,
       {},
       "How long the outcome of a finished transfer is remembered: late callers get it, and reuse of its id "
       "is refused."},
      {"transfer.terminal_memory_count",
       KeyKind::kCount,
       Ref(FIELD(transfer.terminal_memory_count)),
       "transfers",
       0,
       1e7,
       {},
       "Most finished transfers remembered; the oldest are forgotten first."},
      {"transfer.max_tokens",
       KeyKind::kCount,
       Ref(FIELD(transfer.max_tokens)),
       "tokens",
       1,
       67108864,
       {},
       "Most tokens of one transfer: bounds what a single request can make the daemon plan."},
      {"lease.default_ttl_ms",
       KeyKind::kMilliseconds,
       Ref(FIELD(lease.default_ttl_ms)),
       "ms",
       1,
       24 * kHourMs,
       {},
       "Life of a pool's lease when the worker names none. A worker that is silent for so long loses all it held."},
      {"lease.min_ttl_ms",
       KeyKind::kMilliseconds,
       Ref(FIELD(lease.min_ttl_ms)),
       "ms",
       1,
       24 * kHourMs,
       {},
       "Shortest lease a worker may ask for: shorter ones would expire by a hiccup of the scheduler."},
      {"lease.max_ttl_ms",
       KeyKind::kMilliseconds,
       Ref(FIELD(lease.max_ttl_ms)),
       "ms",
       1,
       24 * kHourMs,
       {},
       "Longest lease a worker may ask for: bounds how long a dead worker's memory stays mapped."},
  };
}

std::vector<KeySpec> MakePolicyKeys() {
  return {
      {"policy.budget",
       KeyKind::kRatio,
       Ref(FIELD(policy.budget)),
       "share of raw KV bytes",
       0.001,
       1.1,
       {},
       "Bytes that may cross the wire, everything counted, for requests that name no budget. 1.1 lets raw transfers "
       "pay "
       "for their headers."},
      {"policy.allocator",
       KeyKind::kChoice,
       Ref(FIELD(policy.allocator)),
       "",
       0,
       0,
       {"OPTIMAL", "GREEDY", "SINK_PROTECT", "BALANCED", "TWO_TIER", "UNIFORM", "RANDOM", "PDTRIM",
        "SLIDING_WINDOW_SINK", "RAW"},
       "Who chooses the tier of each token."},
      {"policy.tiers",
       KeyKind::kChoices,
       Ref(FIELD(policy.tiers)),
       "",
       0,
       0,
       {"RAW", "Q8", "Q4", "Q3", "Q2", "P8", "P4", "DROP"},
       "Tiers that may be used. P8 and P4 are plain INT8 and INT4, P8 the fastest on a CPU. DROP lets allocators leave "
       "tokens out, where the destination accepts it too."},
      {"policy.sinks",
       KeyKind::kCount,
       Ref(FIELD(policy.sinks)),
       "tokens",
       0,
       65536,
       {},
       "Tokens at the front that always travel raw: attention leans on them far more than on others."},
      {"policy.decay_lambda",
       KeyKind::kRatio,
       Ref(FIELD(policy.decay_lambda)),
       "per token",
       0,
       1000,
       {},
       "Importance is multiplied by exp(-decay_lambda * distance to the end). 0 leaves it as it is."},
      {"log.level",
       KeyKind::kChoice,
       Ref(FIELD(log.level)),
       "",
       0,
       0,
       {"debug", "info", "warning", "error"},
       "Least severe events that are logged. Can be changed while running: spectrumkvctl, SetLogLevel."},
      {"log.format",
       KeyKind::kChoice,
       Ref(FIELD(log.format)),
       "",
       0,
       0,
       {"text", "json"},
       "One line for each event on stderr, for people or for machines."},
      {"drain.timeout_ms",
       KeyKind::kMilliseconds,
       Ref(FIELD(drain.timeout_ms)),
       "ms",
       0,
       24 * kHourMs,
       {},
       "How long a stop waits for transfers that are under way before it cancels them. Keep it below the "
       "terminationGracePeriodSeconds of the pod."},
  };
}

#undef FIELD

}  // namespace

const std::vector<KeySpec>& AllKeys() {
  static const auto* const keys = [] {
    auto* all = new std::vector<KeySpec>;
    for (auto make : {MakeServerKeys, MakeMemoryKeys, MakeTransferKeys, MakePolicyKeys}) {
      for (KeySpec& key : make()) all->push_back(std::move(key));
    }
    return all;
  }();
  return *keys;
}

const KeySpec* FindKey(const std::string& path) {
  for (const KeySpec& key : AllKeys()) {
    if (key.path == path) return &key;
  }
  return nullptr;
}

std::string EnvironmentName(const std::string& path) {
  std::string name = "SPECTRUMKV_";
  for (const char c : path) {
    name.push_back(c == '.' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c))));
  }
  return name;
}

std::string LimitsText(const KeySpec& key) {
  if (!key.allowed.empty()) {
    std::string text = key.kind == KeyKind::kChoices ? "some of " : "one of ";
    for (size_t i = 0; i < key.allowed.size(); ++i) text += (i > 0 ? ", " : "") + key.allowed[i];
    return text;
  }
  switch (key.kind) {
    case KeyKind::kBool: return "true or false";
    case KeyKind::kCount:
    case KeyKind::kMilliseconds:
    case KeyKind::kSeconds:
    case KeyKind::kRatio: return NumberText(key.min) + " to " + NumberText(key.max);
    case KeyKind::kBytes:
      return BytesText(static_cast<uint64_t>(key.min)) + " to " + BytesText(static_cast<uint64_t>(key.max));
    default: return "";
  }
}

}  // namespace spectrumkv
