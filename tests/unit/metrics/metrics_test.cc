#include "server/metrics/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <iterator>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "server/metrics/metric_names.h"
#include "tests/unit/metrics/exposition.h"

namespace spectrumkv {
namespace {

using Series = std::map<std::string, double>;

const MetricSpec& SpecOf(MetricId id) { return AllMetrics()[static_cast<size_t>(id)]; }

// The series that differ between two scrapes, and by how much.
Series Moved(const Series& before, const Series& after) {
  Series moved;
  for (const auto& [name, value] : after) {
    const double delta = value - before.at(name);
    if (delta != 0) moved[name] = delta;
  }
  return moved;
}

// What `count` moves, buckets of histograms left out.
template <typename Count>
Series Effect(Count count) {
  Metrics metrics({"1", "r", "scalar"});
  const Series before = ParseExposition(metrics.Render());
  count(metrics);
  Series moved = Moved(before, ParseExposition(metrics.Render()));
  for (auto it = moved.begin(); it != moved.end();) {
    it = it->first.find("_bucket{") != std::string::npos ? moved.erase(it) : std::next(it);
  }
  return moved;
}

TEST(MetricNamesTest, TheListIsInTheOrderOfItsIds) {
  ASSERT_EQ(AllMetrics().size(), static_cast<size_t>(MetricId::kCount));
  std::set<std::string> names;
  for (size_t i = 0; i < AllMetrics().size(); ++i) {
    const MetricSpec& spec = AllMetrics()[i];
    EXPECT_EQ(static_cast<size_t>(spec.id), i) << spec.name;
    EXPECT_TRUE(names.insert(spec.name).second) << spec.name;
    EXPECT_TRUE(spec.name.rfind("spectrumkv_", 0) == 0 || spec.name == "process_start_time_seconds") << spec.name;
    EXPECT_FALSE(spec.help.empty()) << spec.name;
    const bool is_total = spec.name.size() > 6 && spec.name.substr(spec.name.size() - 6) == "_total";
    EXPECT_EQ(is_total, spec.type == MetricType::kCounter) << spec.name;
    EXPECT_EQ(!spec.buckets.empty(), spec.type == MetricType::kHistogram) << spec.name;
    for (size_t edge = 1; edge < spec.buckets.size(); ++edge) EXPECT_LT(spec.buckets[edge - 1], spec.buckets[edge]);
  }
}

TEST(MetricNamesTest, LabelValuesAreClosedSets) {
  const std::set<std::string> open = {"version", "revision"};  // of this build, not of requests
  for (const MetricSpec& spec : AllMetrics()) {
    for (const MetricLabel& label : spec.labels) {
      EXPECT_EQ(label.values.empty(), open.count(label.name) > 0) << spec.name << " " << label.name;
      const std::set<std::string> distinct(label.values.begin(), label.values.end());
      EXPECT_EQ(distinct.size(), label.values.size()) << spec.name << " " << label.name;
      EXPECT_EQ(distinct.count(""), 0u) << spec.name << " " << label.name;
    }
  }
  EXPECT_EQ(SpecOf(MetricId::kErrors).labels[1].values,
            std::vector<std::string>({"cancelled", "unknown", "invalid_argument", "deadline_exceeded", "not_found",
                                      "already_exists", "permission_denied", "resource_exhausted",
                                      "failed_precondition", "aborted", "out_of_range", "unimplemented", "internal",
                                      "unavailable", "data_loss", "unauthenticated"}));
  EXPECT_EQ(SpecOf(MetricId::kTransfers).labels[0].values, std::vector<std::string>({"sender", "receiver"}));
  EXPECT_EQ(SpecOf(MetricId::kTransfers).labels[1].values,
            std::vector<std::string>({"committed", "failed", "cancelled", "expired"}));
}

TEST(MetricsTest, EverySeriesExistsAtZeroFromTheStart) {
  const Series series = ParseExposition(Metrics({"1.2.3", "abc", "avx2"}).Render());
  size_t expected = 0;
  for (const MetricSpec& spec : AllMetrics()) {
    size_t combinations = 1;
    for (const MetricLabel& label : spec.labels) combinations *= std::max<size_t>(label.values.size(), 1);
    // Buckets with +Inf, sum, count.
    expected += combinations * (spec.type == MetricType::kHistogram ? spec.buckets.size() + 3 : 1);
  }
  EXPECT_EQ(series.size(), expected);
  Series not_zero;
  for (const auto& [name, value] : series) {
    if (value != 0) not_zero[name] = value;
  }
  const double now = static_cast<double>(std::time(nullptr));
  EXPECT_NEAR(not_zero["process_start_time_seconds"], now, 60);
  not_zero.erase("process_start_time_seconds");
  EXPECT_EQ(not_zero, (Series{{"spectrumkv_build_info{version=\"1.2.3\",revision=\"abc\"}", 1},
                              {"spectrumkv_codec_info{backend=\"avx2\"}", 1}}));
}

TEST(MetricsTest, TransfersAndChunks) {
  EXPECT_EQ(Effect([](Metrics& m) { m.CountTransfer(MetricRole::kReceiver, MetricOutcome::kExpired, 0.5, 1000); }),
            (Series{{"spectrumkv_transfers_total{role=\"receiver\",outcome=\"expired\"}", 1},
                    {"spectrumkv_transfer_duration_seconds_count{role=\"receiver\",outcome=\"expired\"}", 1},
                    {"spectrumkv_transfer_duration_seconds_sum{role=\"receiver\",outcome=\"expired\"}", 0.5},
                    {"spectrumkv_transfer_bytes_count{role=\"receiver\"}", 1},
                    {"spectrumkv_transfer_bytes_sum{role=\"receiver\"}", 1000}}));
  EXPECT_EQ(Effect([](Metrics& m) { m.CountChunk(MetricRole::kSender, 4096, 1100); }),
            (Series{{"spectrumkv_chunks_total{role=\"sender\"}", 1},
                    {"spectrumkv_kv_bytes_total{role=\"sender\"}", 4096},
                    {"spectrumkv_wire_bytes_total{role=\"sender\"}", 1100}}));
  EXPECT_EQ(Effect([](Metrics& m) {
              m.CountChunkDuplicate();
              m.CountChunkResent();
              m.CountChunkResent();
            }),
            (Series{{"spectrumkv_chunks_duplicate_total", 1}, {"spectrumkv_chunks_resent_total", 2}}));
  EXPECT_EQ(Effect([](Metrics& m) {
              m.AddOverheadBytes(77);
              m.AddNonfiniteValues(3);
              m.AddCreditStall(0.25);
            }),
            (Series{{"spectrumkv_overhead_bytes_total", 77},
                    {"spectrumkv_nonfinite_values_total", 3},
                    {"spectrumkv_credit_stall_seconds_total", 0.25}}));
}

TEST(MetricsTest, WireAboveRawIsExpandedNotSaved) {
  EXPECT_EQ(Effect([](Metrics& m) { m.AddSavedBytes(MetricRole::kSender, 1000, 300); }),
            (Series{{"spectrumkv_saved_bytes_total{role=\"sender\"}", 700}}));
  EXPECT_EQ(Effect([](Metrics& m) { m.AddSavedBytes(MetricRole::kSender, 1000, 1064); }),
            (Series{{"spectrumkv_expanded_bytes_total", 64}}));
  EXPECT_TRUE(Effect([](Metrics& m) { m.AddSavedBytes(MetricRole::kSender, 1000, 1000); }).empty());
}

TEST(MetricsTest, EveryLabelCombinationHasItsOwnSeries) {
  for (int role = 0; role < kMetricRoles; ++role) {
    for (int tier = 0; tier < kMetricTiers; ++tier) {
      const auto r = static_cast<MetricRole>(role);
      const auto t = static_cast<MetricTier>(tier);
      const std::string name =
          std::string("spectrumkv_tokens_total{role=\"") + MetricLabelOf(r) + "\",tier=\"" + MetricLabelOf(t) + "\"}";
      EXPECT_EQ(Effect([&](Metrics& m) { m.AddTokens(r, t, 9); }), (Series{{name, 9}}));
    }
  }
  for (int stage = 0; stage < kMetricStages; ++stage) {
    for (int code = 1; code <= 16; ++code) {
      const auto s = static_cast<MetricStage>(stage);
      const auto c = static_cast<absl::StatusCode>(code);
      const std::string name =
          std::string("spectrumkv_errors_total{stage=\"") + MetricLabelOf(s) + "\",code=\"" + MetricLabelOf(c) + "\"}";
      EXPECT_EQ(Effect([&](Metrics& m) { m.CountError(s, c); }), (Series{{name, 1}}));
    }
  }
}

TEST(MetricsTest, CodesOutsideTheSetCountAsUnknown) {
  const Series unknown = {{"spectrumkv_errors_total{stage=\"receive\",code=\"unknown\"}", 1}};
  EXPECT_EQ(Effect([](Metrics& m) { m.CountError(MetricStage::kReceive, static_cast<absl::StatusCode>(99)); }),
            unknown);
  EXPECT_EQ(Effect([](Metrics& m) { m.CountError(MetricStage::kReceive, static_cast<absl::StatusCode>(-5)); }),
            unknown);
  EXPECT_TRUE(Effect([](Metrics& m) { m.CountError(MetricStage::kReceive, absl::StatusCode::kOk); }).empty());
}

TEST(MetricsTest, Gauges) {
  EXPECT_EQ(Effect([](Metrics& m) {
              m.AddInflightTransfers(3);
              m.AddInflightTransfers(-1);
            }),
            (Series{{"spectrumkv_inflight_transfers", 2}}));
  EXPECT_EQ(Effect([](Metrics& m) {
              m.SetPoolBlocks(MetricBlocks::kSending, 5);
              m.SetPoolBlocks(MetricBlocks::kSending, 4);
            }),
            (Series{{"spectrumkv_pool_blocks{state=\"sending\"}", 4}}));
  EXPECT_EQ(Effect([](Metrics& m) { m.SetStagingBytes(MetricStaging::kReceiveFree, 8); }),
            (Series{{"spectrumkv_staging_bytes{state=\"receive_free\"}", 8}}));
  EXPECT_EQ(Effect([](Metrics& m) { m.SetDeviceBytes(MetricDevice::kContext, 9); }),
            (Series{{"spectrumkv_device_bytes{use=\"context\"}", 9}}));
  EXPECT_EQ(Effect([](Metrics& m) {
              m.SetCertificateExpiry(1e9);
              m.SetDraining(true);
            }),
            (Series{{"spectrumkv_certificate_expiry_timestamp_seconds", 1e9}, {"spectrumkv_draining", 1}}));
  EXPECT_TRUE(Effect([](Metrics& m) {
                m.SetDraining(true);
                m.SetDraining(false);
              }).empty());
  EXPECT_EQ(Effect([](Metrics& m) { m.CountLeaseExpired(MetricLease::kDestination); }),
            (Series{{"spectrumkv_leases_expired_total{kind=\"destination\"}", 1}}));
}

TEST(MetricsTest, WhatLimitsTransfersAndWhatLinksCarry) {
  EXPECT_EQ(Effect([](Metrics& m) {
              m.CountLimit(MetricRole::kSender, MetricLimit::kLink);
              m.CountLimit(MetricRole::kReceiver, MetricLimit::kStaging);
              m.CountBudgetChoice(MetricBudgetReason::kOutOfReach);
              m.CountBudgetChoice(MetricBudgetReason::kStageUnknown);
            }),
            (Series{{"spectrumkv_transfers_limited_total{role=\"sender\",limited_by=\"link\"}", 1},
                    {"spectrumkv_transfers_limited_total{role=\"receiver\",limited_by=\"staging\"}", 1},
                    {"spectrumkv_budget_choices_total{reason=\"out_of_reach\"}", 1},
                    {"spectrumkv_budget_choices_total{reason=\"stage_unknown\"}", 1}}));
  EXPECT_EQ(Effect([](Metrics& m) { m.ObserveLinkRate(1.25e8); }),
            (Series{{"spectrumkv_link_rate_bytes_per_second_count", 1},
                    {"spectrumkv_link_rate_bytes_per_second_sum", 1.25e8}}));
}

TEST(MetricsTest, ReconstructionIsSampledAtTheShareAskedFor) {
  for (const uint64_t chunks : {uint64_t{0}, uint64_t{1}, uint64_t{2}, uint64_t{64}, uint64_t{1'000'000'000}}) {
    Metrics metrics({"1", "r", "scalar"}, chunks);
    constexpr int kChunks = 64 * 1000;
    std::vector<int> sampled;
    for (int i = 0; i < kChunks; ++i) {
      if (metrics.SampleReconstruction()) sampled.push_back(i);
    }
    if (chunks == 0) {
      EXPECT_TRUE(sampled.empty());
      continue;
    }
    ASSERT_FALSE(sampled.empty());
    EXPECT_EQ(sampled[0], 0) << "the first chunk, so that a small transfer is seen";
    const double expected = static_cast<double>(kChunks) / static_cast<double>(chunks);
    EXPECT_NEAR(static_cast<double>(sampled.size()), expected, 1 + 0.1 * expected) << chunks;
    if (chunks != 64) continue;
    // Models have 32 or 64 layers: none may be left out.
    std::set<int> places;
    for (const int i : sampled) places.insert(i % 64);
    EXPECT_EQ(places.size(), 64u);
  }
}

TEST(MetricsTest, BucketsCountUpToAndWithTheirEdge) {
  Metrics metrics;
  const double edge = 0.001;
  metrics.ObserveFirstToken(std::nextafter(edge, 0));
  metrics.ObserveFirstToken(edge);
  metrics.ObserveFirstToken(std::nextafter(edge, 1));
  metrics.ObserveFirstToken(1e9);
  metrics.ObserveFirstToken(std::numeric_limits<double>::quiet_NaN());  // not counted
  const Series series = ParseExposition(metrics.Render());
  const std::string name = "spectrumkv_time_to_first_token_seconds";
  EXPECT_EQ(series.at(name + "_bucket{le=\"0.001\"}"), 2);
  EXPECT_EQ(series.at(name + "_bucket{le=\"0.005\"}"), 3);
  EXPECT_EQ(series.at(name + "_bucket{le=\"2560\"}"), 3);
  EXPECT_EQ(series.at(name + "_bucket{le=\"+Inf\"}"), 4);
  EXPECT_EQ(series.at(name + "_count"), 4);
  EXPECT_GE(series.at(name + "_sum"), 1e9);
}

TEST(MetricsTest, ThreadsLoseNothing) {
  Metrics metrics;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&metrics] {
      for (int i = 0; i < 5000; ++i) {
        metrics.CountChunk(MetricRole::kSender, 10, 3);
        metrics.ObserveStage(MetricStage::kEncode, 0.5);
        if (i % 1000 == 0) metrics.Render();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const Series series = ParseExposition(metrics.Render());
  EXPECT_EQ(series.at("spectrumkv_kv_bytes_total{role=\"sender\"}"), 200000);
  EXPECT_EQ(series.at("spectrumkv_stage_duration_seconds_count{stage=\"encode\"}"), 20000);
  EXPECT_EQ(series.at("spectrumkv_stage_duration_seconds_sum{stage=\"encode\"}"), 10000);
}

TEST(MetricsTest, PromtoolFindsNothing) {
  if (std::system("command -v promtool > /dev/null 2>&1") != 0) {
    std::puts("SKIPPED: promtool is not installed (Debian package prometheus)");
    GTEST_SKIP();
  }
  Metrics metrics({"1.0.0", "abc", "scalar"});
  metrics.CountTransfer(MetricRole::kSender, MetricOutcome::kCommitted, 0.1, 1 << 20);
  const std::string errors = testing::TempDir() + "promtool." + std::to_string(getpid());
  FILE* promtool = popen(("promtool check metrics > " + errors + " 2>&1").c_str(), "w");
  ASSERT_NE(promtool, nullptr);
  const std::string text = metrics.Render();
  ASSERT_EQ(fwrite(text.data(), 1, text.size(), promtool), text.size());
  const int status = pclose(promtool);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  FILE* said = fopen(errors.c_str(), "r");
  ASSERT_NE(said, nullptr);
  std::string words(4096, '\0');
  words.resize(fread(words.data(), 1, words.size(), said));
  fclose(said);
  std::remove(errors.c_str());
  EXPECT_EQ(words, "");
}

}  // namespace
}  // namespace spectrumkv
