// Importance from recent queries through the engine: what is sent is what scores computed apart from it would send.
#include <algorithm>

#include "kernels/codec/codec_math.h"
#include "server/scan/attention.h"
#include "tests/unit/transfer/two_engines.h"

namespace spectrumkv {
namespace {

constexpr uint32_t kTokens = 80, kQueryHeads = 4, kStar = 30;

float ValueOf(const std::string& plane, size_t index) {
  uint16_t word;
  std::memcpy(&word, plane.data() + 2 * index, sizeof(word));
  return HalfToFloat(word);
}

class EngineAttentionTest : public EngineTest {
 protected:
  // Queries of the given layers at positions 70 and 79 that look for the keys of token kStar.
  std::shared_ptr<RecentQueries> LookForStar(const std::vector<uint32_t>& layers) const {
    auto queries = std::make_shared<RecentQueries>();
    queries->dtype = DType::kFloat32;
    queries->positions = {70, 79};
    const uint32_t heads = source_layout_.heads, dim = source_layout_.head_dim;
    for (const uint32_t layer : layers) {
      std::vector<float> values;
      for (uint32_t i = 0; i < 2 * kQueryHeads * dim; ++i) {
        const uint32_t head = i / dim % kQueryHeads / (kQueryHeads / heads);
        values.push_back(ValueOf(sent_[2 * layer], (kStar * heads + head) * dim + i % dim));
      }
      queries->layers.push_back(
          {layer, std::string(reinterpret_cast<const char*>(values.data()), values.size() * 4), kQueryHeads, 0, 0, 0});
    }
    return queries;
  }

  std::vector<float> ScoresOf(std::shared_ptr<const RecentQueries> queries, size_t entry, uint32_t tokens) const {
    PlanLayer layer;
    layer.heads = source_layout_.heads;
    layer.head_dim = source_layout_.head_dim;
    const uint32_t token_bytes = layer.heads * layer.head_dim * 2;
    const std::string& keys = sent_[2 * queries->layers[entry].layer];
    std::vector<const uint8_t*> rows;
    for (uint32_t t = 0; t < tokens; ++t) rows.push_back(reinterpret_cast<const uint8_t*>(keys.data()) + t * token_bytes);
    LayerAttention attention(0, layer, tokens, queries, entry);
    Workspace workspace;
    for (uint32_t h = 0; h < layer.heads; ++h) {
      attention.AttendHead(*ScalarBackend(), {rows.data(), layer.head_dim * 2, 2}, h, &workspace);
    }
    return attention.TakeScores();
  }

  // Error of a token of one plane over its energy.
  static double ErrorOf(const std::string& sent, const std::string& landed, uint32_t token) {
    const uint32_t values = PoolLayout().heads * PoolLayout().head_dim;
    double error = 0, energy = 0;
    for (uint32_t i = 0; i < values; ++i) {
      const double x = ValueOf(sent, token * values + i), y = ValueOf(landed, token * values + i);
      error += (x - y) * (x - y);
      energy += x * x;
    }
    return error / energy;
  }

