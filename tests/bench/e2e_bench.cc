#include "tests/bench/e2e_bench.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "grpcpp/grpcpp.h"
#include "tests/bench/e2e_cluster.h"

namespace spectrumkv {
namespace {

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double MemcpySeconds(const uint8_t* from, uint8_t* to, uint64_t bytes) {
  const double begin = Now();
  memcpy(to, from, bytes);
  return Now() - begin;
}

// One connection, 1 MiB writes and reads; -1 where sockets fail.
double SocketSeconds(const uint8_t* from, uint64_t bytes) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), length) != 0 || listen(listener, 1) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    return -1;
  }
  std::thread writer([&] {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) {
      for (uint64_t at = 0; at < bytes;) {
        const ssize_t n = send(fd, from + at, std::min<uint64_t>(1 << 20, bytes - at), MSG_NOSIGNAL);
        if (n <= 0) break;
        at += static_cast<uint64_t>(n);
      }
    }
    close(fd);
  });
  const int fd = accept(listener, nullptr, nullptr);
  std::vector<uint8_t> buffer(1 << 20);
  const double begin = Now();
  uint64_t got = 0;
  for (ssize_t n; (n = recv(fd, buffer.data(), buffer.size(), 0)) > 0;) got += static_cast<uint64_t>(n);
  const double seconds = Now() - begin;
  writer.join();
  close(fd);
  close(listener);
  return got == bytes ? seconds : -1;
}

struct Variant {
  const char* name;
  v1::Allocator allocator;
  v1::Tier tier;  // for UNIFORM
  double budget;
};

