// Runs the PTX that nvcc wrote of the kernels, in the interpreter.
#pragma once

#include <memory>

#include "tests/cuda/executor.h"
#include "tests/cuda/ptx/machine.h"
#include "tests/cuda/ptx/parser.h"

namespace spectrumkv::testing {

// The module must live as long; counters (may be null) are added to.
std::unique_ptr<Executor> MakePtxExecutor(const ptx::Module* module, shim::Order order, unsigned seed,
                                          ptx::Counters* counters);

}  // namespace spectrumkv::testing
