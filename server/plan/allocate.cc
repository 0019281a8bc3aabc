#include "server/plan/allocate.h"

#include <algorithm>
#include <utility>

#include "server/plan/importance.h"

namespace spectrumkv {
namespace {

constexpr int kSelectionsMax = 3;  // before everything is sorted

// Highest rung in [0, below) that all tokens can have; `below` where none can.
size_t HighestForAll(CostModel* model, size_t below, uint64_t share) {
  for (size_t rung = below; rung-- > 0;) {
    if (model->SetAll(rung) <= share) return rung;
  }
  return below;
}

Allocation AllOn(size_t rung, uint32_t tokens, uint64_t bytes) {
  return {std::vector<uint8_t>(tokens, static_cast<uint8_t>(rung)), {}, bytes};
}

// The most of `order` that are within `share` one rung up, counted in loose bytes.
size_t MostThatFitLoosely(const CostModel& model, const std::vector<uint32_t>& order, size_t base, uint64_t share) {
  uint64_t loose = model.LooseBytes() + model.LastingCentres(base, base + 1);
  size_t most = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    loose += static_cast<uint64_t>(model.LooseDelta(order[i], base, base + 1));
    if (loose <= share) most = i + 1;
  }
  return most;
}

}  // namespace

Allocation AllocateGreedy(CostModel* model, size_t rungs, const std::vector<double>& keys, uint32_t pinned,
                          uint32_t tokens, uint64_t share) {
  const size_t base = HighestForAll(model, rungs, share);
  if (base >= rungs - 1) return AllOn(std::min(base, rungs - 1), tokens, model->bytes());
  // The loose bytes are a plain sum and, with the centres that stay, never above the exact ones: no count beyond `most`
  // can fit. From there down, every count is tried exactly, because padding and centres that go make the cost fall here
  // and there as the count rises.
  const size_t movable = tokens - pinned;
  std::vector<uint32_t> order;
  size_t most = 0, sorted_from = 0;
  if (model->has_escapes()) {
    order = OrderByImportance(keys, pinned);
    most = MostThatFitLoosely(*model, order, base, share);
  } else {  // every token costs the same: only the border between the two rungs matters
    const int64_t delta = movable == 0 ? 0 : model->LooseDelta(pinned, base, base + 1);
    const uint64_t loose = model->LooseBytes() + model->LastingCentres(base, base + 1);
    most = movable;
    if (delta > 0)
      most = std::min<uint64_t>(movable, loose > share ? 0 : (share - loose) / static_cast<uint64_t>(delta));
    Selection selection = SelectMostImportant(keys, pinned, most);
    order = std::move(selection.tokens);
    sorted_from = selection.sorted_from;
  }
  model->MoveMany(order.data(), most, base, base + 1);
  size_t best = most;
  for (int selections = 1; best > 0 && model->bytes() > share;) {
    if (best == sorted_from && selections++ < kSelectionsMax) {
      Selection selection = SelectMostImportant(keys, pinned, best);
      order = std::move(selection.tokens);
      sorted_from = selection.sorted_from;
    } else if (best == sorted_from) {
      order = OrderByImportance(keys, pinned);
      sorted_from = 0;
    }
    model->Move(order[--best], base + 1, base);
  }
  Allocation result = AllOn(base, tokens, model->bytes());
  for (size_t i = 0; i < best; ++i) result.rungs[order[i]] = static_cast<uint8_t>(base + 1);
  return result;
}

Allocation AllocateBalanced(CostModel* model, size_t rungs, size_t middle, const std::vector<uint32_t>& order,
                            uint32_t tokens, uint64_t share) {
  const size_t top = rungs - 1;
  size_t low = HighestForAll(model, middle, share);
  if (low == middle && model->SetAll(middle) > share) {
    // Only tiny chunks, where centres outweigh codes, have a higher rung that is cheaper.
    const size_t rung = HighestForAll(model, rungs, share);
    return AllOn(std::min(rung, top), tokens, model->bytes());
  }
  Allocation trial = AllOn(low, tokens, model->bytes());
  size_t middle_end = 0;  // order[0, middle_end) has left the low rung
  const auto move = [&](size_t i, size_t to) {
    uint8_t& rung = trial.rungs[order[i]];
    model->Move(order[i], rung, to);
    rung = static_cast<uint8_t>(to);
  };
  size_t best = 0;
  uint64_t best_bytes = model->bytes();
  for (size_t x = 1; x <= order.size(); ++x) {
    for (const size_t end = std::min(order.size(), 3 * x); middle_end < end; ++middle_end) move(middle_end, middle);
    move(x - 1, top);
    if (model->bytes() > share) continue;
    best = x;
    best_bytes = model->bytes();
  }
  Allocation result = AllOn(low, tokens, best_bytes);
  for (size_t i = 0; i < std::min(order.size(), 3 * best); ++i) {
    result.rungs[order[i]] = static_cast<uint8_t>(i < best ? top : middle);
  }
  return result;
}

}  // namespace spectrumkv
