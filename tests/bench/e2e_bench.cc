#include "tests/bench/e2e_bench.h"

#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/bench/baselines.h"
#include "tests/bench/cluster.h"
#include "tests/bench/peer_system.h"
#include "tests/bench/transfers.h"

namespace spectrumkv {
namespace bench {
namespace {

constexpr char kE2eUsage[] =
    "usage: spectrumkv_bench e2e [options]\n"
    "  --tokens N         of the transfer (8192)\n"
    "  --layers N --heads N --head-dim N --block-tokens N   (8, 8, 128, 16: pages of 32 KiB)\n"
    "  --repeat N         rounds, each with new processes and one counted transfer of each contestant (5)\n"
    "  --warm-up N        transfers of each before the counted one (2)\n"
    "  --variants LIST    RAW,P8,P4,Q8,Q4,Q3,Q2 b=BUDGET or greedy=BUDGET (RAW,P8,Q8,Q4,b=0.3)\n"
    "  --peers LIST       nixl,mooncake; none by default\n"
    "  --peer-python PATH --peer-dir DIR    interpreter with their packages, folder of their scripts\n"
    "  --link NAME        how the rows call the network (loopback)\n"
    "  --json             one JSON object per line\n";

struct E2eOptions {
  ClusterOptions cluster;
  Shape shape;
  uint32_t tokens = 8192, repeat = 5, warm_up = 2;
  std::vector<std::string> variants, peers;
  std::string peer_python = "python3", peer_dir = "tests/bench/peers", link = "loopback";
  bool json = false, help = false;

  bool Parse(int argc, char** argv) {
    Flags flags(std::string(kE2eUsage) + kClusterUsage);
    cluster.AddFlags(&flags);
    flags.Add("--tokens", &tokens, 1, 1 << 20);
    flags.Add("--layers", &shape.layers, 1, 256);
    flags.Add("--heads", &shape.heads, 1, 128);
    flags.Add("--head-dim", &shape.head_dim, 8, 1024);
    flags.Add("--block-tokens", &shape.block_tokens, 1, 1 << 16);
    flags.Add("--repeat", &repeat, 1, 1000);
    flags.Add("--variants", &variants);
    flags.Add("--peers", &peers);
    flags.Add("--peer-python", &peer_python);
    flags.Add("--peer-dir", &peer_dir);
    flags.Add("--warm-up", &warm_up, 1, 100);
    flags.Add("--link", &link);
    flags.Add("--json", &json);
    flags.Add("--help", &help);
    if (!flags.Parse(argc, argv) || !cluster.Finish()) return false;
    if (variants.empty()) variants = {"RAW", "P8", "Q8", "Q4", "b=0.3"};
    return true;
  }
};

// One line of the result: who moved the bytes, and the figures of its counted rounds.
struct Contestant {
  std::string name;
  std::vector<double> seconds, cpu_per_gb, first_layer_share;
  double wire_share = 1, relative_error = 0;
  void Count(const Cost& cost, double gb) {
    seconds.push_back(cost.seconds);
    cpu_per_gb.push_back(cost.cpu_s / gb);
  }
};

class Bench {
 public:
  explicit Bench(E2eOptions options) : options_(std::move(options)) {}

  absl::Status Prepare() {
    const Shape& shape = options_.shape;
    pages_ = shape.blocks_of(options_.tokens) * shape.layers * 2;
    gb_ = static_cast<double>(pages_ * shape.block_bytes()) * 1e-9;
    for (const std::string& name : options_.variants) {
      absl::StatusOr<Variant> variant = VariantOf(name);
      if (!variant.ok()) return variant.status();
      variants_.push_back(*std::move(variant));
      ours_.push_back({name});
    }
    for (const std::string& name : options_.peers) theirs_.push_back({name});
    return absl::OkStatus();
  }

  // All take turns, so that a machine that changes its speed changes it for all. And all processes are new in each
  // round and warmed up: a pair may be half as fast again as the next, for as long as it lives, with whatever system.
  // What arrived is checked in the first round.
  absl::Status Run() {
    for (uint32_t round = 0; round < options_.repeat; ++round) {
      absl::StatusOr<Cluster> cluster = Cluster::Start(options_.cluster);
      if (!cluster.ok()) return cluster.status();
      absl::StatusOr<Scene> scene = Scene::Create(*cluster, options_.shape, options_.tokens);
      if (!scene.ok()) return scene.status();
      absl::Status ran = RunBaselines(*scene);
      for (size_t i = 0; i < theirs_.size() && ran.ok(); ++i) ran = RunPeer(&theirs_[i], round == 0);
      if (ran.ok()) ran = RunOurs(*cluster, scene->request, round == 0);
      if (!ran.ok()) return ran;
    }
    return absl::OkStatus();
  }

  void Print() const {
    if (!options_.json) {
      std::printf("%u tokens, %.3f GB of raw KV in %llu pages of %llu bytes, %s, %s, medians of %u\n", options_.tokens,
                  gb_, static_cast<unsigned long long>(pages_),
                  static_cast<unsigned long long>(options_.shape.block_bytes()), options_.link.c_str(),
                  options_.cluster.security(), options_.repeat);
    }
    PrintRow(copy_, "baseline");
    PrintRow(socket_, "baseline");
    for (const Contestant& c : theirs_) PrintRow(c, "peer");
    for (const Contestant& c : ours_) PrintRow(c, "spectrumkv");
  }

