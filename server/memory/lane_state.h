// What a lane keeps between its uses. Internal to server/memory.
#pragma once

#include <atomic>
#include <cstdint>

#include "kernels/cuda/runtime.h"

namespace spectrumkv {

struct LaneState {
  gpu::DeviceStream stream;
  void* pinned = nullptr;
  void* on_device = nullptr;
  uint64_t pinned_bytes = 0;
  std::atomic<uint64_t> on_device_bytes{0};  // read by Device::use
};

}  // namespace spectrumkv
