// Whether this process may have as many threads as it is going to start.
#pragma once

#include <cstddef>

#include "absl/status/status.h"

namespace spectrumkv {

// Starts `count` threads at once and ends them again: the only question that all limits answer (RLIMIT_NPROC, the pids
// of a cgroup, the kernel's own). RESOURCE_EXHAUSTED OUT_OF_THREADS says how many could be had, and the limits that can be
// read. Asked before parts are built that cannot report it: a library that gets no thread aborts.
absl::Status CheckThreads(size_t count);

}  // namespace spectrumkv
