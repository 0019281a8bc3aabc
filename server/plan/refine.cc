#include "server/plan/refine.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include "kernels/format/chunk.h"
#include "server/base/status.h"

namespace spectrumkv {
namespace {

// How much a tier loses against others; the plain one of as many bits loses more than the rotated one.
constexpr int kLossMax = 6;
int LossOf(Tier tier) {
  constexpr std::array<uint8_t, kTierCount> kLoss = {/*RAW*/ 0, /*P8*/ 2, /*Q4*/ 3, /*Q3*/ 5, /*Q2*/ kLossMax, /*P4*/ 4, /*Q8*/ 1};
  return kLoss[static_cast<size_t>(tier)];
}

constexpr uint8_t kUnknownTiers = static_cast<uint8_t>(Tier::kQ2) | static_cast<uint8_t>(Tier::kQ2) << 4;

absl::Status InvalidSelection(const std::string& field, const std::string& what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_SELECTION", "selection." + field + " " + what,
                   {{"field", "selection." + field}});
}

absl::Status CheckSelection(const TransferShape& base, const RefineSelection& selection) {
  uint64_t end = 0;
  for (const TokenRange& run : selection.tokens) {
    if (run.count == 0 || run.first < end || uint64_t{run.first} + run.count > base.token_count) {
      return InvalidSelection("tokens", "have the run " + std::to_string(run.first) + "+" + std::to_string(run.count) +
                                   "; runs ascend, are not empty and end at " + std::to_string(base.token_count));
    }
    end = uint64_t{run.first} + run.count;
  }
  for (const uint32_t layer : selection.layers) {
    const bool known = std::any_of(base.layers.begin(), base.layers.end(),
                                   [layer](const PlanLayer& l) { return l.layer == layer; });
    if (!known) return InvalidSelection("layers", "name " + std::to_string(layer) + ", which the transfer does not have");
  }
  if (selection.scores.empty()) return absl::OkStatus();
  if (selection.scores.size() != base.token_count) {
    return InvalidSelection("scores", "are " + std::to_string(selection.scores.size()) + ", the transfer has " +
                                 std::to_string(base.token_count) + " tokens");
  }
  const bool good = std::all_of(selection.scores.begin(), selection.scores.end(),
                                [](float s) { return std::isfinite(s) && s >= 0; });
  return good ? absl::OkStatus() : InvalidSelection("scores", "must be finite and not negative");
}

// All that the selection names, and how much of it can be taken.
class Chooser {
 public:
  Chooser(const TransferShape& base, const TierMap& tiers, const RefineSelection& selection, Tier tier)
      : base_(base), tiers_(tiers), tier_(tier), positions_(PositionsOf(base.kept)) {
    for (uint32_t l = 0; l < base.layers.size(); ++l) {
      const bool named = selection.layers.empty() || std::find(selection.layers.begin(), selection.layers.end(),
                                                               base.layers[l].layer) != selection.layers.end();
      if (named) layers_.push_back(l);
    }
    Order(selection);
  }

  size_t tokens() const { return order_.size(); }

  // The first `count` tokens, by what they matter.
  RefineChoice Take(size_t count) const {
    std::vector<bool> taken(positions_.size(), false);
    for (size_t i = 0; i < count; ++i) taken[order_[i]] = true;
    RefineChoice choice;
    std::vector<std::vector<TokenRange>> tokens;
    for (const uint32_t l : layers_) {
      for (const bool values : {false, true}) {
        if (values && !base_.layers[l].has_v) continue;
        std::vector<TokenRange> rows, places;
        for (uint32_t t = 0; t < taken.size(); ++t) {
          if (!selected_[t] || !IsFiner(tier_, tiers_.At(l, values, t))) continue;
          if (!taken[t]) {
            ++choice.cells_left;
            continue;
          }
          AppendToken(&rows, t);
          AppendToken(&places, positions_[t]);
          ++choice.cells;
        }
        if (rows.empty()) continue;
        choice.strips.push_back({l, values});
        choice.rows.push_back(std::move(rows));
        tokens.push_back(std::move(places));
      }
    }
    choice.shape = ShapeOfStrips(base_, choice.strips, std::move(tokens));
    Price(&choice);
    return choice;
  }

 private:
  void Order(const RefineSelection& selection) {
    selected_.assign(positions_.size(), selection.tokens.empty());
    auto run = selection.tokens.begin();
    for (uint32_t t = 0; t < positions_.size() && run != selection.tokens.end(); ++t) {
      while (run != selection.tokens.end() && run->first + run->count <= positions_[t]) ++run;
      if (run != selection.tokens.end() && positions_[t] >= run->first) selected_[t] = true;
    }
    for (uint32_t t = 0; t < positions_.size(); ++t) {
      if (selected_[t]) order_.push_back(t);
    }
    if (selection.scores.empty()) return;
    std::stable_sort(order_.begin(), order_.end(), [&](uint32_t a, uint32_t b) {
      return selection.scores[positions_[a]] > selection.scores[positions_[b]];
    });
  }