  static Policy PolicyOf(Allocator allocator) {
    Policy policy;
    policy.budget = 0.45;
    policy.allocator = allocator;
    policy.importance = ImportanceSource::kRecentQueries;
    return policy;
  }
};

TEST_F(EngineAttentionTest, IsSentAsByTheSameScores) {
  Build();
  Prepare();
  for (const Allocator allocator : {Allocator::kOptimal, Allocator::kGreedy, Allocator::kSlidingWindowSink}) {
    const std::string name = AllocatorName(allocator);
    const auto queries = LookForStar({0, 2});
    Policy policy = PolicyOf(allocator);
    policy.allow_drop = allocator == Allocator::kSlidingWindowSink;
    AttentionScores scores(3, kTokens);
    scores.Set(0, ScoresOf(queries, 0, kTokens));
    scores.Set(2, ScoresOf(queries, 1, kTokens));
    const auto receive = [&](SenderSpec spec, const std::string& id) {
      ReceiverSpec receiver = Expect(id, Target());
      receiver.accept_dropped = true;
      EXPECT_TRUE(b_->manager().StartReceiver(std::move(receiver)).ok());
      EXPECT_TRUE(a_->manager().StartSender(std::move(spec)).ok());
      const TransferReport report = a_->Watch(id, Role::kSender)->WaitTerminal();
      EXPECT_EQ(report.state, TransferState::kCommitted) << report.error;
      return report;
    };
    SenderSpec spec = Send(name, Source(), policy);
    spec.queries = queries;
    const TransferReport attended = receive(std::move(spec), name);
    EXPECT_EQ(attended.importance, ImportanceSource::kRecentQueries) << name;
    const std::vector<std::string> landed = Landed();

    policy.importance = ImportanceSource::kScores;
    policy.scores = scores.ByLayer();
    policy.scores_per_layer = true;
    const TransferReport scored = receive(Send(name + "-scores", Source(), policy), name + "-scores");
    EXPECT_EQ(scored.importance, ImportanceSource::kScores);
    EXPECT_EQ(scored.wire_bytes, attended.wire_bytes) << name;
    EXPECT_EQ(scored.kept_tokens, attended.kept_tokens) << name;
    EXPECT_TRUE(Landed() == landed) << name;
    EXPECT_EQ(attended.kept_tokens < kTokens, policy.allow_drop);
  }
}

TEST_F(EngineAttentionTest, LayerByLayerQueriesComeWithTheirLayers) {
  Build();
  Prepare();
  SenderSpec spec = Send("t", Source(), PolicyOf(Allocator::kGreedy));
  spec.layerwise = true;
  ASSERT_TRUE(b_->manager().StartReceiver(Expect("t", Target())).ok());
  ASSERT_TRUE(a_->manager().StartSender(std::move(spec)).ok());
  auto watcher = b_->Watch("t", Role::kReceiver);
  const auto of_unwritten = a_->manager().Advance(kMe, "t", 1, kTokens, {{}, LookForStar({1})});
  EXPECT_EQ(ReasonOf(of_unwritten), "INVALID_QUERIES");
  const auto and_scores = a_->manager().Advance(kMe, "t", 1, kTokens, {std::vector<float>(kTokens, 1), LookForStar({0})});
  EXPECT_EQ(ReasonOf(and_scores), "INVALID_QUERIES");
  for (uint32_t layer = 0; layer < 3; ++layer) {
    ASSERT_TRUE(a_->manager().Advance(kMe, "t", layer + 1, kTokens, {{}, LookForStar({layer})}).ok());
    ASSERT_TRUE(watcher->WaitLayers(layer + 1)) << layer;
  }
  const TransferReport report = a_->Watch("t", Role::kSender)->WaitTerminal();
  ASSERT_EQ(report.state, TransferState::kCommitted) << report.error;
  EXPECT_EQ(report.importance, ImportanceSource::kRecentQueries);
  EXPECT_LE(report.wire_bytes, 0.45 * report.kv_bytes);
  // The token they look for has the higher rung.
  const std::vector<std::string> landed = Landed();
  for (uint32_t layer = 0; layer < 3; ++layer) {
    const auto error_of = [&](uint32_t token) { return ErrorOf(sent_[2 * layer], landed[2 * layer], token); };
    double largest = 0;
    for (uint32_t t = 0; t < kTokens; ++t) largest = std::max(largest, error_of(t));
    EXPECT_LT(error_of(kStar) * 20, largest) << layer;
  }
}

TEST_F(EngineAttentionTest, WithoutQueriesTheReportSaysWhatTookTheirPlace) {
  Build();
  Prepare();
  for (const Allocator allocator : {Allocator::kOptimal, Allocator::kGreedy}) {
    const std::string id = AllocatorName(allocator);
    SenderSpec spec = Send(id, Source(), PolicyOf(allocator));
    spec.layerwise = true;
    ASSERT_TRUE(b_->manager().StartReceiver(Expect(id, Target())).ok());
    ASSERT_TRUE(a_->manager().StartSender(std::move(spec)).ok());
    ASSERT_TRUE(a_->manager().Advance(kMe, id, 3, kTokens, {}).ok());
    const TransferReport report = a_->Watch(id, Role::kSender)->WaitTerminal();
    ASSERT_EQ(report.state, TransferState::kCommitted) << report.error;
    EXPECT_EQ(report.importance,
              allocator == Allocator::kOptimal ? ImportanceSource::kNone : ImportanceSource::kPosition);
  }
}

TEST_F(EngineAttentionTest, RefusesWhatDoesNotFit) {
  Build();
  Prepare();
  const auto refused = [&](SenderSpec spec) { return ReasonOf(a_->manager().StartSender(std::move(spec))); };
  EXPECT_EQ(refused(Send("none", Source(), PolicyOf(Allocator::kOptimal))), "INVALID_QUERIES");
  Policy scored = PolicyOf(Allocator::kOptimal);
  scored.importance = ImportanceSource::kNone;
  SenderSpec spec = Send("other", Source(), scored);
  spec.queries = LookForStar({0});
  EXPECT_EQ(refused(std::move(spec)), "INVALID_QUERIES");
  spec = Send("early", Source(), PolicyOf(Allocator::kOptimal));
  spec.queries = LookForStar({0});
  spec.layerwise = true;
  EXPECT_EQ(refused(std::move(spec)), "INVALID_QUERIES");
  Policy drops = PolicyOf(Allocator::kSlidingWindowSink);
  drops.allow_drop = true;
  spec = Send("drops", Source(), drops);
  spec.layerwise = true;
  EXPECT_EQ(refused(std::move(spec)), "INVALID_POLICY");
  const auto queries = LookForStar({0});
  queries->layers[0].words.pop_back();
  spec = Send("short", Source(), PolicyOf(Allocator::kOptimal));
  spec.queries = queries;
  EXPECT_EQ(refused(std::move(spec)), "INVALID_QUERIES");
}

}  // namespace
}  // namespace spectrumkv
