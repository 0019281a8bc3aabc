// The PTX that nvcc wrote of the kernels, executed on the CPU, against the scalar backend. argv[1]: the PTX.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>

#include "tests/cuda/batch_case.h"
#include "tests/cuda/codec_case.h"
#include "tests/cuda/ptx_executor.h"

namespace spectrumkv::testing {
namespace {

const ptx::Module* module = nullptr;
ptx::Counters counters;
uint64_t cases = 0, checks = 0;

void RunCase(const CodecCase& test) {
  const shim::Order order = static_cast<shim::Order>(cases % 3);
  const std::unique_ptr<Executor> executor =
      MakePtxExecutor(module, order, static_cast<unsigned>(test.seed), &counters);
  EXPECT_EQ(RunCodecCase(test, executor.get(), &checks), "") << NameOf(test);
  ++cases;
}

constexpr DType kDTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};

// Of every tier one token at least, K and V.
std::vector<uint8_t> AllTiers(uint32_t tokens) {
  std::vector<uint8_t> tiers(tokens);
  for (uint32_t t = 0; t < tokens; ++t) {
    tiers[t] = TierMapByte(static_cast<Tier>(t % kTierCount), static_cast<Tier>((t + t / kTierCount) % kTierCount));
  }
  return tiers;
}

TEST(PtxCodecTest, NothingIsRefused) { EXPECT_EQ(module->Refused(), std::vector<std::string>()); }

TEST(PtxCodecTest, EqualsScalar) {
  uint64_t seed = 7;
  for (uint32_t head_dim : {8u, 24u, 64u, 80u, 128u, 256u, 320u, 1024u}) {
    for (DType dtype : kDTypes) {
      CodecCase test;
      const uint32_t tokens = head_dim <= 128 ? 9 : 7;
      test.dims = ChunkDims{tokens, head_dim <= 64 ? 3u : 1u, head_dim, dtype, true};
      test.seed = ++seed;
      test.tiers = AllTiers(tokens);
      test.target = kDTypes[seed % 3];
      test.shape.page_tokens = 4;
      test.shape.skip = seed % 4;
      test.shape.order = static_cast<PageOrder>(seed / 3 % 3);
      test.shape.fused = seed % 2 == 0;
      if (seed % 4 == 0) test.shape.misalignment = 2;
      if (seed % 5 == 0) test.shape.pad_bytes = 1;
      RunCase(test);
    }
  }
}

TEST(PtxCodecTest, ChunksOfOneLaunch) {
  for (DType dtype : kDTypes) {
    const std::unique_ptr<Executor> executor = MakePtxExecutor(module, shim::Order::kRandom, 1, &counters);
    EXPECT_EQ(RunBatchCase(BatchDims(dtype, 64), static_cast<uint64_t>(dtype), executor.get(), &checks), "");
  }
}

// Two runs of centres, and a tier map longer than the layout kernel's block.
TEST(PtxCodecTest, LongChunks) {
  for (DType dtype : kDTypes) {
    CodecCase test;
    test.dims = ChunkDims{dtype == DType::kFloat16 ? 300u : 66u, 1, 8, dtype, dtype != DType::kBFloat16};
    test.seed = 100 + static_cast<uint64_t>(dtype);
    test.target = dtype;
    RunCase(test);
  }
}

// Counts the first job of each kind of a case.
class Counting final : public Executor {
 public:
  struct Cost {
    ptx::Counters all;
    bool counted = false;
  };

  std::string name() const override { return executor_->name(); }
  void Allow(std::vector<shim::Range> memory) override { executor_->Allow(std::move(memory)); }
  void EncodeBatch(const gpu::EncodeJob* jobs, uint32_t count, void* workspace) override {
    Count(&encode, [&] { executor_->EncodeBatch(jobs, count, workspace); });
  }
  void DecodeBatch(const gpu::DecodeJob* jobs, uint32_t count, void* workspace) override {
    Count(&decode, [&] { executor_->DecodeBatch(jobs, count, workspace); });
  }
  void ScanBatch(const gpu::ScanJob* jobs, uint32_t count) override {
    Count(&scan, [&] { executor_->ScanBatch(jobs, count); });
  }
  void SpreadBatch(const gpu::SpreadJob* jobs, uint32_t count) override { executor_->SpreadBatch(jobs, count); }
  void Zero(const gpu::ZeroJob& job) override { executor_->Zero(job); }
  void Attend(const gpu::AttendJob& job, void* workspace) override {
    Count(&attend, [&] { executor_->Attend(job, workspace); });
  }

  Cost encode, decode, scan, attend;

 private:
  template <typename F>
  void Count(Cost* cost, const F& run) {
    counted_ = ptx::Counters();
    run();
    if (!cost->counted) *cost = Cost{counted_, true};
  }

  ptx::Counters counted_;
  std::unique_ptr<Executor> executor_ = MakePtxExecutor(module, shim::Order::kForward, 1, &counted_);
};

// Not a measurement of any device: PTX instructions as executed, and bytes as accessed. Nothing can fail here but the
// bits.
TEST(PtxCodecTest, CostPerValue) {
  std::printf(
      "float16, 64 tokens, 4 heads of 128, 128-bit accesses; PTX instructions (bytes read + written) per value\n");
  for (int id = 0; id < kTierCount; ++id) {
    CodecCase test;
    test.dims = ChunkDims{64, 4, 128, DType::kFloat16, true};
    test.target = DType::kFloat16;
    const Tier tier = static_cast<Tier>(id);
    test.tiers.assign(test.dims.tokens, TierMapByte(tier, tier));
    Counting executor;
    EXPECT_EQ(RunCodecCase(test, &executor, &checks), "");
    const double values = 2.0 * 64 * 4 * 128;
    const auto print = [](const char* what, const Counting::Cost& cost, double of) {
      std::printf("  %s %5.1f (%.2f + %.2f)", what, static_cast<double>(cost.all.instructions) / of,
                  static_cast<double>(cost.all.global_read_bytes) / of,
                  static_cast<double>(cost.all.global_written_bytes) / of);
    };
    std::printf("%-4s", TierName(tier));
    print("encode", executor.encode, values);
    print("decode", executor.decode, values);
    if (tier == Tier::kRaw) print("scan", executor.scan, values / 2);
    if (tier == Tier::kRaw) print("attend", executor.attend, values / 2);
    std::printf("\n");
  }
}

}  // namespace
}  // namespace spectrumkv::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (argc != 2) {
    std::printf("usage: %s FILE.ptx\n", argv[0]);
    return 2;
  }
  const auto start = std::chrono::steady_clock::now();
  const spectrumkv::ptx::Module module = spectrumkv::ptx::Module::Load(argv[1]);
  spectrumkv::testing::module = &module;
  const int result = RUN_ALL_TESTS();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  using spectrumkv::testing::counters;
  std::printf("PTX executed on CPU, no GPU: %llu cases, %llu checks equal bit for bit, %.1f M instructions in %.1f s\n",
              static_cast<unsigned long long>(spectrumkv::testing::cases),
              static_cast<unsigned long long>(spectrumkv::testing::checks),
              static_cast<double>(counters.instructions) / 1e6, seconds);
  return result;
}
