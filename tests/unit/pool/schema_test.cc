#include "server/pool/schema.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>

#include "kernels/format/chunk.h"
#include "server/base/status.h"
#include "server/pool/overlap.h"
#include "tests/unit/pool/pool_fixture.h"

namespace spectrumkv {
namespace {

constexpr uint64_t kNoLimit = 0;

void ExpectBad(const PoolSchema& schema, const std::string& reason, const std::string& field,
               uint64_t max_chunk_bytes = kNoLimit) {
  const absl::Status status = CheckSchema(schema, max_chunk_bytes);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << field << " " << status;
  EXPECT_EQ(ReasonOf(status), reason) << status;
  EXPECT_EQ(MetadataOf(status)["field"], field) << status;
  EXPECT_NE(std::string(status.message()).find(field), std::string::npos) << status;
}

// Every order of the axes is some engine's layout, or could be.
TEST(CheckSchema, TakesEveryOrderOfTheAxes) {
  std::string axes = "bdhlpt";
  int orders = 0;
  do {
    for (const Geometry& g : {Geometry{}, Geometry{1, 1, 8, 1, 1, DType::kFloat32}, Geometry{3, 5, 24, 7, 3, DType::kBFloat16},
                              Geometry{2, 1, 8, 4, 1}, Geometry{2, 2, 8, 1, 9}}) {
      const absl::Status status = CheckSchema(MakeSchema(axes, g), kNoLimit);
      ASSERT_TRUE(status.ok()) << axes << " " << status;
    }
    ++orders;
  } while (std::next_permutation(axes.begin(), axes.end()));
  EXPECT_EQ(orders, 720);
}

TEST(CheckSchema, TakesTransposedKeysBesideOrdinaryValues) {
  const Geometry g{1, 2, 16, 4, 8, DType::kFloat32};
  PoolSchema schema = MakeSchema("lbpthd", g);
  TensorSchema& k = schema.groups[0].layers[0].k;  // [block][head][dim][token], in the same half of each block
  k.head_stride_bytes = 16 * 4 * 4;
  k.dim_stride_bytes = 4 * 4;
  k.token_stride_bytes = 4;
  EXPECT_TRUE(CheckSchema(schema, kNoLimit).ok()) << CheckSchema(schema, kNoLimit);
}

struct Edge {
  const char* field;
  std::function<void(PoolSchema*, uint64_t)> set;
  std::vector<uint64_t> good, bad;
};

TEST(CheckSchema, EveryLimitAtItsEdges) {
  using namespace schema_limits;
  const std::vector<Edge> edges = {
      {"tensor_parallel_size", [](PoolSchema* s, uint64_t v) { s->tensor_parallel_size = static_cast<uint32_t>(v); },
       {1, 2, kTensorParallel - 1, kTensorParallel}, {0, kTensorParallel + 1, UINT32_MAX}},
      {"tensor_parallel_rank", [](PoolSchema* s, uint64_t v) {
         s->tensor_parallel_size = 4;
         s->tensor_parallel_rank = static_cast<uint32_t>(v);
       }, {0, 1, 3}, {4, 5, UINT32_MAX}},
      {"groups[0].heads_total", [](PoolSchema* s, uint64_t v) { s->groups[0].heads_total = static_cast<uint32_t>(v); },
       {2, 3, kHeads - 1, kHeads}, {0, kHeads + 1, UINT32_MAX}},
      {"groups[0].head_count", [](PoolSchema* s, uint64_t v) { s->groups[0].head_count = static_cast<uint32_t>(v); },
       {1, 2}, {0, 3, UINT32_MAX}},
      {"groups[0].head_first", [](PoolSchema* s, uint64_t v) {
         s->groups[0].heads_total = 8;
         s->groups[0].head_first = static_cast<uint32_t>(v);
       }, {0, 1, 5, 6}, {7, 8, UINT32_MAX}},
      {"groups[0].head_dim", [](PoolSchema* s, uint64_t v) { s->groups[0].head_dim = static_cast<uint32_t>(v); },
       {8, 16}, {0, 1, 7, 9, 15, 1025, 1032, UINT32_MAX}},
      {"groups[0].block_tokens", [](PoolSchema* s, uint64_t v) { s->groups[0].block_tokens = static_cast<uint32_t>(v); },
       {1, 2, 4}, {0, kBlockTokens + 1, UINT32_MAX}},
      {"groups[0].num_blocks", [](PoolSchema* s, uint64_t v) { s->groups[0].num_blocks = v; },
       {1, 7, 8}, {0, kNumBlocks + 1, UINT64_MAX}},
      {"groups[0].layers[1].layer", [](PoolSchema* s, uint64_t v) {
         s->groups[0].layers[1].layer = static_cast<uint32_t>(v);
       }, {1, 2, kLayerIndex - 1, kLayerIndex}, {0 /* twice */, kLayerIndex + 1, UINT32_MAX}},
      {"groups[0].dtype", [](PoolSchema* s, uint64_t v) { s->groups[0].dtype = static_cast<DType>(v); },
       {1, 2}, {0, 4, 255}},
      {"groups[0].kind", [](PoolSchema* s, uint64_t v) { s->groups[0].kind = static_cast<GroupKind>(v); },
       {0}, {3, 4}},
      {"segments[0].size_bytes", [](PoolSchema* s, uint64_t v) { s->segments[0].size_bytes = v; },
       {8192, 8193, kSegmentBytes - 1, kSegmentBytes}, {0, kSegmentBytes + 1, UINT64_MAX}},
      {"groups[0].layers[0].k.segment", [](PoolSchema* s, uint64_t v) {
         s->groups[0].layers[0].k.segment = static_cast<uint32_t>(v);
       }, {0}, {1, 2, UINT32_MAX}},
  };
  for (const Edge& edge : edges) {
    for (const uint64_t value : edge.good) {
      PoolSchema schema = MakeSchema("lpbthd");
      edge.set(&schema, value);
      EXPECT_TRUE(CheckSchema(schema, kNoLimit).ok()) << value << " " << CheckSchema(schema, kNoLimit);
    }
    for (const uint64_t value : edge.bad) {
      PoolSchema schema = MakeSchema("lpbthd");
      edge.set(&schema, value);
      ExpectBad(schema, "INVALID_SCHEMA", edge.field);
    }
  }
}

TEST(CheckSchema, LargestGeometryFits) {
  const Geometry g{1, 1024, 1024, 256, 1, DType::kFloat32};
  EXPECT_TRUE(CheckSchema(MakeSchema("lpbthd", g), kNoLimit).ok());
  PoolSchema schema = MakeSchema("lpbthd", Geometry{1, 1, 8, 1, schema_limits::kNumBlocks});
  EXPECT_TRUE(CheckSchema(schema, kNoLimit).ok()) << CheckSchema(schema, kNoLimit);
}

TEST(CheckSchema, CountsAndNames) {
  PoolSchema schema;
  ExpectBad(schema, "INVALID_SCHEMA", "groups (count)");
  schema = MakeSchema("lpbthd");
  schema.segments.clear();
  ExpectBad(schema, "INVALID_SCHEMA", "segments (count)");
  schema = MakeSchema("lpbthd");
  schema.groups[0].layers.clear();
  ExpectBad(schema, "INVALID_SCHEMA", "groups[0].layers (count)");
  schema = MakeSchema("lpbthd");
  schema.model = std::string(schema_limits::kNameBytes + 1, 'm');
  ExpectBad(schema, "INVALID_SCHEMA", "model (bytes)");
  schema = MakeSchema("lpbthd");
  schema.segments[0].kind = SegmentSpec::Kind::kPosixShm;
  ExpectBad(schema, "INVALID_SCHEMA", "segments[0].name (bytes)");
  schema.segments[0].name = "/a";
  schema.segments.push_back(schema.segments[0]);
  ExpectBad(schema, "INVALID_SCHEMA", "segments[1].name");
  schema.segments[1].kind = SegmentSpec::Kind::kFile;  // another kind: another object
  EXPECT_TRUE(CheckSchema(schema, kNoLimit).ok());
  schema = MakeSchema("lpbthd");
  schema.groups[0].layers[1].v.reset();
  ExpectBad(schema, "INVALID_SCHEMA", "groups[0].layers[1].v");
  schema.groups[0].layers[0].v.reset();
  schema.groups[0].kind = GroupKind::kMla;
  EXPECT_TRUE(CheckSchema(schema, kNoLimit).ok());
  schema = MakeSchema("lpbthd");
  schema.groups[0].kind = GroupKind::kSlidingWindow;
  ExpectBad(schema, "INVALID_SCHEMA", "groups[0].sliding_window_tokens");
}

TEST(CheckSchema, StridesAndOffsets) {
  const auto with = [](uint64_t TensorSchema::*member, uint64_t value) {
    PoolSchema schema = MakeSchema("lpbthd");
    schema.groups[0].layers[1].k.*member = value;
    return schema;
  };
  const std::string k = "groups[0].layers[1].k";
  const std::vector<std::pair<uint64_t TensorSchema::*, std::string>> strides = {
      {&TensorSchema::block_stride_bytes, ".block_stride_bytes"},
      {&TensorSchema::token_stride_bytes, ".token_stride_bytes"},
      {&TensorSchema::head_stride_bytes, ".head_stride_bytes"},
      {&TensorSchema::dim_stride_bytes, ".dim_stride_bytes"}};
  const uint64_t size = MakeSchema("lpbthd").segments[0].size_bytes;
  for (const auto& [member, name] : strides) {
    ExpectBad(with(member, 0), "INVALID_SCHEMA", k + name);
    ExpectBad(with(member, 3), "INVALID_SCHEMA", k + name);
    ExpectBad(with(member, size + 2), "OUT_OF_RANGE", k + name);
    ExpectBad(with(member, UINT64_MAX - 1), "OUT_OF_RANGE", k + name);
  }
  ExpectBad(with(&TensorSchema::offset_bytes, 1), "INVALID_SCHEMA", k + ".offset_bytes");
  for (const uint64_t offset : {size - 2, size, size + 2, UINT64_MAX - 1}) {
    ExpectBad(with(&TensorSchema::offset_bytes, offset), "OUT_OF_RANGE", k);
  }
  // The last byte of the last tensor is the last of the segment.
  PoolSchema schema = MakeSchema("lpbthd");
  schema.segments[0].size_bytes -= 1;
  ExpectBad(schema, "OUT_OF_RANGE", "groups[0].layers[1].v");
}

TEST(CheckSchema, OverlapInsideATensor) {
  PoolSchema schema = MakeSchema("lpbthd");
  TensorSchema& k = schema.groups[0].layers[0].k;
  k.token_stride_bytes -= 2;  // one element less than the heads of a token
  ExpectBad(schema, "OVERLAP", "groups[0].layers[0].k.token_stride_bytes");
  k = MakeSchema("lpbthd").groups[0].layers[0].k;
  k.head_stride_bytes = 2;
  ExpectBad(schema, "OVERLAP", "groups[0].layers[0].k.head_stride_bytes");
  k = MakeSchema("lpbthd").groups[0].layers[0].k;
  k.block_stride_bytes -= 2;
  ExpectBad(schema, "OVERLAP", "groups[0].layers[0].k.block_stride_bytes");
}

TEST(CheckSchema, OverlapBetweenTensors) {
  for (const char* axes : {"lpbthd", "lbpthd", "blpthd", "lbtphd", "lbthpd", "lbthdp", "lbphtd"}) {
    PoolSchema same = MakeSchema(axes);
    same.groups[0].layers[1].k = same.groups[0].layers[0].k;
    EXPECT_EQ(ReasonOf(CheckSchema(same, kNoLimit)), "OVERLAP") << axes;
    PoolSchema planes = MakeSchema(axes);
    planes.groups[0].layers[1].v = planes.groups[0].layers[1].k;
    ExpectBad(planes, "OVERLAP", "groups[0].layers[1].v");
    // One element off its place: into its neighbour.
    PoolSchema shifted = MakeSchema(axes);
    if (std::string(axes) == "lbthdp") continue;  // there every place is somebody's, and the end is out of range
    shifted.groups[0].layers[0].k.offset_bytes += 2;
    EXPECT_EQ(ReasonOf(CheckSchema(shifted, kNoLimit)), "OVERLAP") << axes;
  }
}

TEST(CheckSchema, GenerationTable) {
  PoolSchema schema = MakeSchema("lpbthd");
  const uint64_t end = schema.segments[0].size_bytes;
  schema.segments[0].size_bytes += 8 * 8;
  schema.generations = PoolSchema::Generations{0, end};
  EXPECT_TRUE(CheckSchema(schema, kNoLimit).ok()) << CheckSchema(schema, kNoLimit);
  schema.generations->offset_bytes = end + 8;
  ExpectBad(schema, "OUT_OF_RANGE", "generations.offset_bytes");
  schema.generations->offset_bytes = end + 4;
  ExpectBad(schema, "INVALID_SCHEMA", "generations.offset_bytes");
  schema.generations->offset_bytes = UINT64_MAX - 7;
  ExpectBad(schema, "OUT_OF_RANGE", "generations.offset_bytes");
  schema.generations->offset_bytes = end - 8;
  ExpectBad(schema, "OVERLAP", "generations");
  schema.generations->segment = 1;
  ExpectBad(schema, "INVALID_SCHEMA", "generations.segment");
}

TEST(CheckSchema, ChunkOfOneTokenMustFit) {
  const PoolSchema schema = MakeSchema("lpbthd");
  const uint64_t bytes = MaxChunkBytes(ChunkDims{1, 2, 16, DType::kFloat16, true});
  EXPECT_TRUE(CheckSchema(schema, bytes).ok());
  EXPECT_TRUE(CheckSchema(schema, bytes + 1).ok());
  ExpectBad(schema, "CHUNK_TOO_LARGE", "groups[0]", bytes - 1);
}

// Brute force: the answer must be right wherever it says "disjoint".
TEST(FindOverlap, NeverMissesOne) {
  std::mt19937 random(5);
  const auto pick = [&random](uint64_t n) { return std::uniform_int_distribution<uint64_t>(0, n - 1)(random); };
  int disjoint = 0, overlapping = 0;
  for (int round = 0; round < 20000; ++round) {
    std::vector<Lattice> lattices;
    for (int i = 0; i < 3; ++i) {
      Lattice lattice{0, pick(12) * 2, 2, {}};
      for (auto& dim : lattice.dims) dim = {2 * (1 + pick(16)), 1 + pick(4)};
      if (SpanOf(lattice) && FindSelfOverlap(lattice) < 0) lattices.push_back(lattice);
    }
    std::vector<int> owners(1024, -1);
    bool truth = false;
    for (size_t i = 0; i < lattices.size(); ++i) {
      const auto& d = lattices[i].dims;
      for (uint64_t n = 0; n < d[0].extent * d[1].extent * d[2].extent * d[3].extent; ++n) {
        uint64_t rest = n, at = lattices[i].offset;
        for (const auto& dim : d) {
          at += rest % dim.extent * dim.stride;
          rest /= dim.extent;
        }
        ASSERT_NE(owners[at], static_cast<int>(i)) << "nested, and yet an element is there twice";
        truth = truth || owners[at] >= 0;
        owners[at] = static_cast<int>(i);
      }
    }
    const bool found = FindOverlap(lattices).has_value();
    ASSERT_TRUE(found || !truth) << "round " << round;
    (found ? overlapping : disjoint) += 1;
  }
  EXPECT_GT(disjoint, 1000);
  EXPECT_GT(overlapping, 1000);
}

}  // namespace
}  // namespace spectrumkv
