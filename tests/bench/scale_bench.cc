#include "tests/bench/scale_bench.h"

#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/bench/cluster.h"
#include "tests/bench/transfers.h"

namespace spectrumkv {
namespace bench {
namespace {

constexpr char kScaleUsage[] =
    "usage: spectrumkv_bench scale [options]\n"
    "  --sweeps LIST      tokens,layers,heads,block_tokens,streams,concurrent,blocks (all)\n"
    "  --variants LIST    RAW,P8,P4,Q8,Q4,Q3,Q2 or b=BUDGET (RAW,P8)\n"
    "  --repeat N         counted rounds; one more warms up (5)\n"
    "  --max-gib N        leaves out points whose pools are larger, both sides together (6)\n"
    "  --json             one JSON object per line\n";

// Given to the daemons, so that the staging memory is known here.
constexpr uint64_t kSendSlots = 32, kReceiveSlots = 64, kSlotMib = 2;

struct ScaleOptions {
  ClusterOptions cluster;
  std::vector<std::string> sweeps, variants;
  uint32_t repeat = 5, max_gib = 6;
  bool json = false, help = false;

  bool Parse(int argc, char** argv) {
    Flags flags(std::string(kScaleUsage) + kClusterUsage);
    cluster.AddFlags(&flags);
    flags.Add("--sweeps", &sweeps);
    flags.Add("--variants", &variants);
    flags.Add("--repeat", &repeat, 1, 1000);
    flags.Add("--max-gib", &max_gib, 1, 1024);
    flags.Add("--json", &json);
    flags.Add("--help", &help);
    if (!flags.Parse(argc, argv) || !cluster.Finish()) return false;
    if (variants.empty()) variants = {"RAW", "P8"};
    if (sweeps.empty()) sweeps = {"tokens", "layers", "heads", "block_tokens", "streams", "concurrent", "blocks"};
    for (const auto& [key, value] : {std::pair("send_slots", kSendSlots), std::pair("receive_slots", kReceiveSlots)}) {
      cluster.set.push_back(std::string("memory.") + key + "=" + std::to_string(value));
    }
    cluster.set.push_back("memory.slot_bytes=" + std::to_string(kSlotMib) + "MiB");
    return true;
  }
};

// One point of a sweep.
struct Point {
  const char* sweep;
  uint32_t value;
  Shape shape;
  uint32_t tokens;  // of one transfer
  uint32_t concurrent = 1;
  uint32_t streams = 0;  // 0: the daemon's default
  bool scattered = true;

  uint64_t blocks() const { return shape.blocks_of(tokens) * concurrent; }
  double kv_gb() const { return static_cast<double>(blocks() * shape.block_bytes() * shape.layers * 2) * 1e-9; }
};

std::vector<Point> PointsOf(const std::string& sweep) {
  std::vector<Point> points;
  const Shape base{8, 8, 128, 16, 0};
  if (sweep == "tokens") {
    for (uint32_t n : {1024, 4096, 16384, 65536}) points.push_back({"tokens", n, base, n});
  } else if (sweep == "layers") {
    for (uint32_t n : {1, 8, 32, 80}) points.push_back({"layers", n, {n, 8, 128, 16, 0}, 1024});
  } else if (sweep == "heads") {
    for (uint32_t n : {1, 2, 8, 32}) points.push_back({"heads", n, {8, n, 128, 16, 0}, 4096});
  } else if (sweep == "block_tokens") {
    for (uint32_t n : {1, 4, 16, 64, 256}) points.push_back({"block_tokens", n, {8, 8, 128, n, 0}, 8192});
  } else if (sweep == "streams") {
    for (uint32_t n : {1, 2, 4, 8}) points.push_back({"streams", n, base, 8192, 1, n});
  } else if (sweep == "concurrent") {
    for (uint32_t n : {1, 4, 16, 64}) points.push_back({"concurrent", n, base, 512, n});
  } else if (sweep == "blocks") {
    // One token of one head in each block: little but the list of blocks itself. Beside it the same tokens in one run.
    points.push_back({"blocks", 100000, {1, 1, 64, 1, 0}, 100000});
    points.push_back({"blocks", 1, {1, 1, 64, 1, 0}, 100000, 1, 0, false});
  }
  return points;
}

struct Round {
  double seconds = 0, cpu_s = 0;
  std::vector<MoveTimes> transfers;
};

class PointRun {
 public:
  PointRun(const ScaleOptions& options, Cluster* cluster, const Point& point)
      : options_(options), cluster_(cluster), point_(point) {}