// CPU seconds (user and system) a process has used.
double CpuSeconds(pid_t pid) {
  char path[64];
  snprintf(path, sizeof(path), "/proc/%d/stat", pid);
  FILE* file = fopen(path, "r");
  if (file == nullptr) return 0;
  unsigned long user = 0, system = 0;
  const int fields = fscanf(file, "%*d %*s %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user, &system);
  fclose(file);
  return fields == 2 ? static_cast<double>(user + system) / static_cast<double>(sysconf(_SC_CLK_TCK)) : 0;
}

struct Bench {
  std::unique_ptr<BenchDaemon> prefill, decode;
  std::unique_ptr<BenchPool> source, target;
  std::vector<uint64_t> source_blocks, target_blocks;
  uint32_t tokens = 0;
  int next_id = 0;

  static void AddBlocks(const std::vector<uint64_t>& blocks, v1::GroupBlocks* out) {
    for (uint64_t block : blocks) {
      v1::BlockRun* run = out->add_runs();
      run->set_first(block);
      run->set_count(1);
    }
  }

  // Seconds from Send to the receiver's COMMITTED.
  absl::StatusOr<v1::TransferReport> Move(const Variant& variant, double* seconds) {
    const std::string id = absl::StrCat("bench-", next_id++);
    v1::ExpectRequest expect;
    expect.set_transfer_id(id);
    *expect.mutable_pool() = target->ref();
    expect.set_token_count(tokens);
    AddBlocks(target_blocks, expect.add_blocks());
    v1::ExpectResponse expected;
    grpc::ClientContext expect_context;
    grpc::Status status = decode->worker()->Expect(&expect_context, expect, &expected);
    if (!status.ok()) return absl::UnknownError(status.error_message());
    v1::SendRequest send;
    send.set_transfer_id(id);
    send.set_peer(prefill == nullptr ? "" : decode->peer_address());
    *send.mutable_pool() = source->ref();
    send.set_token_count(tokens);
    AddBlocks(source_blocks, send.add_blocks());
    send.mutable_policy()->set_allocator(variant.allocator);
    send.mutable_policy()->set_uniform_tier(variant.tier);
    send.mutable_policy()->set_budget(variant.budget);
    if (variant.allocator == v1::ALLOCATOR_UNIFORM) {
      send.mutable_policy()->add_tiers(v1::TIER_RAW);
      send.mutable_policy()->add_tiers(variant.tier);
      send.mutable_policy()->mutable_importance()->set_sinks(0);
    }
    v1::WatchTransferRequest watch;
    watch.mutable_transfer()->set_transfer_id(id);
    grpc::ClientContext watch_context;
    auto events = decode->worker()->WatchTransfer(&watch_context, watch);
    const double begin = Now();
    v1::SendResponse sent;
    grpc::ClientContext send_context;
    status = prefill->worker()->Send(&send_context, send, &sent);
    if (!status.ok()) return absl::UnknownError(status.error_message());
    v1::WatchTransferResponse event;
    while (events->Read(&event)) {
      if (!event.has_terminal()) continue;
      *seconds = Now() - begin;
      if (event.terminal().state() != v1::TRANSFER_STATE_COMMITTED) return absl::UnknownError(event.terminal().message());
      return event.terminal();
    }
    return absl::UnknownError("the watch ended without a terminal event");
  }
};

absl::Status Prepare(const std::string& daemon_path, uint32_t tokens, Bench* bench) {
  absl::StatusOr<std::unique_ptr<BenchDaemon>> prefill = BenchDaemon::Start(daemon_path, "prefill");
  if (!prefill.ok()) return prefill.status();
  bench->prefill = *std::move(prefill);
  absl::StatusOr<std::unique_ptr<BenchDaemon>> decode = BenchDaemon::Start(daemon_path, "decode");
  if (!decode.ok()) return decode.status();
  bench->decode = *std::move(decode);
  bench->tokens = tokens;
  BenchPool::Shape shape;
  const uint64_t needed = (tokens + shape.block_tokens - 1) / shape.block_tokens;
  shape.num_blocks = needed + needed / 4;
  absl::StatusOr<std::unique_ptr<BenchPool>> source = BenchPool::Create(bench->prefill.get(), shape, 1);
  if (!source.ok()) return source.status();
  bench->source = *std::move(source);
  absl::StatusOr<std::unique_ptr<BenchPool>> target = BenchPool::Create(bench->decode.get(), shape, 2);
  if (!target.ok()) return target.status();
  bench->target = *std::move(target);
  std::vector<uint64_t> blocks(shape.num_blocks);
  std::iota(blocks.begin(), blocks.end(), 0);
  std::mt19937 rng(7);
  std::shuffle(blocks.begin(), blocks.end(), rng);
  bench->source_blocks.assign(blocks.begin(), blocks.begin() + static_cast<int64_t>(needed));
  std::shuffle(blocks.begin(), blocks.end(), rng);
  bench->target_blocks.assign(blocks.begin(), blocks.begin() + static_cast<int64_t>(needed));
  return absl::OkStatus();
}

void PrintRow(bool json, const std::string& name, double seconds, double kv_gb, double wire_share, double socket,
              double cpu) {
  if (json) {
    printf("{\"bench\":\"e2e\",\"variant\":\"%s\",\"seconds\":%.6f,\"kv_gb_per_second\":%.3f,\"wire_share\":%.4f,"
           "\"ratio_to_socket\":%.3f,\"cpu_seconds_per_gb\":%.3f}\n",
           name.c_str(), seconds, kv_gb / seconds, wire_share, socket / seconds, cpu);
  } else {
    printf("%-14s %9.1f ms %8.2f GB/s %7.3f of raw bytes %7.2fx socket %7.3f CPU-s/GB\n", name.c_str(), seconds * 1e3,
           kv_gb / seconds, wire_share, socket / seconds, cpu);
  }
}

}  // namespace

