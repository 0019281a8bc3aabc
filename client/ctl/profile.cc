#include "client/ctl/profile.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <utility>

#include "client/ctl/args.h"
#include "client/ctl/codec.h"
#include "kernels/codec/codec_math.h"

namespace spectrumkv::ctl {
namespace {

constexpr Tier kMeasured[] = {Tier::kQ8, Tier::kQ4, Tier::kQ3, Tier::kQ2, Tier::kP8, Tier::kP4};
constexpr Tier kProbe = Tier::kQ3;  // whose errors are followed into the attention's output

// The ratio is of one layer's output alone. What an error does to the next token through all layers was measured for
// SmolLM2-135M (docs/quality.md): keys there are 3.4 times as sensitive, where this ratio is 1.75.
constexpr double kDefaultKWeight = 3.4, kRatioOfDefault = 1.75;
constexpr double kLeastKWeight = 1.7, kMostKWeight = 6.8, kLeastLayerWeight = 0.25, kMostLayerWeight = 4;

using Values = std::vector<float>;

// One plane of one layer, [tokens, heads, head_dim].
struct Plane {
  std::string words;
  Values values;
};

struct Shape {
  uint32_t layers = 0, tokens = 0, heads = 0, head_dim = 0;
  DType dtype = DType::kFloat16;
  size_t plane_values() const { return size_t{tokens} * heads * head_dim; }
};

Values Widened(const std::string& words, DType dtype) {
  Values values(words.size() / SizeOf(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kFloat32) {
      std::memcpy(&values[i], words.data() + 4 * i, 4);
      continue;
    }
    uint16_t word;
    std::memcpy(&word, words.data() + 2 * i, 2);
    values[i] = dtype == DType::kFloat16 ? HalfToFloat(word) : BfloatToFloat(word);
  }
  return values;
}

absl::StatusOr<DType> TypeOf(const Array& array, const std::string& name) {
  if (array.descr == "<f2") return DType::kFloat16;
  if (array.descr == "<f4") return DType::kFloat32;
  if (array.descr == "<u2") return DType::kBFloat16;
  return UsageError(name + " are of type " + array.descr + ", not float16, float32 or uint16 words of bfloat16");
}

absl::StatusOr<Shape> ShapeOf(const Capture& capture) {
  const std::vector<uint64_t>& dims = capture.kv.shape;
  if (dims.size() != 5 || dims[1] != 2) return UsageError("KV must be [layers, 2, tokens, heads, head_dim]");
  const bool fits = dims[0] >= 1 && dims[0] <= 4096 && dims[2] >= 64 && dims[2] <= (1 << 22) && dims[3] >= 1 &&
                    dims[3] <= kMaxHeads && dims[4] >= 8 && dims[4] <= kMaxHeadDim && dims[4] % 8 == 0;
  if (!fits) return UsageError("KV of 1 to 4096 layers, at least 64 tokens and heads the codec takes are needed");
  const absl::StatusOr<DType> dtype = TypeOf(capture.kv, "KV");
  if (!dtype.ok()) return dtype.status();
  Shape shape{static_cast<uint32_t>(dims[0]), static_cast<uint32_t>(dims[2]), static_cast<uint32_t>(dims[3]),
              static_cast<uint32_t>(dims[4]), *dtype};
  if (capture.queries.data.empty()) return shape;
  const std::vector<uint64_t>& q = capture.queries.shape;
  if (q.size() != 4 || q[0] != dims[0] || q[1] < 1 || q[1] > dims[2] || q[2] < 1 || q[2] % dims[3] != 0 || q[3] != dims[4]) {
    return UsageError("queries must be [layers, positions, query_heads, head_dim] of the same layers and head_dim");
  }
  return shape;
}

Plane PlaneOf(const Capture& capture, const Shape& shape, uint32_t layer, uint32_t which) {
  const size_t bytes = shape.plane_values() * SizeOf(shape.dtype);
  Plane plane;
  plane.words = capture.kv.data.substr((size_t{layer} * 2 + which) * bytes, bytes);
  plane.values = Widened(plane.words, shape.dtype);
  return plane;
}

// K and V after a round trip in which all tokens but the sinks have `tier`.
std::pair<Values, Values> RoundTrip(const Backend& backend, const Shape& shape, const Plane& k, const Plane& v, Tier tier,
                                    uint32_t sinks) {
  const size_t token_bytes = size_t{shape.heads} * shape.head_dim * SizeOf(shape.dtype);
  const int64_t word = static_cast<int64_t>(SizeOf(shape.dtype)), head = word * shape.head_dim;
  std::string out[2] = {std::string(k.words.size(), '\0'), std::string(v.words.size(), '\0')};
  const uint32_t step = TokensPerChunk(shape.heads, shape.head_dim, shape.dtype, true);
  Workspace workspace;
  for (uint32_t first = 0; first < shape.tokens; first += step) {
    const ChunkDims dims{std::min(step, shape.tokens - first), shape.heads, shape.head_dim, shape.dtype, true};
    const size_t at = first * token_bytes;
    const auto bytes = [at](const std::string& words) { return reinterpret_cast<const uint8_t*>(words.data()) + at; };
    const auto k_rows = Rows(bytes(k.words), dims), v_rows = Rows(bytes(v.words), dims);
    const auto k_out = Rows(reinterpret_cast<uint8_t*>(out[0].data()) + at, dims);
    const auto v_out = Rows(reinterpret_cast<uint8_t*>(out[1].data()) + at, dims);
    std::vector<uint8_t> tiers(dims.tokens, TierMapByte(tier, tier)), chunk(MaxChunkBytes(dims));
    for (uint32_t t = 0; t < dims.tokens && first + t < sinks; ++t) tiers[t] = TierMapByte(Tier::kRaw, Tier::kRaw);
    const SourcePlane k_in{k_rows.data(), head, word}, v_in{v_rows.data(), head, word};
    const uint64_t size =
        backend.Encode(dims, {}, k_in, &v_in, tiers.data(), &workspace, chunk.data(), chunk.size()).chunk_bytes;
    ChunkView view;
    if (ParseChunk(chunk.data(), size, &view) != Refusal::kNone) continue;  // cannot be: it is our own
    const TargetPlane k_target{k_out.data(), head, word}, v_target{v_out.data(), head, word};
    backend.Decode(view, shape.dtype, k_target, &v_target, &workspace);
  }
  return {Widened(out[0], shape.dtype), Widened(out[1], shape.dtype)};
}

// Each value around the mean of its channel over its run of 64 tokens, sinks left out.
Values Centred(const Values& values, const Shape& shape, uint32_t sinks) {
  const size_t row = size_t{shape.heads} * shape.head_dim;
  Values centred = values;
  for (uint32_t first = 0; first < shape.tokens; first += kCentreTokens) {
    const uint32_t last = std::min(first + kCentreTokens, shape.tokens), from = std::max(first, sinks);
    for (size_t c = 0; c < row && from < last; ++c) {
      double sum = 0;
      for (uint32_t t = from; t < last; ++t) sum += double{values[t * row + c]};
      const float mean = static_cast<float>(sum / (last - from));
      for (uint32_t t = first; t < last; ++t) centred[t * row + c] -= mean;
    }
  }
  return centred;
}

double Energy(const Values& a, const Shape& shape, uint32_t sinks, const Values* minus = nullptr) {
  double sum = 0;
  for (size_t i = size_t{sinks} * shape.heads * shape.head_dim; i < a.size(); ++i) {
    const double x = double{a[i]} - (minus == nullptr ? 0.0 : double{(*minus)[i]});
    sum += x * x;
  }
  return sum;
}

double OutlierRatio(const Values& values, const Shape& shape, uint32_t sinks) {
  const size_t row = size_t{shape.heads} * shape.head_dim;
  std::vector<double> energy(row);
  for (uint32_t t = sinks; t < shape.tokens; ++t) {
    for (size_t c = 0; c < row; ++c) energy[c] += double{values[t * row + c]} * double{values[t * row + c]};
  }
  std::nth_element(energy.begin(), energy.begin() + static_cast<long>(row / 2), energy.end());
  const double median = energy[row / 2];
  return median > 0 ? std::sqrt(*std::max_element(energy.begin(), energy.end()) / median) : 0;
}

// One query head: its softmax over the keys times the values.
std::vector<double> Output(const float* query, uint32_t position, const Values& k, const Values& v, const Shape& shape,
                           uint32_t head) {
  const uint32_t dim = shape.head_dim;
  const auto cell = [&](const Values& values, uint32_t t) { return values.data() + (size_t{t} * shape.heads + head) * dim; };
  std::vector<double> weights(position + 1), out(dim);
  double top = -1e300, sum = 0;
  for (uint32_t t = 0; t <= position; ++t) {
    double dot = 0;
    for (uint32_t d = 0; d < dim; ++d) dot += double{query[d]} * double{cell(k, t)[d]};
    weights[t] = dot / std::sqrt(static_cast<double>(dim));
    top = std::max(top, weights[t]);
  }
  for (double& weight : weights) sum += weight = std::exp(weight - top);
  for (uint32_t t = 0; t <= position; ++t) {
    for (uint32_t d = 0; d < dim; ++d) out[d] += weights[t] / sum * double{cell(v, t)[d]};
  }
  return out;
}

double Apart(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return sum;
}

// Sums over captures, of one layer.
struct LayerSums {
  double k_energy = 0, v_energy = 0;
  std::array<double, kTierCount> k_error{}, v_error{};
  double out_energy = 0, out_error_k = 0, out_error_v = 0;
  double outliers = 0, outliers_uncentred = 0;
};

void FollowErrors(const Capture& capture, const Shape& shape, uint32_t layer, DType query_type, const Plane& k,
                  const Plane& v, const std::pair<Values, Values>& probe, LayerSums* sums) {
  const uint64_t positions = capture.queries.shape[1], heads = capture.queries.shape[2];
  const size_t bytes = positions * heads * shape.head_dim * SizeOf(query_type);
  const Values queries = Widened(capture.queries.data.substr(layer * bytes, bytes), query_type);
  for (uint64_t p = 0; p < positions; ++p) {
    for (uint64_t q = 0; q < heads; ++q) {
      const float* query = queries.data() + (p * heads + q) * shape.head_dim;
      const uint32_t position = shape.tokens - static_cast<uint32_t>(positions - p);
      const uint32_t head = static_cast<uint32_t>(q / (heads / shape.heads));
      const std::vector<double> exact = Output(query, position, k.values, v.values, shape, head);
      sums->out_energy += Apart(exact, std::vector<double>(exact.size()));
      sums->out_error_k += Apart(exact, Output(query, position, probe.first, v.values, shape, head));
      sums->out_error_v += Apart(exact, Output(query, position, k.values, probe.second, shape, head));
    }
  }
}

void MeasureLayer(const Backend& backend, const Capture& capture, const Shape& shape, uint32_t layer, DType query_type,
                  uint32_t sinks, LayerSums* sums) {
  const Plane k = PlaneOf(capture, shape, layer, 0), v = PlaneOf(capture, shape, layer, 1);
  const Values centred = Centred(k.values, shape, sinks);
  sums->k_energy += Energy(centred, shape, sinks);
  sums->v_energy += Energy(v.values, shape, sinks);
  sums->outliers = std::max(sums->outliers, OutlierRatio(centred, shape, sinks));
  sums->outliers_uncentred = std::max(sums->outliers_uncentred, OutlierRatio(k.values, shape, sinks));
  for (const Tier tier : kMeasured) {
    const std::pair<Values, Values> back = RoundTrip(backend, shape, k, v, tier, sinks);
    sums->k_error[static_cast<size_t>(tier)] += Energy(back.first, shape, sinks, &k.values);
    sums->v_error[static_cast<size_t>(tier)] += Energy(back.second, shape, sinks, &v.values);
    if (tier == kProbe && !capture.queries.data.empty()) {
      FollowErrors(capture, shape, layer, query_type, k, v, back, sums);
    }
  }
}

void AddLayer(const LayerSums& sums, Findings* findings) {
  LayerFindings layer{sums.outliers, sums.outliers_uncentred, 0, 0};
  for (const Tier tier : kMeasured) {
    const size_t id = static_cast<size_t>(tier);
    if (sums.k_energy > 0) findings->k_errors[id] += sums.k_error[id] / sums.k_energy / findings->layers;
    if (sums.v_energy > 0) findings->v_errors[id] += sums.v_error[id] / sums.v_energy / findings->layers;
  }
  const size_t probe = static_cast<size_t>(kProbe);
  if (sums.out_error_k > 0 && sums.out_error_v > 0 && sums.k_error[probe] > 0 && sums.v_error[probe] > 0) {
    const double of_k = sums.out_error_k / (sums.k_error[probe] / sums.k_energy);
    const double of_v = sums.out_error_v / (sums.v_error[probe] / sums.v_energy);
    layer.k_to_v = of_k / of_v;
    layer.sensitivity = std::sqrt(of_k * of_v) / sums.out_energy;
  }
  findings->by_layer.push_back(layer);
}

// Of the values above 0; 0 where there are none.
double GeometricMean(const std::vector<LayerFindings>& layers, double LayerFindings::*value) {
  double sum = 0, count = 0;
  for (const LayerFindings& layer : layers) {
    if (!(layer.*value > 0)) continue;
    sum += std::log(layer.*value);
    ++count;
  }
  return count > 0 ? std::exp(sum / count) : 0;
}

void Conclude(Findings* findings) {
  const double ratio = GeometricMean(findings->by_layer, &LayerFindings::k_to_v);
  const double mean = GeometricMean(findings->by_layer, &LayerFindings::sensitivity);
  findings->queries = ratio > 0;
  if (!findings->queries) return;
  findings->k_weight = std::clamp(kDefaultKWeight * ratio / kRatioOfDefault, kLeastKWeight, kMostKWeight);
  for (const LayerFindings& layer : findings->by_layer) {
    const double weight = layer.sensitivity > 0 ? layer.sensitivity / mean : 1;
    findings->layer_weights.push_back(std::clamp(weight, kLeastLayerWeight, kMostLayerWeight));
  }
}

}  // namespace

absl::StatusOr<Findings> MeasureProfile(const Backend& backend, const std::vector<Capture>& captures,
                                        const ProfileOptions& options) {
  Findings findings;
  std::vector<LayerSums> sums;
  for (const Capture& capture : captures) {
    const absl::StatusOr<Shape> shape = ShapeOf(capture);
    if (!shape.ok()) return shape.status();
    if (options.sinks >= shape->tokens) return UsageError("--sinks leaves no token to measure");
    DType query_type = DType::kFloat16;
    if (!capture.queries.data.empty()) {
      const absl::StatusOr<DType> type = TypeOf(capture.queries, "queries");
      if (!type.ok()) return type.status();
      query_type = *type;
    }
    if (sums.empty()) {
      findings.layers = shape->layers;
      findings.heads = shape->heads;
      findings.head_dim = shape->head_dim;
      sums.resize(shape->layers);
    }
    if (findings.layers != shape->layers || findings.heads != shape->heads || findings.head_dim != shape->head_dim) {
      return UsageError("the KV files are of different layers, heads or head_dim");
    }
    findings.tokens += shape->tokens;
    for (uint32_t layer = 0; layer < shape->layers; ++layer) {
      MeasureLayer(backend, capture, *shape, layer, query_type, options.sinks, &sums[layer]);
    }
  }
  if (sums.empty()) return UsageError("KV files are needed");
  for (const LayerSums& layer : sums) AddLayer(layer, &findings);
  Conclude(&findings);
  return findings;
}

}  // namespace spectrumkv::ctl
