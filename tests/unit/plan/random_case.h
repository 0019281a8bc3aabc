// Random transfers, small enough to plan by brute force: geometry is free, because nothing but counts depends on it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "server/plan/plan.h"

namespace spectrumkv {

struct RandomCase {
  Policy policy;
  std::vector<PlanLayer> layers;
  uint32_t tokens = 0;
  std::vector<LayerScan> scan;  // of all tokens
};

class CaseMaker {
 public:
  explicit CaseMaker(uint64_t seed) : random_(seed) {}

  uint32_t Below(uint32_t n) { return static_cast<uint32_t>(random_() % n); }
  bool Chance(double p) { return static_cast<double>(random_() % 1000000) < p * 1e6; }
  template <typename T>
  T Pick(const std::vector<T>& from) {
    return from[Below(static_cast<uint32_t>(from.size()))];
  }

  std::vector<PlanLayer> MakeLayers() {
    // From 4096 tokens a chunk down to one.
    struct Geometry {
      uint32_t heads, head_dim;
    };
    const std::vector<Geometry> known = {{1, 8}, {3, 24}, {8, 128}, {32, 128}, {64, 256}, {100, 512}, {1024, 1024}};
    const auto make = [&] {
      const Geometry g = Pick(known);
      PlanLayer layer;
      layer.heads = g.heads;
      layer.head_dim = g.head_dim;
      layer.dtype = Pick<DType>({DType::kFloat16, DType::kFloat16, DType::kBFloat16, DType::kFloat32});
      layer.has_v = !Chance(0.15);
      return layer;
    };
    std::vector<PlanLayer> layers(1 + Below(4), make());
    uint16_t index = static_cast<uint16_t>(Below(3));
    for (PlanLayer& layer : layers) {
      if (Chance(0.2)) layer = make();
      layer.raw_only = Chance(0.05);
      layer.layer = index;
      index = static_cast<uint16_t>(index + 1 + Below(2));
    }
    return layers;
  }

  std::vector<TokenScan> MakePlane(uint32_t tokens, double escape_share) {
    std::vector<TokenScan> plane(tokens);
    for (TokenScan& token : plane) {
      token.energy_log2 = static_cast<uint8_t>(100 + Below(12));
      if (Chance(escape_share)) token.escape = static_cast<EscapeClass>(1 + Below(3));
    }
    return plane;
  }

  RandomCase Make(const std::vector<Allocator>& allocators) {
    RandomCase c;
    c.layers = MakeLayers();
    c.tokens = Chance(0.1) ? 1 + Below(3) : 1 + Below(Chance(0.2) ? 200 : 40);
    Policy& p = c.policy;
    p.allocator = Pick(allocators);
    p.budget = 0.02 + 1.08 * Below(1000) / 1000.0;
    p.tiers = {Tier::kRaw, Tier::kQ8, Tier::kQ4, Tier::kQ3, Tier::kQ2, Tier::kP8, Tier::kP4};
    std::shuffle(p.tiers.begin(), p.tiers.end(), random_);
    p.tiers.resize(1 + Below(7));
    if (p.allocator == Allocator::kTwoTier) {
      const bool has =
          std::any_of(p.tiers.begin(), p.tiers.end(), [](Tier t) { return t == Tier::kP8 || t == Tier::kQ8; });
      if (!has) p.tiers.push_back(Chance(0.5) ? Tier::kP8 : Tier::kQ8);
    }
    p.uniform_tier = Pick(p.tiers);
    p.random_seed = random_();
    p.allow_drop = Chance(0.7);
    p.sinks = Chance(0.3) ? 0 : Below(8);
    p.payload_only = Chance(0.2);
    p.decay_lambda = Pick<double>({0, 0, 0.03, 1.5});  // 0.01 would cancel POSITION's own decay
    p.importance =
        Pick<ImportanceSource>({ImportanceSource::kScores, ImportanceSource::kPosition, ImportanceSource::kKeyNorm});
    if (p.allocator == Allocator::kOptimal && Chance(0.3)) p.importance = ImportanceSource::kNone;
    if (p.importance == ImportanceSource::kScores) {
      p.scores_per_layer = Chance(0.3);
      p.scores.resize(p.scores_per_layer ? c.tokens * c.layers.size() : c.tokens);
      const uint32_t distinct = Chance(0.5) ? 5 : 1000;  // ties
      for (float& score : p.scores) score = static_cast<float>(Below(distinct)) / 8;
    }
    const double escape_share = Pick<double>({0, 0, 0.02, 0.3});
    for (const PlanLayer& layer : c.layers) {
      LayerScan scan;
      scan.k = MakePlane(c.tokens, escape_share);
      if (layer.has_v) scan.v = MakePlane(c.tokens, Chance(0.5) ? escape_share : 0);
      if (p.allocator == Allocator::kOptimal) MakeSpreads(c.tokens, layer.has_v, &scan);
      c.scan.push_back(scan);
    }
    if (p.allocator == Allocator::kOptimal && Chance(0.3)) {
      p.profile.k_weight = Pick<double>({0.5, 1, 8});
      for (std::vector<float>* values : {&p.profile.layer_weights, &p.profile.layer_budgets}) {
        for (size_t l = 0; l < c.layers.size(); ++l) values->push_back(Pick<float>({0.25f, 1, 3}));
      }
    }
    return c;
  }

  void MakeSpreads(uint32_t tokens, bool has_v, LayerScan* scan) {
    if (Chance(0.1)) return;  // a layer without any
    const uint32_t middle = 40 + Below(150), width = Pick<uint32_t>({1, 10, 40});
    for (uint32_t t = 0; t < tokens; ++t) {
      scan->k_spread.push_back(static_cast<uint8_t>(Chance(0.02) ? Below(256) : middle + Below(width)));
      if (has_v) scan->v_spread.push_back(static_cast<uint8_t>(Chance(0.02) ? 0 : middle + Below(width)));
    }
  }

 private:
  std::mt19937_64 random_;
};

}  // namespace spectrumkv
