// Exact bytes of a rectangle of (layers x tokens) while tokens move between rungs.
//
// Layers of one geometry whose chunk has the same escapes (mostly none) cost the same: they are counted once and
// weighted. Escapes of pinned tokens change nothing.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kernels/format/chunk.h"
#include "server/plan/ladder.h"
#include "server/plan/plan.h"

namespace spectrumkv {

// The tier a value of this escape class really travels at.
constexpr Tier AfterEscape(Tier tier, EscapeClass escape) {
  if (escape >= kEscapeAll) return Tier::kRaw;
  return escape == kEscapeRotated && IsRotated(tier) ? Tier::kRaw : tier;
}

// Has any of tokens [first, end) an escape class? Not in an empty scan.
bool AnyEscape(const std::vector<TokenScan>& scan, uint32_t first, uint32_t end);

// A rectangle: some layers of the shape, one run of kept tokens that begins and ends at chunk cuts of all of them.
struct Unit {
  TokenRange tokens;             // counted in kept tokens
  std::vector<uint32_t> layers;  // indices into TransferShape::layers, ascending
};

// Do chunks of equal tiers have equal bytes in both?
inline bool SameGeometry(const PlanLayer& a, const PlanLayer& b) {
  return a.heads == b.heads && a.head_dim == b.head_dim && a.dtype == b.dtype && a.has_v == b.has_v &&
         a.raw_only == b.raw_only;
}

// What the cost is counted in.
struct CostRules {
  const Ladder* ladder = nullptr;
  uint32_t pinned = 0;  // kept tokens [0, pinned) are RAW
  bool payload_only = false;
};

// Chunk bytes, or code bytes alone.
uint64_t CountedBytes(const ChunkDims& dims, const TierCounts& counts, bool payload_only);

class CostModel {
 public:
  // scan: one entry per layer of `layers`, or null for no escapes. Ladder, layers and scan are borrowed.
  CostModel(const std::vector<PlanLayer>& layers, const Unit& unit, const CostRules& rules,
            const std::vector<LayerScan>* scan);

  // Puts every token that is not pinned on one rung; returns bytes(). First call before anything else.
  uint64_t SetAll(size_t rung);
  // Moves one token, counted from the first of the unit. REQUIRES: it is on rung `from`, and not pinned.
  void Move(uint32_t token, size_t from, size_t to);
  // Moves `count` of them; cheaper than one by one.
  void MoveMany(const uint32_t* tokens, size_t count, size_t from, size_t to);
  uint64_t bytes() const { return bytes_; }

  // bytes() without centres and padding: a sum over tokens, and never above bytes().
  uint64_t LooseBytes() const;
  // Centres of the present state, which bytes() has beyond LooseBytes(), if they stay whatever moves from one rung to the
  // other; else 0.
  uint64_t LastingCentres(size_t from, size_t to) const;
  // What Move would add to LooseBytes().
  int64_t LooseDelta(uint32_t token, size_t from, size_t to) const;

  // Does any token that is not pinned escape in some layer? If none does, all tokens cost the same.
  bool has_escapes() const { return has_escapes_; }

  // Of one rung for all; the state afterwards is that rung.
  std::vector<uint64_t> BytesByRung();

 private:
  struct Chunk {
    uint64_t weight = 0;  // layers that look like this
    uint64_t bytes = 0;
    TierCounts counts;
    std::vector<uint8_t> escapes;   // [tokens]: class of K | class of V << 4; empty: none
    std::vector<uint32_t> escaped;  // tokens with an entry in `escapes`
  };
  struct Column {  // the chunks of one token range
    uint32_t tokens = 0;
    uint32_t pinned = 0;
    std::vector<Chunk> chunks;
  };
  struct Geometry {
    ChunkDims dims;
    uint32_t step = 0;  // tokens per chunk
    std::vector<Column> columns;
    std::array<uint64_t, kTierCount> token_bytes{};  // of K or V of one token: codes and scales
  };

  Geometry* GeometryOf(const PlanLayer& layer);
  void AddLayer(const PlanLayer& layer, const LayerScan* scan);
  // Escape entries of `column` in this layer, or an empty vector.
  std::vector<uint8_t> EscapesIn(const LayerScan& scan, const Column& column, uint32_t first, bool has_v) const;
  void AddEscaped(Column* column, std::vector<uint8_t> escapes);
  void Count(const Geometry& geometry, const Column& column, Chunk* chunk);
  // Recount of tokens of one column for all its chunks.
  void RecountColumn(const Geometry& geometry, const uint32_t* tokens, size_t count, const Rung& from, const Rung& to,
                     Column* column) const;
  // Chunk::counts after a token left one rung for another.
  void Recount(const Geometry& geometry, uint32_t token, const Rung& from, const Rung& to, Chunk* chunk) const;

  const Unit unit_;
  const CostRules rules_;
  std::vector<Geometry> geometries_;
  uint64_t fixed_bytes_ = 0;  // layers that only travel RAW
  uint64_t bytes_ = 0;
  bool has_escapes_ = false;
};

}  // namespace spectrumkv
