// The functions of NVML that kernels/cuda/management.h calls, with the prototypes of nvml.h, over two devices: one GPU and
// one MIG instance. FAKE_MANAGEMENT_INIT: what starting comes to. FAKE_MANAGEMENT_FREE: bytes; unset: an error.
#include <cstdlib>
#include <cstring>

namespace {

constexpr int kSuccess = 0, kInvalidArgument = 2, kNotFound = 6, kUnknown = 999;
constexpr const char* kUuids[] = {"GPU-face0001-0203-0405-0607-08090a0b0c0d", "MIG-31600000-0000-0000-0000-000000000000"};

}  // namespace

extern "C" {

struct nvmlDevice_st;
using nvmlDevice_t = nvmlDevice_st*;
using nvmlReturn_t = int;
struct nvmlMemory_t {
  unsigned long long total, free, used;
};

nvmlReturn_t nvmlInit_v2() {
  const char* const code = std::getenv("FAKE_MANAGEMENT_INIT");
  return code == nullptr ? kSuccess : std::atoi(code);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char* uuid, nvmlDevice_t* device) {
  for (const char* const& known : kUuids) {
    if (std::strcmp(uuid, known) != 0) continue;
    *device = reinterpret_cast<nvmlDevice_t>(const_cast<const char**>(&known));
    return kSuccess;
  }
  return kNotFound;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t* memory) {
  if (device == nullptr || memory == nullptr) return kInvalidArgument;
  const char* const bytes = std::getenv("FAKE_MANAGEMENT_FREE");
  if (bytes == nullptr) return kUnknown;
  const unsigned long long free_bytes = std::strtoull(bytes, nullptr, 10);
  *memory = {free_bytes + 11, free_bytes, 11};
  return kSuccess;
}

}  // extern "C"
