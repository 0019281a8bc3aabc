#include "kernels/cuda/management.h"

#include <dlfcn.h>

#include <cstdio>
#include <initializer_list>

namespace spectrumkv::gpu {
namespace {

constexpr int kNvmlSuccess = 0;

template <typename Function>
Function Symbol(void* library, const char* name) {
  return reinterpret_cast<Function>(dlsym(library, name));
}

}  // namespace

Management::Management(const char* library) {
  void* const loaded = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (loaded == nullptr) return;
  const auto init = Symbol<Init>(loaded, "nvmlInit_v2");
  const auto by_uuid = Symbol<ByUuid>(loaded, "nvmlDeviceGetHandleByUUID");
  memory_info_ = Symbol<MemoryInfo>(loaded, "nvmlDeviceGetMemoryInfo");
  if (init == nullptr || by_uuid == nullptr || memory_info_ == nullptr || init() != kNvmlSuccess) return;
  by_uuid_ = by_uuid;
}

bool Management::FreeBytes(const uint8_t (&uuid)[16], uint64_t* bytes) const {
  if (by_uuid_ == nullptr) return false;
  const uint8_t(&u)[16] = uuid;
  // The runtime does not say whether a uuid is a GPU's or a MIG instance's.
  for (const char* kind : {"GPU", "MIG"}) {
    char text[64];
    std::snprintf(text, sizeof(text), "%s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", kind, u[0],
                  u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
    void* device = nullptr;
    Memory memory{};
    if (by_uuid_(text, &device) != kNvmlSuccess || memory_info_(device, &memory) != kNvmlSuccess) continue;
    *bytes = memory.free;
    return true;
  }
  return false;
}

}  // namespace spectrumkv::gpu
