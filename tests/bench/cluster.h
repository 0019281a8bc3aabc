// Two spectrumkvd processes and shared-memory pools of one worker each, for benchmarks.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "spectrumkv/v1/worker_service.grpc.pb.h"
#include "tests/bench/bench_util.h"

namespace spectrumkv::bench {

// Where a side runs.
struct Place {
  std::string netns;  // network namespace, or empty
  std::string host = "127.0.0.1";
};

// fork(), and the child is killed when this thread ends, so that an interrupted benchmark leaves no process.
pid_t ForkChild();
// Ends a child process: SIGTERM, after some seconds SIGKILL; returns when it has ended.
void EndProcess(pid_t pid);

// What every benchmark with daemons may be told.
struct ClusterOptions {
  std::string daemon = "spectrumkvd";
  Place prefill, decode;
  std::string tls_dir;           // with ca.pem, cert.pem, key.pem: mutual TLS. Empty: plain
  std::vector<std::string> set;  // KEY=VALUE for both daemons
  std::vector<std::string> netns, hosts;

  void AddFlags(Flags* flags);
  // Takes --netns and --hosts apart. False after words on stderr.
  bool Finish();
  const char* security() const { return tls_dir.empty() ? "plain" : "mtls"; }
};
extern const char kClusterUsage[];

// A daemon process with a free port of its host; killed in the destructor.
class Daemon {
 public:
  // Starts it with a directory of its own; waits until it is ready.
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(const ClusterOptions& options, const Place& place);
  ~Daemon();
  v1::WorkerService::Stub* worker() { return worker_.get(); }
  const std::string& peer_address() const { return peer_; }
  pid_t pid() const { return pid_; }

 private:
  Daemon() = default;
  pid_t pid_ = -1;
  std::string dir_, peer_;
  std::unique_ptr<v1::WorkerService::Stub> worker_;
};

struct Cluster {
  static absl::StatusOr<Cluster> Start(const ClusterOptions& options);
  double CpuSeconds() const { return ProcessCpuSeconds(prefill->pid()) + ProcessCpuSeconds(decode->pid()); }
  std::unique_ptr<Daemon> prefill, decode;
};

struct Shape {
  uint32_t layers = 8, heads = 8, head_dim = 128, block_tokens = 16;
  uint64_t num_blocks = 0;
  // One block of one tensor: the page.
  uint64_t block_bytes() const { return uint64_t{block_tokens} * heads * head_dim * 2; }
  uint64_t blocks_of(uint32_t tokens) const { return (tokens + block_tokens - 1) / block_tokens; }
};

// [layers][K, V][num_blocks, block_tokens, heads, head_dim] float16 in one POSIX shared memory segment, of normal values.
class Pool {
 public:
  static absl::StatusOr<std::unique_ptr<Pool>> Create(Daemon* daemon, const Shape& shape, uint32_t seed);
  // Unregisters it; the daemon must live.
  ~Pool();
  const v1::PoolRef& ref() const { return ref_; }
  const Shape& shape() const { return shape_; }
  uint64_t bytes() const { return bytes_; }
  uint8_t* data() const { return data_; }
  // tensor: 2 * layer, and one more for V.
  uint8_t* block(uint32_t tensor, uint64_t block) const {
    return data_ + (tensor * shape_.num_blocks + block) * shape_.block_bytes();
  }

 private:
  Pool() = default;
  absl::Status Map();
  absl::Status Register();
  std::string name_;
  Daemon* daemon_ = nullptr;
  Shape shape_;
  uint8_t* data_ = nullptr;
  uint64_t bytes_ = 0;
  v1::PoolRef ref_;
};

// Two daemons for `run`. The exit status of the benchmark `name`: 1 after words on stderr where something failed.
int RunOnCluster(const char* name, const ClusterOptions& options, const std::function<absl::Status(const Cluster&)>& run);

}  // namespace spectrumkv::bench