 private:
  absl::Status RunBaselines(const Scene& scene) {
    const uint64_t bytes = pages_ * options_.shape.block_bytes();
    for (uint32_t move = 0; move <= options_.warm_up; ++move) {
      const Cost copy = MemcpyCost(scene.source->data(), scene.target->data(), bytes);
      absl::StatusOr<Cost> sent =
          SocketCost(options_.cluster.prefill, options_.cluster.decode, scene.source->data(), bytes);
      if (!sent.ok()) return sent.status();
      if (move == options_.warm_up) copy_.Count(copy, gb_), socket_.Count(*sent, gb_);
    }
    return absl::OkStatus();
  }

  absl::Status RunPeer(Contestant* contestant, bool check) {
    absl::StatusOr<std::unique_ptr<PeerSystem>> peer =
        PeerSystem::Start({contestant->name, options_.peer_python, options_.peer_dir, options_.cluster.prefill,
                           options_.cluster.decode, pages_, options_.shape.block_bytes()});
    if (!peer.ok()) return peer.status();
    for (uint32_t move = 0; move <= options_.warm_up; ++move) {
      absl::StatusOr<Cost> cost = (*peer)->Move();
      if (!cost.ok()) return cost.status();
      if (move == options_.warm_up) contestant->Count(*cost, gb_);
    }
    if (!check) return absl::OkStatus();
    absl::StatusOr<bool> verified = (*peer)->Verified();
    if (!verified.ok()) return verified.status();
    if (!*verified) return absl::DataLossError(contestant->name + " left pages that are not the source's");
    return absl::OkStatus();
  }

  absl::Status RunOurs(const Cluster& cluster, const Request& request, bool check) {
    for (uint32_t move = 0; move <= options_.warm_up; ++move) {
      for (size_t i = 0; i < variants_.size(); ++i) {
        if (check && move == 0) ClearTarget(request);
        const double cpu = cluster.CpuSeconds();
        absl::StatusOr<MoveTimes> times = Move(cluster, request, variants_[i]);
        if (!times.ok()) {
          return absl::Status(times.status().code(), variants_[i].name + ": " + std::string(times.status().message()));
        }
        const double used = cluster.CpuSeconds() - cpu;
        Contestant& c = ours_[i];
        if (move == options_.warm_up) {
          c.Count({times->committed_s, used}, gb_);
          c.first_layer_share.push_back(times->first_layer_s / times->committed_s);
        }
        if (!check || move > 0) continue;
        c.wire_share = static_cast<double>(times->report.wire_bytes()) / static_cast<double>(times->report.kv_bytes());
        c.relative_error = RelativeError(request);
        const double allowed = c.name == "RAW" ? 0 : 0.6;
        if (!(c.relative_error <= allowed)) {
          return absl::DataLossError(c.name + " arrived with relative error " + std::to_string(c.relative_error));
        }
      }
    }
    return absl::OkStatus();
  }

  void PrintRow(const Contestant& c, const char* kind) const {
    const Summary seconds = Summarize(c.seconds), cpu = Summarize(c.cpu_per_gb);
    const double to_socket = Summarize(socket_.seconds).median / seconds.median;
    if (!options_.json) {
      std::printf("%-10s %9.1f ms [%.1f..%.1f] %7.2f GB/s %7.3f of raw bytes %6.2fx socket %7.3f CPU-s/GB\n",
                  c.name.c_str(), seconds.median * 1e3, seconds.min * 1e3, seconds.max * 1e3, gb_ / seconds.median,
                  c.wire_share, to_socket, cpu.median);
      return;
    }
    JsonRow row;
    row.Add("bench", "e2e").Add("kind", kind).Add("name", c.name).Add("link", options_.link);
    row.Add("security", options_.cluster.security()).Add("page_bytes", options_.shape.block_bytes());
    row.Add("tokens", options_.tokens)
        .Add("layers", options_.shape.layers)
        .Add("kv_gb", gb_)
        .Add("repeat", options_.repeat);
    row.Add("seconds", seconds).Add("gb_per_second", gb_ / seconds.median).Add("ratio_to_socket", to_socket);
    row.Add("cpu_s_per_gb", cpu).Add("wire_share", c.wire_share);
    if (!c.first_layer_share.empty()) {
      row.Add("relative_error", c.relative_error).Add("first_layer_share", Summarize(c.first_layer_share));
    }
    row.Print();
  }

  const E2eOptions options_;
  uint64_t pages_ = 0;
  double gb_ = 0;
  std::vector<Variant> variants_;
  Contestant copy_{"memcpy"}, socket_{"socket"};
  std::vector<Contestant> ours_, theirs_;
};

}  // namespace
}  // namespace bench

int RunE2eBench(int argc, char** argv) {
  bench::E2eOptions options;
  if (!options.Parse(argc, argv)) return 2;
  if (options.help) {
    std::printf("%s%s", bench::kE2eUsage, bench::kClusterUsage);
    return 0;
  }
  bench::Bench bench(options);
  absl::Status status = bench.Prepare();
  if (status.ok()) status = bench.Run();
  if (!status.ok()) {
    std::fprintf(stderr, "e2e: %s\n", status.ToString().c_str());
    return 1;
  }
  bench.Print();
  return 0;
}

}  // namespace spectrumkv
