#include "server/transfer/calibrate.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

namespace spectrumkv {
namespace {

constexpr ChunkDims kDims{128, 8, 128, DType::kFloat16, true};  // 512 KiB
constexpr int kRuns = 3;
constexpr uint32_t kSampledTokens = 4096;  // K of 8 MiB: a sample's time is that of the memory it comes from
constexpr Tier kTierOfFamily[kTierFamilies] = {Tier::kRaw, Tier::kP8, Tier::kQ4};

// Of float16 values between 1/8 and 8.
std::vector<uint8_t> MadeUpPlane() {
  std::vector<uint8_t> plane(KvBytes(kDims) / 2);
  uint32_t x = 2026;
  for (size_t i = 0; i < plane.size(); i += 2) {
    x = x * 1664525u + 1013904223u;
    const uint32_t r = x >> 8;
    const auto word = static_cast<uint16_t>((r >> 23 & 1) << 15 | (12 + (r >> 20 & 7) % 6) << 10 | (r & 0x3FF));
    std::memcpy(&plane[i], &word, 2);
  }
  return plane;
}

// Seconds of kRuns runs, all as quick as the quickest.
double Quickest(Clock* clock, const std::function<void()>& work) {
  int64_t quickest_ns = 0;
  for (int run = 0; run < kRuns; ++run) {
    const int64_t begin_ns = clock->NowNs();
    work();
    const int64_t ns = std::max<int64_t>(1, clock->NowNs() - begin_ns);
    quickest_ns = run == 0 ? ns : std::min(quickest_ns, ns);
  }
  return kRuns * static_cast<double>(quickest_ns) * 1e-9;
}

// K of many tokens, of zeros: what the values are costs nothing.
void MeasureSample(const Backend& backend, Clock* clock, StageSpeeds* speeds) {
  const size_t token_bytes = kDims.heads * kDims.head_dim * SizeOf(kDims.dtype);
  const std::vector<uint8_t> plane(kSampledTokens * token_bytes);
  std::vector<const uint8_t*> rows;
  for (uint32_t t = 0; t < kSampledTokens; ++t) rows.push_back(plane.data() + t * token_bytes);
  std::vector<uint8_t> out(kDims.tokens);
  Workspace workspace;
  const auto stride = static_cast<int64_t>(kDims.head_dim * SizeOf(kDims.dtype));
  speeds->sampled_kv_bytes = kRuns * static_cast<double>(plane.size());
  speeds->sample_seconds = Quickest(clock, [&] {
    for (uint32_t first = 0; first < kSampledTokens; first += kDims.tokens) {
      const SourcePlane source{rows.data() + first, stride, static_cast<int64_t>(SizeOf(kDims.dtype))};
      backend.Spread(kDims, source, true, 0, &workspace, out.data());
    }
  });
}

// A few queries of one head.
void MeasureAttention(const Backend& backend, Clock* clock, const SourcePlane& k, StageSpeeds* speeds) {
  constexpr uint32_t kQueries = 16;
  const std::vector<float> values(size_t{kQueries} * kDims.head_dim, 0.01f);
  const std::vector<uint32_t> positions(kQueries, kDims.tokens - 1);
  std::vector<float> out(kDims.tokens);
  Workspace workspace;
  const uint64_t attended_bytes = kQueries * (KvBytes(kDims) / 2 / kDims.heads);
  speeds->attended_bytes = kRuns * static_cast<double>(attended_bytes);
  speeds->attend_seconds = Quickest(clock, [&] {
    backend.Attend(kDims, k, 0, AttendQueries{values.data(), positions.data(), kQueries}, &workspace, out.data());
  });
}

}  // namespace

StageSpeeds MeasureStages(const Backend& backend, Clock* clock) {
  std::vector<uint8_t> plane = MadeUpPlane();
  std::vector<uint8_t> landed(plane.size());
  const size_t cell = kDims.head_dim * SizeOf(kDims.dtype);
  std::vector<uint8_t*> from, to;
  for (uint32_t t = 0; t < kDims.tokens; ++t) {
    from.push_back(plane.data() + t * kDims.heads * cell);
    to.push_back(landed.data() + t * kDims.heads * cell);
  }
  const auto stride = static_cast<int64_t>(cell);
  const SourcePlane source{from.data(), stride, static_cast<int64_t>(SizeOf(kDims.dtype))};
  const TargetPlane target{to.data(), stride, static_cast<int64_t>(SizeOf(kDims.dtype))};
  std::vector<uint8_t> chunk(MaxChunkBytes(kDims));
  std::vector<TokenScan> scan(kDims.tokens);
  Workspace workspace;

  StageSpeeds speeds;
  speeds.kv_bytes = kRuns * static_cast<double>(KvBytes(kDims));
  speeds.scan_seconds = Quickest(clock, [&] {
    backend.Scan(kDims, source, scan.data());
    backend.Scan(kDims, source, scan.data());
  });
  MeasureSample(backend, clock, &speeds);
  MeasureAttention(backend, clock, source, &speeds);
  for (size_t family = 0; family < kTierFamilies; ++family) {
    const Tier tier = kTierOfFamily[family];
    const std::vector<uint8_t> tiers(kDims.tokens, TierMapByte(tier, tier));
    uint64_t bytes = 0;
    speeds.encode_seconds[family] = Quickest(clock, [&] {
      bytes =
          backend.Encode(kDims, ChunkIdentity{}, source, &source, tiers.data(), &workspace, chunk.data(), chunk.size())
              .chunk_bytes;
    });
    speeds.decode_seconds[family] = Quickest(clock, [&] {
      ChunkView view;
      if (ParseChunk(chunk.data(), bytes, &view) != Refusal::kNone) return;
      backend.Decode(view, kDims.dtype, target, &target, &workspace);
    });
  }
  return speeds;
}

}  // namespace spectrumkv
