// The sampled error of coding against sums made here, in the plainest way, from the same blocks.
#include "server/encode/reconstruction.h"

#include <cmath>
#include <cstring>
#include <random>

#include "kernels/codec/codec_math.h"
#include "kernels/codec/registry.h"
#include "kernels/cpu/cpu_backends.h"
#include "tests/unit/pool/pool_fixture.h"

namespace spectrumkv {
namespace {

class Reconstruction : public PoolTest {
 protected:
  Reconstruction() {
    AddCpuBackends(&backends_);
    std::string error;
    backend_ = backends_.Choose("scalar", &error);
  }

  static float Widen(const uint8_t* at, DType dtype) {
    uint32_t word = 0;
    std::memcpy(&word, at, SizeOf(dtype));
    return dtype == DType::kFloat16 ? HalfToFloat(word)
                                    : dtype == DType::kBFloat16 ? BfloatToFloat(word) : BitsFloat(word);
  }
  static uint32_t Narrow(float x, DType dtype) {
    return dtype == DType::kFloat16 ? FloatToHalf(x) : dtype == DType::kBFloat16 ? NarrowBfloat(x) : FloatBits(x);
  }

  // Registers a pool of one layer in this order of axes and fills it with normal values, or zeros.
  void Fill(const std::string& axes, Geometry geometry, bool zeros = false) {
    geometry.layers = 1;
    Use(MakeSchema(axes, geometry), zeros);
  }
  void Use(const PoolSchema& schema, bool zeros = false) {
    schema_ = schema;
    const GroupSchema& group = schema_.groups[0];
    pool_ = Register(schema_);
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (const PlaneId plane : {PlaneId::kK, PlaneId::kV}) {
      if (plane == PlaneId::kV && !group.layers[0].v) continue;
      for (uint64_t block = 0; block < group.num_blocks; ++block) {
        std::string data(size_t{group.block_tokens} * group.head_count * group.head_dim * SizeOf(group.dtype), '\0');
        for (size_t at = 0; at < data.size(); at += SizeOf(group.dtype)) {
          const uint32_t word = Narrow(zeros ? 0 : normal(random), group.dtype);
          std::memcpy(&data[at], &word, SizeOf(group.dtype));
        }
        Put(plane, block, data);
      }
    }
    hold_ = Source(pool_, Blocks({{5, 1}, {0, 4}, {7, 1}}), tokens_);
    shape_ = {};
    shape_.token_count = tokens_;
    shape_.kept = {{0, tokens_}};
    shape_.layers = {PlanLayer{0, 0, group.head_count, group.head_dim, group.dtype, group.layers[0].v.has_value()}};
  }
  void Put(PlaneId plane, uint64_t block, const std::string& data) {
    ASSERT_TRUE(registry_->PutBlock(kMe, pool_, kEpoch, 0, 0, plane, block, data).ok());
  }

  EncodeSource source() const { return {hold_.get(), &shape_, &places_}; }
  ChunkCut cut() const { return CutChunks(shape_)[0]; }

  // Token t's K at tier (t mod 7), its V at tier (t / 3 mod 7).
  void Encode() {
    PlannedChunk chunk;
    chunk.cut = cut();
    for (uint32_t t = 0; t < tokens_; ++t) {
      const Tier v = shape_.layers[0].has_v ? static_cast<Tier>(t / 3 % kTierCount) : Tier::kRaw;
      chunk.tier_map.push_back(TierMapByte(static_cast<Tier>(t % kTierCount), v));
    }
    const ChunkDims dims = DimsOf(shape_.layers[0], tokens_);
    chunk.chunk_bytes = ChunkBytes(dims, CountTiers(chunk.tier_map.data(), tokens_, dims.has_v));
    bytes_.resize(MaxChunkBytes(dims));
    std::vector<Piece> lent;
    const auto result = EncodeChunk(*backend_, source(), chunk, 99, &scratch_, bytes_.data(), bytes_.size(), &lent);
    ASSERT_TRUE(result.ok()) << result.status();
    bytes_.resize(result->chunk_bytes);
  }
  ReconstructionError Measure() {
    return MeasureReconstruction(*backend_, source(), cut(), bytes_.data(), bytes_.size(), &scratch_);
  }

