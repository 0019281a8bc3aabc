#include "server/pool/schema.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
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
       {0}, {4, 5}},
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
  for (const GroupKind kind : {GroupKind::kMla, GroupKind::kOpaqueState}) {
    schema.groups[0].kind = kind;
    EXPECT_TRUE(CheckSchema(schema, kNoLimit).ok());
  }
  schema.groups.push_back(schema.groups[0]);
  schema.groups[1].kind = GroupKind::kMla;
  ExpectBad(schema, "INVALID_SCHEMA", "groups[1].kind");  // rows of state beside tokens
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

// A group of one layer, fused K and V, that has `share` of every `stride` bytes from `offset` on, one block in each.
GroupSchema Slice(uint32_t layer, uint64_t offset, uint64_t stride, uint32_t block_tokens, uint64_t num_blocks) {
  GroupSchema group = MakeSchema("lbpthd").groups[0];
  const uint64_t token = group.layers[0].k.token_stride_bytes;  // 64 bytes
  group.block_tokens = block_tokens;
  group.num_blocks = num_blocks;
  TensorSchema k = group.layers[0].k;
  k.offset_bytes = offset;
  k.block_stride_bytes = stride;
  TensorSchema v = k;
  v.offset_bytes += token * block_tokens;
  group.layers = {LayerSchema{layer, k, v}};
  return group;
}

PoolSchema Shared(std::vector<GroupSchema> groups) {
  PoolSchema schema = MakeSchema("lbpthd");
  schema.groups = std::move(groups);
  schema.segments[0].size_bytes = 1 << 20;
  return schema;
}

TEST(CheckSchema, GroupsMayShareARegionInDisjointParts) {
  // Blocks of 4 tokens have 512 bytes, of 8 tokens 1024.
  const struct {
    const char* what;
    std::vector<GroupSchema> groups;
    const char* overlap;  // "": disjoint
  } cases[] = {
      {"one after the other", {Slice(0, 0, 512, 4, 8), Slice(1, 4096, 512, 4, 8)}, ""},
      {"side by side in each page", {Slice(0, 0, 1536, 4, 8), Slice(1, 512, 1536, 8, 8)}, ""},
      {"side by side, more pages of one", {Slice(0, 0, 1536, 4, 80), Slice(1, 512, 1536, 8, 8)}, ""},
      {"another in every second page",
       {Slice(0, 0, 1536, 4, 8), Slice(1, 512, 3072, 8, 4), Slice(2, 2048, 3072, 8, 4)}, ""},
      {"two strides without a common page", {Slice(0, 0, 1024, 4, 9), Slice(1, 512, 5 * 1024, 4, 2)}, ""},
      {"apart, with a third that reaches from one to the other",
       {Slice(0, 0, 2048, 4, 4), Slice(1, 8192, 2048, 4, 4), Slice(2, 1024, 2048, 4, 8)}, ""},
      {"the same, with its own stride",
       {Slice(0, 0, 2048, 4, 4), Slice(1, 8192, 2048, 4, 4), Slice(2, 1024, 4096, 4, 3)}, ""},
      {"the same page", {Slice(0, 0, 1536, 4, 8), Slice(1, 0, 1536, 4, 8)}, "groups[1].layers[0].k"},
      {"a page's end", {Slice(0, 0, 1536, 4, 8), Slice(1, 510, 1536, 8, 8)}, "groups[1].layers[0].k"},
      {"the next page's begin", {Slice(0, 0, 1536, 4, 8), Slice(1, 514, 1536, 8, 8)}, "groups[1].layers[0].v"},
      {"every second page, shifted into the first", {Slice(0, 0, 1536, 4, 8), Slice(1, 1024, 3072, 8, 4)},
       "groups[1].layers[0].v"},
      {"strides that meet once, late", {Slice(0, 0, 5120, 4, 100), Slice(1, 1024, 7168, 4, 70)},
       "groups[1].layers[0].k"},
  };
  for (const auto& test : cases) {
    SCOPED_TRACE(test.what);
    const absl::Status status = CheckSchema(Shared(test.groups), kNoLimit);
    if (std::string(test.overlap).empty()) {
      EXPECT_TRUE(status.ok()) << status;
    } else {
      EXPECT_EQ(ReasonOf(status), "OVERLAP");
      EXPECT_EQ(MetadataOf(status)["field"], test.overlap) << status;
    }
  }
}

// Marks every byte. The answer must be right whether it says that two overlap or that none do.
class BruteForce {
 public:
  // Whether any two of `lattices` share a byte; `among` restricts it to two of them.
  static bool Overlap(const std::vector<Lattice>& lattices, std::optional<std::pair<size_t, size_t>> among = {}) {
    std::map<uint64_t, size_t> owners;
    for (size_t i = 0; i < lattices.size(); ++i) {
      if (among.has_value() && i != among->first && i != among->second) continue;
      const auto& d = lattices[i].dims;
      for (uint64_t n = 0; n < d[0].extent * d[1].extent * d[2].extent * d[3].extent; ++n) {
        uint64_t rest = n, at = lattices[i].offset;
        for (const auto& dim : d) {
          at += rest % dim.extent * dim.stride;
          rest /= dim.extent;
        }
        for (uint64_t byte = at; byte < at + lattices[i].element_bytes; ++byte) {
          if (!owners.emplace(byte, i).second) return true;
        }
      }
    }
    return false;
  }
};

