// Attention as the definition has it against attention as everybody has it, in double precision.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/codec/attend_math.h"
#include "kernels/cpu/cpu_backends.h"

namespace spectrumkv {
namespace {

struct Case {
  uint32_t tokens, count, window;
  float soft_cap, sigma;
};

// Keys float32 [tokens, 2, head_dim], queries of head 1.
struct Data {
  Data(const Case& c, uint32_t dim) : keys(size_t{c.tokens} * 2 * dim), values(size_t{c.count} * dim) {
    std::mt19937_64 rng(17);
    std::normal_distribution<float> normal(0.0f, c.sigma);
    for (float& x : keys) x = normal(rng);
    for (float& x : values) x = normal(rng) / std::sqrt(static_cast<float>(dim));
    for (uint32_t q = 0; q < c.count; ++q) positions.push_back(c.tokens - c.count + q);
    for (uint32_t t = 0; t < c.tokens; ++t) {
      rows.push_back(reinterpret_cast<const uint8_t*>(keys.data() + size_t{t} * 2 * dim));
    }
  }
  std::vector<float> keys, values;
  std::vector<uint32_t> positions;
  std::vector<const uint8_t*> rows;
};

std::vector<double> Expected(const Case& c, uint32_t dim, const Data& data) {
  std::vector<double> scores(c.tokens);
  for (uint32_t q = 0; q < c.count; ++q) {
    std::vector<double> weights(c.tokens, 0.0);
    double sum = 0;
    for (uint32_t t = 0; t <= data.positions[q]; ++t) {
      if (c.window != 0 && t + c.window <= data.positions[q]) continue;
      double dot = 0;
      for (uint32_t d = 0; d < dim; ++d) {
        dot += double{data.values[size_t{q} * dim + d]} * double{data.keys[(size_t{t} * 2 + 1) * dim + d]};
      }
      const double cap = c.soft_cap;
      weights[t] = std::exp(cap == 0 ? dot : cap * std::tanh(dot / cap));
      sum += weights[t];
    }
    for (uint32_t t = 0; t < c.tokens; ++t) scores[t] += weights[t] / sum;
  }
  return scores;
}

TEST(Attend, IsTheSoftmaxOfTheLogits) {
  constexpr uint32_t kDim = 64;
  const Case cases[] = {{1, 1, 0, 0, 1},    {64, 5, 0, 0, 1},    {200, 64, 0, 0, 1},
                        {200, 9, 30, 0, 1}, {200, 9, 0, 3, 2},   {333, 17, 100, 20, 3},
                        {150, 8, 0, 0, 6}};
  for (const Case& c : cases) {
    const Data data(c, kDim);
    const ChunkDims dims{c.tokens, 2, kDim, DType::kFloat32, false};
    const SourcePlane k{data.rows.data(), kDim * 4, 4};
    const AttendQueries queries{data.values.data(), data.positions.data(), c.count, c.window, c.soft_cap};
    std::vector<float> scores(c.tokens);
    Workspace workspace;
    ScalarBackend()->Attend(dims, k, 1, queries, &workspace, scores.data());
    const std::vector<double> expected = Expected(c, kDim, data);
    double sum = 0;
    for (uint32_t t = 0; t < c.tokens; ++t) {
      EXPECT_NEAR(scores[t], expected[t], 2e-5 * expected[t] + 1e-9) << "token " << t << " of " << c.tokens;
      sum += double{scores[t]};
    }
    EXPECT_NEAR(sum, c.count, 1e-4 * c.count);
  }
}

// Groups of queries are an internal affair: a request so long that the weights of all queries do not fit at once.
TEST(Attend, GroupsOfQueriesChangeNothing) {
  constexpr uint32_t kTokens = 120000, kDim = 8, kCount = 26;
  const Case c{kTokens, kCount, 0, 0, 1};
  const Data data(c, kDim);
  const ChunkDims dims{kTokens, 2, kDim, DType::kFloat32, false};
  const SourcePlane k{data.rows.data(), kDim * 4, 4};
  std::vector<float> together(kTokens), apart(kTokens, 0.0f), one(kTokens);
  Workspace workspace;
  ScalarBackend()->Attend(dims, k, 1, {data.values.data(), data.positions.data(), kCount, 0, 0}, &workspace,
                          together.data());
  for (uint32_t q = 0; q < kCount; ++q) {
    ScalarBackend()->Attend(dims, k, 1, {data.values.data() + q * kDim, &data.positions[q], 1, 0, 0}, &workspace,
                            one.data());
    for (uint32_t t = 0; t < kTokens; ++t) apart[t] += one[t];
  }
  for (uint32_t t = 0; t < kTokens; ++t) ASSERT_NEAR(together[t], apart[t], 1e-5f * apart[t]) << t;
}

TEST(Attend, WhatIsNotFiniteIsNotSeen) {
  constexpr uint32_t kTokens = 70, kDim = 16;
  std::vector<float> keys(kTokens * kDim, 1.0f), query(kDim, 0.5f), scores(kTokens);
  keys[3 * kDim + 5] = std::nanf("");
  keys[9 * kDim] = INFINITY;
  keys[66 * kDim] = -INFINITY;
  keys[67 * kDim] = 3e6f;  // a logit above the limit
  std::vector<const uint8_t*> rows;
  for (uint32_t t = 0; t < kTokens; ++t) rows.push_back(reinterpret_cast<const uint8_t*>(&keys[t * kDim]));
  const uint32_t position = kTokens;
  Workspace workspace;
  for (const Backend* backend : {ScalarBackend(), Avx2Backend(), Avx512Backend()}) {
    if (!backend->supported()) continue;
    backend->Attend({kTokens, 1, kDim, DType::kFloat32, false}, {rows.data(), kDim * 4, 4}, 0,
                    {query.data(), &position, 1, 0, 0}, &workspace, scores.data());
    for (uint32_t t = 0; t < kTokens; ++t) {
      const bool hidden = t == 3 || t == 9 || t == 66 || t == 67;
      EXPECT_NEAR(scores[t], hidden ? 0.0f : 1.0f / (kTokens - 4), 1e-6f) << backend->name() << " " << t;
    }
  }
}

TEST(Attend, NothingSeenGivesNothing) {
  constexpr uint32_t kTokens = 5, kDim = 8;
  std::vector<float> keys(kTokens * kDim, INFINITY), query(kDim, 1.0f), scores(kTokens, 7.0f);
  std::vector<const uint8_t*> rows;
  for (uint32_t t = 0; t < kTokens; ++t) rows.push_back(reinterpret_cast<const uint8_t*>(&keys[t * kDim]));
  const uint32_t positions[2] = {4, 4000000000u};  // the second looks back 10 only, beyond all keys
  Workspace workspace;
  for (uint32_t q = 0; q < 2; ++q) {
    ScalarBackend()->Attend({kTokens, 1, kDim, DType::kFloat32, false}, {rows.data(), kDim * 4, 4}, 0,
                            {query.data(), &positions[q], 1, 10, 0}, &workspace, scores.data());
    EXPECT_EQ(scores, std::vector<float>(kTokens, 0.0f)) << q;
  }
}

TEST(Attend, ExponentialsAreAccurate) {
  for (double x = -86.9; x <= 0; x += 0.0137) {
    const float f = static_cast<float>(x);
    ASSERT_NEAR(double{ExpOf(f)} / std::exp(double{f}), 1.0, 3e-7) << x;
  }
  EXPECT_EQ(ExpOf(0.0f), 1.0f);
  EXPECT_EQ(ExpOf(-0.0f), 1.0f);
  EXPECT_EQ(ExpOf(-87.5f), 0.0f);
  EXPECT_EQ(ExpOf(kHiddenLogit), 0.0f);
  for (float logit : {-300.0f, -30.0f, -1.0f, -1e-3f, 0.0f, 0.2f, 20.0f, 1e6f}) {
    EXPECT_NEAR(SoftCap(logit, 30.0f, 1.0f / 30.0f), 30.0 * std::tanh(logit / 30.0), 1e-5) << logit;
  }
}

}  // namespace
}  // namespace spectrumkv
