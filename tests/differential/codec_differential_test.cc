// Every backend against scalar, byte for byte: encoding, decoding into each dtype, scanning; all layouts, odd values and
// sizes; and nothing written outside.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/cpu_backends.h"
#include "tests/differential/planes.h"

namespace spectrumkv::testing {
namespace {

constexpr DType kDTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};
constexpr uint8_t kFill = 0xA5;

// A chunk between guard bytes, in a buffer of exactly the capacity given to Encode.
struct Encoded {
  EncodeResult result;
  std::vector<uint8_t> chunk;
};

class CodecDifferentialTest : public ::testing::TestWithParam<uint32_t> {
 protected:
  static void SetUpTestSuite() { seed_ = Seed(); }

  void SetUp() override { rng_.seed(seed_ + GetParam()); }

  uint32_t Random(uint32_t below) { return static_cast<uint32_t>(rng_() % below); }
  Layout RandomLayout() { return kLayouts[Random(4)]; }
  size_t RandomMisalignment() { return Random(3) == 0 ? 0 : Random(64); }

  static Encoded Encode(const Backend& backend, const ChunkDims& dims, const Plane& k, const Plane& v,
                        const std::vector<uint8_t>& tiers, uint64_t capacity) {
    constexpr size_t kGuard = 64;
    Encoded encoded;
    std::vector<uint8_t> out(capacity + 2 * kGuard, kFill);
    const SourcePlane k_plane = k.source(), v_plane = v.source();
    Workspace workspace;
    encoded.result = backend.Encode(dims, ChunkIdentity{77, 5, 2, 9, 640, 8}, k_plane, dims.has_v ? &v_plane : nullptr,
                                    tiers.data(), &workspace, out.data() + kGuard, capacity);
    for (size_t i = 0; i < kGuard; ++i) {
      EXPECT_EQ(out[i], kFill) << "byte before the chunk";
      EXPECT_EQ(out[kGuard + capacity + i], kFill) << "byte after the chunk";
    }
    encoded.chunk.assign(out.begin() + kGuard, out.begin() + kGuard + static_cast<long>(encoded.result.chunk_bytes));
    return encoded;
  }

  static void ExpectSameEncoding(const Encoded& got, const Encoded& expected) {
    ASSERT_EQ(got.result.chunk_bytes, expected.result.chunk_bytes);
    EXPECT_EQ(got.result.escaped, expected.result.escaped);
    EXPECT_EQ(got.result.nonfinite_values, expected.result.nonfinite_values);
    if (got.chunk == expected.chunk) return;
    size_t at = 0;
    while (got.chunk[at] == expected.chunk[at]) ++at;
    FAIL() << "chunks differ from byte " << at << " of " << got.chunk.size();
  }

  // Decodes with scalar and each of `others` into planes of one layout; all memory must agree.
  void ExpectSameDecoding(const std::vector<uint8_t>& chunk, DType target, const std::vector<const Backend*>& others) {
    ChunkView view;
    ASSERT_EQ(ParseChunk(chunk.data(), chunk.size(), &view), Refusal::kNone);
    const Layout layout = RandomLayout();
    const size_t misalignment = RandomMisalignment();
    Plane k(view.dims, target, layout, misalignment, kFill), v(view.dims, target, layout, misalignment, kFill);
    const DecodeResult expected = Decode(*ScalarBackend(), view, target, &k, &v);
    EXPECT_TRUE(k.GuardsIntact());
    EXPECT_TRUE(v.GuardsIntact());
    for (const Backend* backend : others) {
      SCOPED_TRACE(std::string(backend->name()) + " to " + DTypeName(target));
      Plane other_k(view.dims, target, layout, misalignment, kFill);
      Plane other_v(view.dims, target, layout, misalignment, kFill);
      const DecodeResult got = Decode(*backend, view, target, &other_k, &other_v);
      EXPECT_EQ(got.rounded_words, expected.rounded_words);
      EXPECT_TRUE(other_k.Values() == k.Values()) << "K differs";
      EXPECT_TRUE(other_k.GuardsIntact());
      EXPECT_TRUE(other_v.GuardsIntact());
      if (view.dims.has_v) {
        EXPECT_TRUE(other_v.Values() == v.Values()) << "V differs";
      }
      ExpectSameFromPieces(*backend, chunk, target, &k, &v);
    }
  }

  static DecodeResult Decode(const Backend& backend, const ChunkView& view, DType target, Plane* k, Plane* v) {
    Workspace workspace;
    const TargetPlane k_plane = k->target(), v_plane = v->target();
    return backend.Decode(view, target, k_plane, view.dims.has_v ? &v_plane : nullptr, &workspace);
  }

