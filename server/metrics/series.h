// Storage of every series as atomics, laid out once from AllMetrics(). prometheus-cpp only reads it: its own counters
// and histograms would lock or look up on the hot path.
#pragma once

#include <prometheus/collectable.h>
#include <prometheus/metric_family.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "server/metrics/metric_names.h"

namespace spectrumkv {

// A series' index within its metric is row-major over its labels, in the order of AllMetrics(). Thread-safe.
class SeriesStore : public prometheus::Collectable {
 public:
  // `open_values`: of the labels without a closed set, in the order they stand in AllMetrics().
  explicit SeriesStore(const std::vector<std::string>& open_values);

  void Add(MetricId id, size_t series, double value) { Value(id, series).fetch_add(value, std::memory_order_relaxed); }
  void Set(MetricId id, size_t series, double value) { Value(id, series).store(value, std::memory_order_relaxed); }
  // Of a histogram. NaN is not counted, it would spoil the sum for good.
  void Observe(MetricId id, size_t series, double value);

  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  struct Metric {
    const MetricSpec* spec = nullptr;
    size_t series = 0;
    size_t first_value = 0;   // in values_: one for each series, the sum where it is a histogram
    size_t first_bucket = 0;  // in buckets_: edges + 1 for each series of a histogram, not cumulative
    std::vector<std::vector<prometheus::ClientMetric::Label>> labels;  // of each series
  };

  std::atomic<double>& Value(MetricId id, size_t series) {
    return values_[metrics_[static_cast<size_t>(id)].first_value + series];
  }
  prometheus::ClientMetric CollectOne(const Metric& metric, size_t series) const;

  std::vector<Metric> metrics_;
  std::unique_ptr<std::atomic<double>[]> values_;
  std::unique_ptr<std::atomic<uint64_t>[]> buckets_;
};

}  // namespace spectrumkv
