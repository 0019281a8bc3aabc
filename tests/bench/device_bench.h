// `spectrumkv_bench codec --backend cuda`: GB/s of raw KV that the kernels encode, decode and scan in the memory of GPU 0,
// per tier, beside the copy bandwidth of the same run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cuda/runtime.h"

namespace spectrumkv::bench {

struct DeviceBenchOptions {
  std::string tier;  // empty: all
  std::vector<uint32_t> head_dims;
  std::vector<DType> dtypes;
  std::vector<uint64_t> kv_mib;
  double budget_s = 0.1;  // of each measurement
  bool json = false;
};

// The exit code: 77 where there is no GPU, after saying why; 1 where a call of the runtime failed.
int RunDeviceBench(const DeviceBenchOptions& options, gpu::Runtime* runtime);

}  // namespace spectrumkv::bench
