// Several chunks of different sizes in one launch, against each alone on the scalar backend.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/cuda/executor.h"

namespace spectrumkv::testing {

// Chunks of 1 to gpu::kMaxBatch dims of one kind: encoded together, one of them into room that is too small by a byte,
// decoded together, scanned and sampled together. Counts what is equal in *checks. Returns what differs, or "".
std::string RunBatchCase(const std::vector<ChunkDims>& dims, uint64_t seed, Executor* executor, uint64_t* checks);

// Dims of the kind that dtype and head_dim are of: other numbers of tokens and heads, with V and without.
std::vector<ChunkDims> BatchDims(DType dtype, uint32_t head_dim);

}  // namespace spectrumkv::testing
