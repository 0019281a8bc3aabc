#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/codec/codec_math.h"
#include "kernels/codec/raw_words.h"
#include "kernels/codec/scan_math.h"

namespace spectrumkv {
namespace {

// Value of a float16 word by its definition.
double HalfByDefinition(uint32_t half) {
  const int exponent = static_cast<int>(half >> 10 & 31);
  const double fraction = half & 0x3FF;
  const double magnitude = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return half & 0x8000 ? -magnitude : magnitude;
}

TEST(HalfTest, WidensEveryWord) {
  for (uint32_t half = 0; half < 0x10000; ++half) {
    const float x = HalfToFloat(half);
    if ((half & 0x7FFF) > kHalfInf) {
      EXPECT_TRUE(std::isnan(x)) << half;
    } else if ((half & 0x7FFF) == kHalfInf) {
      EXPECT_TRUE(std::isinf(x)) << half;
    } else {
      ASSERT_EQ(x, HalfByDefinition(half)) << half;
      EXPECT_EQ(std::signbit(x), (half & 0x8000) != 0);
      EXPECT_EQ(FloatToHalf(x), half);
    }
  }
}

TEST(HalfTest, RoundsToNearestEven) {
  for (uint32_t half = 0; half < kHalfMax; ++half) {
    const double low = HalfByDefinition(half), high = HalfByDefinition(half + 1);
    const float middle = static_cast<float>((low + high) / 2);  // exact
    const float below = std::nextafter(middle, 0.0f), above = std::nextafter(middle, 1e9f);
    ASSERT_EQ(FloatToHalf(middle), half % 2 == 0 ? half : half + 1) << half;
    ASSERT_EQ(FloatToHalf(below), half);
    ASSERT_EQ(FloatToHalf(above), half + 1);
    ASSERT_EQ(FloatToHalf(-above), (half + 1) | 0x8000);
  }
  EXPECT_EQ(FloatToHalf(65519.996f), kHalfMax);
  EXPECT_EQ(FloatToHalf(65520.0f), kHalfInf);
  EXPECT_EQ(NarrowHalf(65520.0f), kHalfMax);
  EXPECT_EQ(NarrowHalf(-1e30f), 0x8000 | kHalfMax);
}

TEST(BfloatTest, NarrowsToNearestEvenAndSaturates) {
  EXPECT_EQ(NarrowBfloat(BitsFloat(0x3F808000)), 0x3F80u);  // tie to even
  EXPECT_EQ(NarrowBfloat(BitsFloat(0x3F818000)), 0x3F82u);
  EXPECT_EQ(NarrowBfloat(BitsFloat(0x3F808001)), 0x3F81u);
  EXPECT_EQ(NarrowBfloat(BitsFloat(0xBF807FFF)), 0xBF80u);
  EXPECT_EQ(NarrowBfloat(std::numeric_limits<float>::max()), kBfloatMax);
  EXPECT_EQ(NarrowBfloat(-std::numeric_limits<float>::max()), 0x8000 | kBfloatMax);
  EXPECT_EQ(NarrowBfloat(BitsFloat(0x00008001)), 1u);  // subnormals round too
}

TEST(RoundingTest, MatchesLibm) {
  std::mt19937 rng(3);
  std::uniform_real_distribution<float> any(-400.0f, 400.0f);
  for (int i = 0; i < 200000; ++i) {
    const float x = i % 3 == 0 ? std::round(any(rng)) + 0.5f : any(rng);
    ASSERT_EQ(RoundToInt(x), static_cast<int32_t>(std::nearbyintf(x))) << x;
    ASSERT_EQ(FloorToInt(x), static_cast<int32_t>(std::floor(x))) << x;
  }
  EXPECT_EQ(FloorToInt(-0.0f), 0);
  EXPECT_EQ(FloorToInt(-1e-30f), -1);
  EXPECT_EQ(RoundToInt(-0.0f), 0);
}

TEST(EnergyTest, QuantisesLikeLog2) {
  EXPECT_EQ(EnergyLog2(0.0f), 0);
  EXPECT_EQ(EnergyLog2(1.0f), 128);
  EXPECT_EQ(EnergyLog2(2.0f), 132);
  EXPECT_EQ(EnergyLog2(std::numeric_limits<float>::infinity()), 255);
  EXPECT_EQ(EnergyLog2(std::numeric_limits<float>::denorm_min()), 1);
  EXPECT_EQ(EnergyLog2(std::numeric_limits<float>::max()), 255);
  std::mt19937 rng(5);
  for (int i = 0; i < 200000; ++i) {
    const float sum = BitsFloat(0x2E000000u + rng() % 0x22000000u);
    const double exact = std::round(4 * std::log2(static_cast<double>(sum)));
    ASSERT_EQ(EnergyLog2(sum), std::min(255.0, std::max(1.0, 128 + exact))) << sum;
  }
}

TEST(EnergyTest, FoldsInTheStatedOrder) {
  float lanes[kEnergyLanes];
  for (uint32_t i = 0; i < kEnergyLanes; ++i) lanes[i] = static_cast<float>(i);
  EXPECT_EQ(FoldEnergy(lanes), 63.0f * 32);
}

template <typename Word>
std::vector<uint8_t> Bytes(const std::vector<Word>& words) {
  std::vector<uint8_t> bytes(words.size() * sizeof(Word));
  std::memcpy(bytes.data(), words.data(), bytes.size());
  return bytes;
}

TEST(RawWordsTest, ConvertsCountsAndKeepsNonFinite) {
  const std::vector<uint16_t> half = {0x3C00, 0x3C01, 0x8000, 0x7C00, 0xFE01, 0x0001};
  std::vector<uint8_t> out(half.size() * 2);
  EXPECT_EQ(ConvertWords(Bytes(half).data(), DType::kFloat16, out.data(), DType::kBFloat16, half.size()), 1u);
  EXPECT_EQ(out, Bytes<uint16_t>({0x3F80, 0x3F80, 0x8000, 0x7F80, 0xFFC0, 0x3380}));

  const std::vector<uint32_t> wide = {0x3F800001, 0x49742400, 0xFF800000, 0x7F800001, 0x00000000};
  std::vector<uint8_t> narrow(wide.size() * 2);
  EXPECT_EQ(ConvertWords(Bytes(wide).data(), DType::kFloat32, narrow.data(), DType::kFloat16, wide.size()), 2u);
  EXPECT_EQ(narrow, Bytes<uint16_t>({0x3C00, 0x7BFF, 0xFC00, 0x7E00, 0x0000}));

  std::vector<uint8_t> same(narrow.size());
  EXPECT_EQ(ConvertWords(narrow.data(), DType::kFloat16, same.data(), DType::kFloat16, wide.size()), 0u);
  EXPECT_EQ(same, narrow);
  EXPECT_EQ(CountNonFinite(narrow.data(), DType::kFloat16, wide.size()), 2u);
  EXPECT_EQ(CountNonFinite(Bytes(wide).data(), DType::kFloat32, wide.size()), 2u);
}

}  // namespace
}  // namespace spectrumkv
