#include "server/plan/distortion.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

namespace spectrumkv {
namespace {

// A token without any attention still matters a little: later queries may look at it.
constexpr double kFloorOfMean = 0.1;

struct ErrorRow {
  uint32_t head_dim;
  double eight, q4, q3, q2, p4;
};
constexpr ErrorRow kErrors[] = {
    {8, 1.6e-5, .0048, .023, .097, .0052},   {16, 2.2e-5, .0064, .027, .106, .0073},
    {32, 2.9e-5, .0083, .032, .119, .0095},  {64, 3.5e-5, .0101, .037, .136, .0116},
    {128, 4.1e-5, .0108, .039, .129, .0136}, {256, 4.9e-5, .0125, .043, .131, .0161},
    {512, 5.5e-5, .0140, .047, .139, .0182}, {1024, 6.2e-5, .0157, .052, .151, .0205},
};
// Plain tiers meet values as they come, less even than rotated ones.
constexpr double kPlainFactor = 1.2;

constexpr int kMantissaBits = 11;

// round(kWeightUnits * log2(1 + m / 2^kMantissaBits)).
const std::array<int16_t, 1 << kMantissaBits>& MantissaLog2() {
  static const auto table = [] {
    std::array<int16_t, 1 << kMantissaBits> made{};
    for (size_t m = 0; m < made.size(); ++m) {
      const double x = 1 + (static_cast<double>(m) + 0.5) / static_cast<double>(made.size());
      made[m] = static_cast<int16_t>(std::lround(kWeightUnits * std::log2(x)));
    }
    return made;
  }();
  return table;
}

}  // namespace

double TierError(Tier tier, uint32_t head_dim) {
  const ErrorRow* row = std::begin(kErrors);
  while (row + 1 != std::end(kErrors) && row->head_dim < head_dim) ++row;
  switch (tier) {
    case Tier::kRaw: return 0;
    case Tier::kQ8: return row->eight;
    case Tier::kP8: return row->eight * kPlainFactor;
    case Tier::kQ4: return row->q4;
    case Tier::kP4: return row->p4 * kPlainFactor;
    case Tier::kQ3: return row->q3;
    case Tier::kQ2: return row->q2;
  }
  return 0;
}

double TierError(const std::array<double, kTierCount>& measured, Tier tier, uint32_t head_dim) {
  const double error = tier == Tier::kRaw ? 0 : measured[static_cast<size_t>(tier)];
  return error > 0 ? error : TierError(tier, head_dim);
}

int32_t WeightLog2(float weight) {
  const uint32_t bits = weight > 0 ? std::bit_cast<uint32_t>(weight) : 0;
  const int32_t exponent = static_cast<int32_t>(bits >> 23) - 127;
  return exponent * kWeightUnits + MantissaLog2()[bits >> (23 - kMantissaBits) & ((1 << kMantissaBits) - 1)];
}

double WeightOfLog2(int32_t units) { return std::exp2(static_cast<double>(units) / kWeightUnits); }

TokenWeights WeightsOfKeys(const std::vector<double>& keys, bool logarithms, uint32_t pinned) {
  const size_t count = keys.size();
  std::vector<double> linear(keys);
  if (logarithms && pinned < count) {
    const double top = *std::max_element(keys.begin() + pinned, keys.end());
    for (double& key : linear) key = std::isfinite(top) ? std::exp(std::min(key - top, 0.0)) : 0;
  }
  double sum = 0;
  for (size_t t = pinned; t < count; ++t) sum += linear[t];
  TokenWeights weights;
  weights.linear.assign(count, 1.0f);
  weights.log2.assign(count, 0);
  if (!(sum > 0)) return weights;
  const double mean = sum / static_cast<double>(count - pinned);
  for (size_t t = pinned; t < count; ++t) {
    weights.linear[t] = static_cast<float>(linear[t] / mean + kFloorOfMean);
    weights.log2[t] = static_cast<int16_t>(WeightLog2(weights.linear[t]));
  }
  return weights;
}

}  // namespace spectrumkv
