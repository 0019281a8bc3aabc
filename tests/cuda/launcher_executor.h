// An Executor made of a Launcher for kernels/cuda/pipeline.cuh; include that first. MakeLauncher(memory) gives one.
#pragma once

#include <functional>

#include "tests/cuda/executor.h"

namespace spectrumkv::testing {

template <typename Launcher>
class LauncherExecutor final : public Executor {
 public:
  LauncherExecutor(std::string name, std::function<Launcher(const std::vector<shim::Range>&)> make_launcher)
      : name_(std::move(name)), make_launcher_(std::move(make_launcher)) {}

  std::string name() const override { return name_; }
  void Allow(std::vector<shim::Range> memory) override { memory_ = std::move(memory); }
  void EncodeBatch(const gpu::EncodeJob* jobs, uint32_t count, void* workspace) override {
    Launcher launch = make_launcher_(memory_);
    gpu::RunEncode(jobs, count, workspace, launch);
  }
  void DecodeBatch(const gpu::DecodeJob* jobs, uint32_t count, void* workspace) override {
    Launcher launch = make_launcher_(memory_);
    gpu::RunDecode(jobs, count, workspace, launch);
  }
  void ScanBatch(const gpu::ScanJob* jobs, uint32_t count) override {
    Launcher launch = make_launcher_(memory_);
    gpu::RunScan(jobs, count, launch);
  }
  void SpreadBatch(const gpu::SpreadJob* jobs, uint32_t count) override {
    Launcher launch = make_launcher_(memory_);
    gpu::RunSpread(jobs, count, launch);
  }
  void Attend(const gpu::AttendJob& job, void* workspace) override {
    Launcher launch = make_launcher_(memory_);
    gpu::RunAttend(job, workspace, launch);
  }
  void Zero(const gpu::ZeroJob& job) override {
    Launcher launch = make_launcher_(memory_);
    gpu::RunZero(job, launch);
  }

 private:
  std::string name_;
  std::function<Launcher(const std::vector<shim::Range>&)> make_launcher_;
  std::vector<shim::Range> memory_;
};

}  // namespace spectrumkv::testing
