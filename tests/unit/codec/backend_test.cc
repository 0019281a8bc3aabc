// Registry, self-test and the parts of Encode and Decode that the differential tests do not look at.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "kernels/codec/cell_ops.h"
#include "kernels/codec/table_backend.h"
#include "kernels/cpu/cpu_backends.h"

namespace spectrumkv {
namespace {

TEST(RegistryTest, ListsTheBestFirstAndChooses) {
  BackendRegistry registry;
  AddCpuBackends(&registry);
  ASSERT_EQ(registry.all().size(), 3u);
  EXPECT_STREQ(registry.all().front()->name(), "avx512");
  EXPECT_STREQ(registry.all().back()->name(), "scalar");
  EXPECT_EQ(registry.Find("scalar"), ScalarBackend());
  EXPECT_EQ(registry.Find("neon"), nullptr);

  std::string error;
  const Backend* best = registry.Choose("auto", &error);
  ASSERT_NE(best, nullptr);
  EXPECT_TRUE(best->supported());
  EXPECT_EQ(registry.Choose("", &error), best);
  EXPECT_EQ(registry.Choose("scalar", &error), ScalarBackend());
  EXPECT_TRUE(error.empty());
  EXPECT_EQ(registry.Choose("neon", &error), nullptr);
  EXPECT_NE(error.find("neon"), std::string::npos);
  EXPECT_NE(error.find("scalar"), std::string::npos);
}

TEST(RegistryTest, RefusesWhatTheMachineCannotRun) {
  const TableBackend absent(ScalarCellOps(), false);
  BackendRegistry registry;
  registry.Add(ScalarBackend());
  std::string error;
  BackendRegistry only_absent;
  only_absent.Add(&absent);
  EXPECT_EQ(only_absent.Choose("scalar", &error), nullptr);
  EXPECT_NE(error.find("cannot run"), std::string::npos);
  EXPECT_EQ(only_absent.Choose("auto", &error), nullptr);
  EXPECT_FALSE(SelfTest(absent, &error));
}

TEST(SelfTestTest, PassesOnEverySupportedBackendQuickly) {
  for (const Backend* backend : {ScalarBackend(), Avx2Backend(), Avx512Backend()}) {
    if (!backend->supported()) {
      std::printf("not on this machine: %s\n", backend->name());
      continue;
    }
    std::string detail;
    const auto start = std::chrono::steady_clock::now();
    EXPECT_TRUE(SelfTest(*backend, &detail)) << detail;
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    std::printf("self-test of %s: %.2f ms\n", backend->name(), took.count());
  }
}

// Faults an instruction set could have, one function at a time.
uint32_t WrongMagnitude(const CellsIn&) { return 0; }
uint32_t WrongEnergy(const CellsIn& cells, float* lanes, float* sum) {
  const uint32_t magnitude = ScalarCellOps().energy(cells, lanes, sum);
  *sum *= 1.5f;
  return magnitude;
}
uint32_t WrongEnergyMagnitude(const CellsIn& cells, float* lanes, float* sum) {
  return ScalarCellOps().energy(cells, lanes, sum) / 2;
}
uint32_t WrongSums(const CellsIn& cells, float* sums) {
  const uint32_t magnitude = ScalarCellOps().accumulate(cells, sums);
  sums[0] += 8.0f;
  return magnitude;
}
uint32_t WrongCopy(const CellsIn& cells, uint8_t* words) {
  const uint32_t magnitude = ScalarCellOps().copy(cells, words);
  words[0] ^= 1;
  return magnitude;
}
template <Tier kBroken>
uint32_t WrongEncode(const CellsIn& cells, Tier tier, const Centres& centres, uint8_t* scales, uint8_t* codes) {
  const uint32_t magnitude = ScalarCellOps().encode(cells, tier, centres, scales, codes);
  if (tier == kBroken) codes[0] ^= 1;
  return magnitude;
}
void WrongSpread(const CellsIn& cells, const float* means, float* sums) {
  ScalarCellOps().spread(cells, means, sums);
  sums[cells.tokens - 1] *= 2;
}

void WrongAttend(const CellsIn& keys, uint32_t first_position, const AttendQueries& queries, float* panel, float* weights,
                 float* tops, float* sums) {
  ScalarCellOps().attend(keys, first_position, queries, panel, weights, tops, sums);
  sums[queries.count - 1] *= 2;
}
void WrongFold(const float* weights, const float* factors, uint32_t count, float* scores) {
  ScalarCellOps().fold(weights, factors, count - 1, scores);
}

template <Tier kBroken>
void WrongDecode(const CellsOut& cells, Tier tier, const Centres& centres, const uint8_t* scales,
                 const uint8_t* codes) {
  ScalarCellOps().decode(cells, tier, centres, scales, codes);
  if (tier == kBroken) cells.rows[0][0] ^= 1;
}

template <Tier kBroken>
void ExpectTierFaultsCaught() {
  std::string detail;
  CellOps ops = ScalarCellOps();
  ops.encode = WrongEncode<kBroken>;
  EXPECT_FALSE(SelfTest(TableBackend(ops, true), &detail)) << TierName(kBroken);
  EXPECT_NE(detail.find("Encode"), std::string::npos) << detail;
  ops = ScalarCellOps();
  ops.decode = WrongDecode<kBroken>;
  EXPECT_FALSE(SelfTest(TableBackend(ops, true), &detail)) << TierName(kBroken);
}

TEST(SelfTestTest, CatchesABrokenBackend) {
  ExpectTierFaultsCaught<Tier::kP8>();
  ExpectTierFaultsCaught<Tier::kP4>();
  ExpectTierFaultsCaught<Tier::kQ8>();
  ExpectTierFaultsCaught<Tier::kQ4>();
  ExpectTierFaultsCaught<Tier::kQ3>();
  ExpectTierFaultsCaught<Tier::kQ2>();
  std::string detail;
  CellOps ops = ScalarCellOps();
  ops.magnitude = WrongMagnitude;
  EXPECT_FALSE(SelfTest(TableBackend(ops, true), &detail));
  ops = ScalarCellOps();
  for (auto* energy : {WrongEnergy, WrongEnergyMagnitude}) {
    ops.energy = energy;
    EXPECT_FALSE(SelfTest(TableBackend(ops, true), &detail));
    EXPECT_NE(detail.find("Scan"), std::string::npos) << detail;
  }
  ops = ScalarCellOps();
  ops.spread = WrongSpread;
  EXPECT_FALSE(SelfTest(TableBackend(ops, true), &detail));
  EXPECT_NE(detail.find("Spread"), std::string::npos) << detail;
  ops = ScalarCellOps();
  ops.attend = WrongAttend;
  EXPECT_FALSE(SelfTest(TableBackend(ops, true), &detail));
  EXPECT_NE(detail.find("Attend"), std::string::npos) << detail;
  ops = ScalarCellOps();
  ops.fold = WrongFold;
  EXPECT_FALSE(SelfTest(TableBackend(ops, true), &detail));
  EXPECT_NE(detail.find("Attend"), std::string::npos) << detail;
  ops = ScalarCellOps();
  ops.copy = WrongCopy;
  EXPECT_FALSE(SelfTest(TableBackend(ops, true), &detail));
  ops = ScalarCellOps();
  ops.accumulate = WrongSums;
  EXPECT_FALSE(SelfTest(TableBackend(ops, true), &detail));
}

struct OnePlane {
  explicit OnePlane(const ChunkDims& d) : dims(d), words(KvBytes(d)), rows(d.tokens) {
    for (uint32_t t = 0; t < d.tokens; ++t) rows[t] = words.data() + t * words.size() / d.tokens;
  }
  SourcePlane Source() const {
    const int64_t word = static_cast<int64_t>(SizeOf(dims.dtype));
    return SourcePlane{rows.data(), word * dims.head_dim, word};
  }
  ChunkDims dims;
  std::vector<uint8_t> words;
  std::vector<uint8_t*> rows;
};

TEST(EncodeTest, TooSmallACapacityWritesNoResult) {
  const OnePlane plane(ChunkDims{3, 2, 64, DType::kFloat16, false});
  const std::vector<uint8_t> tiers(3, static_cast<uint8_t>(Tier::kQ4));
  std::vector<uint8_t> out(MaxChunkBytes(plane.dims));
  Workspace workspace;
  for (const Backend* backend : {ScalarBackend(), Avx2Backend(), Avx512Backend()}) {
    if (!backend->supported()) continue;
    const SourcePlane source = plane.Source();
    const uint64_t exact =
        backend->Encode(plane.dims, {}, source, nullptr, tiers.data(), &workspace, out.data(), out.size()).chunk_bytes;
    ASSERT_GT(exact, kHeaderBytes);
    std::vector<uint8_t> small(exact - 1);
    EXPECT_EQ(backend->Encode(plane.dims, {}, source, nullptr, tiers.data(), &workspace, small.data(), small.size())
                  .chunk_bytes,
              0u);
    std::vector<uint8_t> enough(exact);
    EXPECT_EQ(backend->Encode(plane.dims, {}, source, nullptr, tiers.data(), &workspace, enough.data(), enough.size())
                  .chunk_bytes,
              exact);
  }
}

TEST(WorkspaceTest, IsAlignedAndGrows) {
  Workspace workspace;
  for (size_t bytes : {1u, 63u, 64u, 100000u, 5u}) {
    uint8_t* memory = workspace.Reserve(bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % 64, 0u);
    memory[0] = 1;
    memory[bytes - 1] = 2;
  }
}

}  // namespace
}  // namespace spectrumkv
