// Moves KV between the two daemons of a cluster and measures it from where workers stand.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tests/bench/cluster.h"

namespace spectrumkv::bench {

// A policy by name: RAW, a tier for all tokens (P8, Q4), or b=0.3 (GREEDY with that budget and the default tiers).
struct Variant {
  std::string name;
  v1::Policy policy;
};
absl::StatusOr<Variant> VariantOf(const std::string& name);

// Blocks of one transfer on one side.
using Blocks = std::vector<uint64_t>;
// `count` of the pool's blocks in random order.
Blocks ScatteredBlocks(const Shape& shape, uint64_t count, uint32_t seed);

struct MoveTimes {
  double expect_s = 0;       // the Expect call
  double send_call_s = 0;    // the Send call
  double first_layer_s = 0;  // from Send to LayersReady with the first layer
  double committed_s = 0;    // from Send to COMMITTED at the decode worker
  double total_s = 0;        // the same from Expect on
  v1::TransferReport report;  // of the receiver
  std::string id;
};

// One request: the same tokens of source blocks and target blocks.
struct Request {
  Pool* source;
  Pool* target;
  Blocks source_blocks, target_blocks;
  uint32_t tokens;

  // Of `tokens` tokens at scattered blocks of both pools.
  static Request Scattered(Pool* source, Pool* target, uint32_t tokens);
};

// Two pools and one request at scattered blocks of them. The cluster must outlive it.
struct Scene {
  // The pools have a quarter more blocks than `tokens` tokens need.
  static absl::StatusOr<Scene> Create(const Cluster& cluster, Shape shape, uint32_t tokens);
  std::unique_ptr<Pool> source, target;
  Request request;
};

// Expect, then Send; refinable where the policy retains. Returns at COMMITTED, which is an error's text otherwise. Thread-safe.
absl::StatusOr<MoveTimes> Move(const Cluster& cluster, const Request& request, const Variant& variant);

// Of a transfer that is retained: from Refine (everything, RAW) until all is in place.
struct RefineTimes {
  double seconds = 0;
  v1::TransferReport report;
};
absl::StatusOr<RefineTimes> Refine(const Cluster& cluster, const std::string& id, v1::RefineMode mode);
// Both halves let go of it.
absl::Status ReleaseBoth(const Cluster& cluster, const std::string& id);

// Relative error of what lies in the target, as the root of summed squares over all blocks; 0: bit for bit.
double RelativeError(const Request& request);
// Overwrites the target's blocks, so that RelativeError tells whether a transfer wrote them.
void ClearTarget(const Request& request);

}  // namespace spectrumkv::bench