  // The same in the plainest way: the chunk decoded to dense planes, the source word by word.
  std::array<std::optional<double>, kTierCount> Plainly(PlaneId plane) {
    ChunkView view;
    EXPECT_EQ(ParseChunk(bytes_.data(), bytes_.size(), &view), Refusal::kNone);
    const ChunkDims& dims = view.dims;
    const size_t element = SizeOf(dims.dtype), head = dims.head_dim * element, token = head * dims.heads;
    std::vector<uint8_t> out[2];
    std::vector<uint8_t*> rows[2];
    for (int p = 0; p < 2; ++p) {
      out[p].resize(token * dims.tokens);
      for (uint32_t t = 0; t < dims.tokens; ++t) rows[p].push_back(out[p].data() + t * token);
    }
    const auto target = [&](int p) {
      return TargetPlane{rows[p].data(), static_cast<int64_t>(head), static_cast<int64_t>(element)};
    };
    const TargetPlane k = target(0), v = target(1);
    Workspace workspace;
    backend_->Decode(view, dims.dtype, k, dims.has_v ? &v : nullptr, &workspace);

    double squares[kTierCount] = {}, errors[kTierCount] = {};
    bool any[kTierCount] = {};
    const TensorSchema& tensor =
        plane == PlaneId::kK ? schema_.groups[0].layers[0].k : *schema_.groups[0].layers[0].v;
    for (uint32_t t = 0; t < dims.tokens; t += compared_step_) {
      const uint8_t map = view.tier_map()[t];
      const auto tier = static_cast<size_t>(plane == PlaneId::kK ? TierOfK(map) : TierOfV(map));
      any[tier] = true;
      uint8_t* row = nullptr;
      hold_->FillRows(0, 0, plane, t, 1, &row);
      for (uint32_t h = 0; h < dims.heads; ++h) {
        for (uint32_t d = 0; d < dims.head_dim; ++d) {
          const double x = Widen(row + h * tensor.head_stride_bytes + d * tensor.dim_stride_bytes, dims.dtype);
          const double y = Widen(rows[plane == PlaneId::kK ? 0 : 1][t] + h * head + d * element, dims.dtype);
          if (!std::isfinite(x)) continue;
          squares[tier] += x * x;
          errors[tier] += (y - x) * (y - x);
        }
      }
    }
    std::array<std::optional<double>, kTierCount> ratios;
    for (size_t tier = 0; tier < kTierCount; ++tier) {
      if (any[tier]) ratios[tier] = squares[tier] > 0 ? std::sqrt(errors[tier] / squares[tier]) : 0;
    }
    return ratios;
  }
  static void ExpectSame(const std::array<std::optional<double>, kTierCount>& got,
                         const std::array<std::optional<double>, kTierCount>& want) {
    for (size_t tier = 0; tier < kTierCount; ++tier) {
      ASSERT_EQ(got[tier].has_value(), want[tier].has_value()) << tier;
      if (!want[tier].has_value()) continue;
      EXPECT_NEAR(*got[tier], *want[tier], 1e-6 + 1e-4 * *want[tier]) << tier;
    }
  }

