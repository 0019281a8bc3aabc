// Schemas and a registry for tests of pools.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/base/status.h"
#include "server/pool/pool.h"
#include "tests/unit/base/fake_clock.h"
#include "tests/unit/base/me.h"
#include "tests/unit/pool/segments.h"

namespace spectrumkv {

struct Geometry {
  uint32_t layers = 2, heads = 2, head_dim = 16, block_tokens = 4;
  uint64_t num_blocks = 8;
  DType dtype = DType::kFloat16;
};

// A pool is a dense array with axes l(ayer) p(lane: K, V) b(lock) t(oken) h(ead) d(im) in the given order, outermost
// first: "lpbthd" is per-layer split NHD, "lbphtd" fused HND, "blpthd" all layers of a block together ...
inline PoolSchema MakeSchema(const std::string& axes, const Geometry& g = {}) {
  const uint64_t element = SizeOf(g.dtype);
  const auto extent = [&g](char axis) -> uint64_t {
    switch (axis) {
      case 'l': return g.layers;
      case 'p': return 2;
      case 'b': return g.num_blocks;
      case 't': return g.block_tokens;
      case 'h': return g.heads;
      default: return g.head_dim;
    }
  };
  const auto stride = [&](char axis) {
    uint64_t bytes = element;
    for (size_t i = axes.size(); axes[--i] != axis;) bytes *= extent(axes[i]);
    return bytes;
  };
  PoolSchema schema;
  schema.model = "m";
  GroupSchema group;
  group.dtype = g.dtype;
  group.heads_total = group.head_count = g.heads;
  group.head_dim = g.head_dim;
  group.block_tokens = g.block_tokens;
  group.num_blocks = g.num_blocks;
  for (uint32_t l = 0; l < g.layers; ++l) {
    TensorSchema k{0, l * stride('l'), stride('b'), stride('t'), stride('h'), stride('d')};
    TensorSchema v = k;
    v.offset_bytes += stride('p');
    group.layers.push_back(LayerSchema{l, k, v});
  }
  schema.groups.push_back(group);
  uint64_t bytes = element;
  for (const char axis : axes) bytes *= extent(axis);
  schema.segments.push_back(SegmentSpec{SegmentSpec::Kind::kDaemonOwned, "", bytes});
  return schema;
}

inline std::vector<GroupBlockList> Blocks(std::vector<BlockRange> runs) { return {GroupBlockList{0, std::move(runs)}}; }

class PoolTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kEpoch = 77;

  PoolTest() { Restart(DefaultLimits()); }

  static PoolLimits DefaultLimits() {
    PoolLimits limits;
    limits.shm_prefix = "/skvtest-";
    limits.max_owned_bytes = 1 << 20;
    limits.max_pools = 4;
    limits.max_chunk_bytes = 2 << 20;
    return limits;
  }
  void Restart(const PoolLimits& limits) {
    registry_.reset();
    PoolEvents events;
    events.lease_expired = [this](const std::string& kind) { expired_.push_back(kind); };
    events.quota_refused = [this](PoolQuota quota) { quotas_.push_back(quota); };
    registry_ = PoolRegistry::Create(limits, kEpoch, &clock_, events);
  }
  std::string Register(const PoolSchema& schema, int64_t ttl_ms = 0) {
    auto handle = registry_->Register(kMe, "", schema, ttl_ms);
    EXPECT_TRUE(handle.ok()) << handle.status();
    return handle.ok() ? handle->pool_id : "";
  }
  std::unique_ptr<BlockHold> Source(const std::string& pool, const std::vector<GroupBlockList>& blocks, uint32_t n) {
    auto hold = registry_->HoldSource(kMe, pool, kEpoch, blocks, n);
    EXPECT_TRUE(hold.ok()) << hold.status();
    return hold.ok() ? *std::move(hold) : nullptr;
  }
  std::unique_ptr<BlockHold> Target(const std::string& pool, const std::vector<GroupBlockList>& blocks, uint32_t n) {
    auto hold = registry_->ReserveTarget(kMe, pool, kEpoch, blocks, n);
    EXPECT_TRUE(hold.ok()) << hold.status();
    return hold.ok() ? *std::move(hold) : nullptr;
  }
  std::string ReasonOfSource(const std::string& pool, const std::vector<GroupBlockList>& blocks, uint32_t n) {
    auto hold = registry_->HoldSource(kMe, pool, kEpoch, blocks, n);
    return hold.ok() ? "OK" : ReasonOf(hold.status());
  }
  std::string ReasonOfTarget(const std::string& pool, const std::vector<GroupBlockList>& blocks, uint32_t n) {
    auto hold = registry_->ReserveTarget(kMe, pool, kEpoch, blocks, n);
    return hold.ok() ? "OK" : ReasonOf(hold.status());
  }

  FakeClock clock_;
  std::vector<std::string> expired_;
  std::vector<PoolQuota> quotas_;
  std::unique_ptr<PoolRegistry> registry_;
};

}  // namespace spectrumkv
