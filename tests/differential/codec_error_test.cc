// What goes in comes out, within the error of its tier, on every backend.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <random>
#include <vector>

#include "kernels/cpu/cpu_backends.h"
#include "tests/differential/planes.h"

namespace spectrumkv::testing {
namespace {

// Relative squared error of normal values, measured, with 30 % of room; by head_dim 64, 128, 256.
struct Bound {
  Tier tier;
  double relative_squared;
};
constexpr Bound kBounds[] = {{Tier::kRaw, 0.0},    {Tier::kP8, 8e-5},  {Tier::kQ8, 8e-5}, {Tier::kP4, 0.025},
                             {Tier::kQ4, 0.0135}, {Tier::kQ3, 0.050}, {Tier::kQ2, 0.18}};

class CodecErrorTest : public ::testing::TestWithParam<uint32_t> {};

std::vector<const Backend*> AllBackends() {
  std::vector<const Backend*> backends = OtherBackends();
  backends.push_back(ScalarBackend());
  return backends;
}

double RelativeSquaredError(Plane* before, Plane* after, const ChunkDims& dims, DType target) {
  double error = 0, energy = 0;
  for (uint32_t t = 0; t < dims.tokens; ++t) {
    for (uint32_t h = 0; h < dims.heads; ++h) {
      for (uint32_t d = 0; d < dims.head_dim; ++d) {
        const double x = ValueOf(before->GetWord(t, h, d), dims.dtype), y = ValueOf(after->GetWord(t, h, d), target);
        error += (x - y) * (x - y);
        energy += x * x;
      }
    }
  }
  return error / energy;
}

TEST_P(CodecErrorTest, StaysWithinTheTiersBound) {
  std::mt19937_64 rng(Seed());
  const ChunkDims dims{128, 2, GetParam(), DType::kFloat16, true};
  Plane k(dims, dims.dtype, Layout::kTokenMajor, 0, 0), v(dims, dims.dtype, Layout::kTokenMajor, 0, 0);
  FillNormal(&k, dims, 2.0f, &rng);
  FillNormal(&v, dims, 0.5f, &rng);
  for (const Backend* backend : AllBackends()) {
    double last_k = -1;
    for (const Bound& bound : kBounds) {
      SCOPED_TRACE(std::string(backend->name()) + " " + TierName(bound.tier));
      const std::vector<uint8_t> tiers(dims.tokens, TierMapByte(bound.tier, bound.tier));
      std::vector<uint8_t> out(MaxChunkBytes(dims));
      Workspace workspace;
      const SourcePlane k_in = k.source(), v_in = v.source();
      const EncodeResult encoded =
          backend->Encode(dims, {}, k_in, &v_in, tiers.data(), &workspace, out.data(), out.size());
      EXPECT_EQ(encoded.escaped, 0u);
      EXPECT_EQ(encoded.nonfinite_values, 0u);
      ChunkView view;
      ASSERT_EQ(ParseChunk(out.data(), encoded.chunk_bytes, &view), Refusal::kNone);
      Plane k_back(dims, dims.dtype, Layout::kTokenMajor, 0, 0), v_back(dims, dims.dtype, Layout::kTokenMajor, 0, 0);
      const TargetPlane k_out = k_back.target(), v_out = v_back.target();
      backend->Decode(view, dims.dtype, k_out, &v_out, &workspace);
      const double k_error = RelativeSquaredError(&k, &k_back, dims, dims.dtype);
      EXPECT_LE(k_error, bound.relative_squared);
      EXPECT_LE(RelativeSquaredError(&v, &v_back, dims, dims.dtype), bound.relative_squared);
      if (bound.tier != Tier::kRaw) {
        EXPECT_GT(k_error, 0.0);
        EXPECT_NE(k_error, last_k);
      }
      last_k = k_error;
    }
  }
}

// The centre is what makes a constant offset of a key channel cost nothing.
TEST_P(CodecErrorTest, ConstantKeyOffsetsCostLittle) {
  std::mt19937_64 rng(Seed());
  const ChunkDims dims{64, 1, GetParam(), DType::kFloat16, false};
  Plane k(dims, dims.dtype, Layout::kTokenMajor, 0, 0);
  FillNormal(&k, dims, 0.25f, &rng);
  for (uint32_t t = 0; t < dims.tokens; ++t) {
    for (uint32_t d = 0; d < dims.head_dim; ++d) {
      const float offset = d % 7 == 0 ? 20.0f : 1.0f;
      k.SetWord(t, 0, d, WordOf(ValueOf(k.GetWord(t, 0, d), dims.dtype) + offset, dims.dtype));
    }
  }
  for (const Backend* backend : AllBackends()) {
    std::array<double, 2> error{};
    const Tier tiers_tried[] = {Tier::kQ4, Tier::kP4};
    for (int i = 0; i < 2; ++i) {
      const std::vector<uint8_t> tiers(dims.tokens, TierMapByte(tiers_tried[i], Tier::kRaw));
      std::vector<uint8_t> out(MaxChunkBytes(dims));
      Workspace workspace;
      const EncodeResult encoded =
          backend->Encode(dims, {}, k.source(), nullptr, tiers.data(), &workspace, out.data(), out.size());
      ChunkView view;
      ASSERT_EQ(ParseChunk(out.data(), encoded.chunk_bytes, &view), Refusal::kNone);
      Plane back(dims, dims.dtype, Layout::kTokenMajor, 0, 0);
      backend->Decode(view, dims.dtype, back.target(), nullptr, &workspace);
      error[i] = RelativeSquaredError(&k, &back, dims, dims.dtype);
    }
    EXPECT_LT(error[0] * 20, error[1]) << backend->name();
  }
}

INSTANTIATE_TEST_SUITE_P(HeadDims, CodecErrorTest, ::testing::Values(64, 128, 256));

}  // namespace
}  // namespace spectrumkv::testing