  uint32_t tokens_ = 21;  // 6 blocks of 4, the last one used in part
  uint32_t compared_step_ = 1;
  BackendRegistry backends_;
  const Backend* backend_ = nullptr;
  PoolSchema schema_;
  std::string pool_;
  std::unique_ptr<BlockHold> hold_;
  TransferShape shape_;
  const std::vector<LayerPlace> places_ = {{0, 0}};
  EncodeScratch scratch_;
  std::vector<uint8_t> bytes_;
};

TEST_F(Reconstruction, IsThatOfThePlainSumsInEveryLayoutAndType) {
  for (const char* axes : {"lpbthd", "lbphtd", "blpthd", "lpbhdt"}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
      SCOPED_TRACE(std::string(axes) + " " + DTypeName(dtype));
      Restart(DefaultLimits());
      Geometry geometry;
      geometry.head_dim = 64;
      geometry.dtype = dtype;
      Fill(axes, geometry);
      Encode();
      const ReconstructionError error = Measure();
      ExpectSame(error.k, Plainly(PlaneId::kK));
      ExpectSame(error.v, Plainly(PlaneId::kV));
      EXPECT_EQ(*error.k[static_cast<size_t>(Tier::kRaw)], 0);
      // Fewer bits lose more, and each tier about as much as its step says.
      const Tier order[] = {Tier::kP8, Tier::kQ4, Tier::kQ3, Tier::kQ2};
      for (size_t i = 1; i < std::size(order); ++i) {
        EXPECT_LT(*error.k[static_cast<size_t>(order[i - 1])], *error.k[static_cast<size_t>(order[i])]);
      }
      EXPECT_LT(*error.k[static_cast<size_t>(Tier::kP8)], 0.02);
      EXPECT_GT(*error.k[static_cast<size_t>(Tier::kQ2)], 0.1);
      EXPECT_LT(*error.k[static_cast<size_t>(Tier::kQ2)], 0.6);
      hold_.reset();
    }
  }
}

TEST_F(Reconstruction, AFewTokensOfALongChunkAreCompared) {
  Geometry geometry;
  geometry.block_tokens = 40;
  tokens_ = 210;
  compared_step_ = 4;  // 53 tokens; 3 would be 70
  Fill("lpbthd", geometry);
  Encode();
  const ReconstructionError error = Measure();
  ExpectSame(error.k, Plainly(PlaneId::kK));
  ExpectSame(error.v, Plainly(PlaneId::kV));
}

TEST_F(Reconstruction, ATierWithoutTokensHasNone) {
  Fill("lpbthd", {});
  Encode();
  const ReconstructionError error = Measure();
  for (size_t tier = 0; tier < kTierCount; ++tier) {
    EXPECT_TRUE(error.k[tier].has_value()) << tier;  // 21 tokens, 7 tiers
    EXPECT_TRUE(error.v[tier].has_value()) << tier;
  }
  shape_.layers[0].has_v = false;  // as MLA
  Encode();
  EXPECT_EQ(Measure().v, ReconstructionError().v);
}

TEST_F(Reconstruction, ZerosThatStayHaveNone) {
  Fill("lpbthd", {}, /*zeros=*/true);
  Encode();
  for (const auto& ratio : Measure().v) EXPECT_EQ(ratio, 0.0);
}

TEST_F(Reconstruction, ValuesThatAreNotFiniteAreLeftOut) {
  Fill("lpbthd", {});
  hold_.reset();
  auto block = registry_->GetBlock(kMe, pool_, kEpoch, 0, 0, PlaneId::kK, 5);
  ASSERT_TRUE(block.ok());
  (*block)[0] = 0;
  (*block)[1] = 0x7E;  // a NaN in token 0, which is RAW
  Put(PlaneId::kK, 5, *block);
  hold_ = Source(pool_, Blocks({{5, 1}, {0, 4}, {7, 1}}), tokens_);
  Encode();
  EXPECT_EQ(Measure().k[0], 0.0);
  ExpectSame(Measure().k, Plainly(PlaneId::kK));
}

TEST_F(Reconstruction, ASourceThatWasWrittenSinceSaysNothing) {
  PoolSchema schema = MakeSchema("lpbthd", Geometry{1});
  schema.generations = PoolSchema::Generations{0, schema.segments[0].size_bytes};
  schema.segments[0].size_bytes += 8 * schema.groups[0].num_blocks;
  Use(schema);
  Encode();
  EXPECT_TRUE(Measure().k[0].has_value());
  uint8_t* row = nullptr;
  hold_->FillRows(0, 0, PlaneId::kK, 0, 1, &row);
  // The table lies behind all blocks; block 5 holds token 0.
  uint8_t* table = row - 5 * schema.groups[0].layers[0].k.block_stride_bytes + schema.generations->offset_bytes;
  table[8 * 5] += 2;
  EXPECT_EQ(Measure().k, ReconstructionError().k);
  EXPECT_EQ(Measure().v, ReconstructionError().v);
}

TEST_F(Reconstruction, BytesThatAreNoSuchChunkSayNothing) {
  Fill("lpbthd", {});
  Encode();
  bytes_[70] ^= 1;
  EXPECT_EQ(Measure().k, ReconstructionError().k);
  bytes_[70] ^= 1;
  EXPECT_TRUE(Measure().k[0].has_value());
  shape_.kept = {{0, tokens_ - 1}};
  EXPECT_EQ(Measure().k, ReconstructionError().k);
}

}  // namespace
}  // namespace spectrumkv