  // The chunk cut at random places, each piece in memory of exactly its size: the same values, and (under ASan) no byte
  // read beside a piece.
  void ExpectSameFromPieces(const Backend& backend, const std::vector<uint8_t>& chunk, DType target, Plane* k,
                            Plane* v) {
    std::vector<std::unique_ptr<uint8_t[]>> memory;
    std::vector<Piece> pieces;
    const size_t step = 1 + rng_() % (rng_() % 4 == 0 ? 40 : chunk.size());
    for (size_t at = 0; at < chunk.size();) {
      const size_t size = std::min<size_t>(1 + rng_() % step, chunk.size() - at);
      memory.push_back(std::make_unique<uint8_t[]>(size));
      std::memcpy(memory.back().get(), chunk.data() + at, size);
      pieces.push_back({memory.back().get(), size});
      at += size;
    }
    std::vector<uint8_t> room(chunk.size());
    ChunkView view;
    ASSERT_EQ(ParseChunk(Pieces{pieces.data(), pieces.size()}, room.data(), &view), Refusal::kNone);
    Plane other_k(view.dims, target, RandomLayout(), RandomMisalignment(), 0);
    Plane other_v(view.dims, target, RandomLayout(), RandomMisalignment(), 0);
    Decode(backend, view, target, &other_k, &other_v);
    EXPECT_TRUE(other_k.Values() == k->Values()) << "K differs, " << pieces.size() << " pieces";
    if (view.dims.has_v) {
      EXPECT_TRUE(other_v.Values() == v->Values()) << "V differs, " << pieces.size() << " pieces";
    }
  }

  // A RAW chunk whose words stay in the planes is the chunk that Encode writes.
  void ExpectRawFramed(const ChunkDims& dims, const Plane& k, const Plane& v, const Backend& backend) {
    const std::vector<uint8_t> tiers(dims.tokens, 0);
    const Encoded expected = Encode(*ScalarBackend(), dims, k, v, tiers, MaxChunkBytes(dims));
    const SourcePlane k_plane = k.source(), v_plane = v.source();
    std::vector<uint8_t> chunk(kHeaderBytes + (dims.tokens + 15) / 16 * 16);
    std::vector<Piece> words{{chunk.data(), 1}};
    const EncodeResult result = backend.FrameRaw(dims, ChunkIdentity{77, 5, 2, 9, 640, 8}, k_plane,
                                                 dims.has_v ? &v_plane : nullptr, chunk.data(), &words);
    if (result.chunk_bytes == 0) return;
    ++framed_;
    size_t lent = 0;
    for (const Piece& piece : words) {
      lent += piece.size;
      chunk.insert(chunk.end(), piece.data, piece.data + piece.size);
    }
    EXPECT_GE(lent, words.size() * Backend::kMinLentBytes);
    ExpectSameEncoding(Encoded{result, chunk}, expected);
  }

  // Queries of random heads, positions and windows over odd keys: bit for bit the scores of scalar.
  void ExpectSameAttention(const ChunkDims& dims, const Plane& k, const std::vector<const Backend*>& others) {
    const uint32_t count = 1 + Random(40);
    std::vector<float> values(size_t{count} * dims.head_dim);
    std::vector<uint32_t> positions;
    std::normal_distribution<float> normal(0.0f, 1.0f / std::sqrt(static_cast<float>(dims.head_dim)));
    for (float& value : values) value = normal(rng_);
    for (uint32_t q = 0; q < count; ++q) positions.push_back(Random(dims.tokens + 20));
    const AttendQueries queries{values.data(), positions.data(), count, Random(2) * (1 + Random(80)),
                                Random(2) == 0 ? 0.0f : 0.5f + static_cast<float>(Random(50))};
    Workspace workspace;
    for (uint32_t head = 0; head < dims.heads; ++head) {
      std::vector<float> expected(dims.tokens), got(dims.tokens);
      ScalarBackend()->Attend(dims, k.source(), head, queries, &workspace, expected.data());
      for (const Backend* backend : others) {
        backend->Attend(dims, k.source(), head, queries, &workspace, got.data());
        ASSERT_EQ(std::memcmp(got.data(), expected.data(), got.size() * sizeof(float)), 0)
            << backend->name() << " head " << head << " queries " << count << " window " << queries.window << " cap "
            << queries.soft_cap;
      }
    }
  }

