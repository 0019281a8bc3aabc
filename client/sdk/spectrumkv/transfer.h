// What a transfer is asked to do, and what it says it did. Names and meanings are those of policy.proto and report.proto.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "spectrumkv/cache.h"
#include "spectrumkv/status.h"

namespace spectrumkv {

enum class Tier { kUnspecified = 0, kRaw, kP8, kQ4, kQ3, kQ2, kP4, kQ8, kDrop };

enum class Allocator {
  kUnspecified = 0,  // the daemon's configured default
  kGreedy,
  kSinkProtect,
  kBalanced,
  kTwoTier,
  kUniform,
  kRandom,
  kPdtrim,
  kSlidingWindowSink,
  kRaw,
  kOptimal,
};

enum class ImportanceSource { kUnspecified = 0, kScores, kPosition, kKeyNorm, kNone, kRecentQueries };

// The last queries of one layer, with RoPE applied as the keys in the cache have it.
struct LayerQueries {
  uint32_t layer = 0;        // index in the model
  std::string words;         // [positions, query_heads, head_dim], little-endian, of RecentQueries::data_type
  uint32_t query_heads = 0;  // a multiple of the layer's KV heads
  double softmax_scale = 0;  // 0: 1 / sqrt(head_dim)
  double logit_soft_cap = 0;
  uint32_t window_tokens = 0;  // 0: the group's own
};

// Of 1 to 64 ascending positions of the request; tokens matter by the attention they receive from them.
struct RecentQueries {
  DataType data_type = DataType::kFloat16;
  std::vector<uint32_t> positions;
  std::vector<LayerQueries> layers;
};

// How tokens are coded. What is not set is the sending daemon's default.
struct Policy {
  // Share of the raw KV bytes that may cross the wire, everything counted.
  std::optional<double> budget;
  // Instead of `budget`: the daemon takes the least lossy one whose predicted time meets the target.
  std::optional<double> target_seconds;
  std::optional<double> min_budget;  // only with target_seconds
  Allocator allocator = Allocator::kUnspecified;
  Tier uniform_tier = Tier::kUnspecified;  // for kUniform
  uint64_t random_seed = 0;                // for kRandom
  std::vector<Tier> tiers;                 // those that may be used; empty: the daemon's default
  ImportanceSource importance = ImportanceSource::kUnspecified;
  std::vector<float> scores;  // token_count values, or layers * token_count with scores_per_layer
  bool scores_per_layer = false;
  std::optional<RecentQueries> queries;  // for kRecentQueries, of a source that is written whole
  double decay_lambda = 0;
  std::optional<uint32_t> sinks;
  bool strict_budget = false;
  bool payload_only = false;
};

// Block ids in token order, of group 0, 1, ...
using BlockTables = std::vector<std::vector<uint64_t>>;

// Of a transfer of several pools, each opened by a call of its own on either side: all arrive, or none.
struct Part {
  uint32_t index = 0;
  uint32_t count = 1;
};

// The sending half.
struct Source {
  // 1..128 characters of A-Z a-z 0-9 . _ : - ; chosen by the caller, the same in both halves.
  std::string transfer_id;
  std::string token;  // empty or 16 bytes, the same in both halves
  std::string peer;   // host:port of the other daemon, for Send
  uint32_t token_count = 0;
  BlockTables blocks;
  // By group; missing: 0. Tokens of its first block that are not of this transfer: a prefix that the receiver has.
  std::vector<uint32_t> skip_tokens;
  Policy policy;
  int64_t deadline_ms = 0;  // 0: the daemon's default
  bool layerwise = false;   // nothing is written yet; Advance tells
  Part part;                // all parts have the same peer
};

// The receiving half.
struct Destination {
  std::string transfer_id;
  std::string token;
  std::string peer;  // host:port of the other daemon, for Fetch
  uint32_t token_count = 0;
  BlockTables blocks;
  std::vector<uint32_t> skip_tokens;  // as in Source, of these blocks
  int64_t deadline_ms = 0;
  bool accept_dropped = false;    // the source may drop tokens
  bool exact_conversion = false;  // refuse a source whose data type cannot be converted without rounding
  Part part;
};

// Which half a daemon has. Needed only where one daemon has both.
enum class Role { kUnspecified = 0, kSender = 1, kReceiver = 2 };

enum class State {
  kUnspecified = 0,
  kWaiting,
  kPlanned,
  kStreaming,
  kVerifying,
  kCommitted,  // this and what follows are terminal
  kFailed,
  kCancelled,
  kExpired,
};

struct TierCount {
  Tier tier = Tier::kUnspecified;
  uint64_t k_tokens = 0;  // summed over layers
  uint64_t v_tokens = 0;
};

struct TokenRun {
  uint32_t first = 0;
  uint32_t count = 0;
};

// One half of one transfer, final once its state is terminal.
struct Report {
  std::string transfer_id;
  Role role = Role::kUnspecified;
  State state = State::kUnspecified;
  Status outcome;  // OK until the end, and for kCommitted
  uint32_t tokens = 0;
  uint32_t kept_tokens = 0;
  std::vector<TokenRun> dropped_tokens;
  uint64_t kv_bytes = 0;
  uint64_t wire_bytes = 0;
  uint64_t saved_bytes = 0;
  double budget = 0;
  double bits_per_value = 0;
  std::vector<TierCount> tiers;
  uint64_t chunks = 0;
  uint64_t chunks_resent = 0;
  uint64_t nonfinite_values = 0;
  uint64_t rounded_words = 0;
  Allocator allocator = Allocator::kUnspecified;
  std::string backend;
  std::string path;
  std::string source_guard;
  uint32_t layers_ready = 0;
  double first_layer_ready_seconds = 0;
  double duration_seconds = 0;
  std::string limited_by;  // "LINK", "ENCODE", ...; empty where it is not known
  Part part;                  // in `parts`: which one
  std::vector<Report> parts;  // of several: those that this daemon has; the above is then of all together
};

struct Progress {
  State state = State::kUnspecified;
  uint64_t chunks_done = 0;
  uint64_t chunks_total = 0;
  uint64_t wire_bytes = 0;
};

// What a Send would do.
struct PlanAnswer {
  uint64_t kv_bytes = 0;
  uint64_t wire_bytes = 0;
  double budget_used = 0;
  double least_budget = 0;
  double bits_per_value = 0;
  double predicted_distortion = 0;
  std::vector<TierCount> tiers;
  std::vector<TokenRun> dropped_tokens;
  std::optional<double> predicted_seconds;  // where Source::peer is one whose link was measured
};

}  // namespace spectrumkv