  void Price(RefineChoice* choice) const {
    choice->kv_bytes = choice->strips.empty() ? 0 : KvBytesOf(choice->shape);
    for (const ChunkCut& cut : CutChunks(choice->shape)) {
      const PlanLayer& layer = choice->shape.layers[cut.layer_index];
      TierCounts counts;
      counts.k[static_cast<size_t>(layer.raw_only ? Tier::kRaw : tier_)] = cut.token_count;
      choice->wire_bytes += ChunkBytes(DimsOf(layer, cut.token_count), counts);
    }
  }

  const TransferShape& base_;
  const TierMap& tiers_;
  const Tier tier_;
  const std::vector<uint32_t> positions_;  // of the kept tokens
  std::vector<uint32_t> layers_;
  std::vector<bool> selected_;
  std::vector<uint32_t> order_;
};

bool Fits(const RefineChoice& choice, const RefineLimits& limits) {
  size_t runs = 0;
  const std::vector<TokenRange>* before = nullptr;
  for (const std::vector<TokenRange>& strip : choice.shape.strips) {
    if (before == nullptr || *before != strip) runs += strip.size();
    before = &strip;
  }
  return choice.wire_bytes <= limits.wire_bytes && choice.kv_bytes <= limits.kv_bytes && runs <= limits.runs;
}

}  // namespace

bool IsFiner(Tier tier, Tier than) { return LossOf(tier) < LossOf(than); }

std::vector<float> ScoresOfTiers(const TransferShape& base, const TierMap& tiers) {
  std::vector<float> scores(base.token_count, 0);
  const std::vector<uint32_t> positions = PositionsOf(base.kept);
  for (uint32_t l = 0; l < base.layers.size(); ++l) {
    for (uint32_t t = 0; t < tiers.tokens(); ++t) {
      scores[positions[t]] += static_cast<float>(kLossMax - LossOf(tiers.At(l, false, t)));
      if (base.layers[l].has_v) scores[positions[t]] += static_cast<float>(kLossMax - LossOf(tiers.At(l, true, t)));
    }
  }
  return scores;
}

TierMap::TierMap(const TransferShape& shape)
    : tokens_(shape.kept_count()), bytes_(shape.layers.size() * tokens_, kUnknownTiers) {}

void TierMap::Set(uint32_t layer_index, uint32_t first, uint32_t count, const uint8_t* map) {
  std::copy_n(map, count, bytes_.begin() + static_cast<ptrdiff_t>(size_t{layer_index} * tokens_ + first));
}

void TierMap::SetCell(uint32_t layer_index, bool values, uint32_t token, Tier tier) {
  uint8_t& byte = bytes_[size_t{layer_index} * tokens_ + token];
  const auto id = static_cast<uint8_t>(tier);
  byte = values ? static_cast<uint8_t>((byte & 0x0F) | id << 4) : static_cast<uint8_t>((byte & 0xF0) | id);
}

uint64_t TierMap::CoarseCells(const TransferShape& shape) const {
  uint64_t cells = 0;
  for (uint32_t l = 0; l < shape.layers.size(); ++l) {
    const uint8_t* const row = bytes_.data() + size_t{l} * tokens_;
    for (uint32_t t = 0; t < tokens_; ++t) cells += ((row[t] & 15) != 0) + (shape.layers[l].has_v && row[t] >> 4 != 0);
  }
  return cells;
}

TransferShape ShapeOfStrips(const TransferShape& base, const std::vector<RefineChoice::Strip>& strips,
                            std::vector<std::vector<TokenRange>> tokens) {
  TransferShape shape;
  shape.token_count = base.token_count;
  shape.kept = {{0, base.token_count}};
  for (const RefineChoice::Strip& strip : strips) {
    PlanLayer layer = base.layers[strip.layer_index];
    layer.has_v = false;
    shape.layers.push_back(layer);
  }
  shape.strips = std::move(tokens);
  return shape;
}

absl::StatusOr<RefineChoice> ChooseCells(const TransferShape& base, const TierMap& tiers,
                                         const RefineSelection& selection, Tier tier, const RefineLimits& limits) {
  if (absl::Status ok = CheckSelection(base, selection); !ok.ok()) return ok;
  const Chooser chooser(base, tiers, selection, tier);
  RefineChoice all = chooser.Take(chooser.tokens());
  if (Fits(all, limits)) return all;
  size_t fits = 0, too_many = chooser.tokens();
  while (too_many - fits > 1) {
    const size_t middle = fits + (too_many - fits) / 2;
    (Fits(chooser.Take(middle), limits) ? fits : too_many) = middle;
  }
  return chooser.Take(fits);
}

}  // namespace spectrumkv
