#include "server/plan/emit.h"

#include <algorithm>
#include <array>

namespace spectrumkv {
namespace {

// Forces `map` to what the escapes of tokens [first, first + tokens) allow; returns (token, plane) pairs that changed.
uint32_t ApplyEscapes(const LayerScan& scan, uint32_t first, uint32_t tokens, bool has_v, uint8_t* map) {
  uint32_t changed = 0;
  const bool scanned_k = AnyEscape(scan.k, first, first + tokens);
  const bool scanned_v = has_v && AnyEscape(scan.v, first, first + tokens);
  if (!scanned_k && !scanned_v) return 0;
  for (uint32_t t = 0; t < tokens; ++t) {
    const EscapeClass of_k = scanned_k ? scan.k[first + t].escape : kEscapeNone;
    const EscapeClass of_v = scanned_v ? scan.v[first + t].escape : kEscapeNone;
    if (of_k == kEscapeNone && of_v == kEscapeNone) continue;
    const Tier k = AfterEscape(TierOfK(map[t]), of_k), v = AfterEscape(TierOfV(map[t]), of_v);
    changed += (k != TierOfK(map[t])) + (v != TierOfV(map[t]));
    map[t] = TierMapByte(k, v);
  }
  return changed;
}

}  // namespace

Emitter::Emitter(const std::vector<PlanLayer>& layers, const std::vector<ChunkCut>& cuts,
                 const std::vector<uint32_t>& chunk_indices, const CostRules& rules, PlanBatch* batch)
    : layers_(layers), cuts_(cuts), indices_(chunk_indices), rules_(rules), batch_(batch) {
  batch_->chunks.resize(indices_.size());
}

void Emitter::AddTotals(const TierCounts& counts) {
  for (int id = 0; id < kTierCount; ++id) {
    batch_->totals.k[id] += counts.k[id];
    batch_->totals.v[id] += counts.v[id];
  }
}

const Emitter::CleanLayer& Emitter::CleanOf(const PlanLayer& layer, size_t first_slot, size_t slots, const Unit& unit,
                                            const uint8_t* map) {
  for (const CleanLayer& known : clean_) {
    if (SameGeometry(known.geometry, layer)) return known;
  }
  CleanLayer& added = clean_.emplace_back();
  added.geometry = layer;
  for (size_t i = first_slot; i < first_slot + slots; ++i) {
    const ChunkCut& cut = cuts_[indices_[i]];
    CleanChunk& chunk = added.chunks.emplace_back();
    const ChunkDims dims = DimsOf(layer, cut.token_count);
    chunk.counts = CountTiers(map + (cut.token_first - unit.tokens.first), cut.token_count, layer.has_v);
    chunk.chunk_bytes = ChunkBytes(dims, chunk.counts);
    chunk.counted_bytes = CountedBytes(dims, chunk.counts, rules_.payload_only);
  }
  return added;
}

uint64_t Emitter::EmitChunk(const PlanLayer& layer, const LayerScan* scan, const uint8_t* map, const CleanChunk& clean,
                            PlannedChunk* chunk) {
  const ChunkCut& cut = chunk->cut;
  chunk->tier_map.assign(map, map + cut.token_count);
  const uint32_t escaped =
      scan == nullptr ? 0 : ApplyEscapes(*scan, cut.token_first, cut.token_count, layer.has_v, chunk->tier_map.data());
  TierCounts counts = clean.counts;
  uint64_t counted = clean.counted_bytes;
  chunk->chunk_bytes = clean.chunk_bytes;
  if (escaped != 0) {
    const ChunkDims dims = DimsOf(layer, cut.token_count);
    counts = CountTiers(chunk->tier_map.data(), cut.token_count, layer.has_v);
    chunk->chunk_bytes = ChunkBytes(dims, counts);
    counted = CountedBytes(dims, counts, rules_.payload_only);
  }
  batch_->escaped += escaped;
  batch_->wire_bytes += chunk->chunk_bytes;
  batch_->kv_bytes += KvBytes(DimsOf(layer, cut.token_count));
  AddTotals(counts);
  return counted;
}

void Emitter::FillMaps(const Unit& unit, const Allocation& allocation) {
  std::array<uint8_t, 256> byte_of{};  // of a rung
  for (size_t i = 0; i < rules_.ladder->size(); ++i)
    byte_of[i] = TierMapByte((*rules_.ladder)[i].k, (*rules_.ladder)[i].v);
  const uint32_t count = unit.tokens.count;
  const uint32_t pinned = rules_.pinned > unit.tokens.first ? std::min(rules_.pinned - unit.tokens.first, count) : 0;
  map_.resize(count);
  std::fill_n(map_.begin(), pinned, TierMapByte(Tier::kRaw, Tier::kRaw));
  for (uint32_t t = pinned; t < count; ++t) map_[t] = byte_of[allocation.rungs[t]];
  map_k_.resize(count);
  for (uint32_t t = 0; t < count; ++t) map_k_[t] = map_[t] & 15;
  map_raw_.assign(count, TierMapByte(Tier::kRaw, Tier::kRaw));
}

uint64_t Emitter::Emit(const Unit& unit, const Allocation& allocation, const std::vector<LayerScan>& scan) {
  const bool by_layer = !allocation.tier_maps.empty();
  if (!by_layer) FillMaps(unit, allocation);
  clean_.clear();
  uint64_t counted = 0;
  const uint8_t* own_map = allocation.tier_maps.data();
  for (const uint32_t l : unit.layers) {
    const PlanLayer& layer = layers_[l];
    const auto is_before = [this, l, &unit](uint32_t index, int) {
      const ChunkCut& cut = cuts_[index];
      return cut.layer_index < l || (cut.layer_index == l && cut.token_first < unit.tokens.first);
    };
    const size_t first =
        static_cast<size_t>(std::lower_bound(indices_.begin(), indices_.end(), 0, is_before) - indices_.begin());
    size_t slots = 0;
    for (uint32_t tokens = 0; tokens < unit.tokens.count; ++slots) tokens += cuts_[indices_[first + slots]].token_count;
    const uint8_t* map = by_layer ? own_map : MapOf(layer).data();
    if (by_layer) own_map += unit.tokens.count;
    if (by_layer) clean_.clear();
    const CleanLayer& clean = CleanOf(layer, first, slots, unit, map);
    const LayerScan* layer_scan = scan.empty() || layer.raw_only ? nullptr : &scan[l];
    for (size_t i = 0; i < slots; ++i) {
      PlannedChunk* chunk = &batch_->chunks[first + i];
      chunk->cut = cuts_[indices_[first + i]];
      const uint8_t* chunk_map = map + (chunk->cut.token_first - unit.tokens.first);
      counted += EmitChunk(layer, layer_scan, chunk_map, clean.chunks[i], chunk);
    }
  }
  return counted;
}

}  // namespace spectrumkv
