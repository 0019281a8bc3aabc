#include "server/metrics/series.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>
#include <utility>

namespace spectrumkv {
namespace {

using Labels = std::vector<prometheus::ClientMetric::Label>;

// Every combination of label values, the last label fastest.
std::vector<Labels> AllLabels(const MetricSpec& spec, const std::vector<std::string>& open_values, size_t* open_used) {
  std::vector<Labels> all(1);
  for (const MetricLabel& label : spec.labels) {
    std::vector<std::string> values = label.values;
    if (values.empty()) values.push_back(*open_used < open_values.size() ? open_values[(*open_used)++] : "unknown");
    std::vector<Labels> longer;
    for (const Labels& labels : all) {
      for (const std::string& value : values) {
        longer.push_back(labels);
        longer.back().push_back({label.name, value});
      }
    }
    all = std::move(longer);
  }
  return all;
}

}  // namespace

SeriesStore::SeriesStore(const std::vector<std::string>& open_values) {
  size_t values = 0;
  size_t buckets = 0;
  size_t open_used = 0;
  for (const MetricSpec& spec : AllMetrics()) {
    assert(static_cast<size_t>(spec.id) == metrics_.size());
    Metric metric;
    metric.spec = &spec;
    metric.labels = AllLabels(spec, open_values, &open_used);
    metric.series = metric.labels.size();
    metric.first_value = values;
    metric.first_bucket = buckets;
    values += metric.series;
    if (spec.type == MetricType::kHistogram) buckets += metric.series * (spec.buckets.size() + 1);
    metrics_.push_back(std::move(metric));
  }
  values_ = std::make_unique<std::atomic<double>[]>(values);
  buckets_ = std::make_unique<std::atomic<uint64_t>[]>(buckets);
}

void SeriesStore::Observe(MetricId id, size_t series, double value) {
  if (std::isnan(value)) return;
  const Metric& metric = metrics_[static_cast<size_t>(id)];
  const std::vector<double>& edges = metric.spec->buckets;
  const size_t bucket = static_cast<size_t>(std::lower_bound(edges.begin(), edges.end(), value) - edges.begin());
  buckets_[metric.first_bucket + series * (edges.size() + 1) + bucket].fetch_add(1, std::memory_order_relaxed);
  values_[metric.first_value + series].fetch_add(value, std::memory_order_relaxed);
}

prometheus::ClientMetric SeriesStore::CollectOne(const Metric& metric, size_t series) const {
  prometheus::ClientMetric out;
  out.label = metric.labels[series];
  const double value = values_[metric.first_value + series].load(std::memory_order_relaxed);
  switch (metric.spec->type) {
    case MetricType::kCounter: out.counter.value = value; break;
    case MetricType::kGauge: out.gauge.value = value; break;
    case MetricType::kHistogram: {
      const std::vector<double>& edges = metric.spec->buckets;
      uint64_t cumulative = 0;
      for (size_t i = 0; i <= edges.size(); ++i) {
        cumulative += buckets_[metric.first_bucket + series * (edges.size() + 1) + i].load(std::memory_order_relaxed);
        const double edge = i < edges.size() ? edges[i] : std::numeric_limits<double>::infinity();
        out.histogram.bucket.push_back({cumulative, edge});
      }
      // The count is the last bucket by construction, so the two agree whatever is counted meanwhile.
      out.histogram.sample_count = cumulative;
      out.histogram.sample_sum = value;
      break;
    }
  }
  return out;
}

std::vector<prometheus::MetricFamily> SeriesStore::Collect() const {
  static constexpr prometheus::MetricType kTypes[] = {prometheus::MetricType::Counter, prometheus::MetricType::Gauge,
                                                      prometheus::MetricType::Histogram};
  std::vector<prometheus::MetricFamily> families;
  families.reserve(metrics_.size());
  for (const Metric& metric : metrics_) {
    prometheus::MetricFamily family;
    family.name = metric.spec->name;
    family.help = metric.spec->help;
    family.type = kTypes[static_cast<size_t>(metric.spec->type)];
    for (size_t series = 0; series < metric.series; ++series) family.metric.push_back(CollectOne(metric, series));
    families.push_back(std::move(family));
  }
  return families;
}

}  // namespace spectrumkv
