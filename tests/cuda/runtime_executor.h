// Runs jobs on a gpu::Runtime: on a GPU where there is one, or on the fake one. What a job points to is copied to the
// device before it and back after it, each piece at the alignment to 256 that it has on the host.
#pragma once

#include <memory>

#include "kernels/cuda/runtime.h"
#include "tests/cuda/executor.h"

namespace spectrumkv::testing {

// Device 0. Throws std::runtime_error where a call fails. `runtime` is borrowed.
std::unique_ptr<Executor> MakeRuntimeExecutor(gpu::Runtime* runtime);

}  // namespace spectrumkv::testing
