#include "tests/cuda/shim_executor.h"

#include "tests/cuda/shim/cuda_shim.h"
// Behind the shim:
#include "kernels/cuda/pipeline.cuh"

namespace spectrumkv::testing {
namespace {

class ShimExecutor final : public Executor {
 public:
  explicit ShimExecutor(const shim::Options& options) : options_(options) {}

  std::string name() const override {
    constexpr const char* kOrders[] = {"forward", "reverse", "random"};
    return std::string("shim, ") + kOrders[static_cast<int>(options_.order)];
  }
  void Allow(std::vector<shim::Range> memory) override { options_.memory = std::move(memory); }
  void Encode(const gpu::EncodeJob& job, void* workspace) override {
    shim::Launcher launch(options_);
    gpu::RunEncode(job, workspace, launch);
  }
  void Decode(const gpu::DecodeJob& job, void* workspace) override {
    shim::Launcher launch(options_);
    gpu::RunDecode(job, workspace, launch);
  }
  void Scan(const gpu::ScanJob& job) override {
    shim::Launcher launch(options_);
    gpu::RunScan(job, launch);
  }
  void Zero(const gpu::ZeroJob& job) override {
    shim::Launcher launch(options_);
    gpu::RunZero(job, launch);
  }

 private:
  shim::Options options_;
};

}  // namespace

std::unique_ptr<Executor> MakeShimExecutor(shim::Order order, unsigned seed) {
  return std::make_unique<ShimExecutor>(shim::Options{order, seed, {}});
}

}  // namespace spectrumkv::testing
