#include "tests/bench/plan_bench.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "server/plan/plan.h"
#include "tests/bench/bench_util.h"
#ifdef SPECTRUMKV_BENCH_STREAM
#include "server/stream/tune_allocator.h"
#endif

namespace spectrumkv {
namespace {

constexpr uint32_t kTokens = 131072;
constexpr uint32_t kLayers = 80;
constexpr int kRuns = 5;

double Milliseconds(std::chrono::steady_clock::time_point since) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - since).count();
}

// Of copying `bytes`, from the best of some runs over 256 MiB.
double MemcpyMs(uint64_t bytes) {
  constexpr size_t kSample = size_t{256} << 20;
  std::vector<uint8_t> from(kSample, 1), to(kSample, 2);
  double best_ms = 1e300;
  for (int run = 0; run < kRuns; ++run) {
    const auto begin = std::chrono::steady_clock::now();
    std::memcpy(to.data(), from.data(), kSample);
    best_ms = std::min(best_ms, Milliseconds(begin));
    from[static_cast<size_t>(run)] = to[static_cast<size_t>(run) + 1];
  }
  return best_ms * static_cast<double>(bytes) / static_cast<double>(kSample);
}

struct Case {
  const char* name;
  ImportanceSource importance;
  bool per_layer;
  uint32_t escape_every;  // tokens; 0: none
};

Policy PolicyOf(const Case& c) {
  Policy policy;
  policy.budget = 0.3;
  policy.importance = c.importance;
  policy.scores_per_layer = c.per_layer;
  if (c.importance == ImportanceSource::kScores) {
    policy.scores.resize(c.per_layer ? size_t{kTokens} * kLayers : kTokens);
    uint32_t state = 1;
    for (float& score : policy.scores) {
      state = state * 1664525 + 1013904223;
      score = static_cast<float>(state >> 8);
    }
  }
  return policy;
}

// Best of some runs, Create and Plan; negative on error.
double PlanMs(const Case& c) {
  const Policy policy = PolicyOf(c);
  std::vector<PlanLayer> layers(kLayers);
  for (uint32_t l = 0; l < kLayers; ++l) {
    layers[l] = {0, static_cast<uint16_t>(l), 8, 128, DType::kFloat16, true, false};
  }
  std::vector<LayerScan> scan(kLayers);
  for (LayerScan& layer : scan) {
    layer.k.resize(kTokens);
    layer.v.resize(kTokens);
    for (uint32_t t = 0; t < kTokens; ++t) {
      layer.k[t].energy_log2 = static_cast<uint8_t>(128 + t % 61);
      if (c.escape_every != 0 && t % c.escape_every == 0) layer.k[t].escape = kEscapeRotated;
    }
  }
  double best_ms = 1e300;
  for (int run = 0; run < kRuns; ++run) {
    const auto begin = std::chrono::steady_clock::now();
    absl::StatusOr<Planner> planner = Planner::Create(policy, layers, kTokens);
    if (!planner.ok()) return -1;
    std::vector<uint32_t> all(planner->cuts().size());
    std::iota(all.begin(), all.end(), 0);
    if (!planner->Plan(all, scan).ok()) return -1;
    best_ms = std::min(best_ms, Milliseconds(begin));
  }
  return best_ms;
}

}  // namespace

int RunPlanBench(int argc, char** argv) {
  bool json = false;
  bench::Flags flags("usage: spectrumkv_bench plan [--json]\n");
  flags.Add("--json", &json);
  if (!flags.Parse(argc, argv)) return 2;
#ifdef SPECTRUMKV_BENCH_STREAM
  TuneAllocator();  // as the daemon does
#endif
  const uint64_t kv_bytes = uint64_t{kTokens} * kLayers * 8 * 128 * 2 * 2;
  const double copy_ms = MemcpyMs(kv_bytes);
  if (!json) {
    std::printf("GREEDY, budget 0.3, %u tokens x %u layers x 8 heads x 128 float16 = %.1f GB raw; memcpy of it %.0f ms\n",
                kTokens, kLayers, static_cast<double>(kv_bytes) / 1e9, copy_ms);
    std::printf("%-44s %10s %18s\n", "importance", "plan ms", "plan / memcpy");
  }
  const Case cases[] = {
      {"POSITION", ImportanceSource::kPosition, false, 0},
      {"SCORES", ImportanceSource::kScores, false, 0},
      {"KEY_NORM", ImportanceSource::kKeyNorm, false, 0},
      {"SCORES, an escape every 4096 tokens", ImportanceSource::kScores, false, 4096},
      {"SCORES, an escape in every chunk", ImportanceSource::kScores, false, 256},
      {"SCORES per layer", ImportanceSource::kScores, true, 0},
  };
  for (const Case& c : cases) {
    const double ms = PlanMs(c);
    if (ms < 0) {
      std::fprintf(stderr, "%s: planning failed\n", c.name);
      return 1;
    }
    if (json) {
      bench::JsonRow row;
      row.Add("bench", "plan").Add("name", c.name).Add("tokens", kTokens).Add("layers", kLayers);
      row.Add("kv_gb", static_cast<double>(kv_bytes) / 1e9).Add("memcpy_s", copy_ms / 1e3).Add("plan_s", ms / 1e3).Print();
    } else {
      std::printf("%-44s %10.1f %17.2f%%\n", c.name, ms, 100 * ms / copy_ms);
    }
  }
  return 0;
}

}  // namespace spectrumkv
