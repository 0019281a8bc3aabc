#include "tests/cuda/shim_executor.h"

#include "tests/cuda/shim/cuda_shim.h"
// Behind the shim:
#include "kernels/cuda/pipeline.cuh"
#include "tests/cuda/launcher_executor.h"

namespace spectrumkv::testing {

std::unique_ptr<Executor> MakeShimExecutor(shim::Order order, unsigned seed) {
  constexpr const char* kOrders[] = {"forward", "reverse", "random"};
  return std::make_unique<LauncherExecutor<shim::Launcher>>(std::string("shim, ") + kOrders[static_cast<int>(order)],
                                                            [order, seed](const std::vector<shim::Range>& memory) {
                                                              return shim::Launcher(shim::Options{order, seed, memory});
                                                            });
}

}  // namespace spectrumkv::testing
