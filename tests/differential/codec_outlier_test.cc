// Keys as models with outliers have them, through every tier: what the attention logits lose. Prints the table of
// docs/quality.md, "Outliers".
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/cpu_backends.h"
#include "tests/differential/planes.h"

namespace spectrumkv::testing {
namespace {

constexpr uint32_t kTokens = 512, kDim = 64, kQueries = 32, kChannels = 4;
constexpr double kRopeTheta = 1e6;
constexpr Tier kTiers[] = {Tier::kQ8, Tier::kQ4, Tier::kQ3, Tier::kQ2, Tier::kP8, Tier::kP4};

enum class Kind {
  kNone,
  kConstant,  // channels with a constant after RoPE
  kBias,      // a bias before RoPE, in slow channels: Qwen2.5
  kFastBias,  // the same, half of the channels fast: they turn within a run
  kScale,     // channels of larger variance
};
constexpr Kind kKinds[] = {Kind::kNone, Kind::kConstant, Kind::kBias, Kind::kFastBias, Kind::kScale};

const char* NameOf(Kind kind) {
  switch (kind) {
    case Kind::kNone: return "none";
    case Kind::kConstant: return "constant";
    case Kind::kBias: return "bias";
    case Kind::kFastBias: return "fast bias";
    case Kind::kScale: return "scale";
  }
  return "?";
}

// Pairs (i, i + kDim / 2), as most engines have them.
void ApplyRope(uint32_t position, std::vector<double>* x) {
  for (uint32_t i = 0; i < kDim / 2; ++i) {
    const double angle = position * std::pow(kRopeTheta, -2.0 * i / kDim);
    const double a = (*x)[i], b = (*x)[i + kDim / 2];
    (*x)[i] = a * std::cos(angle) - b * std::sin(angle);
    (*x)[i + kDim / 2] = b * std::cos(angle) + a * std::sin(angle);
  }
}

// [kTokens][kDim] normal values of deviation 1, with outliers of `factor` times that in kChannels channels.
std::vector<std::vector<double>> KeysOf(Kind kind, double factor, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<double> normal;
  std::vector<std::vector<double>> keys(kTokens, std::vector<double>(kDim));
  const uint32_t slow[kChannels] = {27, 29, 30, 31}, mixed[kChannels] = {2, 6, 29, 31}, spread[kChannels] = {3, 17, 38, 60};
  for (uint32_t t = 0; t < kTokens; ++t) {
    for (double& x : keys[t]) x = normal(rng);
    for (uint32_t c = 0; c < kChannels; ++c) {
      if (kind == Kind::kBias) keys[t][slow[c]] += factor;
      if (kind == Kind::kFastBias) keys[t][mixed[c]] += factor;
    }
    if (kind == Kind::kBias || kind == Kind::kFastBias) ApplyRope(t, &keys[t]);
    for (uint32_t c = 0; c < kChannels; ++c) {
      if (kind == Kind::kConstant) keys[t][spread[c]] += factor;
      if (kind == Kind::kScale) keys[t][spread[c]] *= factor;
    }
  }
  return keys;
}

std::vector<std::vector<double>> RoundTrip(const std::vector<std::vector<double>>& keys, Tier tier) {
  const ChunkDims dims{kTokens, 1, kDim, DType::kFloat16, false};
  Plane plane(dims, dims.dtype, Layout::kTokenMajor, 0, 0), back(dims, dims.dtype, Layout::kTokenMajor, 0, 0);
  for (uint32_t t = 0; t < kTokens; ++t) {
    for (uint32_t d = 0; d < kDim; ++d) plane.SetWord(t, 0, d, WordOf(static_cast<float>(keys[t][d]), dims.dtype));
  }
  const std::vector<uint8_t> tiers(kTokens, TierMapByte(tier, Tier::kRaw));
  std::vector<uint8_t> chunk(MaxChunkBytes(dims));
  Workspace workspace;
  const EncodeResult encoded =
      ScalarBackend()->Encode(dims, {}, plane.source(), nullptr, tiers.data(), &workspace, chunk.data(), chunk.size());
  EXPECT_EQ(encoded.escaped, 0u);
  ChunkView view;
  EXPECT_EQ(ParseChunk(chunk.data(), encoded.chunk_bytes, &view), Refusal::kNone);
  ScalarBackend()->Decode(view, dims.dtype, back.target(), nullptr, &workspace);
  std::vector<std::vector<double>> decoded(kTokens, std::vector<double>(kDim));
  for (uint32_t t = 0; t < kTokens; ++t) {
    for (uint32_t d = 0; d < kDim; ++d) decoded[t][d] = double{ValueOf(back.GetWord(t, 0, d), dims.dtype)};
  }
  return decoded;
}

// RMS error of the logits of random queries over the deviation they have with keys that are `plain`, of no outliers: what a
// model tells tokens apart by. Both without their mean over the tokens, which a softmax does not see.
double LogitError(const std::vector<std::vector<double>>& keys, const std::vector<std::vector<double>>& decoded,
                  const std::vector<std::vector<double>>& plain, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<double> normal;
  double error = 0, deviation = 0;
  for (uint32_t q = 0; q < kQueries; ++q) {
    std::vector<double> query(kDim), exact(kTokens), off(kTokens);
    for (double& x : query) x = normal(rng);
    double mean = 0, mean_off = 0;
    for (uint32_t t = 0; t < kTokens; ++t) {
      for (uint32_t d = 0; d < kDim; ++d) {
        exact[t] += query[d] * plain[t][d];
        off[t] += query[d] * (decoded[t][d] - keys[t][d]);
      }
      mean += exact[t] / kTokens;
      mean_off += off[t] / kTokens;
    }
    for (uint32_t t = 0; t < kTokens; ++t) {
      error += (off[t] - mean_off) * (off[t] - mean_off);
      deviation += (exact[t] - mean) * (exact[t] - mean);
    }
  }
  return std::sqrt(error / deviation);
}

TEST(Outliers, RotatedTiersBearThem) {
  const uint64_t seed = Seed();
  const std::vector<std::vector<double>> plain = KeysOf(Kind::kNone, 1, seed);
  std::map<Tier, double> without;
  std::printf("| outliers |");
  for (const Tier tier : kTiers) std::printf(" %s |", TierName(tier));
  std::printf("\n");
  for (const Kind kind : kKinds) {
    for (const double factor : {20.0, 50.0, 100.0}) {
      if (kind == Kind::kNone && factor > 20) continue;
      const std::vector<std::vector<double>> keys = KeysOf(kind, factor, seed);
      if (kind == Kind::kNone) {
        std::printf("| none |");
      } else {
        std::printf("| %s, x%.0f |", NameOf(kind), factor);
      }
      std::map<Tier, double> error;
      for (const Tier tier : kTiers) {
        error[tier] = LogitError(keys, RoundTrip(keys, tier), plain, seed + 1);
        std::printf(" %.4f |", error[tier]);
      }
      std::printf("\n");
      SCOPED_TRACE(std::string(NameOf(kind)) + " x" + std::to_string(factor));
      if (kind == Kind::kNone) {
        without = error;
        continue;
      }
      EXPECT_GT(error[Tier::kP4], 3 * without[Tier::kP4]) << "P4 collapses";
      EXPECT_LT(error[Tier::kQ8], error[Tier::kP8]);
      EXPECT_LT(error[Tier::kQ4], error[Tier::kP4]);
      if (kind != Kind::kConstant && kind != Kind::kBias) continue;
      for (const Tier tier : {Tier::kQ8, Tier::kQ4}) EXPECT_LE(error[tier], 2 * without[tier]) << TierName(tier);
    }
  }
}

}  // namespace
}  // namespace spectrumkv::testing
