// `spectrumkv_bench codec`: GB/s of raw KV that each backend encodes, decodes and scans on one core, per tier, beside
// memcpy and the memory limits of the same run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/codec/backend.h"
#include "tests/bench/memory_limits.h"

namespace spectrumkv {
namespace bench {

struct CodecCase {
  const Backend* backend = nullptr;
  Tier tier = Tier::kRaw;  // of K and V
  DType dtype = DType::kFloat16;
  uint32_t heads = 8, head_dim = 128;
  uint64_t kv_bytes = 0;  // rounded down to whole chunks, at least one
  double budget_s = 0.1;  // CPU time of each measurement
};

struct CodecFigures {
  double encode_gbs = 0, decode_gbs = 0, scan_gbs = 0;
  double wire_ratio = 0;  // chunk bytes / KV bytes
};

// K with an offset per channel, V normal; planes [tokens][heads][head_dim]. All memory is touched before.
CodecFigures MeasureCodec(const CodecCase& c);

// One plane [chunks * chunk_tokens][heads][head_dim] of such values, the same in every chunk; `offset`: how far channels
// lie from zero.
std::vector<uint8_t> BenchPlane(const CodecCase& c, uint64_t chunks, uint64_t chunk_tokens, float offset);

}  // namespace bench

// argv: after the subcommand's name; --help lists the options. Returns the exit code.
int RunCodecBench(int argc, char** argv);

}  // namespace spectrumkv