  absl::Status Prepare() {
    Shape shape = point_.shape;
    shape.num_blocks = point_.blocks() + point_.blocks() / 16 + 1;
    for (auto [pool, daemon] : {std::pair(&source_, &cluster_->prefill), std::pair(&target_, &cluster_->decode)}) {
      absl::StatusOr<std::unique_ptr<Pool>> created = Pool::Create(daemon->get(), shape, pool == &source_ ? 1 : 2);
      if (!created.ok()) return created.status();
      *pool = *std::move(created);
    }
    Blocks from = ScatteredBlocks(shape, point_.blocks(), 7), to = ScatteredBlocks(shape, point_.blocks(), 8);
    if (!point_.scattered) {
      std::iota(from.begin(), from.end(), 0);
      std::iota(to.begin(), to.end(), 0);
    }
    const auto each = static_cast<int64_t>(point_.shape.blocks_of(point_.tokens));
    for (int64_t i = 0; i < point_.concurrent; ++i) {
      requests_.push_back({source_.get(), target_.get(), Blocks(from.begin() + i * each, from.begin() + (i + 1) * each),
                           Blocks(to.begin() + i * each, to.begin() + (i + 1) * each), point_.tokens});
    }
    return absl::OkStatus();
  }

  absl::Status Run(const Variant& variant) {
    std::vector<Round> rounds;
    for (const Request& request : requests_) ClearTarget(request);
    for (uint32_t i = 0; i <= options_.repeat; ++i) {
      absl::StatusOr<Round> round = RunRound(variant);
      if (!round.ok()) return round.status();
      if (i > 0) rounds.push_back(*std::move(round));
      for (const Request& request : requests_) {
        if (i == 0 && !(RelativeError(request) < 0.6)) return absl::DataLossError(variant.name + " arrived wrong");
      }
    }
    Print(variant, rounds);
    return absl::OkStatus();
  }

 private:
  // All requests at once, each from a thread of its own.
  absl::StatusOr<Round> RunRound(const Variant& variant) {
    std::vector<absl::StatusOr<MoveTimes>> results(requests_.size(), absl::UnknownError("not run"));
    std::vector<std::thread> threads;
    std::mutex mutex;
    std::condition_variable gate;
    bool open = false;
    for (size_t i = 0; i < requests_.size(); ++i) {
      threads.emplace_back([&, i] {
        {
          std::unique_lock<std::mutex> lock(mutex);
          gate.wait(lock, [&] { return open; });
        }
        results[i] = Move(*cluster_, requests_[i], variant);
      });
    }
    Round round;
    const double cpu = cluster_->CpuSeconds(), begin = Now();
    {
      std::lock_guard<std::mutex> lock(mutex);
      open = true;
    }
    gate.notify_all();
    for (std::thread& thread : threads) thread.join();
    round.seconds = Now() - begin;
    round.cpu_s = cluster_->CpuSeconds() - cpu;
    for (absl::StatusOr<MoveTimes>& result : results) {
      if (!result.ok()) return result.status();
      round.transfers.push_back(*std::move(result));
    }
    return round;
  }