  void RunCase(const ChunkDims& dims, const std::vector<const Backend*>& others) {
    Plane k(dims, dims.dtype, RandomLayout(), RandomMisalignment(), 0);
    Plane v(dims, dims.dtype, RandomLayout(), RandomMisalignment(), 0);
    FillRandom(&k, dims, &rng_);
    FillRandom(&v, dims, &rng_);
    const std::vector<uint8_t> tiers = RandomTiers(dims, &rng_);
    const Encoded expected = Encode(*ScalarBackend(), dims, k, v, tiers, MaxChunkBytes(dims));
    ASSERT_NE(expected.result.chunk_bytes, 0u);
    ExpectRawFramed(dims, k, v, *ScalarBackend());
    std::vector<TokenScan> expected_scan(dims.tokens), scan(dims.tokens);
    ScalarBackend()->Scan(dims, k.source(), expected_scan.data());
    Workspace workspace;
    std::vector<uint8_t> expected_spread(dims.tokens), spread(dims.tokens);
    for (const Backend* backend : others) {
      SCOPED_TRACE(backend->name());
      for (const bool centred : {false, true}) {
        const uint32_t skip = static_cast<uint32_t>(Random(4));
        ScalarBackend()->Spread(dims, k.source(), centred, skip, &workspace, expected_spread.data());
        backend->Spread(dims, k.source(), centred, skip, &workspace, spread.data());
        ASSERT_EQ(spread, expected_spread) << "skip " << skip;
      }
      // Exactly the room needed, and twice: equal bytes.
      for (int round = 0; round < 2; ++round) {
        ExpectSameEncoding(Encode(*backend, dims, k, v, tiers, expected.chunk.size()), expected);
      }
      ExpectRawFramed(dims, k, v, *backend);
      backend->Scan(dims, k.source(), scan.data());
      for (uint32_t t = 0; t < dims.tokens; ++t) {
        ASSERT_EQ(scan[t].escape, expected_scan[t].escape) << "token " << t;
        ASSERT_EQ(scan[t].energy_log2, expected_scan[t].energy_log2) << "token " << t;
      }
    }
    ExpectSameAttention(dims, k, others);
    for (DType target : kDTypes) ExpectSameDecoding(expected.chunk, target, others);
    std::vector<uint8_t> scrambled = expected.chunk;
    ScrambleChunk(&scrambled, &rng_);
    ExpectSameDecoding(scrambled, dims.dtype, others);
    ExpectSameDecoding(scrambled, DType::kFloat32, others);
  }

  static inline uint64_t seed_ = 0;
  std::mt19937_64 rng_;
  uint64_t framed_ = 0;
};

TEST_P(CodecDifferentialTest, AllBackendsAgree) {
  const std::vector<const Backend*> others = OtherBackends();
  for (DType dtype : kDTypes) {
    for (uint32_t tokens : {1u, 2u, 63u, 64u, 65u, 130u}) {
      for (uint32_t heads : {1u, 2u, 5u}) {
        if (GetParam() >= 512 && tokens * heads > 130) continue;  // seconds, not minutes
        ChunkDims dims{tokens, heads, GetParam(), dtype, Random(5) != 0};
        SCOPED_TRACE(std::string(DTypeName(dtype)) + " tokens " + std::to_string(tokens) + " heads " +
                     std::to_string(heads));
        RunCase(dims, others);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Dense planes are framed, others are not; pieces end where the next token lies elsewhere.
TEST_P(CodecDifferentialTest, RawIsFramedWhereTokensAreContiguous) {
  for (Layout layout : kLayouts) {
    const ChunkDims dims{70, 2, GetParam(), DType::kFloat32, true};
    Plane k(dims, dims.dtype, layout, RandomMisalignment(), 0), v(dims, dims.dtype, layout, RandomMisalignment(), 0);
    FillRandom(&k, dims, &rng_);
    FillRandom(&v, dims, &rng_);
    framed_ = 0;
    ExpectRawFramed(dims, k, v, *ScalarBackend());
    const bool dense = layout == Layout::kTokenMajor;
    const size_t plane_bytes = size_t{dims.tokens} * dims.heads * dims.head_dim * 4;
    EXPECT_EQ(framed_ > 0, dense && plane_bytes >= Backend::kMinLentBytes) << static_cast<int>(layout);
  }
}

INSTANTIATE_TEST_SUITE_P(HeadDims, CodecDifferentialTest,
                         ::testing::Values(8, 16, 24, 32, 48, 64, 72, 80, 96, 112, 128, 136, 160, 192, 256, 320, 512,
                                           576, 768, 1024));

}  // namespace
}  // namespace spectrumkv::testing
