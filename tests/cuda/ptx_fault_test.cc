// Faults seeded into kernels and into their compilation: the interpreter catches each. Arguments: the PTX of faults.cu,
// of codec.cu as shipped, of codec.cu with contraction, and with fast math.
#include <cstdio>

#include "tests/cuda/shim/cuda_shim.h"

// Behind the shim:
#include "tests/cuda/faults.cuh"

// Behind the faults:
#include "tests/cuda/codec_case.h"
#include "tests/cuda/fault_runs.h"
#include "tests/cuda/ptx_executor.h"
#include "tests/cuda/ptx_launcher.h"

namespace spectrumkv::testing {
namespace {

enum File { kFaults, kShipped, kContracted, kFastMath };
const char* const* files = nullptr;

const ptx::Module& FaultModule() {
  static const ptx::Module module = ptx::Module::Load(files[kFaults]);
  return module;
}

PtxLauncher Make(const shim::Options& options) { return PtxLauncher(&FaultModule(), options, nullptr); }

TEST(PtxFaultTest, MissingBarrier) { ExpectOrderShows<ptx::Fault>(Make); }

TEST(PtxFaultTest, Misaligned) {
  ExpectRefused<ptx::Fault>(gpu::Misaligned<false>, gpu::Misaligned<true>, "misaligned: ld.global.v4.u32", Make);
}

TEST(PtxFaultTest, OutOfBounds) {
  ExpectRefused<ptx::Fault>(gpu::OutOfBounds<false>, gpu::OutOfBounds<true>,
                            "outside of every allocation: st.global.u8", Make);
}

TEST(PtxFaultTest, FullMaskInADivergentBranch) {
  ExpectRefused<ptx::Fault>(gpu::DivergentMask<false>, gpu::DivergentMask<true>, "deadlock", Make);
}

TEST(PtxFaultTest, ShuffleFromOutsideOfTheMask) {
  ExpectRefused<ptx::Fault>(gpu::OutsideOfMask<false>, gpu::OutsideOfMask<true>,
                            "a shuffle reads a lane outside of its mask: shfl.sync", Make);
}

// Values that are no power of two, of a rotated tier with its centre, and energies.
CodecCase SmallCase() {
  CodecCase test;
  test.dims = ChunkDims{20, 2, 64, DType::kFloat32, true};
  test.target = DType::kFloat32;
  test.seed = 5;
  test.tiers.assign(test.dims.tokens, TierMapByte(Tier::kQ8, Tier::kP8));
  return test;
}

std::string RunCompiled(File file, std::vector<std::string>* refused) {
  const ptx::Module module = ptx::Module::Load(files[file]);
  *refused = module.Refused();
  uint64_t checks = 0;
  const std::unique_ptr<Executor> executor = MakePtxExecutor(&module, shim::Order::kForward, 1, nullptr);
  return RunCodecCase(SmallCase(), executor.get(), &checks);
}

TEST(PtxFaultTest, ContractionIsCaught) {
  std::vector<std::string> refused;
  EXPECT_EQ(RunCompiled(kShipped, &refused), "");
  EXPECT_TRUE(refused.empty());
  std::string differs;
  try {
    differs = RunCompiled(kContracted, &refused);
  } catch (const ptx::Fault& fault) {
    differs = fault.what();
  }
  std::printf("contracted: %s\n", differs.c_str());
  EXPECT_NE(differs, "");
}

TEST(PtxFaultTest, FastMathIsRefusedByName) {
  std::vector<std::string> refused;
  try {
    RunCompiled(kFastMath, &refused);
    FAIL() << "it ran";
  } catch (const ptx::Fault& fault) {
    EXPECT_NE(std::string(fault.what()).find("not reproducible"), std::string::npos) << fault.what();
  }
  EXPECT_FALSE(refused.empty());
}

}  // namespace
}  // namespace spectrumkv::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (argc != 5) {
    std::printf("usage: %s FAULTS.ptx CODEC.ptx CONTRACTED.ptx FAST_MATH.ptx\n", argv[0]);
    return 2;
  }
  spectrumkv::testing::files = argv + 1;
  return RUN_ALL_TESTS();
}
