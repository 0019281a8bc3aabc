// What queries attend to in one paged plane, on an executor and on the scalar backend: equal bit for bit.
#pragma once

#include <cstdint>
#include <string>

#include "tests/cuda/executor.h"
#include "tests/cuda/paged_pool.h"

namespace spectrumkv::testing {

struct AttendCase {
  ChunkDims dims;
  PoolShape shape;
  uint64_t seed = 1;
  uint32_t queries = 1;  // of each head
  uint32_t window = 0;
  float soft_cap = 0;
};

// Values of keys and queries of all kinds, those that are not finite too. Counts heads that are equal in *checks. Returns what
// differs, or "".
std::string RunAttendCase(const AttendCase& test, Executor* executor, uint64_t* checks);

}  // namespace spectrumkv::testing
