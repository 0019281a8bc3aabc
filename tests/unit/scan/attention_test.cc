// Scores from recent queries: what they attend to, by layer and by head, against the plain formula.
#include "server/scan/attention.h"

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backends.h"
#include "server/base/status.h"

namespace spectrumkv {
namespace {

constexpr uint32_t kTokens = 100, kHeads = 2, kQueryHeads = 6, kDim = 32;

std::vector<PlanLayer> Layers() {
  std::vector<PlanLayer> layers(3);
  for (uint16_t i = 0; i < 3; ++i) layers[i] = {0, static_cast<uint16_t>(2 * i + 1), kHeads, kDim, DType::kFloat32, true, false};
  layers[2].raw_only = true;
  return layers;
}

LayerQueries OfLayer(uint32_t layer, size_t positions, std::mt19937* rng) {
  std::normal_distribution<float> normal;
  std::vector<float> values(positions * kQueryHeads * kDim);
  for (float& value : values) value = normal(*rng);
  return {layer, std::string(reinterpret_cast<const char*>(values.data()), values.size() * 4), kQueryHeads, 0, 0, 0};
}

RecentQueries Queries() {
  std::mt19937 rng(5);
  RecentQueries queries{DType::kFloat32, {40, 97, 98, 99}, {}};
  queries.layers.push_back(OfLayer(1, 4, &rng));
  return queries;
}

std::string Reason(const RecentQueries& queries) {
  const absl::Status status = CheckQueries(queries, Layers(), kTokens);
  return status.ok() ? "" : ReasonOf(status) + ": " + std::string(status.message());
}

TEST(CheckQueries, NamesWhatIsWrong) {
  EXPECT_EQ(Reason(Queries()), "");
  struct Case {
    const char* says;
    void (*spoil)(RecentQueries*);
  };
  const Case cases[] = {
      {"positions are 0", [](RecentQueries* q) { q->positions.clear(); }},
      {"positions are 65", [](RecentQueries* q) { q->positions.resize(65); }},
      {"positions[1] is 40", [](RecentQueries* q) { q->positions[1] = 40; }},
      {"positions[3] is 100", [](RecentQueries* q) { q->positions[3] = 100; }},
      {"layers is empty", [](RecentQueries* q) { q->layers.clear(); }},
      {"layers[0].layer 2 is not", [](RecentQueries* q) { q->layers[0].layer = 2; }},
      {"layers[0].layer 4000000000 is not", [](RecentQueries* q) { q->layers[0].layer = 4000000000u; }},
      {"layers[0].layer 5 has no keys", [](RecentQueries* q) { q->layers[0].layer = 5; }},
      {"layers[1].layer 1 is given twice", [](RecentQueries* q) { q->layers.push_back(q->layers[0]); }},
      {"layers[0].query_heads is 0", [](RecentQueries* q) { q->layers[0].query_heads = 0; }},
      {"layers[0].query_heads is 5", [](RecentQueries* q) { q->layers[0].query_heads = 5; }},
      {"layers[0].query_heads is 4294967294", [](RecentQueries* q) { q->layers[0].query_heads = 4294967294u; }},
      {"layers[0].queries has 3071 bytes, expected 3072", [](RecentQueries* q) { q->layers[0].words.pop_back(); }},
      {"layers[0].softmax_scale is -1", [](RecentQueries* q) { q->layers[0].softmax_scale = -1; }},
      {"layers[0].softmax_scale is nan", [](RecentQueries* q) { q->layers[0].softmax_scale = std::nanf(""); }},
      {"layers[0].logit_soft_cap is inf", [](RecentQueries* q) { q->layers[0].soft_cap = INFINITY; }},
  };
  for (const Case& c : cases) {
    RecentQueries queries = Queries();
    c.spoil(&queries);
    EXPECT_NE(Reason(queries).find(std::string("INVALID_QUERIES: queries.") + c.says), std::string::npos)
        << c.says << "; got " << Reason(queries);
  }
}

TEST(CheckQueries, QueriesGoWithTheirSourceAlone) {
  const RecentQueries queries = Queries();
  Policy policy;
  policy.importance = ImportanceSource::kRecentQueries;
  EXPECT_TRUE(CheckQueriesOf(policy, &queries, Layers(), kTokens, false).ok());
  EXPECT_TRUE(CheckQueriesOf(policy, nullptr, Layers(), kTokens, true).ok());
  EXPECT_EQ(ReasonOf(CheckQueriesOf(policy, nullptr, Layers(), kTokens, false)), "INVALID_QUERIES");
  EXPECT_EQ(ReasonOf(CheckQueriesOf(policy, &queries, Layers(), kTokens, true)), "INVALID_QUERIES");
  EXPECT_EQ(ReasonOf(CheckQueriesOf(policy, &queries, Layers(), 99, false)), "INVALID_QUERIES");
  policy.importance = ImportanceSource::kNone;
  EXPECT_TRUE(CheckQueriesOf(policy, nullptr, Layers(), kTokens, false).ok());
  EXPECT_EQ(ReasonOf(CheckQueriesOf(policy, &queries, Layers(), kTokens, false)), "INVALID_QUERIES");
}

struct Keys {
  Keys() : values(kTokens * kHeads * kDim) {
    std::mt19937 rng(6);
    std::normal_distribution<float> normal;
    for (float& value : values) value = normal(rng);
    for (uint32_t t = 0; t < kTokens; ++t) rows.push_back(reinterpret_cast<const uint8_t*>(&values[t * kHeads * kDim]));
  }
  SourcePlane plane() const { return {rows.data(), kDim * 4, 4}; }
  std::vector<float> values;
  std::vector<const uint8_t*> rows;
};

std::vector<float> ScoresOf(const RecentQueries& queries, const PlanLayer& layer, uint32_t tokens) {
  const Keys keys;
  LayerAttention attention(0, layer, tokens, std::make_shared<RecentQueries>(queries), 0);
  Workspace workspace;
  EXPECT_FALSE(attention.AttendHead(*ScalarBackend(), keys.plane(), 1, &workspace));
  EXPECT_TRUE(attention.AttendHead(*ScalarBackend(), keys.plane(), 0, &workspace)) << "the last one missing";
  return attention.TakeScores();
}

// The formula of docs/allocators.md, plainly.
std::vector<double> Expected(const RecentQueries& queries, uint32_t tokens, double scale, uint32_t window) {
  const Keys keys;
  std::vector<float> values(queries.layers[0].words.size() / 4);
  std::memcpy(values.data(), queries.layers[0].words.data(), queries.layers[0].words.size());
  std::vector<double> received(tokens), seen_by(tokens);
  for (size_t w = 0; w < queries.positions.size(); ++w) {
    const uint32_t position = queries.positions[w];
    const auto sees = [&](uint32_t t) { return t <= position && (window == 0 || t + window > position); };
    for (uint32_t t = 0; t < tokens; ++t) seen_by[t] += sees(t);
    for (uint32_t q = 0; q < kQueryHeads; ++q) {
      const uint32_t head = q / (kQueryHeads / kHeads);
      std::vector<double> weight(tokens);
      double sum = 0;
      for (uint32_t t = 0; t < tokens; ++t) {
        if (!sees(t)) continue;
        double dot = 0;
        for (uint32_t d = 0; d < kDim; ++d) {
          dot += double{values[(w * kQueryHeads + q) * kDim + d]} * double{keys.values[(t * kHeads + head) * kDim + d]};
        }
        sum += weight[t] = std::exp(dot * scale);
      }
      for (uint32_t t = 0; t < tokens && sum > 0; ++t) received[t] += weight[t] / sum;
    }
  }
  for (uint32_t t = 0; t < tokens; ++t) received[t] = seen_by[t] == 0 ? 0 : received[t] / seen_by[t] / kQueryHeads;
  return received;
}

void ExpectNear(const std::vector<float>& got, const std::vector<double>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t t = 0; t < got.size(); ++t) EXPECT_NEAR(got[t], expected[t], 1e-5 * expected[t] + 1e-9) << t;
}

TEST(AttendedBytes, CountsKeysOnceForEachQueryThatReadsThem) {
  RecentQueries queries = Queries();
  const double all = 4.0 * kTokens * kQueryHeads * kDim * 4;  // positions * tokens * heads * words of 4 bytes
  EXPECT_EQ(AttendedBytes(queries, Layers(), kTokens), all);
  queries.layers[0].window = 25;
  EXPECT_EQ(AttendedBytes(queries, Layers(), kTokens), all / 4);
  queries.layers[0].window = 2 * kTokens;
  EXPECT_EQ(AttendedBytes(queries, Layers(), kTokens), all);
  std::vector<PlanLayer> windowed = Layers();
  windowed[0].window_tokens = 50;
  queries.layers[0].window = 0;
  EXPECT_EQ(AttendedBytes(queries, windowed, kTokens), all / 2);
}

TEST(LayerAttention, IsAttentionReceivedByQueriesThatCouldSee) {
  RecentQueries queries = Queries();
  PlanLayer layer = Layers()[0];
  ExpectNear(ScoresOf(queries, layer, kTokens), Expected(queries, kTokens, 1 / std::sqrt(double{kDim}), 0));
  // Not all is written yet: what is there gets all the attention.
  ExpectNear(ScoresOf(queries, layer, 60), Expected(queries, 60, 1 / std::sqrt(double{kDim}), 0));
  // The layer's own window, and another.
  layer.window_tokens = 20;
  ExpectNear(ScoresOf(queries, layer, kTokens), Expected(queries, kTokens, 1 / std::sqrt(double{kDim}), 20));
  queries.layers[0].window = 7;
  queries.layers[0].softmax_scale = 0.3f;
  ExpectNear(ScoresOf(queries, layer, kTokens), Expected(queries, kTokens, double{0.3f}, 7));
}

TEST(AttentionScores, LayersWithoutQueriesHaveTheMean) {
  AttentionScores scores(3, 4);
  EXPECT_TRUE(scores.empty());
  scores.Set(0, {1, 2, 3, 4});
  scores.Set(2, {5, 7});
  EXPECT_FALSE(scores.empty());
  EXPECT_EQ(scores.ByLayer(), (std::vector<float>{1, 2, 3, 4, 3, 4.5, 4.5, 5, 5, 7, 6, 6}));
  scores.Set(0, {2, 2, 2, 2});
  EXPECT_EQ(scores.ByLayer(), (std::vector<float>{2, 2, 2, 2, 3.5, 4.5, 4, 4, 5, 7, 6, 6}));
}

}  // namespace
}  // namespace spectrumkv
