// The scan stage against a backend that records what it is asked.
#include "server/scan/scan.h"

#include <algorithm>
#include <mutex>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace spectrumkv {
namespace {

// energy = first byte of the row, escape = second byte; counts calls by size.
class ByteBackend final : public Backend {
 public:
  const char* name() const override { return "bytes"; }
  bool supported() const override { return true; }
  EncodeResult Encode(const ChunkDims&, const ChunkIdentity&, const SourcePlane&, const SourcePlane*, const uint8_t*,
                      Workspace*, uint8_t*, uint64_t) const override {
    return {};
  }
  EncodeResult FrameRaw(const ChunkDims&, const ChunkIdentity&, const SourcePlane&, const SourcePlane*, uint8_t*,
                        std::vector<Piece>*) const override {
    return {};
  }
  DecodeResult Decode(const ChunkView&, DType, const TargetPlane&, const TargetPlane*, Workspace*) const override {
    return {};
  }
  void Scan(const ChunkDims& dims, const SourcePlane& plane, TokenScan* out) const override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      calls_.push_back(dims.tokens);
    }
    EXPECT_EQ(dims.heads, 2u);
    EXPECT_EQ(plane.head_stride_bytes, 16);
    EXPECT_EQ(plane.dim_stride_bytes, 2);
    for (uint32_t t = 0; t < dims.tokens; ++t) {
      out[t] = {static_cast<EscapeClass>(plane.rows[t][1]), plane.rows[t][0]};
    }
  }
  void Spread(const ChunkDims& dims, const SourcePlane& plane, bool centred, uint32_t skip, Workspace*,
              uint8_t* out) const override {
    for (uint32_t t = 0; t < dims.tokens; ++t) {
      out[t] = static_cast<uint8_t>(plane.rows[t][0] + (centred ? 1 : 0) + (t < skip ? 2 : 0));
    }
  }
  // The position of the first query, and of head `head`.
  void Attend(const ChunkDims& dims, const SourcePlane&, uint32_t head, const AttendQueries& queries, Workspace*,
              float* out) const override {
    for (uint32_t t = 0; t < dims.tokens; ++t) out[t] = static_cast<float>(queries.positions[0] * 10 + head);
  }
  std::vector<uint32_t> calls() const { return calls_; }

 private:
  mutable std::mutex mutex_;
  mutable std::vector<uint32_t> calls_;
};

class Scan : public testing::Test {
 protected:
  static constexpr uint32_t kTokens = 3 * kMaxChunkTokens;
  Scan() : memory_(kTokens * 2 * kRowBytes), k_rows_(kTokens), v_rows_(kTokens) {
    for (uint32_t t = 0; t < kTokens; ++t) {
      uint8_t* k = &memory_[t * 2 * kRowBytes];
      k[0] = static_cast<uint8_t>(t % 251);
      k[1] = static_cast<uint8_t>(t % 4);
      k[kRowBytes] = static_cast<uint8_t>(t % 241);
      k_rows_[t] = k;
      v_rows_[t] = k + kRowBytes;
    }
    out_.k.resize(kTokens, {kEscapeNone, 255});
    out_.v.resize(kTokens, {kEscapeNone, 255});
  }
  SourcePlane K(uint32_t first) const { return {k_rows_.data() + first, 16, 2}; }
  SourcePlane V(uint32_t first) const { return {v_rows_.data() + first, 16, 2}; }
  void ExpectRange(const std::vector<TokenScan>& plane, TokenRange range, uint32_t modulus) const {
    for (uint32_t t = 0; t < kTokens; ++t) {
      const bool inside = t >= range.first && t < range.first + range.count;
      ASSERT_EQ(plane[t].energy_log2, inside ? t % modulus : 255) << t;
    }
  }

  static constexpr size_t kRowBytes = 32;
  const ChunkDims dims_{0, 2, 8, DType::kFloat16, true};
  std::vector<uint8_t> memory_;
  std::vector<const uint8_t*> k_rows_, v_rows_;
  LayerScan out_;
  ByteBackend backend_;
};

TEST_F(Scan, FillsTheRangeAndNothingElse) {
  const TokenRange range{100, 50};
  const SourcePlane v = V(100);
  ScanLayer(backend_, dims_, K(100), &v, range, &out_);
  ExpectRange(out_.k, range, 251);
  ExpectRange(out_.v, range, 241);
  EXPECT_EQ(out_.k[102].escape, static_cast<EscapeClass>(102 % 4));
  EXPECT_EQ(out_.v[102].escape, kEscapeNone);
}

TEST_F(Scan, WithoutVLeavesVAlone) {
  ChunkDims dims = dims_;
  dims.has_v = false;
  ScanLayer(backend_, dims, K(0), nullptr, {0, 10}, &out_);
  ExpectRange(out_.k, {0, 10}, 251);
  ExpectRange(out_.v, {0, 0}, 241);
}

TEST_F(Scan, NothingToDo) {
  ScanLayer(backend_, dims_, K(0), nullptr, {7, 0}, &out_);
  EXPECT_TRUE(backend_.calls().empty());
}

TEST_F(Scan, SplitsAtTheLargestChunk) {
  struct Split {
    uint32_t count;
    std::vector<uint32_t> calls;
  };
  const std::vector<Split> table = {{4095, {4095}}, {4096, {4096}}, {4097, {4096, 1}}, {3 * 4096, {4096, 4096, 4096}}};
  for (const Split& split : table) {
    ByteBackend backend;
    std::fill(out_.k.begin(), out_.k.end(), TokenScan{kEscapeNone, 255});
    ScanLayer(backend, dims_, K(0), nullptr, {0, split.count}, &out_);
    EXPECT_EQ(backend.calls(), split.calls);
    ExpectRange(out_.k, {0, split.count}, 251);
  }
}

TEST_F(Scan, ThreadsShareALayer) {
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < 8; ++i) {
    threads.emplace_back([this, i] {
      const uint32_t first = i * (kTokens / 8);
      const SourcePlane v = V(first);
      ScanLayer(backend_, dims_, K(first), &v, {first, kTokens / 8}, &out_);
    });
  }
  for (std::thread& thread : threads) thread.join();
  ExpectRange(out_.k, {0, kTokens}, 251);
  ExpectRange(out_.v, {0, kTokens}, 241);
}

TEST_F(Scan, SpreadsLieAtTheChunksPlace) {
  out_.k_spread.assign(kTokens, 9);
  out_.v_spread.assign(kTokens, 9);
  ChunkDims dims = dims_;
  dims.tokens = 50;
  const SourcePlane v = V(100);
  Workspace workspace;
  SpreadChunk(backend_, dims, K(100), &v, 100, 103, &workspace, &out_);
  for (uint32_t t = 0; t < 300; ++t) {
    const bool inside = t >= 100 && t < 150;
    const uint32_t pinned = t < 103 ? 2 : 0;
    ASSERT_EQ(out_.k_spread[t], inside ? t % 251 + 1 + pinned : 9) << t;
    ASSERT_EQ(out_.v_spread[t], inside ? t % 241 + pinned : 9) << t;
  }
}

}  // namespace
}  // namespace spectrumkv