void ExpectExact(const std::vector<Lattice>& lattices, int* disjoint, int* overlapping) {
  const auto found = FindOverlap(lattices);
  ASSERT_EQ(found.has_value(), BruteForce::Overlap(lattices));
  if (found.has_value()) {
    ASSERT_TRUE(BruteForce::Overlap(lattices, found)) << "the two that are named are apart";
  }
  (found.has_value() ? *overlapping : *disjoint) += 1;
}

TEST(FindOverlap, IsExactOnSmallTensors) {
  std::mt19937 random(5);
  const auto pick = [&random](uint64_t n) { return std::uniform_int_distribution<uint64_t>(0, n - 1)(random); };
  int disjoint = 0, overlapping = 0;
  for (int round = 0; round < 20000; ++round) {
    SCOPED_TRACE(round);
    std::vector<Lattice> lattices;
    for (int i = 0; i < 3; ++i) {
      Lattice lattice{0, pick(12) * 2, 2, {}};
      for (auto& dim : lattice.dims) dim = {2 * (1 + pick(16)), 1 + pick(4)};
      if (!SpanOf(lattice) || FindSelfOverlap(lattice) >= 0) continue;
      ASSERT_FALSE(BruteForce::Overlap({lattice})) << "nested, and yet an element is there twice";
      lattices.push_back(lattice);
    }
    ExpectExact(lattices, &disjoint, &overlapping);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(disjoint, 1000);
  EXPECT_GT(overlapping, 1000);
}

// Pages of many sizes with a slice each, as groups of a hybrid model have them: strides differ and reach far.
TEST(FindOverlap, IsExactOnInterleavedPages) {
  std::mt19937 random(6);
  const auto pick = [&random](uint64_t first, uint64_t last) {
    return std::uniform_int_distribution<uint64_t>(first, last)(random);
  };
  int disjoint = 0, overlapping = 0;
  for (int round = 0; round < 4000; ++round) {
    SCOPED_TRACE(round);
    const uint64_t unit = pick(1, 3);
    std::vector<Lattice> lattices;
    for (uint64_t i = pick(2, 4); i > 0; --i) {
      Lattice lattice{0, unit * pick(0, 40), 1, {}};
      lattice.dims[0] = {unit * pick(6, 30), pick(1, 40)};  // blocks
      lattice.dims[1] = {unit * pick(1, 3), pick(1, 3)};    // tokens
      lattice.dims[2] = {1, pick(1, unit)};                 // bytes
      if (FindSelfOverlap(lattice) < 0) lattices.push_back(lattice);
    }
    ExpectExact(lattices, &disjoint, &overlapping);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(disjoint, 300);
  EXPECT_GT(overlapping, 300);
}

TEST(FindOverlap, LargeTensorsTakeNoTime) {
  const uint64_t page = 1 << 20;
  const auto slice = [](uint64_t offset, uint64_t stride, uint64_t extent, uint64_t bytes) {
    return Lattice{0, offset, bytes, {{{stride, extent}, {0, 1}, {0, 1}, {0, 1}}}};
  };
  // A million pages each. Strides with a common measure are decided; 2^40 bytes are not walked.
  EXPECT_FALSE(FindOverlap({slice(0, 2 * page, 1 << 20, page), slice(page, 6 * page, 1 << 18, page)}));
  EXPECT_TRUE(FindOverlap({slice(0, 2 * page, 1 << 20, page + 1), slice(page, 6 * page, 1 << 18, page)}));
  // They meet in one byte, far behind.
  const uint64_t far = 6 * page * ((1 << 18) - 1) + 2 * page;
  EXPECT_TRUE(FindOverlap({slice(0, 2 * page, 1 << 20, page), slice(page, 6 * page, 1 << 18, page),
                           slice(far - 1, 7, 1, 1)}).has_value());
  EXPECT_FALSE(FindOverlap({slice(0, 2 * page, 1 << 20, page - 1), slice(page, 6 * page, 1 << 18, page - 1),
                            slice(far - 1, 7, 1, 1)}).has_value());
  // The bytes of one are 0 modulo 4, those of the other 1, and nothing larger divides their strides: they are apart, but
  // there are 2^28 places to try. The bound on the work ends it, on the safe side.
  const auto combed = [](uint64_t offset, uint64_t stride) {
    return Lattice{0, offset, 1, {{{4 * stride, 1 << 20}, {4, 1 << 27}, {0, 1}, {0, 1}}}};
  };
  EXPECT_TRUE(FindOverlap({combed(0, (1 << 28) - 1), combed(1, (1 << 28) - 3)}).has_value());
  EXPECT_FALSE(FindOverlap({combed(0, (1 << 28) - 1), combed(1, (1 << 28) - 1)}).has_value());
}

}  // namespace
}  // namespace spectrumkv
