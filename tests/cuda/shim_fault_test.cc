// Faults seeded into kernels: the shim catches each.
#include "tests/cuda/shim/cuda_shim.h"
// Behind the shim:
#include "tests/cuda/faults.cuh"

// Behind the faults:
#include "tests/cuda/fault_runs.h"

namespace spectrumkv::testing {
namespace {

shim::Launcher Make(const shim::Options& options) { return shim::Launcher(options); }

TEST(ShimFaultTest, MissingBarrier) { ExpectOrderShows<shim::Fault>(Make); }

TEST(ShimFaultTest, Misaligned) {
  ExpectRefused<shim::Fault>(gpu::Misaligned<false>, gpu::Misaligned<true>, "misaligned 16-byte load", Make);
}

TEST(ShimFaultTest, OutOfBounds) {
  ExpectRefused<shim::Fault>(gpu::OutOfBounds<false>, gpu::OutOfBounds<true>,
                             "1-byte store outside of every allocation", Make);
}

TEST(ShimFaultTest, FullMaskInADivergentBranch) {
  ExpectRefused<shim::Fault>(gpu::DivergentMask<false>, gpu::DivergentMask<true>, "deadlock", Make);
}

TEST(ShimFaultTest, ShuffleFromOutsideOfTheMask) {
  ExpectRefused<shim::Fault>(gpu::OutsideOfMask<false>, gpu::OutsideOfMask<true>,
                             "a shuffle reads a lane outside of its mask", Make);
}

// After a fault the next launch is as any other.
TEST(ShimFaultTest, RunsOnAfterAFault) {
  EXPECT_NE(RunFault<shim::Fault>(gpu::OutsideOfMask<true>, shim::Order::kRandom, Make).fault, "");
  EXPECT_EQ(RunFault<shim::Fault>(gpu::OutsideOfMask<false>, shim::Order::kRandom, Make).fault, "");
}

}  // namespace
}  // namespace spectrumkv::testing
