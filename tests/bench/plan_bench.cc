#include "tests/bench/plan_bench.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/cpu/cpu_backends.h"
#include "server/plan/plan.h"
#include "tests/bench/bench_util.h"
#ifdef SPECTRUMKV_BENCH_STREAM
#include "server/stream/tune_process.h"
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
  Allocator allocator = Allocator::kGreedy;
};

Policy PolicyOf(const Case& c) {
  Policy policy;
  policy.budget = 0.3;
  policy.allocator = c.allocator;
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
      layer.k_spread.push_back(static_cast<uint8_t>(128 + t * 2654435761u % 41));
      layer.v_spread.push_back(static_cast<uint8_t>(120 + t * 2246822519u % 33));
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

// --- What OPTIMAL costs beside the encoder: the sample of all values, the plan, and the encoding it is for.

constexpr uint32_t kSourceTokens = 65536, kSourceLayers = 32, kHeads = 8, kHeadDim = 128;

// RECENT_QUERIES: so many positions of a model with four query heads for each KV head. One KV head is measured and stands
// for all: they are alike.
constexpr uint32_t kRecent = 16, kQueriesOfHead = 4 * kRecent;

struct SourceFigures {
  double spread_ms = 0, plan_ms = 0, encode_ms = 0, attend_ms = 0;
};

// One layer's planes of random values stand for all layers: they are larger than any cache.
class Source {
 public:
  Source() : memory_(2 * size_t{kSourceTokens} * kRowBytes), rows_(2) {
    uint32_t state = 1;
    for (size_t i = 0; i + 1 < memory_.size(); i += 2) {  // float16 of magnitude 1/8 to 8
      state = state * 1664525 + 1013904223;
      const uint32_t word = (state >> 31) << 15 | (12 + (state >> 28 & 7) % 6) << 10 | (state >> 8 & 0x3FF);
      std::memcpy(&memory_[i], &word, 2);
    }
    for (size_t plane = 0; plane < 2; ++plane) {
      for (size_t t = 0; t < kSourceTokens; ++t)
        rows_[plane].push_back(&memory_[(plane * kSourceTokens + t) * kRowBytes]);
    }
  }
  SourcePlane Plane(size_t plane, uint32_t first) const { return {rows_[plane].data() + first, kHeadDim * 2, 2}; }

 private:
  static constexpr size_t kRowBytes = size_t{kHeads} * kHeadDim * 2;
  std::vector<uint8_t> memory_;
  std::vector<std::vector<const uint8_t*>> rows_;
};

double AttendMs(const Source& source, const Backend& backend, Workspace* workspace) {
  std::vector<float> queries(size_t{kQueriesOfHead} * kHeadDim), scores(kSourceTokens);
  uint32_t state = 7;
  for (float& value : queries) {
    state = state * 1664525 + 1013904223;
    value = static_cast<float>(static_cast<int32_t>(state)) * 1e-11f;
  }
  std::vector<uint32_t> positions;
  for (uint32_t q = 0; q < kQueriesOfHead; ++q) positions.push_back(kSourceTokens - kRecent + q / 4);
  const ChunkDims dims{kSourceTokens, kHeads, kHeadDim, DType::kFloat16, true};
  const auto begin = std::chrono::steady_clock::now();
  backend.Attend(dims, source.Plane(0, 0), 0, {queries.data(), positions.data(), kQueriesOfHead, 0, 0}, workspace,
                 scores.data());
  return Milliseconds(begin) * kHeads * kSourceLayers;
}

// One thread each; false on error.
bool MeasureSource(const Source& source, const Backend& backend, SourceFigures* figures) {
  std::vector<PlanLayer> layers(kSourceLayers);
  for (uint32_t l = 0; l < kSourceLayers; ++l) {
    layers[l] = {0, static_cast<uint16_t>(l), kHeads, kHeadDim, DType::kFloat16, true, false};
  }
  Policy policy;
  policy.budget = 0.3;
  policy.allocator = Allocator::kOptimal;
  policy.importance = ImportanceSource::kNone;
  std::vector<LayerScan> scan(kSourceLayers);
  for (LayerScan& layer : scan) {
    layer.k_spread.resize(kSourceTokens);
    layer.v_spread.resize(kSourceTokens);
  }
  Workspace workspace;
  const auto begin = std::chrono::steady_clock::now();
  absl::StatusOr<Planner> planner = Planner::Create(policy, layers, kSourceTokens);
  if (!planner.ok()) return false;
  const double create_ms = Milliseconds(begin);
  const auto spread_begin = std::chrono::steady_clock::now();
  for (const ChunkCut& cut : planner->cuts()) {
    const ChunkDims dims = DimsOf(layers[cut.layer_index], cut.token_count);
    LayerScan& out = scan[cut.layer_index];
    const uint32_t pinned = cut.token_first == 0 ? policy.sinks : 0;
    backend.Spread(dims, source.Plane(0, cut.token_first), true, pinned, &workspace, &out.k_spread[cut.token_first]);
    backend.Spread(dims, source.Plane(1, cut.token_first), false, pinned, &workspace, &out.v_spread[cut.token_first]);
  }
  figures->spread_ms = Milliseconds(spread_begin);
  std::vector<uint32_t> all(planner->cuts().size());
  std::iota(all.begin(), all.end(), 0);
  const auto plan_begin = std::chrono::steady_clock::now();
  const absl::StatusOr<PlanBatch> batch = planner->Plan(all, scan);
  figures->plan_ms = create_ms + Milliseconds(plan_begin);
  if (!batch.ok()) return false;
  std::vector<uint8_t> slot(2 << 20);
  const auto encode_begin = std::chrono::steady_clock::now();
  for (const PlannedChunk& chunk : batch->chunks) {
    const ChunkCut& cut = chunk.cut;
    const SourcePlane k = source.Plane(0, cut.token_first), v = source.Plane(1, cut.token_first);
    const EncodeResult result = backend.Encode(DimsOf(layers[cut.layer_index], cut.token_count), {}, k, &v,
                                               chunk.tier_map.data(), &workspace, slot.data(), slot.size());
    if (result.chunk_bytes != chunk.chunk_bytes) return false;
  }
  figures->encode_ms = Milliseconds(encode_begin);
  figures->attend_ms = AttendMs(source, backend, &workspace);
  return true;
}

int RunSourceBench(bool json) {
  const Source source;
  BackendRegistry registry;
  AddCpuBackends(&registry);
  std::string error;
  const Backend* backend = registry.Choose("auto", &error);
  SourceFigures best{1e300, 1e300, 1e300, 1e300};
  for (int run = 0; run < 3; ++run) {
    SourceFigures now;
    if (backend == nullptr || !MeasureSource(source, *backend, &now)) {
      std::fprintf(stderr, "OPTIMAL: planning or encoding failed\n");
      return 1;
    }
    best.spread_ms = std::min(best.spread_ms, now.spread_ms);
    best.plan_ms = std::min(best.plan_ms, now.plan_ms);
    best.encode_ms = std::min(best.encode_ms, now.encode_ms);
    best.attend_ms = std::min(best.attend_ms, now.attend_ms);
  }
  const double share = (best.spread_ms + best.plan_ms) / best.encode_ms;
  if (json) {
    bench::JsonRow row;
    row.Add("bench", "optimal").Add("name", "OPTIMAL beside the encoder").Add("tokens", kSourceTokens);
    row.Add("layers", kSourceLayers).Add("sample_s", best.spread_ms / 1e3).Add("plan_s", best.plan_ms / 1e3);
    row.Add("encode_s", best.encode_ms / 1e3).Add("share_of_encode", share);
    row.Add("attend_queries", kQueriesOfHead).Add("attend_s", best.attend_ms / 1e3).Print();
    return 0;
  }
  std::printf(
      "OPTIMAL, NONE, %u tokens x %u layers x %u heads x %u, %s, one thread: sample %.0f ms + plan %.0f ms = %.1f%% of "
      "encode %.0f ms\n",
      kSourceTokens, kSourceLayers, kHeads, kHeadDim, backend->name(), best.spread_ms, best.plan_ms, 100 * share,
      best.encode_ms);
  std::printf("RECENT_QUERIES, %u queries of each KV head: %.0f ms = %.2f of that encode, %.3f for each position of 4 query heads\n",
              kQueriesOfHead, best.attend_ms, best.attend_ms / best.encode_ms, best.attend_ms / best.encode_ms / kRecent);
  return 0;
}

}  // namespace

