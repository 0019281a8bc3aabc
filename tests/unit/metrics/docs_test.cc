// docs/metrics.md names every metric with its type and labels, and no metric that does not exist.
#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "server/metrics/metric_names.h"

namespace spectrumkv {
namespace {

std::string Document() {
  std::ifstream file(SPECTRUMKV_SOURCE_DIR "/docs/metrics.md");
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// The table row that documents the metric.
std::string RowOf(const MetricSpec& spec) {
  std::string labels;
  for (const MetricLabel& label : spec.labels)
    labels += (labels.empty() ? "" : ", ") + std::string("`") + label.name + "`";
  return "| `" + spec.name + "` | " + MetricTypeName(spec.type) + " | " + labels + " | " + spec.help + " |";
}

TEST(MetricsDocsTest, EveryMetricHasItsRow) {
  const std::string document = Document();
  ASSERT_FALSE(document.empty());
  for (const MetricSpec& spec : AllMetrics()) {
    EXPECT_NE(document.find("\n" + RowOf(spec) + "\n"), std::string::npos) << "docs/metrics.md lacks this row:\n"
                                                                           << RowOf(spec);
  }
}

TEST(MetricsDocsTest, EveryLabelValueIsNamed) {
  const std::string document = Document();
  for (const MetricSpec& spec : AllMetrics()) {
    for (const MetricLabel& label : spec.labels) {
      for (const std::string& value : label.values) {
        EXPECT_NE(document.find("`" + value + "`"), std::string::npos)
            << "docs/metrics.md does not name " << value << " of " << spec.name << "{" << label.name << "}";
      }
    }
  }
}

TEST(MetricsDocsTest, NoMetricThatDoesNotExist) {
  std::set<std::string> known;
  for (const MetricSpec& spec : AllMetrics()) {
    known.insert(spec.name);
    if (spec.type == MetricType::kHistogram) {
      for (const char* suffix : {"_bucket", "_sum", "_count"}) known.insert(spec.name + suffix);
    }
  }
  const std::string document = Document();
  static constexpr char kWord[] = "abcdefghijklmnopqrstuvwxyz_0123456789";
  for (size_t at = document.find("spectrumkv_"); at != std::string::npos; at = document.find("spectrumkv_", at + 1)) {
    const std::string name = document.substr(at, document.find_first_not_of(kWord, at) - at);
    EXPECT_EQ(known.count(name), 1u) << name;
  }
}

}  // namespace
}  // namespace spectrumkv
