// Importance by attention: what the last queries of a request, which the client gives, attend to in the keys that are
// there. Source: proto/spectrumkv/v1/policy.proto, RecentQueries; arithmetic: kernels/codec/attend_math.h.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/codec/backend.h"
#include "server/plan/plan.h"

namespace spectrumkv {

constexpr uint32_t kMaxRecentQueries = 64;     // positions
constexpr uint32_t kMaxQueryHeads = 4096;
constexpr float kMaxSoftmaxScale = 1e4f, kMaxLogitSoftCap = 1e5f;

// Of one layer.
struct LayerQueries {
  uint32_t layer = 0;  // index in the model
  std::string words;   // [positions, query_heads, head_dim], little-endian
  uint32_t query_heads = 0;
  float softmax_scale = 0;  // 0: 1 / sqrt(head_dim)
  float soft_cap = 0;       // 0: none
  uint32_t window = 0;      // tokens; 0: the layer's own
};

struct RecentQueries {
  DType dtype = DType::kFloat16;
  std::vector<uint32_t> positions;
  std::vector<LayerQueries> layers;
};

// 1 to kMaxRecentQueries ascending positions below `tokens`; layers of `layers` that have keys of their own, each once, with
// a multiple of their heads and as many bytes as that takes; scale, cap finite and in range. INVALID_QUERIES; the message
// names field, value and limit.
absl::Status CheckQueries(const RecentQueries& queries, const std::vector<PlanLayer>& layers, uint32_t tokens);

// Do queries and policy go together? Checks the queries, too. With RECENT_QUERIES a source that is written layer by layer has
// none at first, all others must have some; with other sources there are none. INVALID_QUERIES.
absl::Status CheckQueriesOf(const Policy& policy, const RecentQueries* queries, const std::vector<PlanLayer>& layers,
                            uint32_t tokens, bool layerwise);

// What attending costs: bytes of keys, counted once for each query that reads them. A window, the queries' or else the
// layer's, bounds what a query reads. REQUIRES: queries that CheckQueries accepts for these layers and tokens.
double AttendedBytes(const RecentQueries& queries, const std::vector<PlanLayer>& layers, uint32_t tokens);

// The scores of one layer, head by head.
class LayerAttention {
 public:
  // layer_index: of the layer among those of the transfer. tokens: keys that are there. queries: checked, kept until this
  // is destroyed; entry: which of its layers.
  LayerAttention(uint32_t layer_index, const PlanLayer& layer, uint32_t tokens,
                 std::shared_ptr<const RecentQueries> queries, size_t entry);

  uint32_t layer_index() const { return layer_index_; }
  uint32_t heads() const { return layer_.heads; }
  uint32_t tokens() const { return tokens_; }

  // k: of tokens [0, tokens). True for the call that was the last one missing. Thread-safe for different heads.
  bool AttendHead(const Backend& backend, const SourcePlane& k, uint32_t head, Workspace* workspace);

  // [tokens]: attention received, divided by the queries that could see the token, averaged over query heads; 0 for tokens
  // that none could see. REQUIRES: every head was attended. Frees what the heads needed.
  std::vector<float> TakeScores();

 private:
  const LayerQueries& mine() const { return queries_->layers[entry_]; }
  uint32_t window() const { return mine().window != 0 ? mine().window : layer_.window_tokens; }

  const uint32_t layer_index_;
  const PlanLayer layer_;
  const uint32_t tokens_;
  const std::shared_ptr<const RecentQueries> queries_;
  const size_t entry_;
  std::vector<std::vector<float>> by_head_;
  std::atomic<uint32_t> heads_left_;
};

// Scores of all layers of a transfer, from those that were attended.
class AttentionScores {
 public:
  AttentionScores() = default;
  AttentionScores(size_t layers, uint32_t tokens) : tokens_(tokens), by_layer_(layers) {}

  // scores: of the first tokens; replaces the layer's earlier ones.
  void Set(uint32_t layer_index, std::vector<float> scores) { by_layer_[layer_index] = std::move(scores); }
  bool empty() const;

  // [layers, tokens], as Policy::scores: a layer without scores has the mean of those that have, and tokens beyond the end
  // of a layer's scores their mean. REQUIRES: not empty.
  std::vector<float> ByLayer() const;

 private:
  uint32_t tokens_ = 0;
  std::vector<std::vector<float>> by_layer_;
};

}  // namespace spectrumkv