  void Print(const Variant& variant, const std::vector<Round>& rounds) const {
    std::vector<double> seconds, cpu, expect, send_call, unfair;
    for (const Round& round : rounds) {
      // With one transfer: from Send, as elsewhere; with several: from the first Expect to the last end.
      seconds.push_back(point_.concurrent == 1 ? round.transfers[0].committed_s : round.seconds);
      cpu.push_back(round.cpu_s / point_.kv_gb());
      std::vector<double> ends;
      for (const MoveTimes& times : round.transfers) {
        ends.push_back(times.total_s);
        expect.push_back(times.expect_s);
        send_call.push_back(times.send_call_s);
      }
      const Summary s = Summarize(ends);
      unfair.push_back(s.max / s.median);
    }
    const Summary took = Summarize(seconds), cpu_per_gb = Summarize(cpu), slowest = Summarize(unfair);
    const double prefill_mib = static_cast<double>(ProcessOwnBytes(cluster_->prefill->pid())) / (1 << 20);
    const double decode_mib = static_cast<double>(ProcessOwnBytes(cluster_->decode->pid())) / (1 << 20);
    if (!options_.json) {
      std::printf(
          "%-12s %6u %-6s %8.1f ms [%.1f..%.1f] %6.2f GB/s %6.3f CPU-s/GB; memory %4.0f and %4.0f MiB; "
          "slowest/median %.2f; Expect %.2f ms, Send %.2f ms\n",
          point_.sweep, point_.value, variant.name.c_str(), took.median * 1e3, took.min * 1e3, took.max * 1e3,
          point_.kv_gb() / took.median, cpu_per_gb.median, prefill_mib, decode_mib, slowest.median,
          Summarize(expect).median * 1e3, Summarize(send_call).median * 1e3);
      std::fflush(stdout);
      return;
    }
    JsonRow row;
    row.Add("bench", "scale").Add("sweep", point_.sweep).Add("value", point_.value).Add("name", variant.name);
    row.Add("kv_gb", point_.kv_gb()).Add("repeat", options_.repeat).Add("seconds", took);
    row.Add("gb_per_second", point_.kv_gb() / took.median).Add("cpu_s_per_gb", cpu_per_gb);
    row.Add("prefill_mib", prefill_mib).Add("decode_mib", decode_mib).Add("slowest_to_median", slowest);
    row.Add("staging_mib", (kSendSlots + kReceiveSlots) * kSlotMib);
    row.Add("expect_s", Summarize(expect)).Add("send_call_s", Summarize(send_call)).Print();
  }

  const ScaleOptions& options_;
  Cluster* cluster_;
  const Point point_;
  std::unique_ptr<Pool> source_, target_;
  std::vector<Request> requests_;
};

// Fresh daemons for each point: its memory is its own, and so are its streams.
absl::Status RunPoint(const ScaleOptions& options, const Point& point) {
  const double gib = 2 * point.kv_gb() * 1e9 / (1 << 30);
  if (gib > options.max_gib) {
    std::fprintf(stderr, "scale: left out %s=%u: its pools need %.1f GiB, --max-gib is %u\n", point.sweep, point.value,
                 gib, options.max_gib);
    return absl::OkStatus();
  }
  ClusterOptions with_streams = options.cluster;
  if (point.streams > 0) with_streams.set.push_back("peer.streams=" + std::to_string(point.streams));
  absl::StatusOr<Cluster> cluster = Cluster::Start(with_streams);
  if (!cluster.ok()) return cluster.status();
  PointRun run(options, &*cluster, point);
  if (absl::Status ready = run.Prepare(); !ready.ok()) return ready;
  for (const std::string& name : options.variants) {
    absl::StatusOr<Variant> variant = VariantOf(name);
    if (!variant.ok()) return variant.status();
    if (absl::Status ran = run.Run(*variant); !ran.ok()) return ran;
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace bench

int RunScaleBench(int argc, char** argv) {
  bench::ScaleOptions options;
  if (!options.Parse(argc, argv)) return 2;
  if (options.help) {
    std::printf("%s%s", bench::kScaleUsage, bench::kClusterUsage);
    return 0;
  }
  for (const std::string& sweep : options.sweeps) {
    const std::vector<bench::Point> points = bench::PointsOf(sweep);
    if (points.empty()) {
      std::fprintf(stderr, "scale: unknown sweep '%s'\n%s", sweep.c_str(), bench::kScaleUsage);
      return 2;
    }
    for (const bench::Point& point : points) {
      if (absl::Status ran = bench::RunPoint(options, point); !ran.ok()) {
        std::fprintf(stderr, "scale %s=%u: %s\n", point.sweep, point.value, ran.ToString().c_str());
        return 1;
      }
    }
  }
  return 0;
}

}  // namespace spectrumkv
