// Something that runs the jobs of kernels/cuda: the shim, the PTX interpreter or a device. What jobs point to lies in
// host memory; an executor for a device copies it.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/codec.h"
#include "tests/cuda/shim/block.h"

namespace spectrumkv::testing {

class Executor {
 public:
  virtual ~Executor() = default;
  virtual std::string name() const = 0;
  // All memory the next jobs may touch.
  virtual void Allow(std::vector<shim::Range> memory) = 0;
  virtual void EncodeBatch(const gpu::EncodeJob* jobs, uint32_t count, void* workspace) = 0;
  void Encode(const gpu::EncodeJob& job, void* workspace) { EncodeBatch(&job, 1, workspace); }
  virtual void DecodeBatch(const gpu::DecodeJob* jobs, uint32_t count, void* workspace) = 0;
  void Decode(const gpu::DecodeJob& job, void* workspace) { DecodeBatch(&job, 1, workspace); }
  virtual void ScanBatch(const gpu::ScanJob* jobs, uint32_t count) = 0;
  void Scan(const gpu::ScanJob& job) { ScanBatch(&job, 1); }
  virtual void SpreadBatch(const gpu::SpreadJob* jobs, uint32_t count) = 0;
  void Spread(const gpu::SpreadJob& job) { SpreadBatch(&job, 1); }
  virtual void Attend(const gpu::AttendJob& job, void* workspace) = 0;
  virtual void Zero(const gpu::ZeroJob& job) = 0;
};

}  // namespace spectrumkv::testing
