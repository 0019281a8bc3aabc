// Which cells of a transfer that has arrived are to come once more, better. Pure, as the planner.
//
// The receiver chooses: it knows at which tier each cell (one token of K or of V of one layer) arrived. What it asks for
// is a list of strips, one for each K or V that has cells to gain, each with its own tokens, all at one tier. A strip
// travels as a layer of one tensor. Source: docs/refinement.md.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/plan/plan.h"

namespace spectrumkv {

// Is `tier` more exact than `than`?
bool IsFiner(Tier tier, Tier than);

// The tier of every cell of a transfer, as it lies in the destination.
class TierMap {
 public:
  // All cells of the kept tokens, not known yet: they count as the coarsest.
  explicit TierMap(const TransferShape& shape);

  // Any thread, where nobody touches the same cells: tier map bytes (K | V << 4) of kept tokens [first, first + count).
  void Set(uint32_t layer_index, uint32_t first, uint32_t count, const uint8_t* map);
  // One cell, by the destination's token.
  void SetCell(uint32_t layer_index, bool values, uint32_t token, Tier tier);
  Tier At(uint32_t layer_index, bool values, uint32_t token) const {
    const uint8_t byte = bytes_[size_t{layer_index} * tokens_ + token];
    return static_cast<Tier>(values ? byte >> 4 : byte & 15);
  }
  uint32_t tokens() const { return tokens_; }
  uint64_t size_bytes() const { return bytes_.size(); }
  // Cells that are not RAW, of layers that have them.
  uint64_t CoarseCells(const TransferShape& shape) const;

 private:
  uint32_t tokens_;
  std::vector<uint8_t> bytes_;  // [layers, tokens]
};

struct RefineSelection {
  std::vector<TokenRange> tokens;  // positions of the request, ascending, disjoint; empty: all
  std::vector<uint32_t> layers;    // indices in the model; empty: all
  // [token_count] how much each token matters: where not all fit, those that matter most come first (the earlier of equal
  // ones). Empty: the first tokens come first.
  std::vector<float> scores;
};

// For a selection whose scores nobody has told: tokens that came finer mattered more to whoever planned them.
// [token_count], in the order of positions.
std::vector<float> ScoresOfTiers(const TransferShape& base, const TierMap& tiers);

struct RefineLimits {
  uint64_t wire_bytes = UINT64_MAX;  // escapes not counted
  uint64_t kv_bytes = UINT64_MAX;    // of the cells, raw
  uint32_t runs = 1 << 16;           // of tokens that the request may name
};

struct RefineChoice {
  // One layer of one tensor for each strip, in the order of layers, K before V; strips in positions of the request.
  TransferShape shape;
  struct Strip {
    uint32_t layer_index = 0;  // of the transfer that is refined
    bool values = false;
  };
  std::vector<Strip> strips;
  std::vector<std::vector<TokenRange>> rows;  // by strip: its tokens in the destination
  uint64_t cells = 0, cells_left = 0;         // left: selected, worse than the target, and not in it
  uint64_t kv_bytes = 0, wire_bytes = 0;      // as TransferReport counts them, before escapes
};

// What `selection` names of the cells that are worse than `tier`, as much as the limits allow. No cells, no error.
// Errors: INVALID_ARGUMENT INVALID_SELECTION (tokens, layers or scores that do not fit the transfer; the message names
// the field).
absl::StatusOr<RefineChoice> ChooseCells(const TransferShape& base, const TierMap& tiers,
                                         const RefineSelection& selection, Tier tier, const RefineLimits& limits);

// The shape of a refinement whose strips are known, from the layers of what is refined.
TransferShape ShapeOfStrips(const TransferShape& base, const std::vector<RefineChoice::Strip>& strips,
                            std::vector<std::vector<TokenRange>> tokens);

}  // namespace spectrumkv
