#include "server/plan/drop.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "server/base/status.h"
#include "server/plan/budget.h"

namespace spectrumkv {
namespace {

std::vector<uint32_t> Iota(uint32_t first, uint32_t count) {
  std::vector<uint32_t> values(count);
  std::iota(values.begin(), values.end(), first);
  return values;
}

// The scan of the kept tokens alone; layers without effective escapes stay empty.
std::vector<LayerScan> Compact(const std::vector<LayerScan>& full, const std::vector<bool>& layer_escapes,
                               const std::vector<uint32_t>& kept) {
  std::vector<LayerScan> compact(full.size());
  for (size_t l = 0; l < full.size(); ++l) {
    if (!layer_escapes[l]) continue;
    for (const uint32_t position : kept) {
      if (!full[l].k.empty()) compact[l].k.push_back(full[l].k[position]);
      if (!full[l].v.empty()) compact[l].v.push_back(full[l].v[position]);
    }
  }
  return compact;
}

bool Escapes(const std::vector<TokenScan>& scan, uint32_t first, const Ladder& ladder) {
  return std::any_of(scan.begin() + std::min<size_t>(first, scan.size()), scan.end(),
                     [&ladder](const TokenScan& token) {
                       return token.escape != kEscapeNone && AfterEscape(ladder[0].k, token.escape) != ladder[0].k;
                     });
}

class Keeper {
 public:
  explicit Keeper(const KeepInput& input) : in_(input), sinks_(std::min(input.policy->sinks, input.token_count)) {
    all_layers_ = Iota(0, static_cast<uint32_t>(in_.layers->size()));
    if (in_.full_scan == nullptr) return;
    for (const LayerScan& scan : *in_.full_scan) {
      layer_escapes_.push_back(Escapes(scan.k, sinks_, in_.ladder) || Escapes(scan.v, sinks_, in_.ladder));
      any_escape_ = any_escape_ || layer_escapes_.back();
    }
  }

  absl::StatusOr<std::vector<uint32_t>> Run() {
    const uint32_t n = in_.token_count;
    const uint64_t all_bytes = CostOfCount(n, nullptr);
    // Without a right to drop, escapes are left to Plan, as for every other allocator.
    if (!in_.policy->allow_drop) {
      if (all_bytes <= in_.budget_bytes) return Iota(0, n);
      return DropNotAllowed(in_.policy->budget, all_bytes, in_.kv_bytes, AllocatorName(in_.policy->allocator));
    }
    const uint32_t least = std::max<uint32_t>(sinks_, 1);
    const uint64_t least_bytes = CostOfCount(least, nullptr);
    if (least_bytes > in_.budget_bytes) return BudgetTooSmall(in_.policy->budget, least_bytes, in_.kv_bytes);
    uint32_t count = LargestThatFits(least, n, [this](uint32_t c) { return CostOfCount(c, nullptr); });
    if (count < n || any_escape_) {
      if (absl::Status status = RankTokens(); !status.ok()) return status;
      if (any_escape_) {
        count = LargestThatFits(least, count, [this](uint32_t c) {
          const std::vector<LayerScan> scan = Compact(*in_.full_scan, layer_escapes_, Kept(c));
          return CostOfCount(c, &scan);
        });
      }
    }
    return count == n ? Iota(0, n) : Kept(count);
  }

 private:
  uint64_t CostOfCount(uint32_t count, const std::vector<LayerScan>* scan) const {
    const CostRules rules{&in_.ladder, sinks_, in_.policy->payload_only};
    return CostModel(*in_.layers, Unit{{0, count}, all_layers_}, rules, scan).SetAll(0);
  }

  // REQUIRES: `least` fits, as far as can be known.
  uint32_t LargestThatFits(uint32_t least, uint32_t most, const std::function<uint64_t(uint32_t)>& cost) const {
    uint32_t fits = least;
    while (fits < most) {
      const uint32_t middle = fits + (most - fits + 1) / 2;
      if (cost(middle) <= in_.budget_bytes)
        fits = middle;
      else
        most = middle - 1;
    }
    return fits;
  }

  absl::Status RankTokens() {
    const uint32_t n = in_.token_count;
    if (in_.policy->allocator == Allocator::kPdTrim) {  // the last tokens first
      ranked_ = Iota(sinks_, n - sinks_);
      std::reverse(ranked_.begin(), ranked_.end());
      return absl::OkStatus();
    }
    std::vector<double> energy;
    if (in_.policy->importance == ImportanceSource::kKeyNorm) {
      absl::StatusOr<std::vector<double>> mean = MeanEnergyLog2(*in_.layers, all_layers_, in_.full_scan, {0, n});
      if (!mean.ok()) return mean.status();
      energy = *std::move(mean);
    }
    ranked_ = OrderByImportance(ImportanceKeys(*in_.policy, n, Iota(0, n), in_.scores, energy), sinks_);
    return absl::OkStatus();
  }

  std::vector<uint32_t> Kept(uint32_t count) const {
    std::vector<uint32_t> kept = Iota(0, sinks_);
    kept.insert(kept.end(), ranked_.begin(), ranked_.begin() + (count - sinks_));
    std::sort(kept.begin(), kept.end());
    return kept;
  }

  const KeepInput& in_;
  const uint32_t sinks_;
  std::vector<uint32_t> all_layers_;
  std::vector<bool> layer_escapes_;
  bool any_escape_ = false;
  std::vector<uint32_t> ranked_;  // tokens that are not sinks, the first to keep first
};

}  // namespace

absl::StatusOr<std::vector<double>> MeanEnergyLog2(const std::vector<PlanLayer>& all,
                                                   const std::vector<uint32_t>& layers,
                                                   const std::vector<LayerScan>* scan, TokenRange tokens) {
  std::vector<uint64_t> sum(tokens.count);
  uint64_t used = 0;
  for (const uint32_t l : layers) {
    if (all[l].raw_only) continue;
    if (scan == nullptr || scan->empty() || (*scan)[l].k.empty()) {
      return MakeError(absl::StatusCode::kFailedPrecondition, "KEY_NORM_UNAVAILABLE",
                       "policy.importance is KEY_NORM but layer " + std::to_string(all[l].layer) + " was not scanned",
                       {{"layer", std::to_string(all[l].layer)}});
    }
    const TokenScan* k = (*scan)[l].k.data() + tokens.first;
    for (uint32_t t = 0; t < tokens.count; ++t) sum[t] += k[t].energy_log2;
    ++used;
  }
  std::vector<double> mean(tokens.count);
  for (uint32_t t = 0; t < tokens.count && used != 0; ++t)
    mean[t] = static_cast<double>(sum[t]) / static_cast<double>(used);
  return mean;
}

absl::StatusOr<std::vector<uint32_t>> DecideKept(const KeepInput& input) {
  if (!MayDrop(input.policy->allocator)) return Iota(0, input.token_count);
  return Keeper(input).Run();
}

}  // namespace spectrumkv
