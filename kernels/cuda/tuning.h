// Numbers that decide speed and nothing else: no result depends on them. All in one place, to be tried against a
// device.
#pragma once

#include <cstdint>

namespace spectrumkv::gpu {

constexpr uint32_t kWarpLanes = 32;

// Values of one cell that one lane holds: 16 bytes of float16, one 128-bit access. Not free: codec.h says why.
constexpr uint32_t kLaneValues = 8;

// Threads of a block, by kernel. Multiples of 32; every kernel is right for any of them.
constexpr uint32_t kCellThreads = 128;      // encode, decode, centres: a group of lanes for each cell
constexpr uint32_t kClassifyThreads = 128;  // a warp for each token
constexpr uint32_t kScanThreads = 128;      // 8 lanes for each token
constexpr uint32_t kSpreadThreads = 128;  // 8 lanes for each token of a run
constexpr uint32_t kZeroThreads = 128;
constexpr uint32_t kAttendThreads = 128;  // 4 tokens by 4 queries each of a tile's 64 by kAttendQueries
constexpr uint32_t kAttendQueries = 32;
constexpr uint32_t kTileSide = 4, kTileDims = 32;  // dims of keys and queries that are in shared memory at a time
constexpr uint32_t kFoldThreads = 128;  // a thread for each query, or for each token
constexpr uint32_t kLayoutThreads = 256;  // one block for a chunk: >= 192, a thread for each byte of padding

// Blocks that a multiprocessor should hold at least: with 128 threads this allows 85 registers, which no kernel needs,
// so that none is spilled for the sake of more.
constexpr uint32_t kBlocksPerMultiprocessor = 6;

// Queries are taken in passes whose weights take no more than this, unless those of one tile do.
constexpr uint64_t kAttendWorkBytes = uint64_t{16} << 20;

}  // namespace spectrumkv::gpu
