#include "tests/unit/plan/reference.h"

#include <cmath>
#include <numeric>

namespace spectrumkv::reference {
namespace {

bool Allowed(const Policy& policy, Tier tier) {
  return std::count(policy.tiers.begin(), policy.tiers.end(), tier) != 0;
}

uint32_t Pinned(const RandomCase& c) {
  const bool protect = c.policy.allocator == Allocator::kSinkProtect && c.policy.sinks == 0;
  return std::min(protect ? 4 : c.policy.sinks, c.tokens);
}

Tier Escaped(Tier tier, const std::vector<TokenScan>& plane, uint32_t position) {
  if (plane.empty()) return tier;
  const EscapeClass escape = plane[position].escape;
  if (escape == kEscapeAll || escape == kEscapeNonFinite) return Tier::kRaw;
  const bool rotated = tier == Tier::kQ8 || tier == Tier::kQ4 || tier == Tier::kQ3 || tier == Tier::kQ2;
  return escape == kEscapeRotated && rotated ? Tier::kRaw : tier;
}

long double LogImportance(const RandomCase& c, uint32_t position, int layer) {
  const Policy& p = c.policy;
  const long double n = c.tokens, j = position;
  long double log_a = 0;
  switch (p.importance) {
    case ImportanceSource::kScores:
    case ImportanceSource::kRecentQueries:  // scores that the daemon computed
      log_a = std::log(static_cast<long double>(p.scores[layer * c.tokens + position]));
      break;
    case ImportanceSource::kPosition: {
      long double a = std::exp(-0.01L * j);
      if (5 * j >= 4 * n) a = std::max(a, 0.3L + 0.5L * (j - 0.8L * n) / (0.2L * n));
      log_a = std::log(a);
      break;
    }
    case ImportanceSource::kKeyNorm: {
      long double sum = 0, used = 0;
      for (size_t l = 0; l < c.layers.size(); ++l) {
        if (c.layers[l].raw_only) continue;
        sum += c.scan[l].k[position].energy_log2;
        used += 1;
      }
      if (used != 0) log_a = sum / used * std::log(2.0L) / 8;
      break;
    }
    case ImportanceSource::kNone: break;
  }
  return log_a - p.decay_lambda * (n - j);
}

Levels Upgraded(Levels levels, const RandomCase& c, const std::vector<uint32_t>& order, size_t begin, size_t end,
                int to) {
  for (size_t l = 0; l < levels.size(); ++l) {
    if (c.layers[l].raw_only) continue;
    for (size_t i = begin; i < std::min(end, order.size()); ++i) levels[l][order[i]] = to;
  }
  return levels;
}

std::optional<int> HighestForAll(const RandomCase& c, const std::vector<uint32_t>& kept, int below) {
  for (int rung = below - 1; rung >= 0; --rung) {
    if (Cost(c, kept, AllOn(c, kept, rung)) <= BudgetBytes(c)) return rung;
  }
  return std::nullopt;
}

std::optional<Levels> PlanBalanced(const RandomCase& c, const std::vector<uint32_t>& kept) {
  const std::vector<Pair> rungs = Rungs(c.policy);
  const int top = static_cast<int>(rungs.size()) - 1;
  int middle = std::max(top - 1, 0);
  for (const Tier eight : {Tier::kQ8, Tier::kP8}) {
    for (int r = 0; r <= top; ++r) {
      if (rungs[r].k == eight) middle = r;
    }
  }
  std::optional<int> low = HighestForAll(c, kept, middle);
  if (!low && Cost(c, kept, AllOn(c, kept, middle)) <= BudgetBytes(c)) low = middle;
  if (!low) {
    const std::optional<int> any = HighestForAll(c, kept, top + 1);
    if (!any) return std::nullopt;
    return AllOn(c, kept, *any);
  }
  const std::vector<uint32_t> order = Order(c, kept, -1);
  const Levels base = AllOn(c, kept, *low);
  Levels best = base;
  for (size_t x = 1; x <= order.size(); ++x) {
    const Levels trial = Upgraded(Upgraded(base, c, order, x, 3 * x, middle), c, order, 0, x, top);
    if (Cost(c, kept, trial) <= BudgetBytes(c)) best = trial;
  }
  return best;
}

}  // namespace

std::vector<Pair> Rungs(const Policy& policy) {
  const Pair raw = {Tier::kRaw, Tier::kRaw};
  if (policy.allocator == Allocator::kUniform) return {{policy.uniform_tier, policy.uniform_tier}};
  if (policy.allocator == Allocator::kRaw || policy.allocator == Allocator::kPdTrim ||
      policy.allocator == Allocator::kSlidingWindowSink) {
    return {raw};
  }
  const std::vector<Pair> all = {{Tier::kQ2, Tier::kQ2}, {Tier::kQ3, Tier::kQ2}, {Tier::kQ3, Tier::kQ3},
                                 {Tier::kQ4, Tier::kQ3}, {Tier::kQ4, Tier::kQ4}, {Tier::kP4, Tier::kP4},
                                 {Tier::kP8, Tier::kP8}, {Tier::kQ8, Tier::kQ8}, raw};
  std::vector<Pair> rungs;
  for (const Pair& pair : all) {
    if (!Allowed(policy, pair.k) || !Allowed(policy, pair.v)) continue;
    if (pair.k == Tier::kP4 && Allowed(policy, Tier::kQ4)) continue;
    if (policy.allocator == Allocator::kTwoTier) {
      const Tier eight = Allowed(policy, Tier::kP8) ? Tier::kP8 : Tier::kQ8;
      if (pair.k != eight && pair.k != Tier::kRaw) continue;
    }
    rungs.push_back(pair);
  }
  return rungs;
}

std::vector<std::vector<uint8_t>> Maps(const RandomCase& c, const std::vector<uint32_t>& kept, const Levels& levels) {
  const std::vector<Pair> rungs = Rungs(c.policy);
  std::vector<std::vector<uint8_t>> maps;
  for (size_t l = 0; l < c.layers.size(); ++l) {
    std::vector<uint8_t>& map = maps.emplace_back();
    for (size_t t = 0; t < kept.size(); ++t) {
      const Pair pair = levels[l][t] < 0 ? Pair{Tier::kRaw, Tier::kRaw} : rungs[levels[l][t]];
      const Tier k = Escaped(pair.k, c.scan[l].k, kept[t]);
      const Tier v = c.layers[l].has_v ? Escaped(pair.v, c.scan[l].v, kept[t]) : Tier::kRaw;
      map.push_back(TierMapByte(k, v));
    }
  }
  return maps;
}

uint64_t Cost(const RandomCase& c, const std::vector<uint32_t>& kept, const Levels& levels) {
  const std::vector<std::vector<uint8_t>> maps = Maps(c, kept, levels);
  uint64_t bytes = 0;
  for (size_t l = 0; l < c.layers.size(); ++l) {
    const PlanLayer& layer = c.layers[l];
    const uint32_t step = TokensPerChunk(layer.heads, layer.head_dim, layer.dtype, layer.has_v);
    for (size_t first = 0; first < kept.size(); first += step) {
      const uint32_t tokens = static_cast<uint32_t>(std::min<size_t>(step, kept.size() - first));
      const TierCounts counts = CountTiers(maps[l].data() + first, tokens, layer.has_v);
      if (!c.policy.payload_only) {
        bytes += ChunkBytes(DimsOf(layer, tokens), counts);
        continue;
      }
      for (int id = 0; id < kTierCount; ++id) {
        bytes += (uint64_t{counts.k[id]} + counts.v[id]) * layer.heads *
                 CellBytes(static_cast<Tier>(id), layer.head_dim, layer.dtype);
      }
    }
  }
  return bytes;
}

Levels AllOn(const RandomCase& c, const std::vector<uint32_t>& kept, int rung) {
  Levels levels;
  for (const PlanLayer& layer : c.layers) {
    std::vector<int>& of_layer = levels.emplace_back(kept.size(), layer.raw_only ? -1 : rung);
    std::fill_n(of_layer.begin(), std::min<size_t>(Pinned(c), kept.size()), -1);
  }
  return levels;
}

std::vector<uint32_t> Order(const RandomCase& c, const std::vector<uint32_t>& kept, int layer) {
  std::vector<uint32_t> order(kept.size() - std::min<size_t>(Pinned(c), kept.size()));
  std::iota(order.begin(), order.end(), Pinned(c));
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return LogImportance(c, kept[a], std::max(layer, 0)) > LogImportance(c, kept[b], std::max(layer, 0));
  });
  return order;
}

uint64_t BudgetBytes(const RandomCase& c) {
  uint64_t kv = 0;
  for (const PlanLayer& layer : c.layers) kv += KvBytes(DimsOf(layer, c.tokens));
  return static_cast<uint64_t>(c.policy.budget * static_cast<double>(kv));
}

std::optional<Levels> Plan(const RandomCase& c, const std::vector<uint32_t>& kept) {
  if (c.policy.allocator == Allocator::kBalanced) return PlanBalanced(c, kept);
  const int rungs = static_cast<int>(Rungs(c.policy).size());
  const std::optional<int> base_rung = HighestForAll(c, kept, rungs);
  if (!base_rung) return std::nullopt;
  const Levels base = AllOn(c, kept, *base_rung);
  Levels best = base;
  if (*base_rung == rungs - 1) return best;
  const std::vector<uint32_t> order = Order(c, kept, -1);
  for (size_t count = 1; count <= order.size(); ++count) {
    const Levels trial = Upgraded(base, c, order, 0, count, *base_rung + 1);
    if (Cost(c, kept, trial) <= BudgetBytes(c)) best = trial;
  }
  return best;
}

}  // namespace spectrumkv::reference
