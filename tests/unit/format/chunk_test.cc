#include "kernels/format/chunk.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "kernels/format/crc32c.h"

namespace spectrumkv {
namespace {

TEST(CountTiers, AddsUpNibbles) {
  uint32_t state = 1;
  for (const uint32_t tokens : {1u, 2u, 127u, 128u, 129u, 255u, 256u, 257u, 4096u}) {
    for (const uint32_t distinct : {1u, 2u, 3u, 4u, 49u, 256u}) {  // 256: nibbles that are no tier too
      std::vector<uint8_t> map(tokens);
      for (uint8_t& byte : map) {
        state = state * 1664525 + 1013904223;
        const uint32_t pick = (state >> 16) % distinct;
        byte = static_cast<uint8_t>(distinct == 256 ? pick : pick % 7 | pick / 7 << 4);
      }
      for (const bool has_v : {false, true}) {
        TierCounts want;
        for (const uint8_t byte : map) {
          if ((byte & 15) < kTierCount) ++want.k[byte & 15];
          if (has_v && byte >> 4 < kTierCount) ++want.v[byte >> 4];
        }
        const TierCounts got = CountTiers(map.data(), tokens, has_v);
        EXPECT_EQ(got.k, want.k) << tokens << " " << distinct;
        EXPECT_EQ(got.v, want.v) << tokens << " " << distinct;
      }
    }
  }
}

TEST(ChunkTest, RotationIsTheLargestPowerOfTwo) {
  EXPECT_EQ(RotationOf(8), 8u);
  EXPECT_EQ(RotationOf(64), 64u);
  EXPECT_EQ(RotationOf(72), 8u);
  EXPECT_EQ(RotationOf(80), 16u);
  EXPECT_EQ(RotationOf(96), 32u);
  EXPECT_EQ(RotationOf(128), 128u);
  EXPECT_EQ(RotationOf(192), 64u);
  EXPECT_EQ(RotationOf(256), 256u);
  EXPECT_EQ(RotationOf(512), 256u);
  EXPECT_EQ(RotationOf(576), 64u);
  EXPECT_EQ(RotationOf(1024), 256u);
}

TEST(ChunkTest, CellBytes) {
  EXPECT_EQ(CellBytes(Tier::kRaw, 128, DType::kFloat16), 256u);
  EXPECT_EQ(CellBytes(Tier::kRaw, 128, DType::kFloat32), 512u);
  EXPECT_EQ(CellBytes(Tier::kP8, 128, DType::kFloat16), 128u);
  EXPECT_EQ(CellBytes(Tier::kQ8, 128, DType::kFloat32), 128u);
  EXPECT_EQ(CellBytes(Tier::kQ4, 128, DType::kFloat16), 64u);
  EXPECT_EQ(CellBytes(Tier::kP4, 128, DType::kFloat16), 64u);
  EXPECT_EQ(CellBytes(Tier::kQ3, 128, DType::kFloat16), 48u);
  EXPECT_EQ(CellBytes(Tier::kQ3, 8, DType::kFloat16), 3u);
  EXPECT_EQ(CellBytes(Tier::kQ2, 128, DType::kFloat16), 32u);
}

TEST(ChunkTest, TokensPerChunkAtTheEdges) {
  // 8 heads of 128 float16 values, K and V: 4 KiB a token, 256 tokens fill 1 MiB exactly.
  EXPECT_EQ(TokensPerChunk(8, 128, DType::kFloat16, true), 256u);
  EXPECT_EQ(TokensPerChunk(8, 128, DType::kFloat16, false), 512u);
  EXPECT_EQ(TokensPerChunk(8, 136, DType::kFloat16, true), 192u);  // 240.9 tokens fit
  EXPECT_EQ(TokensPerChunk(1, 8, DType::kFloat16, true), 4096u);   // 32768 fit: the field's limit binds
  EXPECT_EQ(TokensPerChunk(32, 128, DType::kFloat16, true), 64u);  // 16 KiB a token
  EXPECT_EQ(TokensPerChunk(33, 128, DType::kFloat16, true), 32u);  // 62 fit
  EXPECT_EQ(TokensPerChunk(1024, 1024, DType::kFloat32, true), 1u);  // more than 1 MiB a token
  EXPECT_EQ(TokensPerChunk(128, 1024, DType::kFloat32, true), 1u);   // exactly 1 MiB
  EXPECT_EQ(TokensPerChunk(64, 1024, DType::kFloat32, true), 2u);
}

TEST(ChunkTest, LayoutOrderAndPadding) {
  const ChunkDims dims{66, 3, 24, DType::kFloat16, true};
  TierCounts counts;
  counts.k[static_cast<int>(Tier::kQ4)] = 65;
  counts.k[static_cast<int>(Tier::kRaw)] = 1;
  counts.v[static_cast<int>(Tier::kP8)] = 60;
  counts.v[static_cast<int>(Tier::kQ3)] = 6;
  const ChunkLayout layout = LayoutOf(dims, counts);
  uint64_t at = 64;
  const auto expect = [&at](const Section& section, uint64_t bytes) {
    EXPECT_EQ(section.offset, at);
    EXPECT_EQ(section.bytes, bytes);
    at += (bytes + 15) / 16 * 16;
  };
  expect(layout.tier_map, 66);
  expect(layout.centre_scales, 2 * 2 * 3);
  expect(layout.centre_codes, 2 * 3 * 24);
  expect(layout.scales8, (65 + 6) * 3);
  expect(layout.scales16, 60 * 3 * 2);
  expect(layout.codes[kCodesRaw], 3 * 48);
  expect(layout.codes[kCodesQ8], 0);
  expect(layout.codes[kCodesP8], 60 * 3 * 24);
  expect(layout.codes[kCodesP4], 0);
  expect(layout.codes[kCodesQ4], 65 * 3 * 12);
  expect(layout.codes[kCodesQ3], 6 * 3 * 9);
  expect(layout.codes[kCodesQ2], 0);
  EXPECT_EQ(layout.chunk_bytes, at);
  EXPECT_EQ(ChunkBytes(dims, counts), at);
}

TEST(ChunkTest, CentresOnlyWhereAKeyIsRotated) {
  const ChunkDims dims{64, 1, 64, DType::kFloat16, true};
  TierCounts counts;
  counts.k[static_cast<int>(Tier::kP8)] = 64;
  counts.v[static_cast<int>(Tier::kQ8)] = 64;
  EXPECT_EQ(LayoutOf(dims, counts).centre_codes.bytes, 0u);
  counts.k[static_cast<int>(Tier::kP8)] = 63;
  counts.k[static_cast<int>(Tier::kQ8)] = 1;
  EXPECT_EQ(LayoutOf(dims, counts).centre_codes.bytes, 64u);
}

TEST(ChunkTest, MaxChunkBytesBoundsEveryTierMap) {
  std::mt19937 rng(11);
  for (int i = 0; i < 20000; ++i) {
    ChunkDims dims;
    dims.tokens = 1 + rng() % 130;
    dims.heads = 1 + rng() % 9;
    dims.head_dim = 8 * (1 + rng() % 20);
    dims.dtype = static_cast<DType>(1 + rng() % 3);
    dims.has_v = rng() % 2 != 0;
    TierCounts counts;
    const bool one_tier = rng() % 4 == 0;
    const int k = static_cast<int>(rng() % kTierCount), v = static_cast<int>(rng() % kTierCount);
    for (uint32_t t = 0; t < dims.tokens; ++t) {
      ++counts.k[one_tier ? k : rng() % kTierCount];
      if (dims.has_v) ++counts.v[one_tier ? v : rng() % kTierCount];
    }
    ASSERT_LE(ChunkBytes(dims, counts), MaxChunkBytes(dims));
  }
}

TEST(ChunkTest, SizesAre64Bit) {
  const ChunkDims dims{kMaxChunkTokens, kMaxHeads, kMaxHeadDim, DType::kFloat32, true};
  EXPECT_EQ(KvBytes(dims), uint64_t{1} << 35);
  EXPECT_GT(MaxChunkBytes(dims), uint64_t{1} << 35);
}

// A chunk of RAW tokens only, its CRC right.
std::vector<uint8_t> RawChunk(uint16_t tokens) {
  const ChunkDims dims{tokens, 1, 8, DType::kFloat16, false};
  TierCounts counts;
  counts.k[0] = tokens;
  std::vector<uint8_t> chunk(ChunkBytes(dims, counts));
  ChunkHeader header{};
  std::memcpy(header.magic, "SKV1", 4);
  header.version = 1;
  header.header_bytes = 64;
  header.token_count = tokens;
  header.dtype = 1;
  header.head_count = 1;
  header.head_dim = 8;
  header.rotation = 8;
  header.centre_tokens = 64;
  header.body_bytes = static_cast<uint32_t>(chunk.size() - 64);
  header.crc32c = Crc32c(Crc32c(0, &header, 60), chunk.data() + 64, chunk.size() - 64);
  std::memcpy(chunk.data(), &header, sizeof(header));
  return chunk;
}

TEST(ParseTest, AcceptsTheSmallestChunk) {
  const std::vector<uint8_t> chunk = RawChunk(1);
  ChunkView view;
  ASSERT_EQ(ParseChunk(chunk.data(), chunk.size(), &view), Refusal::kNone);
  EXPECT_EQ(view.metadata, chunk.data());
  EXPECT_EQ(view.layout.codes[kCodesRaw].offset, 80u);
  EXPECT_EQ(view.layout.codes[kCodesRaw].bytes, 16u);
}

TEST(ParseTest, EveryTruncationIsRefused) {
  const std::vector<uint8_t> chunk = RawChunk(5);
  for (size_t size = 0; size < chunk.size(); ++size) {
    const std::vector<uint8_t> cut(chunk.begin(), chunk.begin() + static_cast<long>(size));  // exact, for ASan
    ChunkView view;
    EXPECT_EQ(ParseChunk(cut.data(), cut.size(), &view), size < 64 ? Refusal::kTruncated : Refusal::kBadLength);
  }
}

TEST(ParseTest, EveryFlippedBitIsRefused) {
  const std::vector<uint8_t> chunk = RawChunk(3);
  for (size_t bit = 0; bit < chunk.size() * 8; ++bit) {
    std::vector<uint8_t> flipped = chunk;
    flipped[bit / 8] = static_cast<uint8_t>(flipped[bit / 8] ^ 1 << bit % 8);
    ChunkView view;
    EXPECT_NE(ParseChunk(flipped.data(), flipped.size(), &view), Refusal::kNone) << bit;
  }
}

TEST(NamesTest, AllHaveOne) {
  EXPECT_STREQ(TierName(Tier::kRaw), "RAW");
  EXPECT_STREQ(TierName(Tier::kQ8), "Q8");
  EXPECT_STREQ(TierName(static_cast<Tier>(7)), "?");
  EXPECT_STREQ(DTypeName(DType::kBFloat16), "bfloat16");
  EXPECT_STREQ(DTypeName(static_cast<DType>(0)), "?");
  EXPECT_STREQ(RefusalName(Refusal::kBadPadding), "BAD_PADDING");
}

}  // namespace
}  // namespace spectrumkv
