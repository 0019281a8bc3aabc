#include "tests/cuda/ptx_executor.h"

#include "tests/cuda/shim/cuda_shim.h"
// Behind the shim:
#include "kernels/cuda/pipeline.cuh"
#include "tests/cuda/launcher_executor.h"
#include "tests/cuda/ptx_launcher.h"

namespace spectrumkv::testing {
std::unique_ptr<Executor> MakePtxExecutor(const ptx::Module* module, shim::Order order, unsigned seed,
                                          ptx::Counters* counters) {
  return std::make_unique<LauncherExecutor<PtxLauncher>>(
      "PTX", [module, order, seed, counters](const std::vector<shim::Range>& memory) {
        return PtxLauncher(module, shim::Options{order, seed, memory}, counters);
      });
}

}  // namespace spectrumkv::testing
