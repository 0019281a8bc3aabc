#include "tests/cuda/ptx_executor.h"

#include <dlfcn.h>

#include "tests/cuda/shim/cuda_shim.h"
// Behind the shim:
#include "kernels/cuda/pipeline.cuh"
#include "tests/cuda/launcher_executor.h"

namespace spectrumkv::testing {
namespace {

// The kernel as C++ is here for its name alone: nvcc and the C++ compiler mangle alike.
class PtxLauncher {
 public:
  PtxLauncher(const ptx::Module* module, shim::Options options, ptx::Counters* counters)
      : module_(module), machine_(std::move(options)), counters_(counters) {}
  ~PtxLauncher() {
    if (counters_ == nullptr) return;
    counters_->instructions += machine_.counters().instructions;
    counters_->global_read_bytes += machine_.counters().global_read_bytes;
    counters_->global_written_bytes += machine_.counters().global_written_bytes;
  }

  template <typename Args>
  void operator()(void (*kernel)(const Args), uint32_t blocks, uint32_t threads, const Args& args) {
    Dl_info info;
    if (dladdr(reinterpret_cast<void*>(kernel), &info) == 0 || info.dli_sname == nullptr) {
      throw ptx::Fault("a kernel without a name: is the program linked with its symbols exported?");
    }
    machine_.Launch(module_->Find(info.dli_sname), blocks, threads, &args, sizeof(args));
  }

 private:
  const ptx::Module* module_;
  ptx::Machine machine_;
  ptx::Counters* counters_;
};

}  // namespace

std::unique_ptr<Executor> MakePtxExecutor(const ptx::Module* module, shim::Order order, unsigned seed,
                                          ptx::Counters* counters) {
  return std::make_unique<LauncherExecutor<PtxLauncher>>(
      "PTX", [module, order, seed, counters](const std::vector<shim::Range>& memory) {
        return PtxLauncher(module, shim::Options{order, seed, memory}, counters);
      });
}

}  // namespace spectrumkv::testing
