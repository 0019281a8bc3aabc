#include "server/plan/cost.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

namespace spectrumkv {
namespace {

void AddToken(const Rung& rung, uint8_t escapes, bool has_v, uint32_t count, TierCounts* counts) {
  counts->k[static_cast<int>(AfterEscape(rung.k, static_cast<EscapeClass>(escapes & 15)))] += count;
  if (has_v) counts->v[static_cast<int>(AfterEscape(rung.v, static_cast<EscapeClass>(escapes >> 4)))] += count;
}

}  // namespace

bool AnyEscape(const std::vector<TokenScan>& scan, uint32_t first, uint32_t end) {
  if (scan.empty()) return false;
  static_assert(sizeof(TokenScan) == 2 && offsetof(TokenScan, escape) == 0);
  uint16_t seen = 0;
  for (uint32_t t = first; t < end; ++t) {
    uint16_t word;  // the escape is its low byte
    std::memcpy(&word, &scan[t], sizeof(word));
    seen |= word;
  }
  return (seen & 0xFF) != 0;
}

uint64_t CountedBytes(const ChunkDims& dims, const TierCounts& counts, bool payload_only) {
  if (!payload_only) return ChunkBytes(dims, counts);
  uint64_t bytes = 0;
  for (int id = 0; id < kTierCount; ++id) {
    const uint64_t cells = (uint64_t{counts.k[id]} + counts.v[id]) * dims.heads;
    bytes += cells * CellBytes(static_cast<Tier>(id), dims.head_dim, dims.dtype);
  }
  return bytes;
}

CostModel::CostModel(const std::vector<PlanLayer>& layers, const Unit& unit, const CostRules& rules,
                     const std::vector<LayerScan>* scan)
    : unit_(unit), rules_(rules) {
  for (const uint32_t l : unit.layers) {
    AddLayer(layers[l], scan == nullptr || scan->empty() ? nullptr : &(*scan)[l]);
  }
}

CostModel::Geometry* CostModel::GeometryOf(const PlanLayer& layer) {
  for (Geometry& known : geometries_) {
    if (known.dims.heads == layer.heads && known.dims.head_dim == layer.head_dim && known.dims.dtype == layer.dtype &&
        known.dims.has_v == layer.has_v) {
      return &known;
    }
  }
  Geometry& added = geometries_.emplace_back();
  added.dims = DimsOf(layer, 0);
  added.step = TokensPerChunk(layer.heads, layer.head_dim, layer.dtype, layer.has_v);
  for (int id = 0; id < kTierCount; ++id) {
    const Tier tier = static_cast<Tier>(id);
    const uint64_t scale = rules_.payload_only ? 0 : HasScale8(tier) ? 1 : HasScale16(tier) ? 2 : 0;
    added.token_bytes[id] = layer.heads * (CellBytes(tier, layer.head_dim, layer.dtype) + scale);
  }
  for (uint64_t at = 0; at < unit_.tokens.count; at += added.step) {
    const uint32_t first = unit_.tokens.first + static_cast<uint32_t>(at);
    Column& column = added.columns.emplace_back();
    column.tokens = std::min(added.step, unit_.tokens.count - static_cast<uint32_t>(at));
    column.pinned = rules_.pinned > first ? std::min(rules_.pinned - first, column.tokens) : 0;
    column.chunks.emplace_back();
  }
  return &added;
}

std::vector<uint8_t> CostModel::EscapesIn(const LayerScan& scan, const Column& column, uint32_t first,
                                          bool has_v) const {
  std::vector<uint8_t> escapes;
  const uint32_t begin = first + column.pinned, end = first + column.tokens;
  const bool k = AnyEscape(scan.k, begin, end), v = has_v && AnyEscape(scan.v, begin, end);
  if (!k && !v) return escapes;
  escapes.resize(column.tokens);
  for (uint32_t t = begin; t < end; ++t) {
    const uint8_t of_k = k ? scan.k[t].escape : 0, of_v = v ? scan.v[t].escape : 0;
    escapes[t - first] = static_cast<uint8_t>(of_k | of_v << 4);
  }
  return escapes;
}

void CostModel::AddLayer(const PlanLayer& layer, const LayerScan* scan) {
  Geometry* geometry = GeometryOf(layer);
  uint32_t first = unit_.tokens.first;
  for (Column& column : geometry->columns) {
    if (layer.raw_only) {
      TierCounts counts;
      AddToken(Rung{}, 0, layer.has_v, column.tokens, &counts);
      fixed_bytes_ += CountedBytes(DimsOf(layer, column.tokens), counts, rules_.payload_only);
    } else {
      std::vector<uint8_t> escapes;
      if (scan != nullptr) escapes = EscapesIn(*scan, column, first, layer.has_v);
      if (escapes.empty()) {
        ++column.chunks[0].weight;
      } else {
        AddEscaped(&column, std::move(escapes));
      }
    }
    first += column.tokens;
  }
}

void CostModel::AddEscaped(Column* column, std::vector<uint8_t> escapes) {
  for (Chunk& known : column->chunks) {
    if (known.escapes != escapes) continue;
    ++known.weight;
    return;
  }
  has_escapes_ = true;
  Chunk& chunk = column->chunks.emplace_back();
  chunk.weight = 1;
  for (uint32_t t = 0; t < column->tokens; ++t) {
    if (escapes[t] != 0) chunk.escaped.push_back(t);
  }
  chunk.escapes = std::move(escapes);
}

void CostModel::Count(const Geometry& geometry, const Column& column, Chunk* chunk) {
  ChunkDims dims = geometry.dims;
  dims.tokens = column.tokens;
  chunk->bytes = CountedBytes(dims, chunk->counts, rules_.payload_only);
}

uint64_t CostModel::SetAll(size_t rung) {
  const Rung& to = (*rules_.ladder)[rung];
  bytes_ = fixed_bytes_;
  for (Geometry& geometry : geometries_) {
    const bool has_v = geometry.dims.has_v;
    for (Column& column : geometry.columns) {
      for (Chunk& chunk : column.chunks) {
        if (chunk.weight == 0) continue;
        chunk.counts = TierCounts();
        const uint32_t escaped = static_cast<uint32_t>(chunk.escaped.size());
        AddToken(Rung{}, 0, has_v, column.pinned, &chunk.counts);
        AddToken(to, 0, has_v, column.tokens - column.pinned - escaped, &chunk.counts);
        for (const uint32_t t : chunk.escaped) AddToken(to, chunk.escapes[t], has_v, 1, &chunk.counts);
        Count(geometry, column, &chunk);
        bytes_ += chunk.bytes * chunk.weight;
      }
    }
  }
  return bytes_;
}

void CostModel::Recount(const Geometry& geometry, uint32_t token, const Rung& from, const Rung& to,
                        Chunk* chunk) const {
  constexpr uint32_t kLess = ~uint32_t{0};  // adds -1
  const uint8_t escapes = chunk->escapes.empty() ? 0 : chunk->escapes[token % geometry.step];
  AddToken(from, escapes, geometry.dims.has_v, kLess, &chunk->counts);
  AddToken(to, escapes, geometry.dims.has_v, 1, &chunk->counts);
}

void CostModel::Move(uint32_t token, size_t from, size_t to) {
  for (Geometry& geometry : geometries_) {
    Column& column = geometry.columns[token / geometry.step];
    for (Chunk& chunk : column.chunks) {
      if (chunk.weight == 0) continue;
      Recount(geometry, token, (*rules_.ladder)[from], (*rules_.ladder)[to], &chunk);
      const uint64_t before = chunk.bytes;
      Count(geometry, column, &chunk);
      bytes_ += (chunk.bytes - before) * chunk.weight;
    }
  }
}

void CostModel::RecountColumn(const Geometry& geometry, const uint32_t* tokens, size_t count, const Rung& from,
                              const Rung& to, Column* column) const {
  for (Chunk& chunk : column->chunks) {
    if (chunk.weight == 0) continue;
    if (chunk.escapes.empty()) {
      AddToken(from, 0, geometry.dims.has_v, static_cast<uint32_t>(0 - count), &chunk.counts);
      AddToken(to, 0, geometry.dims.has_v, static_cast<uint32_t>(count), &chunk.counts);
      continue;
    }
    for (size_t i = 0; i < count; ++i) Recount(geometry, tokens[i], from, to, &chunk);
  }
}

void CostModel::MoveMany(const uint32_t* tokens, size_t count, size_t from, size_t to) {
  const Rung old_rung = (*rules_.ladder)[from], new_rung = (*rules_.ladder)[to];
  bytes_ = fixed_bytes_;
  for (Geometry& geometry : geometries_) {
    for (size_t i = 0, end; i < count; i = end) {
      // Neighbours in the list mostly lie in one column.
      const uint32_t at = tokens[i] / geometry.step, first = at * geometry.step;
      for (end = i + 1; end < count && tokens[end] - first < geometry.step;) ++end;
      RecountColumn(geometry, tokens + i, end - i, old_rung, new_rung, &geometry.columns[at]);
    }
    for (Column& column : geometry.columns) {
      for (Chunk& chunk : column.chunks) {
        if (chunk.weight == 0) continue;
        Count(geometry, column, &chunk);
        bytes_ += chunk.bytes * chunk.weight;
      }
    }
  }
}

uint64_t CostModel::LooseBytes() const {
  uint64_t bytes = fixed_bytes_;
  for (const Geometry& geometry : geometries_) {
    for (const Column& column : geometry.columns) {
      for (const Chunk& chunk : column.chunks) {
        uint64_t of_chunk = rules_.payload_only ? 0 : kHeaderBytes + column.tokens;
        for (int id = 0; id < kTierCount; ++id) {
          of_chunk += (uint64_t{chunk.counts.k[id]} + chunk.counts.v[id]) * geometry.token_bytes[id];
        }
        bytes += of_chunk * chunk.weight;
      }
    }
  }
  return bytes;
}

uint64_t CostModel::LastingCentres(size_t from, size_t to) const {
  uint64_t bytes = 0;
  if (rules_.payload_only || !IsRotated((*rules_.ladder)[from].k) || !IsRotated((*rules_.ladder)[to].k)) return bytes;
  for (const Geometry& geometry : geometries_) {
    for (const Column& column : geometry.columns) {
      for (const Chunk& chunk : column.chunks) {
        ChunkDims dims = geometry.dims;
        dims.tokens = column.tokens;
        const ChunkLayout layout = LayoutOf(dims, chunk.counts);
        bytes += (layout.centre_scales.bytes + layout.centre_codes.bytes) * chunk.weight;
      }
    }
  }
  return bytes;
}

int64_t CostModel::LooseDelta(uint32_t token, size_t from, size_t to) const {
  const Rung& old_rung = (*rules_.ladder)[from];
  const Rung& new_rung = (*rules_.ladder)[to];
  uint64_t delta = 0;  // wraps
  for (const Geometry& geometry : geometries_) {
    const auto bytes_of = [&geometry](const Rung& rung, uint8_t escapes) {
      const Tier k = AfterEscape(rung.k, static_cast<EscapeClass>(escapes & 15));
      const Tier v = AfterEscape(rung.v, static_cast<EscapeClass>(escapes >> 4));
      return geometry.token_bytes[static_cast<int>(k)] +
             (geometry.dims.has_v ? geometry.token_bytes[static_cast<int>(v)] : 0);
    };
    for (const Chunk& chunk : geometry.columns[token / geometry.step].chunks) {
      const uint8_t escapes = chunk.escapes.empty() ? 0 : chunk.escapes[token % geometry.step];
      delta += (bytes_of(new_rung, escapes) - bytes_of(old_rung, escapes)) * chunk.weight;
    }
  }
  return static_cast<int64_t>(delta);
}

std::vector<uint64_t> CostModel::BytesByRung() {
  std::vector<uint64_t> bytes;
  for (size_t rung = 0; rung < rules_.ladder->size(); ++rung) bytes.push_back(SetAll(rung));
  return bytes;
}

}  // namespace spectrumkv