int RunPlanBench(int argc, char** argv) {
  bool json = false;
  bench::Flags flags("usage: spectrumkv_bench plan [--json]\n");
  flags.Add("--json", &json);
  if (!flags.Parse(argc, argv)) return 2;
#ifdef SPECTRUMKV_BENCH_STREAM
  TuneProcess();  // as the daemon does
#endif
  const uint64_t kv_bytes = uint64_t{kTokens} * kLayers * 8 * 128 * 2 * 2;
  const double copy_ms = MemcpyMs(kv_bytes);
  if (!json) {
    std::printf(
        "GREEDY where nothing else is said, budget 0.3, %u tokens x %u layers x 8 heads x 128 float16 = %.1f GB raw; "
        "memcpy of it %.0f ms\n",
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
      {"OPTIMAL, NONE", ImportanceSource::kNone, false, 0, Allocator::kOptimal},
      {"OPTIMAL, SCORES", ImportanceSource::kScores, false, 0, Allocator::kOptimal},
      {"OPTIMAL, SCORES per layer", ImportanceSource::kScores, true, 0, Allocator::kOptimal},
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
      row.Add("kv_gb", static_cast<double>(kv_bytes) / 1e9)
          .Add("memcpy_s", copy_ms / 1e3)
          .Add("plan_s", ms / 1e3)
          .Print();
    } else {
      std::printf("%-44s %10.1f %17.2f%%\n", c.name, ms, 100 * ms / copy_ms);
    }
  }
  return RunSourceBench(json);
}

}  // namespace spectrumkv
