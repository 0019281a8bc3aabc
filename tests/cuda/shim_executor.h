// Runs the kernels, compiled as C++, on the shim.
#pragma once

#include <memory>

#include "tests/cuda/executor.h"

namespace spectrumkv::testing {

std::unique_ptr<Executor> MakeShimExecutor(shim::Order order, unsigned seed);

}  // namespace spectrumkv::testing
