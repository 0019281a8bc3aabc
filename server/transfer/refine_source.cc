// What the sender of a refinement reads: the strips that its peer has asked for, and the checksums of all that is retained.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/format/crc32c.h"
#include "server/base/status.h"
#include "server/transfer/refinement.h"
#include "server/transfer/retained_words.h"

namespace spectrumkv {
namespace {

// Read at a time for a checksum.
constexpr uint64_t kChecksumPieceBytes = 1 << 20;

absl::Status BadRefine(const std::string& what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_REFINE", "the peer's refinement " + what);
}

}  // namespace

absl::StatusOr<std::vector<uint32_t>> ChecksumsOf(const BlockHold& hold, const std::vector<PlanLayer>& layers,
                                                  const std::vector<LayerPlace>& places,
                                                  const std::function<bool()>& stopped) {
  std::vector<uint32_t> sums;
  std::vector<uint8_t> dense;
  const absl::Status read = ForEachPiece(
      hold, layers, places, kChecksumPieceBytes,
      [&](const TensorOfHold& tensor, uint32_t first, uint32_t count, uint64_t row_bytes) -> absl::Status {
        if (stopped()) return absl::CancelledError("nobody asks for the checksums any more");
        if (first == 0) sums.push_back(0);
        dense.resize(count * row_bytes);
        absl::Status there = ReadRows(hold, tensor, first, count, dense.data());
        sums.back() = Crc32c(sums.back(), dense.data(), dense.size());
        return there;
      });
  if (!read.ok()) return read;
  return sums;
}

absl::StatusOr<RefineSource> SourceOfRequest(const RefineFrame& request, const std::vector<PlanLayer>& layers,
                                             const std::vector<LayerPlace>& places, uint32_t token_count) {
  RefineSource source;
  if (request.tier < 1 || request.tier > kTierCount) return BadRefine(absl::StrCat("has tier ", request.tier));
  source.tier = static_cast<Tier>(request.tier - 1);
  source.verify = request.verify;
  if (request.verify) {
    source.base_layers = layers;
    source.base_places = places;
  }
  source.shape.token_count = token_count;
  source.shape.kept = {{0, token_count}};
  int64_t before = -1;
  for (const RefineFrame::Strip& strip : request.strips) {
    const auto at = std::find_if(layers.begin(), layers.end(), [&](const PlanLayer& l) { return l.layer == strip.layer; });
    const std::string name = absl::StrCat("strip of layer ", strip.layer);
    if (at == layers.end()) return BadRefine("has a " + name + ", which the source does not have");
    if (strip.values && !at->has_v) return BadRefine("has a " + name + " for V, which has none");
    const int64_t order = 2 * (at - layers.begin()) + (strip.values ? 1 : 0);
    if (order <= before) return BadRefine("has a " + name + " out of order");
    before = order;
    if (strip.token_set >= request.token_sets.size() || request.token_sets[strip.token_set].empty()) {
      return BadRefine("has a " + name + " without tokens");
    }
    auto& tokens = source.shape.strips.emplace_back();
    uint64_t end = 0;
    for (const FrameRun& run : request.token_sets[strip.token_set]) {
      if (run.count == 0 || run.first < end || uint64_t{run.first} + run.count > token_count) {
        return BadRefine(absl::StrCat("has the token run ", run.first, "+", run.count, " of ", token_count));
      }
      end = uint64_t{run.first} + run.count;
      tokens.push_back({run.first, run.count});
    }
    PlanLayer layer = *at;
    layer.has_v = false;
    source.shape.layers.push_back(layer);
    LayerPlace place = places[static_cast<size_t>(at - layers.begin())];
    place.values = strip.values;
    source.places.push_back(place);
  }
  if (source.shape.layers.empty()) return BadRefine("has no strips");
  return source;
}

}  // namespace spectrumkv
