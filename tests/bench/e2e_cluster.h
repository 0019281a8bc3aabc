// Two spectrumkvd processes and shared-memory pools of one worker each, for benchmarks.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "spectrumkv/v1/worker_service.grpc.pb.h"

namespace spectrumkv {

// A daemon process with plain TCP on a free loopback port; ended by its pid in the destructor.
class BenchDaemon {
 public:
  // Starts `binary` with a directory of its own; waits until it is ready.
  static absl::StatusOr<std::unique_ptr<BenchDaemon>> Start(const std::string& binary, const std::string& name);
  ~BenchDaemon();
  v1::WorkerService::Stub* worker() { return worker_.get(); }
  const std::string& peer_address() const { return peer_; }
  pid_t pid() const { return pid_; }

 private:
  BenchDaemon() = default;
  pid_t pid_ = -1;
  std::string dir_, peer_;
  std::unique_ptr<v1::WorkerService::Stub> worker_;
};

// [layers][K, V][num_blocks, block_tokens, heads, head_dim] float16 in one POSIX shared memory segment.
class BenchPool {
 public:
  struct Shape {
    uint32_t layers = 8, heads = 8, head_dim = 128, block_tokens = 16;
    uint64_t num_blocks = 0;
  };
  static absl::StatusOr<std::unique_ptr<BenchPool>> Create(BenchDaemon* daemon, const Shape& shape, uint32_t seed);
  ~BenchPool();
  const v1::PoolRef& ref() const { return ref_; }
  uint64_t bytes() const { return bytes_; }
  uint8_t* data() const { return data_; }

 private:
  BenchPool() = default;
  std::string name_;
  uint8_t* data_ = nullptr;
  uint64_t bytes_ = 0;
  v1::PoolRef ref_;
};

}  // namespace spectrumkv
