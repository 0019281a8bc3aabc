#include "tests/bench/latency_bench.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "tests/bench/cluster.h"
#include "tests/bench/transfers.h"

namespace spectrumkv {
namespace bench {
namespace {

constexpr char kLatencyUsage[] =
    "usage: spectrumkv_bench latency [options]\n"
    "  --transfers N      of each row; 20 more warm up (500)\n"
    "  --tokens N         of a small transfer (128)\n"
    "  --layers LIST --heads N --head-dim N --block-tokens N    of its model (30,8,1; 3; 64; 16)\n"
    "  --variants LIST    RAW,P8,P4,Q8,Q4,Q3,Q2 b=BUDGET or greedy=BUDGET (RAW,P8,b=0.3)\n"
    "  --repeat N         large transfers of each first-layer row; 0 leaves them out (5)\n"
    "  --idle-seconds N   0 leaves idle CPU out (5)\n"
    "  --json             one JSON object per line\n";

constexpr uint32_t kWarmUp = 20;

struct LatencyOptions {
  ClusterOptions cluster;
  Shape shape{30, 3, 64, 16, 0};
  std::vector<std::string> layers, variants;
  uint32_t transfers = 500, tokens = 128, repeat = 5, idle_seconds = 5;
  bool json = false, help = false;

  bool Parse(int argc, char** argv) {
    Flags flags(std::string(kLatencyUsage) + kClusterUsage);
    cluster.AddFlags(&flags);
    flags.Add("--transfers", &transfers, 1, 100000);
    flags.Add("--tokens", &tokens, 1, 1 << 16);
    flags.Add("--layers", &layers);
    flags.Add("--heads", &shape.heads, 1, 128);
    flags.Add("--head-dim", &shape.head_dim, 8, 1024);
    flags.Add("--block-tokens", &shape.block_tokens, 1, 256);
    flags.Add("--variants", &variants);
    flags.Add("--repeat", &repeat, 0, 1000);
    flags.Add("--idle-seconds", &idle_seconds, 0, 600);
    flags.Add("--json", &json);
    flags.Add("--help", &help);
    if (!flags.Parse(argc, argv) || !cluster.Finish()) return false;
    if (layers.empty()) layers = {"30", "8", "1"};
    if (variants.empty()) variants = {"RAW", "P8", "b=0.3"};
    return true;
  }
};

struct Samples {
  std::vector<double> committed_s, total_s, send_call_s, first_layer_s;
  double cpu_s = 0;  // both daemons, of all transfers
};

absl::StatusOr<Samples> Take(const Cluster& cluster, const Request& request, const Variant& variant, uint32_t count,
                             uint32_t warm_up) {
  Samples samples;
  ClearTarget(request);
  for (uint32_t i = 0; i < count + warm_up; ++i) {
    const double cpu = cluster.CpuSeconds();
    absl::StatusOr<MoveTimes> times = Move(cluster, request, variant);
    if (!times.ok()) return times.status();
    if (i == 0 && !(RelativeError(request) < 0.6)) return absl::DataLossError(variant.name + " arrived wrong");
    if (i < warm_up) continue;
    samples.cpu_s += cluster.CpuSeconds() - cpu;
    samples.committed_s.push_back(times->committed_s);
    samples.total_s.push_back(times->total_s);
    samples.send_call_s.push_back(times->send_call_s);
    samples.first_layer_s.push_back(times->first_layer_s);
  }
  return samples;
}

// NAME_p50_ms, NAME_p99_ms, NAME_max_ms.
void AddPercentiles(JsonRow* row, const std::string& name, const std::vector<double>& seconds) {
  row->Add((name + "_p50_ms").c_str(), Percentile(seconds, 0.5) * 1e3);
  row->Add((name + "_p99_ms").c_str(), Percentile(seconds, 0.99) * 1e3);
  row->Add((name + "_max_ms").c_str(), Percentile(seconds, 1) * 1e3);
}

void PrintSmall(const LatencyOptions& options, const Shape& shape, const Variant& variant, const Samples& s) {
  const double cpu_ms = s.cpu_s * 1e3 / static_cast<double>(s.committed_s.size());
  if (!options.json) {
    std::printf(
        "%2u layers %-6s Send to COMMITTED p50 %6.3f p99 %6.3f max %6.3f ms; with Expect p50 %6.3f p99 %6.3f ms; "
        "Send call %5.3f ms; CPU %5.3f ms\n",
        shape.layers, variant.name.c_str(), Percentile(s.committed_s, 0.5) * 1e3, Percentile(s.committed_s, 0.99) * 1e3,
        Percentile(s.committed_s, 1) * 1e3, Percentile(s.total_s, 0.5) * 1e3, Percentile(s.total_s, 0.99) * 1e3,
        Percentile(s.send_call_s, 0.5) * 1e3, cpu_ms);
    std::fflush(stdout);
    return;
  }
  JsonRow row;
  row.Add("bench", "latency")
      .Add("kind", "small")
      .Add("security", options.cluster.security())
      .Add("name", variant.name);
  row.Add("layers", shape.layers)
      .Add("heads", shape.heads)
      .Add("head_dim", shape.head_dim)
      .Add("tokens", options.tokens);
  row.Add("transfers", options.transfers);
  AddPercentiles(&row, "committed", s.committed_s);
  AddPercentiles(&row, "with_expect", s.total_s);
  AddPercentiles(&row, "send_call", s.send_call_s);
  AddPercentiles(&row, "first_layer", s.first_layer_s);
  row.Add("cpu_ms", cpu_ms).Print();
}

absl::Status RunSmall(const LatencyOptions& options, const Cluster& cluster) {
  for (const std::string& layers : options.layers) {
    Shape shape = options.shape;
    shape.layers = static_cast<uint32_t>(std::atoi(layers.c_str()));
    if (shape.layers < 1 || shape.layers > 256) return absl::InvalidArgumentError("--layers must be from 1 to 256");
    absl::StatusOr<Scene> scene = Scene::Create(cluster, shape, options.tokens);
    if (!scene.ok()) return scene.status();
    for (const std::string& name : options.variants) {
      absl::StatusOr<Variant> variant = VariantOf(name);
      if (!variant.ok()) return variant.status();
      absl::StatusOr<Samples> samples = Take(cluster, scene->request, *variant, options.transfers, kWarmUp);
      if (!samples.ok()) return samples.status();
      PrintSmall(options, shape, *variant, *samples);
    }
  }
  return absl::OkStatus();
}

// 32 layers of 8 heads x 128, 2048 tokens: 268 MB.
absl::Status RunFirstLayer(const LatencyOptions& options, const Cluster& cluster) {
  constexpr Shape kLarge{32, 8, 128, 16, 0};
  constexpr uint32_t kTokens = 2048;
  absl::StatusOr<Scene> scene = Scene::Create(cluster, kLarge, kTokens);
  if (!scene.ok()) return scene.status();
  for (const std::string& name : options.variants) {
    absl::StatusOr<Variant> variant = VariantOf(name);
    if (!variant.ok()) return variant.status();
    absl::StatusOr<Samples> samples = Take(cluster, scene->request, *variant, options.repeat, 1);
    if (!samples.ok()) return samples.status();
    const Summary first = Summarize(samples->first_layer_s), whole = Summarize(samples->committed_s);
    if (options.json) {
      JsonRow row;
      row.Add("bench", "latency")
          .Add("kind", "first_layer")
          .Add("security", options.cluster.security())
          .Add("name", name);
      row.Add("layers", kLarge.layers).Add("tokens", kTokens).Add("first_layer_s", first).Add("seconds", whole).Print();
    } else {
      std::printf("%u layers, %u tokens, %-6s first layer ready after %6.1f ms [%.1f..%.1f] of %6.1f ms: %.3f\n",
                  kLarge.layers, kTokens, name.c_str(), first.median * 1e3, first.min * 1e3, first.max * 1e3,
                  whole.median * 1e3, first.median / whole.median);
      std::fflush(stdout);
    }
  }
  return absl::OkStatus();
}

void RunIdle(const LatencyOptions& options, const Cluster& cluster) {
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  const double begin = Now(), prefill = ProcessCpuSeconds(cluster.prefill->pid()),
               decode = ProcessCpuSeconds(cluster.decode->pid());
  std::this_thread::sleep_for(std::chrono::seconds(options.idle_seconds));
  const double wall = Now() - begin;
  const double prefill_share = (ProcessCpuSeconds(cluster.prefill->pid()) - prefill) / wall;
  const double decode_share = (ProcessCpuSeconds(cluster.decode->pid()) - decode) / wall;
  if (options.json) {
    JsonRow row;
    row.Add("bench", "latency").Add("kind", "idle").Add("seconds", wall);
    row.Add("prefill_cpu_percent", prefill_share * 100).Add("decode_cpu_percent", decode_share * 100).Print();
  } else {
    std::printf("idle for %.1f s: prefill daemon %.2f %%, decode daemon %.2f %% of a core\n", wall, prefill_share * 100,
                decode_share * 100);
  }
}

}  // namespace
}  // namespace bench

int RunLatencyBench(int argc, char** argv) {
  bench::LatencyOptions options;
  if (!options.Parse(argc, argv)) return 2;
  if (options.help) {
    std::printf("%s%s", bench::kLatencyUsage, bench::kClusterUsage);
    return 0;
  }
  return bench::RunOnCluster("latency", options.cluster, [&options](const bench::Cluster& cluster) {
    absl::Status status = bench::RunSmall(options, cluster);
    if (status.ok() && options.repeat > 0) status = bench::RunFirstLayer(options, cluster);
    if (status.ok() && options.idle_seconds > 0) bench::RunIdle(options, cluster);
    return status;
  });
}

}  // namespace spectrumkv
