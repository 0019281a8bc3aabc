// Runs a CUDA kernel that was compiled as C++: every CUDA thread is a fiber of one OS thread, with real warps, masks
// and barriers. A collective ends when all lanes of its mask have come to it; where they never come, the launch throws
// Fault, with the threads that wait. Blocks run one after another.
//
// A warp does not run in lockstep here: between two collectives each lane runs as far as it can, in one of three
// orders. A kernel whose result depends on that order lacks a barrier.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace spectrumkv::shim {

enum class Order { kForward, kReverse, kRandom };  // of runnable threads, and of blocks

struct Range {
  const void* begin;
  uint64_t bytes;
};

struct Options {
  Order order = Order::kForward;
  unsigned seed = 1;
  std::vector<Range> memory;  // if any: global accesses outside of all are refused
};

// What a kernel did that a device would not forgive.
class Fault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Runs body() as each thread of a grid of `blocks` by `rows` blocks. Throws Fault.
void RunGrid(const Options& options, uint32_t blocks, uint32_t threads, const std::function<void()>& body,
             uint32_t rows = 1);

// --- For cuda_shim.h; called by a running CUDA thread.

struct Index {
  uint32_t x, y = 0, z = 0;
};
Index ThreadIndex();
Index BlockIndex();
Index BlockSize();
Index GridSize();

enum class Op : uint8_t { kNone, kShuffle, kBallot, kSyncWarp, kSyncBlock };

// Waits until all threads of the mask (of the block, for kSyncBlock) have called it too. Returns what lane `source`
// gave for `in` (kShuffle), or the mask of lanes whose `in` was not 0 (kBallot).
uint64_t Collective(Op op, uint32_t mask, uint64_t in, uint32_t source);

// Ends the launch where this access is misaligned or outside of the memory given.
void CheckAccess(const void* address, uint64_t bytes, const char* what);

}  // namespace spectrumkv::shim
