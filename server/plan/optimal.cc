#include "server/plan/optimal.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace spectrumkv {
namespace {

// A key is the logarithm of a cell's weight in units of WeightLog2, moved so that kKeyOfOne stands for weight 1.
constexpr int32_t kKeys = 32768, kKeyOfOne = kKeys / 2;
constexpr int32_t kUnitsOfSpread = kWeightUnits / 4;  // spreads are quarters of a doubling
constexpr int32_t kSpreadOfOne = 128;
constexpr uint32_t kBlock = 512;  // tokens whose keys are in the first-level cache

uint64_t RoundUp16(uint64_t bytes) { return (bytes + 15) / 16 * 16; }

// The most padding a section can need whose entries have this many bytes.
uint64_t PaddingOf(uint64_t entry_bytes) { return 16 - std::gcd(entry_bytes, uint64_t{16}); }

uint64_t CellCost(Tier tier, const PlanLayer& layer, bool payload_only) {
  const uint64_t scale = payload_only ? 0 : HasScale8(tier) ? 1 : HasScale16(tier) ? 2 : 0;
  return layer.heads * (CellBytes(tier, layer.head_dim, layer.dtype) + scale);
}

bool HasRotated(const TierHull& hull) {
  return IsRotated(hull.lowest) ||
         std::any_of(hull.upgrades.begin(), hull.upgrades.end(), [](const Upgrade& u) { return IsRotated(u.to); });
}

struct HullPoint {
  Tier tier;
  uint64_t bytes;
  double error;
};

// Error saved per byte.
double Slope(const HullPoint& from, const HullPoint& to) {
  return (from.error - to.error) / static_cast<double>(to.bytes - from.bytes);
}

}  // namespace

TierHull HullOf(const std::vector<Tier>& tiers, const PlanLayer& layer, bool payload_only,
                const std::array<double, kTierCount>& errors) {
  std::vector<HullPoint> points;
  for (const Tier tier : tiers) {
    points.push_back({tier, CellCost(tier, layer, payload_only), TierError(errors, tier, layer.head_dim)});
  }
  std::sort(points.begin(), points.end(), [](const HullPoint& a, const HullPoint& b) {
    return a.bytes != b.bytes ? a.bytes < b.bytes : a.error < b.error;
  });
  std::vector<HullPoint> hull;
  std::vector<int32_t> gains;  // of the step to each point but the first
  for (const HullPoint& point : points) {
    if (!hull.empty() && (point.error >= hull.back().error || point.bytes == hull.back().bytes)) continue;
    int32_t gain = 0;
    while (!hull.empty()) {
      gain = WeightLog2(static_cast<float>(Slope(hull.back(), point)));
      if (gains.empty() || gain < gains.back()) break;
      hull.pop_back();
      gains.pop_back();
    }
    if (!hull.empty()) gains.push_back(gain);
    hull.push_back(point);
  }
  TierHull result;
  result.lowest = hull[0].tier;
  result.lowest_bytes = hull[0].bytes;
  for (const HullPoint& point : points) result.error[static_cast<size_t>(point.tier)] = point.error;
  for (size_t i = 1; i < hull.size(); ++i) {
    result.upgrades.push_back({hull[i].tier, hull[i].bytes - hull[i - 1].bytes, gains[i - 1]});
  }
  for (size_t i = hull.size() - 1; i-- > 0;) {
    const Upgrade& up = result.upgrades[i];
    result.error[static_cast<size_t>(hull[i].tier)] =
        result.error[static_cast<size_t>(up.to)] + static_cast<double>(up.bytes) * WeightOfLog2(up.gain);
  }
  return result;
}

OptimalPlan::OptimalPlan(const OptimalInput& input) : in_(input), tokens_(input.unit->tokens.count) {
  const uint32_t first = in_.unit->tokens.first;
  pinned_ = in_.rules->pinned > first ? std::min(in_.rules->pinned - first, tokens_) : 0;
  for (uint32_t slot = 0; slot < in_.unit->layers.size(); ++slot) {
    const PlanLayer& layer = (*in_.layers)[in_.unit->layers[slot]];
    base_bytes_ += OverheadBytes(layer);
    const uint64_t raw_tokens = layer.raw_only ? tokens_ : pinned_;
    base_bytes_ += raw_tokens * (layer.has_v ? 2 : 1) * CellCost(Tier::kRaw, layer, in_.rules->payload_only);
    if (layer.raw_only) continue;
    AddPlane(slot, true);
    if (layer.has_v) AddPlane(slot, false);
  }
  for (PlaneClass& c : classes_) {
    for (size_t key = kKeys; key-- > 0;) c.at_least[key] += c.at_least[key + 1];
  }
}

