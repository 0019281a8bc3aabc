#include "server/plan/importance.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
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

using Entry = std::pair<uint64_t, uint32_t>;  // falling bits, index: ascending by falling importance

// Ascending as an integer where the double falls.
uint64_t FallingBits(double key) {
  const uint64_t bits = std::bit_cast<uint64_t>(key + 0.0);  // -0 becomes +0
  const uint64_t rising = bits >> 63 ? ~bits : bits | uint64_t{1} << 63;
  return ~rising;
}

constexpr int kBucketBits = 11;
constexpr size_t kSmall = 256;  // entries that are sorted at once

// Of `size` entries, the `count` with the lowest bits lie in the buckets below some bucket and partly in that one:
// appends the index of the former to `chosen`, and makes the latter `candidates`. False, and nothing done, where all
// entries have the same bits. REQUIRES: 0 < count <= size.
template <typename BitsOf, typename IndexOf>
bool SplitByBucket(size_t size, const BitsOf& bits_of, const IndexOf& index_of, size_t count,
                   std::vector<uint32_t>* chosen, std::vector<Entry>* candidates) {
  uint64_t low = bits_of(0), high = low;
  for (size_t i = 1; i < size; ++i) {
    const uint64_t bits = bits_of(i);
    low = std::min(low, bits);
    high = std::max(high, bits);
  }
  if (low == high) return false;
  const int shift = std::max(0, static_cast<int>(std::bit_width(high - low)) - kBucketBits);
  std::array<uint32_t, 1 << kBucketBits> histogram{};
  for (size_t i = 0; i < size; ++i) ++histogram[(bits_of(i) - low) >> shift];
  size_t bucket = 0, below = 0;
  while (below + histogram[bucket] < count) below += histogram[bucket++];
  const uint64_t begin = low + (uint64_t{bucket} << shift), width = uint64_t{1} << shift;  // the last may end beyond 2^64
  std::vector<Entry> inside;
  inside.reserve(histogram[bucket]);
  size_t at = chosen->size();
  chosen->resize(at + below + 1);  // one more, that every entry may be written before it is known to belong
  for (size_t i = 0; i < size; ++i) {
    const uint64_t bits = bits_of(i);
    (*chosen)[at] = index_of(i);
    at += bits < begin;
    if (bits >= begin && bits - begin < width) inside.emplace_back(bits, index_of(i));
  }
  chosen->resize(at);
  candidates->swap(inside);
  return true;
}

constexpr size_t kManyKeys = 8192;
constexpr size_t kSample = 1024,
                 kSampleMargin = 48;  // ranks in the sample either side; about three standard deviations

// As SplitByBucket, in one pass: a sample tells between which two keys the border must nearly certainly lie. False, and
// nothing done, where it does not.
bool SplitBySample(const std::vector<double>& keys, uint32_t first, size_t count, std::vector<uint32_t>* chosen,
                   std::vector<Entry>* candidates) {
  const size_t size = keys.size() - first;
  std::array<double, kSample> sample;
  for (size_t i = 0; i < kSample; ++i) sample[i] = keys[first + i * size / kSample];
  std::sort(sample.begin(), sample.end(), std::greater<>());
  const size_t rank = count * kSample / size;
  const double above = rank < kSampleMargin ? std::numeric_limits<double>::infinity() : sample[rank - kSampleMargin];
  const double least =
      rank + kSampleMargin >= kSample ? -std::numeric_limits<double>::infinity() : sample[rank + kSampleMargin];
  chosen->resize(size + 1);
  std::vector<Entry> inside;
  size_t at = 0;
  for (size_t i = 0; i < size; ++i) {
    const double key = keys[first + i];
    const uint32_t index = static_cast<uint32_t>(first + i);
    (*chosen)[at] = index;
    at += key > above;
    if (key <= above && key >= least) inside.emplace_back(FallingBits(key), index);
  }
  // Not all of `count` above the bracket: the last of them must be among what gets sorted.
  const bool holds = at < count && count <= at + inside.size();
  chosen->resize(holds ? at : 0);
  if (!holds) return false;
  candidates->swap(inside);
  return true;
}

}  // namespace

