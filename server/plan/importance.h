// Which token matters more. Keys are compared, never shown: where a decay or an exponential is involved they are
// logarithms, so that tokens far back do not all underflow to the same zero.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "server/plan/plan.h"

namespace spectrumkv {

// Scores in use, by position. Tokens from `count` on have the score `rest`.
struct Scores {
  const float* values = nullptr;
  uint32_t count = 0;
  double rest = 0;
};

// Of scores [layers, tokens].
std::vector<float> MeanOverLayers(const std::vector<float>& scores, uint32_t tokens);

// policy.importance; of RECENT_QUERIES what it amounts to: SCORES, or what stands in for them.
ImportanceSource SourceInUse(const Policy& policy);

// Greater key = more important, for the tokens at `positions` of a request of `token_count` tokens:
//   SCORES    A_j = score
//   POSITION  A_j = max(exp(-0.01 j), on the last fifth 0.3 rising linearly to 0.8)
//   KEY_NORM  A_j = geometric mean over layers of the norm of the token's keys
//   NONE      A_j = 1
//   RECENT_QUERIES as SCORES once there are some; before that as NONE for OPTIMAL and as POSITION for others
// times exp(-decay_lambda * (token_count - j)); RANDOM: a hash of seed and position.
// energy_log2: [positions], mean TokenScan::energy_log2 of K; read for KEY_NORM only.
std::vector<double> ImportanceKeys(const Policy& policy, uint32_t token_count, std::span<const uint32_t> positions,
                                   const Scores& scores, const std::vector<double>& energy_log2);

// Indices [first, keys.size()) by falling key, equal keys in ascending order. Linear time.
std::vector<uint32_t> OrderByImportance(const std::vector<double>& keys, uint32_t first);

// The first `count` of that order, sorted only at its end: tokens[0, sorted_from) are the most important of them in any
// order, and from there on, at least the last of them, they follow each other as in OrderByImportance. Linear time,
// several times faster.
struct Selection {
  std::vector<uint32_t> tokens;
  size_t sorted_from = 0;
};
// REQUIRES: count <= keys.size() - first.
Selection SelectMostImportant(const std::vector<double>& keys, uint32_t first, size_t count);

}  // namespace spectrumkv