size_t OptimalPlan::ClassOf(const PlanLayer& layer, bool is_k) {
  for (size_t i = 0; i < classes_.size(); ++i) {
    if (classes_[i].is_k == is_k && SameGeometry(classes_[i].geometry, layer)) return i;
  }
  const std::array<double, kTierCount>& errors = is_k ? in_.profile->k_errors : in_.profile->v_errors;
  classes_.push_back(
      {layer, is_k, HullOf(*in_.tiers, layer, in_.rules->payload_only, errors), std::vector<uint64_t>(size_t{kKeys} + 1)});
  return classes_.size() - 1;
}

// All but cells: headers, tier maps, centres, and padding as if every section had the most.
uint64_t OptimalPlan::OverheadBytes(const PlanLayer& layer) const {
  if (in_.rules->payload_only) return 0;
  const uint64_t heads = layer.heads;
  uint64_t padding = 0;
  bool rotated = false, scales8 = false, scales16 = false;
  for (const Tier tier : *in_.tiers) {
    padding += PaddingOf(heads * CellBytes(tier, layer.head_dim, layer.dtype));
    rotated |= IsRotated(tier);
    scales8 |= HasScale8(tier);
    scales16 |= HasScale16(tier);
  }
  if (layer.raw_only) padding = 0;
  if (!layer.raw_only && scales8) padding += PaddingOf(heads);
  if (!layer.raw_only && scales16) padding += PaddingOf(2 * heads);
  const uint32_t step = TokensPerChunk(layer.heads, layer.head_dim, layer.dtype, layer.has_v);
  uint64_t bytes = 0;
  for (uint64_t at = 0; at < tokens_; at += step) {
    const uint64_t count = std::min<uint64_t>(step, tokens_ - at);
    bytes += kHeaderBytes + RoundUp16(count) + padding;
    const uint64_t runs = (count + kCentreTokens - 1) / kCentreTokens;
    if (rotated && !layer.raw_only) bytes += RoundUp16(2 * runs * heads) + RoundUp16(runs * heads * layer.head_dim);
  }
  return bytes;
}

const TokenWeights& OptimalPlan::WeightsOf(const Plane& plane) const {
  return in_.token_weights->size() == 1 ? in_.token_weights->front() : (*in_.token_weights)[plane.slot];
}

// Cells whose tier an escape may change stay on the lowest.
bool OptimalPlan::IsFixed(const Plane& plane, uint32_t token) const {
  if (token < pinned_) return true;
  if (plane.escapes == nullptr) return false;
  const EscapeClass escape = plane.escapes[token].escape;
  return escape >= kEscapeAll || (escape == kEscapeRotated && HasRotated(classes_[plane.plane_class].hull));
}

void OptimalPlan::AddPlane(uint32_t slot, bool is_k) {
  const uint32_t index = in_.unit->layers[slot], first = in_.unit->tokens.first;
  const PlanLayer& layer = (*in_.layers)[index];
  Plane plane;
  plane.plane_class = ClassOf(layer, is_k);
  plane.slot = slot;
  if (!in_.scan->empty()) {
    const LayerScan& scan = (*in_.scan)[index];
    const std::vector<uint8_t>& spread = is_k ? scan.k_spread : scan.v_spread;
    const std::vector<TokenScan>& tokens = is_k ? scan.k : scan.v;
    if (!spread.empty()) plane.spread = spread.data() + first;
    if (AnyEscape(tokens, first + pinned_, first + tokens_)) plane.escapes = tokens.data() + first;
  }
  const std::vector<float>& layer_weights = in_.profile->layer_weights;
  double weight = is_k ? in_.profile->k_weight : 1;
  if (!layer_weights.empty()) weight *= double{layer_weights[index]};
  const double mean = MeanWeight(plane);
  plane.level = kKeyOfOne - kUnitsOfSpread * kSpreadOfOne + WeightLog2(static_cast<float>(weight)) -
                (mean > 0 ? WeightLog2(static_cast<float>(mean)) : 0);
  CountKeys(plane);
  planes_.push_back(plane);
}

