// Recent queries of a transfer and what they attend to in its source, in pieces that several threads take.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "server/encode/encode.h"
#include "server/scan/attention.h"

namespace spectrumkv {

// One layer's among those that came together.
struct QueriesOfLayer {
  std::shared_ptr<const RecentQueries> all;
  size_t entry = 0;
};
// By index of the layer among `layers`. REQUIRES: CheckQueries accepted them.
std::map<uint32_t, QueriesOfLayer> QueriesByLayer(std::shared_ptr<const RecentQueries> queries,
                                                  const std::vector<PlanLayer>& layers);

// CheckQueriesOf, for the tokens of `source`.
absl::Status CheckQueriesFor(const BlockHold& source, const Policy& policy, const RecentQueries* queries,
                             const std::vector<PlanLayer>& layers, bool layerwise);

class AttentionWork {
 public:
  // device: that the source's blocks are on, or null.
  explicit AttentionWork(Device* device) : device_(device) {}
  void Add(std::unique_ptr<LayerAttention> layer);

  // One for each KV head of each layer, on a GPU one for each layer; layers one after the other, so that few are under way
  // at a time.
  size_t jobs() const { return jobs_.size(); }
  // Thread-safe for different jobs. REQUIRES: `source` keeps all tokens. Errors: those of the device.
  absl::Status Run(size_t job, const Backend& backend, const EncodeSource& source);
  // A layer whose job failed has no scores. REQUIRES: every job has run.
  void MoveTo(AttentionScores* scores);

 private:
  struct Job {
    size_t layer;
    uint32_t head;
  };
  Device* const device_;
  std::vector<std::unique_ptr<LayerAttention>> layers_;
  std::vector<std::vector<float>> scores_;
  std::vector<Job> jobs_;
};

}  // namespace spectrumkv
