#include "server/plan/importance.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numbers>
#include <utility>

namespace spectrumkv {
namespace {

constexpr double kFrontDecay = 0.01;
constexpr double kTailShare = 0.2, kTailFirst = 0.3, kTailLast = 0.8;

double LogOfPosition(uint32_t position, uint32_t token_count) {
  const double front = -kFrontDecay * position;
  const double tail_begin = (1 - kTailShare) * token_count;
  if (position < tail_begin) return front;
  const double ramp = (position - tail_begin) / (kTailShare * token_count);
  return std::max(front, std::log(kTailFirst + (kTailLast - kTailFirst) * ramp));
}

// SplitMix64's finaliser.
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Ascending as an integer where the double falls.
uint64_t FallingBits(double key) {
  const uint64_t bits = std::bit_cast<uint64_t>(key + 0.0);  // -0 becomes +0
  const uint64_t rising = bits >> 63 ? ~bits : bits | uint64_t{1} << 63;
  return ~rising;
}

}  // namespace

std::vector<double> ImportanceKeys(const Policy& policy, uint32_t token_count, const std::vector<uint32_t>& positions,
                                   const Scores& scores, const std::vector<double>& energy_log2) {
  std::vector<double> keys(positions.size());
  for (size_t i = 0; i < positions.size(); ++i) {
    const uint32_t position = positions[i];
    if (policy.allocator == Allocator::kRandom) {
      keys[i] = static_cast<double>(Mix(Mix(policy.random_seed) ^ position) >> 11);
      continue;
    }
    const double decay = -policy.decay_lambda * (static_cast<double>(token_count) - position);
    switch (policy.importance) {
      case ImportanceSource::kScores: {
        const double score = position < scores.count ? double{scores.values[position]} : scores.rest;
        keys[i] = policy.decay_lambda == 0 ? score : std::log(score) + decay;
        break;
      }
      case ImportanceSource::kPosition: keys[i] = LogOfPosition(position, token_count) + decay; break;
      case ImportanceSource::kKeyNorm:
        // energy_log2 counts quarters of a doubling of the squared norm.
        keys[i] = energy_log2[i] * (std::numbers::ln2 / 8) + decay;
        break;
    }
  }
  return keys;
}

std::vector<uint32_t> OrderByImportance(const std::vector<double>& keys, uint32_t first) {
  using Entry = std::pair<uint64_t, uint32_t>;
  const size_t count = keys.size() > first ? keys.size() - first : 0;
  std::vector<Entry> from(count), to(count);
  std::array<std::array<uint32_t, 256>, 8> histogram{};
  for (size_t i = 0; i < count; ++i) {
    const uint64_t bits = FallingBits(keys[first + i]);
    from[i] = {bits, static_cast<uint32_t>(first + i)};
    for (int byte = 0; byte < 8; ++byte) ++histogram[byte][bits >> (8 * byte) & 255];
  }
  // Stable passes from the lowest byte: equal keys keep their ascending order.
  for (int byte = 0; byte < 8 && count != 0; ++byte) {
    std::array<uint32_t, 256>& slot = histogram[byte];
    if (slot[from[0].first >> (8 * byte) & 255] == count) continue;
    uint32_t at = 0;
    for (uint32_t& entry : slot) at += std::exchange(entry, at);
    for (const Entry& entry : from) to[slot[entry.first >> (8 * byte) & 255]++] = entry;
    from.swap(to);
  }
  std::vector<uint32_t> order(count);
  for (size_t i = 0; i < count; ++i) order[i] = from[i].second;
  return order;
}

}  // namespace spectrumkv
