#include "server/scan/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "kernels/codec/attend_math.h"
#include "server/base/status.h"

namespace spectrumkv {
namespace {

absl::Status Invalid(const std::string& what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_QUERIES", "queries." + what);
}

float ValueAt(const uint8_t* words, DType dtype, size_t index) {
  if (dtype == DType::kFloat32) {
    float value;
    std::memcpy(&value, words + 4 * index, sizeof(value));
    return value;
  }
  uint16_t word;
  std::memcpy(&word, words + 2 * index, sizeof(word));
  return dtype == DType::kFloat16 ? HalfToFloat(word) : BfloatToFloat(word);
}

absl::Status CheckPositions(const std::vector<uint32_t>& positions, uint32_t tokens) {
  if (positions.empty() || positions.size() > kMaxRecentQueries) {
    return Invalid("positions are " + std::to_string(positions.size()) + ", allowed are 1 to " +
                   std::to_string(kMaxRecentQueries));
  }
  for (size_t i = 0; i < positions.size(); ++i) {
    if (positions[i] < tokens && (i == 0 || positions[i] > positions[i - 1])) continue;
    return Invalid("positions[" + std::to_string(i) + "] is " + std::to_string(positions[i]) +
                   "; positions ascend and are below the " + std::to_string(tokens) + " tokens of the request");
  }
  return absl::OkStatus();
}

absl::Status CheckRange(const std::string& name, float value, float most) {
  if (value >= 0 && value <= most) return absl::OkStatus();
  return Invalid(name + " is " + std::to_string(value) + "; it must be 0 to " + std::to_string(static_cast<int>(most)));
}

absl::Status CheckLayer(const LayerQueries& mine, const PlanLayer& layer, const RecentQueries& queries,
                        const std::string& name) {
  if (layer.raw_only) return Invalid(name + ".layer " + std::to_string(mine.layer) + " has no keys that can be attended to");
  if (mine.query_heads == 0 || mine.query_heads > kMaxQueryHeads || mine.query_heads % layer.heads != 0) {
    return Invalid(name + ".query_heads is " + std::to_string(mine.query_heads) + "; it must be a multiple of the " +
                   std::to_string(layer.heads) + " KV heads, at most " + std::to_string(kMaxQueryHeads));
  }
  const uint64_t want =
      uint64_t{queries.positions.size()} * mine.query_heads * layer.head_dim * SizeOf(queries.dtype);
  if (mine.words.size() != want) {
    return Invalid(name + ".queries has " + std::to_string(mine.words.size()) + " bytes, expected " +
                   std::to_string(want) + " (positions * query_heads * head_dim * bytes of data_type)");
  }
  if (absl::Status status = CheckRange(name + ".softmax_scale", mine.softmax_scale, kMaxSoftmaxScale); !status.ok())
    return status;
  return CheckRange(name + ".logit_soft_cap", mine.soft_cap, kMaxLogitSoftCap);
}

}  // namespace

absl::Status CheckQueries(const RecentQueries& queries, const std::vector<PlanLayer>& layers, uint32_t tokens) {
  if (absl::Status status = CheckPositions(queries.positions, tokens); !status.ok()) return status;
  if (queries.layers.empty()) return Invalid("layers is empty");
  std::vector<bool> seen(layers.size());
  for (size_t i = 0; i < queries.layers.size(); ++i) {
    const LayerQueries& mine = queries.layers[i];
    const std::string name = "layers[" + std::to_string(i) + "]";
    const auto layer = std::lower_bound(layers.begin(), layers.end(), mine.layer,
                                        [](const PlanLayer& a, uint32_t b) { return a.layer < b; });
    if (layer == layers.end() || layer->layer != mine.layer) {
      return Invalid(name + ".layer " + std::to_string(mine.layer) + " is not a layer of the pool");
    }
    const size_t at = static_cast<size_t>(layer - layers.begin());
    if (seen[at]) return Invalid(name + ".layer " + std::to_string(mine.layer) + " is given twice");
    seen[at] = true;
    if (absl::Status status = CheckLayer(mine, *layer, queries, name); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CheckQueriesOf(const Policy& policy, const RecentQueries* queries, const std::vector<PlanLayer>& layers,
                            uint32_t tokens, bool layerwise) {
  const bool wanted = policy.importance == ImportanceSource::kRecentQueries;
  if (queries == nullptr) {
    if (!wanted || layerwise) return absl::OkStatus();
    return Invalid("layers is empty, but policy.importance is RECENT_QUERIES");
  }
  if (!wanted) {
    return Invalid(std::string("layers are given, but policy.importance is ") + ImportanceSourceName(policy.importance));
  }
  if (layerwise) return Invalid("layers are given before anything is written; a layer-wise source gives them with Advance");
  return CheckQueries(*queries, layers, tokens);
}

double AttendedBytes(const RecentQueries& queries, const std::vector<PlanLayer>& layers, uint32_t tokens) {
  double bytes = 0;
  for (const LayerQueries& mine : queries.layers) {
    const PlanLayer& layer = *std::find_if(layers.begin(), layers.end(),
                                           [&](const PlanLayer& one) { return one.layer == mine.layer; });
    const uint32_t window = mine.window != 0 ? mine.window : layer.window_tokens;
    const double read = window == 0 ? tokens : std::min(window, tokens);
    bytes += read * layer.head_dim * static_cast<double>(SizeOf(layer.dtype) * queries.positions.size()) * mine.query_heads;
  }
  return bytes;
}

LayerAttention::LayerAttention(uint32_t layer_index, const PlanLayer& layer, uint32_t tokens,
                               std::shared_ptr<const RecentQueries> queries, size_t entry)
    : layer_index_(layer_index),
      layer_(layer),
      tokens_(tokens),
      queries_(std::move(queries)),
      entry_(entry),
      by_head_(layer.heads),
      heads_left_(layer.heads) {}

bool LayerAttention::AttendHead(const Backend& backend, const SourcePlane& k, uint32_t head, Workspace* workspace) {
  const uint32_t of_head = mine().query_heads / layer_.heads, head_dim = layer_.head_dim;
  const float scale =
      mine().softmax_scale != 0 ? mine().softmax_scale : 1.0f / std::sqrt(static_cast<float>(head_dim));
  const uint8_t* words = reinterpret_cast<const uint8_t*>(mine().words.data());
  std::vector<float> values;
  std::vector<uint32_t> positions;
  values.reserve(queries_->positions.size() * of_head * head_dim);
  for (size_t w = 0; w < queries_->positions.size(); ++w) {
    for (uint32_t g = 0; g < of_head; ++g) {
      const size_t first = (w * mine().query_heads + size_t{head} * of_head + g) * head_dim;
      for (uint32_t d = 0; d < head_dim; ++d) values.push_back(scale * ValueAt(words, queries_->dtype, first + d));
      positions.push_back(queries_->positions[w]);
    }
  }
  const AttendQueries asked{values.data(), positions.data(), static_cast<uint32_t>(positions.size()), window(),
                            mine().soft_cap};
  by_head_[head].resize(tokens_);
  ChunkDims dims = DimsOf(layer_, tokens_);
  backend.Attend(dims, k, head, asked, workspace, by_head_[head].data());
  return heads_left_.fetch_sub(1) == 1;
}

std::vector<float> LayerAttention::TakeScores() {
  // Queries that see each token: one more from the first token a query sees on, one less behind the last.
  std::vector<int32_t> steps(size_t{tokens_} + 1);
  for (const uint32_t position : queries_->positions) {
    const SeenTokens seen = SeenOf(position, window(), 0, tokens_);
    ++steps[seen.first];
    --steps[seen.last];
  }
  std::vector<float> scores = std::move(by_head_[0]);
  for (uint32_t h = 1; h < layer_.heads; ++h) {
    for (uint32_t t = 0; t < tokens_; ++t) scores[t] += by_head_[h][t];
  }
  by_head_.clear();
  int32_t queries = 0;
  for (uint32_t t = 0; t < tokens_; ++t) {
    queries += steps[t];
    scores[t] = queries == 0 ? 0.0f : scores[t] / static_cast<float>(queries * static_cast<int32_t>(mine().query_heads));
  }
  return scores;
}

bool AttentionScores::empty() const {
  return std::all_of(by_layer_.begin(), by_layer_.end(), [](const std::vector<float>& s) { return s.empty(); });
}

std::vector<float> AttentionScores::ByLayer() const {
  std::vector<float> all(by_layer_.size() * tokens_);
  std::vector<double> sum(tokens_);
  double known = 0;
  for (size_t l = 0; l < by_layer_.size(); ++l) {
    const std::vector<float>& own = by_layer_[l];
    if (own.empty()) continue;
    double total = 0;
    for (const float score : own) total += double{score};
    float* to = all.data() + l * tokens_;
    std::fill(std::copy(own.begin(), own.end(), to), to + tokens_,
              static_cast<float>(total / static_cast<double>(own.size())));
    for (uint32_t t = 0; t < tokens_; ++t) sum[t] += double{to[t]};
    ++known;
  }
  for (size_t l = 0; l < by_layer_.size(); ++l) {
    if (!by_layer_[l].empty()) continue;
    for (uint32_t t = 0; t < tokens_; ++t) all[l * tokens_ + t] = static_cast<float>(sum[t] / known);
  }
  return all;
}

}  // namespace spectrumkv
