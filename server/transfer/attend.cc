#include "server/transfer/attend.h"

#include <algorithm>
#include <utility>

#include "server/encode/device_encode.h"

namespace spectrumkv {

std::map<uint32_t, QueriesOfLayer> QueriesByLayer(std::shared_ptr<const RecentQueries> queries,
                                                  const std::vector<PlanLayer>& layers) {
  std::map<uint32_t, QueriesOfLayer> by_layer;
  for (size_t entry = 0; entry < queries->layers.size(); ++entry) {
    const auto at = std::find_if(layers.begin(), layers.end(), [&](const PlanLayer& layer) {
      return layer.layer == queries->layers[entry].layer;
    });
    by_layer[static_cast<uint32_t>(at - layers.begin())] = {queries, entry};
  }
  return by_layer;
}

absl::Status CheckQueriesFor(const BlockHold& source, const Policy& policy, const RecentQueries* queries,
                             const std::vector<PlanLayer>& layers, bool layerwise) {
  return CheckQueriesOf(policy, queries, layers, source.token_count(), layerwise);
}

void AttentionWork::Add(std::unique_ptr<LayerAttention> layer) {
  const uint32_t heads = device_ == nullptr ? layer->heads() : 1;
  for (uint32_t head = 0; head < heads; ++head) jobs_.push_back({layers_.size(), head});
  layers_.push_back(std::move(layer));
  scores_.emplace_back();
}

absl::Status AttentionWork::Run(size_t job, const Backend& backend, const EncodeSource& source) {
  const Job& mine = jobs_[job];
  LayerAttention& layer = *layers_[mine.layer];
  EncodeScratch& scratch = ThreadEncodeScratch();
  const ChunkCut all{0, layer.layer_index(), 0, layer.tokens()};
  if (device_ != nullptr) {
    const DeviceRows k = DeviceRowsOf(source, all, PlaneId::kK, &scratch.k_rows);
    if (absl::Status done = layer.AttendOn(device_, k); !done.ok()) return done;
    scores_[mine.layer] = layer.TakeScores();
    return absl::OkStatus();
  }
  const SourcePlane k = SourcePlaneOf(source, all, PlaneId::kK, &scratch.k_rows);
  if (layer.AttendHead(backend, k, mine.head, &scratch.workspace)) scores_[mine.layer] = layer.TakeScores();
  return absl::OkStatus();
}

void AttentionWork::MoveTo(AttentionScores* scores) {
  for (size_t i = 0; i < layers_.size(); ++i) scores->Set(layers_[i]->layer_index(), std::move(scores_[i]));
}

}  // namespace spectrumkv
