#include "server/memory/available.h"

#include <algorithm>
#include <fstream>
#include <limits>

#include "server/base/status.h"

namespace spectrumkv {
namespace {

constexpr uint64_t kNoLimit = std::numeric_limits<uint64_t>::max();

// The number that follows `key` in a file of keys and values, in KiB; kNoLimit where there is none.
uint64_t MeminfoBytes(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    uint64_t kib = 0;
    if (word == key) return file >> kib && kib <= kNoLimit / 1024 ? kib * 1024 : kNoLimit;
  }
  return kNoLimit;
}

// A file of one number; kNoLimit for "max" and for what cannot be read.
uint64_t NumberIn(const std::string& path) {
  std::ifstream file(path);
  uint64_t number = 0;
  return file >> number ? number : kNoLimit;
}

}  // namespace

uint64_t AvailableMemoryBytes(const MemoryFiles& files) {
  const uint64_t machine = MeminfoBytes(files.meminfo, "MemAvailable:");
  const uint64_t max = NumberIn(files.cgroup_max);
  const uint64_t current = NumberIn(files.cgroup_current);
  if (max == kNoLimit || current == kNoLimit) return std::min(machine, max);
  return std::min(machine, max > current ? max - current : 0);
}

absl::Status CheckMemory(const std::string& what, uint64_t bytes, const MemoryFiles& files) {
  const uint64_t available = AvailableMemoryBytes(files);
  if (bytes <= available) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
      what + " " + std::to_string(bytes) + " bytes of memory, " + std::to_string(available) + " are available",
      {{"bytes", std::to_string(bytes)}, {"available_bytes", std::to_string(available)}});
}

}  // namespace spectrumkv
