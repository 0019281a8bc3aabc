// What kernels are given, and where a job's intermediate results lie in its workspace. Internal to kernels/cuda.
#pragma once

#include "kernels/cuda/codec.h"

namespace spectrumkv::gpu {

// Where the cells of one (plane, token) begin in the chunk: head 0; the others follow.
struct CellPlace {
  uint64_t codes;
  uint64_t scales;
};

// What the layout kernel tells those after it.
struct ChunkPlaces {
  uint64_t centre_scales;
  uint64_t centre_codes;
  uint32_t centred;  // the chunk has centres
  uint32_t fits;     // false: it is longer than the capacity, and nothing is written
};

// The workspace of a job; every pointer has the alignment of its type.
struct Workspaces {
  ChunkPlaces* chunk;
  CellPlace* cells;     // [planes, tokens]
  uint32_t* nonfinite;  // [tokens], values of both planes
  uint8_t* escaped;     // [tokens], planes
  uint8_t* tiers;       // [tokens], the tier map on the wire
};

// Of all kernels that work on a chunk; each reads what it needs.
struct ChunkArgs {
  uint32_t tokens;
  uint32_t heads;
  uint32_t head_dim;
  uint32_t rotation;
  uint32_t planes;      // 1 or 2
  uint32_t cell_lanes;  // lanes of a warp that share a cell: a power of two, or 32 for cells of several sets
  DType dtype;          // of the chunk
  DevicePlane k, v;
  const uint8_t* requested;  // tiers; encoding only
  uint8_t* chunk;            // written by encoding only
  uint64_t capacity;
  Workspaces work;
  ChunkReport* report;
};

// Chunks of one launch, a row of the grid each, which has as many blocks of threads as the largest needs.
struct BatchArgs {
  ChunkArgs chunks[kMaxBatch];
};
static_assert(sizeof(BatchArgs) <= 4096, "what a launch may pass to a kernel");

struct ScanArgs {
  uint32_t tokens;
  uint32_t heads;
  uint32_t head_dim;
  DevicePlane plane;
  uint8_t* scans;  // TokenScan[tokens]
};

// The most values that SpreadSampleOf samples of a token, of all numbers of heads and head sizes there are.
constexpr uint32_t kSpreadValues = 256;

struct SpreadArgs {
  uint32_t tokens;
  uint32_t head_dim;
  uint32_t sample_heads, head_step, sample_dims;  // SpreadSampleOf
  uint32_t centred;
  uint32_t skip;
  DevicePlane plane;
  uint8_t* spreads;  // [tokens]
};

// Planes of one launch, a row of the grid each, which has as many blocks of threads as the largest needs.
template <typename Args>
struct PlanesArgs {
  Args planes[kMaxPlanes];
};
static_assert(sizeof(PlanesArgs<ScanArgs>) <= 4096 && sizeof(PlanesArgs<SpreadArgs>) <= 4096,
              "what a launch may pass to a kernel");

// One pass: some heads, some queries. Blocks are those of attend_math.h.
struct AttendArgs {
  uint32_t tokens;
  uint32_t head_dim;
  uint32_t blocks;
  uint32_t head_first, heads;      // of the pass
  uint32_t query_first, queries;   // of the pass
  uint32_t query_count;            // of the job
  uint32_t window;
  float soft_cap, inverse_cap;
  DevicePlane plane;
  const float* values;        // [all heads, query_count, head_dim]
  const uint32_t* positions;  // [query_count]
  float* weights;             // [heads, blocks, queries, kAttendTokens]
  float* tops;                // [heads, blocks, queries]
  float* sums;                // likewise; then factors
  float* scores;              // [all heads, tokens]
};

struct ZeroArgs {
  uint32_t first_token;
  uint32_t tokens;
  uint32_t heads;
  uint32_t head_dim;
  DevicePlane plane;
};

}  // namespace spectrumkv::gpu