ImportanceSource SourceInUse(const Policy& policy) {
  if (policy.importance != ImportanceSource::kRecentQueries) return policy.importance;
  if (ByScores(policy)) return ImportanceSource::kScores;
  return policy.allocator == Allocator::kOptimal ? ImportanceSource::kNone : ImportanceSource::kPosition;
}

std::vector<double> ImportanceKeys(const Policy& policy, uint32_t token_count, std::span<const uint32_t> positions,
                                   const Scores& scores, const std::vector<double>& energy_log2) {
  std::vector<double> keys(positions.size());
  const auto fill = [&](const auto& key_of) {
    for (size_t i = 0; i < positions.size(); ++i) keys[i] = key_of(i, positions[i]);
  };
  if (policy.allocator == Allocator::kRandom) {
    const uint64_t seed = Mix(policy.random_seed);
    fill([seed](size_t, uint32_t position) { return static_cast<double>(Mix(seed ^ position) >> 11); });
    return keys;
  }
  const double lambda = policy.decay_lambda;
  const auto decay = [lambda, token_count](uint32_t position) {
    return -lambda * (static_cast<double>(token_count) - position);
  };
  const auto score = [&scores](uint32_t position) {
    return position < scores.count ? double{scores.values[position]} : scores.rest;
  };
  switch (SourceInUse(policy)) {
    case ImportanceSource::kScores:
      if (lambda == 0) {
        fill([&](size_t, uint32_t position) { return score(position); });
      } else {
        fill([&](size_t, uint32_t position) { return std::log(score(position)) + decay(position); });
      }
      break;
    case ImportanceSource::kPosition:
      fill([&](size_t, uint32_t position) { return LogOfPosition(position, token_count) + decay(position); });
      break;
    case ImportanceSource::kKeyNorm:
      // energy_log2 counts quarters of a doubling of the squared norm.
      fill([&](size_t i, uint32_t position) { return energy_log2[i] * (std::numbers::ln2 / 8) + decay(position); });
      break;
    case ImportanceSource::kRecentQueries:
    case ImportanceSource::kNone: fill([&](size_t, uint32_t position) { return decay(position); }); break;
  }
  return keys;
}

std::vector<uint32_t> OrderByImportance(const std::vector<double>& keys, uint32_t first) {
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

Selection SelectMostImportant(const std::vector<double>& keys, uint32_t first, size_t count) {
  Selection selection;
  if (count == 0) return selection;
  selection.tokens.reserve(count + 1);
  const size_t size = keys.size() - first;
  const auto bits_of = [&](size_t i) { return FallingBits(keys[first + i]); };
  const auto index_of = [&](size_t i) { return static_cast<uint32_t>(first + i); };
  std::vector<Entry> candidates;
  const bool bracketed = size >= kManyKeys && SplitBySample(keys, first, count, &selection.tokens, &candidates);
  if (!bracketed &&
      (size <= kSmall || !SplitByBucket(size, bits_of, index_of, count, &selection.tokens, &candidates))) {
    for (size_t i = 0; i < size; ++i) candidates.emplace_back(bits_of(i), index_of(i));
  }
  while (candidates.size() > kSmall) {
    const std::vector<Entry> from = candidates;
    const size_t wanted = count - selection.tokens.size();
    if (!SplitByBucket(
            from.size(), [&](size_t i) { return from[i].first; }, [&](size_t i) { return from[i].second; }, wanted,
            &selection.tokens, &candidates)) {
      break;  // all alike, and in ascending order of index
    }
  }
  if (candidates.size() <= kSmall) std::sort(candidates.begin(), candidates.end());
  selection.sorted_from = selection.tokens.size();
  for (size_t i = 0; selection.tokens.size() < count; ++i) selection.tokens.push_back(candidates[i].second);
  return selection;
}

std::vector<float> MeanOverLayers(const std::vector<float>& scores, uint32_t tokens) {
  const size_t layers = scores.size() / tokens;
  std::vector<float> mean(tokens);
  for (uint32_t t = 0; t < tokens; ++t) {
    double sum = 0;
    for (size_t l = 0; l < layers; ++l) sum += scores[l * tokens + t];
    mean[t] = static_cast<float>(sum / static_cast<double>(layers));
  }
  return mean;
}

}  // namespace spectrumkv