// Over the cells that have a choice, importance and spread alone.
double OptimalPlan::MeanWeight(const Plane& plane) const {
  static const auto linear = [] {
    std::array<double, 256> table{};
    for (int e = 1; e < 256; ++e) table[static_cast<size_t>(e)] = std::exp2((e - kSpreadOfOne) / 4.0);
    return table;
  }();
  const std::vector<float>& weights = WeightsOf(plane).linear;
  double sums[4] = {};
  uint64_t count = 0;
  if (plane.escapes == nullptr) {
    for (uint32_t t = pinned_; t < tokens_; ++t) {
      sums[t & 3] += double{weights[t]} * (plane.spread == nullptr ? 1.0 : linear[plane.spread[t]]);
    }
    count = tokens_ - pinned_;
  } else {
    for (uint32_t t = pinned_; t < tokens_; ++t) {
      if (IsFixed(plane, t)) continue;
      sums[t & 3] += double{weights[t]} * (plane.spread == nullptr ? 1.0 : linear[plane.spread[t]]);
      ++count;
    }
  }
  return count == 0 ? 0 : ((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<double>(count);
}

void OptimalPlan::KeysOf(const Plane& plane, uint32_t first, uint32_t count, int16_t* keys) const {
  const int16_t* weights = WeightsOf(plane).log2.data() + first;
  if (plane.spread == nullptr) {
    const int32_t level = plane.level + kUnitsOfSpread * kSpreadOfOne;
    for (uint32_t i = 0; i < count; ++i) keys[i] = static_cast<int16_t>(std::clamp(weights[i] + level, 0, kKeys - 1));
    return;
  }
  const uint8_t* spread = plane.spread + first;
  for (uint32_t i = 0; i < count; ++i) {
    const int32_t key = weights[i] + plane.level + kUnitsOfSpread * spread[i];
    keys[i] = static_cast<int16_t>(std::clamp(key, 0, kKeys - 1));
  }
}

void OptimalPlan::CountKeys(const Plane& plane) {
  PlaneClass& c = classes_[plane.plane_class];
  const bool payload_only = in_.rules->payload_only;
  int16_t keys[kBlock];
  for (uint32_t first = pinned_; first < tokens_; first += kBlock) {
    const uint32_t count = std::min(kBlock, tokens_ - first);
    KeysOf(plane, first, count, keys);
    uint64_t counted = count;
    for (uint32_t i = 0; i < count; ++i) {
      if (plane.escapes != nullptr && IsFixed(plane, first + i)) {
        base_bytes_ += CellCost(AfterEscape(c.hull.lowest, plane.escapes[first + i].escape), c.geometry, payload_only);
        --counted;
      } else {
        ++c.at_least[static_cast<size_t>(keys[i])];
      }
    }
    cells_ += counted;
    base_bytes_ += counted * c.hull.lowest_bytes;
  }
}

// What the plan costs in which each cell has the upgrades whose gain times its weight is not below the multiplier.
uint64_t OptimalPlan::BytesAt(int32_t multiplier) const {
  uint64_t bytes = base_bytes_;
  for (const PlaneClass& c : classes_) {
    for (const Upgrade& up : c.hull.upgrades) {
      bytes += up.bytes * c.at_least[static_cast<size_t>(std::clamp(multiplier - up.gain, 0, kKeys))];
    }
  }
  return bytes;
}

std::vector<OptimalPlan::Cut> OptimalPlan::CutAt(uint64_t share, uint64_t* bytes) const {
  int32_t low = 0, high = kKeys;  // of multipliers: `high` fits, and the first that does is in [low, high]
  for (const PlaneClass& c : classes_) {
    for (const Upgrade& up : c.hull.upgrades) {
      low = std::min(low, up.gain);
      high = std::max(high, kKeys + up.gain);
    }
  }
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (BytesAt(middle) <= share) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  *bytes = BytesAt(high);
  uint64_t left = share - *bytes;
  std::vector<Cut> cuts;
  for (const PlaneClass& c : classes_) {
    Cut& cut = cuts.emplace_back();
    for (const Upgrade& up : c.hull.upgrades) {
      int32_t threshold = high - up.gain;
      uint64_t extra = 0;
      // As many of the cells just below the border as still fit.
      if (threshold > 0 && threshold <= kKeys) {
        const size_t key = static_cast<size_t>(threshold) - 1;
        const uint64_t there = c.at_least[key] - c.at_least[key + 1];
        extra = std::min(there, left / up.bytes);
        left -= extra * up.bytes;
        *bytes += extra * up.bytes;
        if (extra == there) {
          --threshold;
          extra = 0;
        }
      }
      cut.thresholds.push_back(threshold);
      cut.extra.push_back(extra);
    }
  }
  return cuts;
}

void OptimalPlan::Assign(const Plane& plane, Cut* cut, uint8_t* tier_map) const {
  const PlaneClass& c = classes_[plane.plane_class];
  const int shift = c.is_k ? 0 : 4;
  int16_t keys[kBlock], tiers[kBlock];
  for (uint32_t first = pinned_; first < tokens_; first += kBlock) {
    const uint32_t count = std::min(kBlock, tokens_ - first);
    KeysOf(plane, first, count, keys);
    std::fill_n(tiers, count, static_cast<int16_t>(c.hull.lowest));
    for (size_t u = 0; u < c.hull.upgrades.size(); ++u) {
      const int32_t threshold = cut->thresholds[u];
      const int16_t to = static_cast<int16_t>(c.hull.upgrades[u].to);
      if (threshold < kKeys) {
        const int16_t from = static_cast<int16_t>(std::max(threshold, 0));
        for (uint32_t i = 0; i < count; ++i) tiers[i] = keys[i] >= from ? to : tiers[i];
      }
      for (uint32_t i = 0; cut->extra[u] != 0 && i < count; ++i) {
        if (keys[i] != threshold - 1 || IsFixed(plane, first + i)) continue;
        tiers[i] = to;
        --cut->extra[u];
      }
    }
    for (uint32_t i = 0; plane.escapes != nullptr && i < count; ++i) {
      if (IsFixed(plane, first + i)) tiers[i] = static_cast<int16_t>(c.hull.lowest);
    }
    uint8_t* to = tier_map + first;
    for (uint32_t i = 0; i < count; ++i) to[i] = static_cast<uint8_t>(to[i] | tiers[i] << shift);
  }
}

bool OptimalPlan::Allocate(Allocation* allocation) const {
  if (base_bytes_ > in_.share) return false;
  std::vector<Cut> cuts = CutAt(in_.share, &allocation->bytes);
  allocation->tier_maps.assign(in_.unit->layers.size() * tokens_, TierMapByte(Tier::kRaw, Tier::kRaw));
  for (const Plane& plane : planes_) {
    Assign(plane, &cuts[plane.plane_class], allocation->tier_maps.data() + size_t{plane.slot} * tokens_);
  }
  return true;
}

double OptimalPlan::Distortion(const std::vector<uint8_t>& tier_maps) const {
  double sum = 0;
  int16_t keys[kBlock];
  for (const Plane& plane : planes_) {
    const PlaneClass& c = classes_[plane.plane_class];
    const uint8_t* map = tier_maps.data() + size_t{plane.slot} * tokens_;
    for (uint32_t first = pinned_; first < tokens_; first += kBlock) {
      const uint32_t count = std::min(kBlock, tokens_ - first);
      KeysOf(plane, first, count, keys);
      for (uint32_t i = 0; i < count; ++i) {
        if (IsFixed(plane, first + i)) continue;
        const Tier tier = c.is_k ? TierOfK(map[first + i]) : TierOfV(map[first + i]);
        sum += c.hull.error[static_cast<size_t>(tier)] * WeightOfLog2(keys[i] - kKeyOfOne);
      }
    }
  }
  return sum;
}

}  // namespace spectrumkv
