// The driver's management library (NVML), for the one figure that the CUDA runtime cannot give: the free memory of a
// device on which this process has no context. It comes with the driver, in containers with its capability "utility".
#pragma once

#include <cstdint>

namespace spectrumkv::gpu {

// Thread-safe. What is loaded stays loaded until the process ends.
class Management {
 public:
  // As dlopen takes it: "libnvidia-ml.so.1". Where it is not there, or does not start, nothing is known.
  explicit Management(const char* library);

  // Free memory of the device, or of the MIG instance, of this uuid. False where that is not known.
  bool FreeBytes(const uint8_t (&uuid)[16], uint64_t* bytes) const;

 private:
  // The functions of nvml.h that are called; 0 is NVML_SUCCESS, a device an opaque pointer.
  struct Memory {
    unsigned long long total, free, used;  // nvmlMemory_t
  };
  using Init = int (*)();
  using ByUuid = int (*)(const char* uuid, void** device);
  using MemoryInfo = int (*)(void* device, Memory* memory);
  ByUuid by_uuid_ = nullptr;  // null: nothing is known
  MemoryInfo memory_info_ = nullptr;
};

}  // namespace spectrumkv::gpu