int RunE2eBench(int argc, char** argv) {
  std::string daemon_path = "spectrumkvd";
  uint32_t tokens = 8192;
  int repeat = 5;
  bool json = false;
  for (int i = 0; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--json") json = true;
    else if (arg == "--daemon" && i + 1 < argc) daemon_path = argv[++i];
    else if (arg == "--tokens" && i + 1 < argc) tokens = static_cast<uint32_t>(std::max(1, atoi(argv[++i])));
    else if (arg == "--repeat" && i + 1 < argc) repeat = std::max(1, atoi(argv[++i]));
    else {
      fprintf(stderr, "usage: spectrumkv_bench e2e [--daemon PATH] [--tokens N] [--repeat N] [--json]\n");
      return 2;
    }
  }
  Bench bench;
  if (absl::Status ready = Prepare(daemon_path, tokens, &bench); !ready.ok()) {
    fprintf(stderr, "e2e: %s\n", ready.ToString().c_str());
    return 1;
  }
  const Variant variants[] = {{"RAW", v1::ALLOCATOR_RAW, v1::TIER_UNSPECIFIED, 1.1},
                              {"P8", v1::ALLOCATOR_UNIFORM, v1::TIER_P8, 0.6},
                              {"Q8", v1::ALLOCATOR_UNIFORM, v1::TIER_Q8, 0.6},
                              {"Q4", v1::ALLOCATOR_UNIFORM, v1::TIER_Q4, 0.4},
                              {"GREEDY b=0.3", v1::ALLOCATOR_GREEDY, v1::TIER_UNSPECIFIED, 0.3}};
  constexpr size_t kVariants = sizeof(variants) / sizeof(variants[0]);
  std::vector<double> seconds[kVariants], cpu[kVariants], sockets, copies;
  double share[kVariants] = {};
  uint64_t kv_bytes = 0;
  // The first round warms connections and memory and is not counted. Variants alternate, so that drift hits all alike.
  for (int round = 0; round <= repeat; ++round) {
    for (size_t v = 0; v < kVariants; ++v) {
      double took = 0;
      const double cpu_before = CpuSeconds(bench.prefill->pid()) + CpuSeconds(bench.decode->pid());
      absl::StatusOr<v1::TransferReport> report = bench.Move(variants[v], &took);
      if (!report.ok()) {
        fprintf(stderr, "e2e %s: %s\n", variants[v].name, report.status().ToString().c_str());
        return 1;
      }
      const double cpu_after = CpuSeconds(bench.prefill->pid()) + CpuSeconds(bench.decode->pid());
      kv_bytes = report->kv_bytes();
      share[v] = static_cast<double>(report->wire_bytes()) / static_cast<double>(kv_bytes);
      if (round == 0) continue;
      seconds[v].push_back(took);
      cpu[v].push_back((cpu_after - cpu_before) / (static_cast<double>(kv_bytes) * 1e-9));
    }
    const uint64_t bytes = std::min(kv_bytes, bench.source->bytes());
    const double socket_seconds = SocketSeconds(bench.source->data(), bytes);
    const double copy_seconds = MemcpySeconds(bench.source->data(), bench.target->data(), bytes);
    if (round == 0) continue;
    sockets.push_back(socket_seconds);
    copies.push_back(copy_seconds);
  }
  const double gb = static_cast<double>(kv_bytes) * 1e-9;
  const double socket = Median(sockets);
  if (!json) printf("%u tokens, %.3f GB of raw KV, 32 KiB pages, loopback, medians of %d\n", tokens, gb, repeat);
  PrintRow(json, "memcpy", Median(copies), gb, 1, socket, 0);
  PrintRow(json, "TCP socket", socket, gb, 1, socket, 0);
  for (size_t v = 0; v < kVariants; ++v) {
    PrintRow(json, variants[v].name, Median(seconds[v]), gb, share[v], socket, Median(cpu[v]));
  }
  if (!json) {
    printf("goal RAW/socket measured %.2f wanted 0.60\n", socket / Median(seconds[0]));
    printf("goal P8/RAW measured %.2f wanted > 1\n", Median(seconds[0]) / Median(seconds[1]));
  }
  return 0;
}

}  // namespace spectrumkv
