// What a tier costs in quality: the relative squared error of a cell, and what it matters. Read by OPTIMAL.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kernels/format/types.h"

namespace spectrumkv {

// Mean squared error of the decoded values over the mean square of the values (of K: around their centre). From a
// simulation of normally distributed values, which rotated keys and values nearly are; real models with head_dim 64
// agree within a tenth.
double TierError(Tier tier, uint32_t head_dim);

// The same where a profile has measured it: an entry of ModelProfile::k_errors or v_errors that is not 0.
double TierError(const std::array<double, kTierCount>& measured, Tier tier, uint32_t head_dim);

// Weights of OPTIMAL are integers: 256 times the binary logarithm. So sums, orders and ties are the same everywhere.
constexpr int kWeightUnits = 256;

// round(kWeightUnits * log2(weight)); a weight of 0 or less is the least float. REQUIRES: finite.
int32_t WeightLog2(float weight);

// 2^(units / kWeightUnits).
double WeightOfLog2(int32_t units);

// How much each token matters to OPTIMAL: importance A_j divided by its mean over tokens [pinned, count), plus a tenth.
struct TokenWeights {
  std::vector<float> linear;
  std::vector<int16_t> log2;  // WeightLog2 of it
};
// keys: A_j, or its natural logarithm. All tokens are alike where none has any importance. Entries of pinned tokens
// mean nothing.
TokenWeights WeightsOfKeys(const std::vector<double>& keys, bool logarithms, uint32_t pinned);

}  // namespace spectrumkv
