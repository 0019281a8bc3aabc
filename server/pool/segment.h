// Where a segment of a pool lies: in host memory that is mapped here, or in the memory of a GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "server/memory/device.h"
#include "server/memory/mapping.h"

namespace spectrumkv {

// Unmapped, freed or closed when destroyed. Thread-safe, but for what is in the memory.
class Segment {
 public:
  explicit Segment(std::unique_ptr<Mapping> host) : host_(std::move(host)) {}
  explicit Segment(std::unique_ptr<DeviceMemory> memory) : device_memory_(std::move(memory)) {}

  // An address of this process or, where device() is not null, of that device: the host must not read or write there.
  uint8_t* data() const { return host_ != nullptr ? host_->data() : device_memory_->data(); }
  uint64_t size() const { return host_ != nullptr ? host_->size() : device_memory_->size(); }
  Device* device() const { return device_memory_ != nullptr ? device_memory_->device() : nullptr; }
  const Mapping* host() const { return host_.get(); }

  // True for ever once what is in the memory must not be trusted any more: it was truncated, or its GPU has failed.
  bool failed() const { return host_ != nullptr ? host_->failed() : !device_memory_->device()->Health().ok(); }
  bool StillWhole() const { return host_ != nullptr ? host_->StillWhole() : !failed(); }

 private:
  const std::unique_ptr<Mapping> host_;
  const std::unique_ptr<DeviceMemory> device_memory_;
};

}  // namespace spectrumkv
