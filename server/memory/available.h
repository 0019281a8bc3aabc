// How much memory this process could still take.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace spectrumkv {

// Where the kernel says it. Others are for tests.
struct MemoryFiles {
  std::string meminfo = "/proc/meminfo";
  // Of the root of this process's cgroup namespace (v2): the limit of a container.
  std::string cgroup_max = "/sys/fs/cgroup/memory.max";
  std::string cgroup_current = "/sys/fs/cgroup/memory.current";
};

// Bytes that can be populated without swapping or a visit of the OOM killer: the least of what the files say. What
// cannot be read does not limit.
uint64_t AvailableMemoryBytes(const MemoryFiles& files = {});

// RESOURCE_EXHAUSTED OUT_OF_MEMORY where `what` ("memory.x needs") takes more than is available. Asked before memory is
// populated: afterwards the answer is a SIGKILL.
absl::Status CheckMemory(const std::string& what, uint64_t bytes, const MemoryFiles& files = {});

}  // namespace spectrumkv
