#include "tests/bench/refine_bench.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "tests/bench/cluster.h"
#include "tests/bench/transfers.h"

namespace spectrumkv {
namespace bench {
namespace {

constexpr char kRefineUsage[] =
    "usage: spectrumkv_bench refine [options]\n"
    "  --tokens N         of the prompt (4096)\n"
    "  --layers N --heads N --head-dim N --block-tokens N    of the model (16; 8; 128; 16)\n"
    "  --variants LIST    of the base: P8,P4,Q8,Q4,Q3,Q2 or b=BUDGET (b=0.2,b=0.3)\n"
    "  --mode NAME        staged or direct (staged)\n"
    "  --repeat N         (5)\n"
    "  --others N         first transfers that are measured alone and beside a refinement; 0 leaves it out (40)\n"
    "  --other-tokens N   of them (512)\n"
    "  --link NAME        a word for the rows (loopback)\n"
    "  --json             one JSON object per line\n";

struct RefineOptions {
  ClusterOptions cluster;
  Shape shape{16, 8, 128, 16, 0};
  std::vector<std::string> variants;
  std::string mode = "staged", link = "loopback";
  uint32_t tokens = 4096, repeat = 5, others = 40, other_tokens = 512;
  bool json = false, help = false;

  bool Parse(int argc, char** argv) {
    Flags flags(std::string(kRefineUsage) + kClusterUsage);
    cluster.AddFlags(&flags);
    flags.Add("--tokens", &tokens, 64, 1 << 20);
    flags.Add("--layers", &shape.layers, 1, 256);
    flags.Add("--heads", &shape.heads, 1, 128);
    flags.Add("--head-dim", &shape.head_dim, 8, 1024);
    flags.Add("--block-tokens", &shape.block_tokens, 1, 256);
    flags.Add("--variants", &variants);
    flags.Add("--mode", &mode);
    flags.Add("--repeat", &repeat, 1, 1000);
    flags.Add("--others", &others, 0, 10000);
    flags.Add("--other-tokens", &other_tokens, 1, 1 << 16);
    flags.Add("--link", &link);
    flags.Add("--json", &json);
    flags.Add("--help", &help);
    if (!flags.Parse(argc, argv) || !cluster.Finish()) return false;
    if (variants.empty()) variants = {"b=0.2", "b=0.3"};
    if (mode == "staged" || mode == "direct") return true;
    std::fprintf(stderr, "--mode is staged or direct, not %s\n", mode.c_str());
    return false;
  }
  v1::RefineMode refine_mode() const { return mode == "direct" ? v1::REFINE_MODE_DIRECT : v1::REFINE_MODE_STAGED; }
};

absl::StatusOr<Variant> RetainedVariant(const std::string& name) {
  absl::StatusOr<Variant> variant = VariantOf(name);
  if (variant.ok()) variant->policy.set_retain_seconds(600);
  return variant;
}

// Time to base and to exact of one variant, in turn with RAW alone.
absl::Status RunExact(const RefineOptions& options, const Cluster& cluster, const Request& request,
                      const std::string& name) {
  absl::StatusOr<Variant> base = RetainedVariant(name), raw = VariantOf("RAW");
  if (!base.ok()) return base.status();
  std::vector<double> base_s, exact_s, raw_s;
  double bytes = 0, raw_bytes = 0;
  for (uint32_t i = 0; i <= options.repeat; ++i) {
    absl::StatusOr<MoveTimes> alone = Move(cluster, request, *raw);
    if (!alone.ok()) return alone.status();
    ClearTarget(request);
    absl::StatusOr<MoveTimes> coarse = Move(cluster, request, *base);
    if (!coarse.ok()) return coarse.status();
    if (RelativeError(request) == 0) return absl::DataLossError("the base is exact: there is nothing to measure");
    absl::StatusOr<RefineTimes> refined = Refine(cluster, coarse->id, options.refine_mode());
    if (!refined.ok()) return refined.status();
    if (const double error = RelativeError(request); error != 0) {
      return absl::DataLossError("after the refinement the relative error is " + std::to_string(error));
    }
    if (absl::Status released = ReleaseBoth(cluster, coarse->id); !released.ok()) return released;
    if (i == 0) continue;  // warms up
    raw_s.push_back(alone->committed_s);
    base_s.push_back(coarse->committed_s);
    exact_s.push_back(coarse->committed_s + refined->seconds);
    bytes = static_cast<double>(coarse->report.wire_bytes() + refined->report.wire_bytes());
    raw_bytes = static_cast<double>(alone->report.wire_bytes());
  }
  const Summary to_base = Summarize(base_s), to_exact = Summarize(exact_s), alone = Summarize(raw_s);
  if (options.json) {
    JsonRow row;
    row.Add("bench", "refine")
        .Add("kind", "exact")
        .Add("link", options.link)
        .Add("security", options.cluster.security());
    row.Add("name", name).Add("mode", options.mode).Add("tokens", options.tokens).Add("base_s", to_base);
    row.Add("exact_s", to_exact).Add("raw_s", alone).Add("bytes_to_raw", bytes / raw_bytes);
    row.Add("relative_error", 0.0).Print();
  } else {
    std::printf("%-6s %s: base after %8.1f ms, exact after %8.1f ms; RAW alone %8.1f ms; %.2f of its bytes\n",
                name.c_str(), options.mode.c_str(), to_base.median * 1e3, to_exact.median * 1e3, alone.median * 1e3,
                bytes / raw_bytes);
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

// First transfers while a refinement runs, and without one, in turn.
absl::Status RunOthers(const RefineOptions& options, const Cluster& cluster, const Request& request,
                       const std::string& name) {
  absl::StatusOr<Variant> base = RetainedVariant(name), plain = VariantOf(name);
  if (!base.ok()) return base.status();
  absl::StatusOr<Scene> other = Scene::Create(cluster, options.shape, options.other_tokens);
  if (!other.ok()) return other.status();
  std::vector<double> alone_s, beside_s;
  const auto take = [&](std::vector<double>* into) -> absl::Status {
    absl::StatusOr<MoveTimes> times = Move(cluster, other->request, *plain);
    if (times.ok()) into->push_back(times->committed_s);
    return times.status();
  };
  while (beside_s.size() < options.others) {
    absl::StatusOr<MoveTimes> coarse = Move(cluster, request, *base);
    if (!coarse.ok()) return coarse.status();
    std::atomic<bool> done{false};
    absl::Status refined;
    std::thread background([&] {
      refined = Refine(cluster, coarse->id, options.refine_mode()).status();
      done = true;
    });
    absl::Status ran;
    // Every other pause is long enough for the refinement to get going again.
    while (!done && ran.ok() && beside_s.size() < options.others) {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      if (!done) ran = take(&beside_s);
    }
    background.join();
    if (ran.ok()) ran = refined;
    for (uint32_t i = 0; i < 5 && ran.ok() && alone_s.size() < options.others; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      ran = take(&alone_s);
    }
    if (ran.ok()) ran = ReleaseBoth(cluster, coarse->id);
    if (!ran.ok()) return ran;
  }
  const Summary alone = Summarize(alone_s), beside = Summarize(beside_s);
  if (options.json) {
    JsonRow row;
    row.Add("bench", "refine").Add("kind", "others").Add("link", options.link).Add("name", name);
    row.Add("tokens", options.other_tokens).Add("alone_s", alone).Add("beside_s", beside);
    row.Add("ratio", beside.median / alone.median).Print();
  } else {
    std::printf("%-6s first transfers of %u tokens: %8.2f ms alone, %8.2f ms beside a refinement: %.3f\n", name.c_str(),
                options.other_tokens, alone.median * 1e3, beside.median * 1e3, beside.median / alone.median);
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace bench

int RunRefineBench(int argc, char** argv) {
  bench::RefineOptions options;
  if (!options.Parse(argc, argv)) return 2;
  if (options.help) {
    std::printf("%s%s", bench::kRefineUsage, bench::kClusterUsage);
    return 0;
  }
  return bench::RunOnCluster("refine", options.cluster, [&options](const bench::Cluster& cluster) {
    absl::StatusOr<bench::Scene> scene = bench::Scene::Create(cluster, options.shape, options.tokens);
    absl::Status status = scene.status();
    for (size_t i = 0; i < options.variants.size() && status.ok(); ++i) {
      status = bench::RunExact(options, cluster, scene->request, options.variants[i]);
      if (status.ok() && options.others > 0)
        status = bench::RunOthers(options, cluster, scene->request, options.variants[i]);
    }
    return status;
  });
}

}  // namespace spectrumkv
