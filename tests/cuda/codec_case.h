// One chunk on an executor and on the scalar backend: everything must be equal, bit for bit, and nothing else touched.
#pragma once

#include <cstdint>
#include <string>

#include "tests/cuda/executor.h"
#include "tests/cuda/paged_pool.h"

namespace spectrumkv::testing {

struct CodecCase {
  ChunkDims dims;
  PoolShape shape;
  uint64_t seed = 1;
  DType target = DType::kFloat16;  // of decoding
  // Tiers asked for: random ones where empty.
  std::vector<uint8_t> tiers;
};

std::string NameOf(const CodecCase& test);

// Encodes (room exact, room too small by one), decodes the chunk and one with other codes, scans, zeroes the tail, attends.
// Counts checks that passed in *checks. Returns what differs, or "".
std::string RunCodecCase(const CodecCase& test, Executor* executor, uint64_t* checks);

}  // namespace spectrumkv::testing
