#include "kernels/codec/table_backend.h"

#include <algorithm>
#include <cstring>

#include "kernels/codec/codec_math.h"
#include "kernels/codec/raw_words.h"
#include "kernels/codec/scan_math.h"
#include "kernels/codec/section_cursors.h"
#include "kernels/format/crc32c.h"

namespace spectrumkv {
namespace {

void GatherHead(const uint8_t* from, int64_t stride_bytes, uint32_t head_dim, size_t word_bytes, uint8_t* to) {
  for (uint32_t d = 0; d < head_dim; ++d, from += stride_bytes, to += word_bytes) {
    if (word_bytes == 2) {
      std::memcpy(to, from, 2);
    } else {
      std::memcpy(to, from, 4);
    }
  }
}

// One plane of the source, token by token, with the values of a head made contiguous.
class TokenReader {
 public:
  // `scratch`: bytes of one token, used where dims are strided.
  TokenReader(const ChunkDims& dims, const SourcePlane& plane, uint8_t* scratch)
      : dims_(dims), plane_(plane), scratch_(scratch), word_(static_cast<int64_t>(SizeOf(dims.dtype))) {}

  bool strided() const { return plane_.dim_stride_bytes != word_; }
  // All heads of a token lie together.
  bool rows_dense() const { return !strided() && plane_.head_stride_bytes == word_ * dims_.head_dim; }
  const uint8_t* row(uint32_t token) const { return plane_.rows[token]; }

  CellsIn Token(uint32_t token) const {
    if (!strided()) {
      return CellsIn{plane_.rows[token], plane_.head_stride_bytes, dims_.heads, dims_.head_dim, dims_.dtype};
    }
    const CellsIn gathered{scratch_, word_ * dims_.head_dim, dims_.heads, dims_.head_dim, dims_.dtype};
    for (uint32_t h = 0; h < dims_.heads; ++h) {
      GatherHead(plane_.rows[token] + h * plane_.head_stride_bytes, plane_.dim_stride_bytes, dims_.head_dim,
                 static_cast<size_t>(word_), scratch_ + h * gathered.head_stride_bytes);
    }
    return gathered;
  }

 private:
  const ChunkDims& dims_;
  const SourcePlane& plane_;
  uint8_t* scratch_;
  int64_t word_;
};

EscapeClass ClassOf(uint32_t magnitude, const EscapeLimits& limits) {
  if (magnitude >= limits.nonfinite) return kEscapeNonFinite;
  if (magnitude >= limits.above_plain) return kEscapeAll;
  return magnitude >= limits.above_rotated ? kEscapeRotated : kEscapeNone;
}

bool Escapes(Tier tier, EscapeClass escape) {
  if (tier == Tier::kRaw) return false;
  return escape >= kEscapeAll || (escape == kEscapeRotated && IsRotated(tier));
}

uint64_t CountNonFinite(const CellsIn& cells) {
  uint64_t found = 0;
  for (uint32_t h = 0; h < cells.heads; ++h) {
    found += CountNonFinite(cells.data + h * cells.head_stride_bytes, cells.dtype, cells.head_dim);
  }
  return found;
}

// The parts of a Workspace that one Encode uses.
struct EncodeScratch {
  float* means;               // [heads, head_dim]
  uint32_t* mean_magnitudes;  // [heads]
  uint32_t* k_magnitudes;     // [tokens, heads]
  uint32_t* v_magnitudes;     // the same
  uint8_t* row;               // the values of one token
  uint8_t* tier_map;          // [tokens], as on the wire

  EncodeScratch(const ChunkDims& dims, Workspace* workspace) {
    const size_t values = size_t{dims.heads} * dims.head_dim, cells = size_t{dims.tokens} * dims.heads;
    const size_t sizes[] = {values * sizeof(float),   dims.heads * sizeof(uint32_t),
                            cells * sizeof(uint32_t), cells * sizeof(uint32_t),
                            values * SizeOf(dims.dtype), dims.tokens};
    constexpr size_t kParts = sizeof(sizes) / sizeof(sizes[0]);
    size_t offsets[kParts], total = 0;
    for (size_t i = 0; i < kParts; ++i) {
      offsets[i] = total;
      total += (sizes[i] + 63) / 64 * 64;
    }
    uint8_t* memory = workspace->Reserve(total);
    means = reinterpret_cast<float*>(memory + offsets[0]);
    mean_magnitudes = reinterpret_cast<uint32_t*>(memory + offsets[1]);
    k_magnitudes = reinterpret_cast<uint32_t*>(memory + offsets[2]);
    v_magnitudes = reinterpret_cast<uint32_t*>(memory + offsets[3]);
    row = memory + offsets[4];
    tier_map = memory + offsets[5];
  }
};

// One chunk being written.
class ChunkWriter {
 public:
  ChunkWriter(const CellOps& ops, const ChunkDims& dims, const EncodeScratch& scratch, uint8_t* out)
      : ops_(ops), dims_(dims), scratch_(scratch), tier_map_(scratch.tier_map), means_(scratch.means), out_(out) {}

  // The tiers asked for.
  void Request(const uint8_t* tiers) {
    for (uint32_t t = 0; t < dims_.tokens; ++t) tier_map_[t] = dims_.has_v ? tiers[t] : tiers[t] & 15;
  }

  // Decides the escapes of a whole plane and puts them in the tier map. shift: 0 for K, 4 for V.
  void Classify(const TokenReader& plane, int shift, EncodeResult* result) {
    ClassifyRange(plane, 0, dims_.tokens, shift, true, result);
  }

  // Fixes the layout by the tier map. False where it does not fit.
  bool Begin(uint64_t capacity) {
    layout_ = LayoutOf(dims_, CountTiers(tier_map_, dims_.tokens, dims_.has_v));
    if (layout_.chunk_bytes > capacity || layout_.chunk_bytes - kHeaderBytes > UINT32_MAX) return false;
    const auto clear_padding = [this](const Section& section) {
      uint8_t* end = out_ + section.offset + section.bytes;
      std::memset(end, 0, (16 - section.bytes % 16) % 16);
    };
    for (const Section* section : {&layout_.tier_map, &layout_.centre_scales, &layout_.centre_codes, &layout_.scales8,
                                   &layout_.scales16}) {
      clear_padding(*section);
    }
    for (const Section& section : layout_.codes) clear_padding(section);
    std::memcpy(out_ + layout_.tier_map.offset, tier_map_, dims_.tokens);
    return true;
  }

  // Writes a plane. classified: Classify was called. If not, tokens are classified on the way, while they are in cache;
  // false where one must escape: the layout is wrong then, and all has to be written again.
  bool WriteKeys(const TokenReader& k, bool classified, SectionCursors<uint8_t>* cursors, EncodeResult* result) {
    const bool centred = layout_.centre_codes.bytes != 0;
    for (uint32_t first = 0; first < dims_.tokens; first += kCentreTokens) {
      const uint32_t end = std::min(first + kCentreTokens, dims_.tokens);
      if (centred && !classified && !ClassifyRange(k, first, end, 0, false, result)) return false;
      if (centred) WriteCentre(k, first, end);
      if (!WriteTokens(k, first, end, 0, means_, classified || centred, cursors, result)) return false;
    }
    return true;
  }

  bool WriteValues(const TokenReader& v, bool classified, SectionCursors<uint8_t>* cursors, EncodeResult* result) {
    return WriteTokens(v, 0, dims_.tokens, 4, nullptr, classified, cursors, result);
  }

  uint64_t Finish(const ChunkIdentity& identity) {
    ChunkHeader header{};
    std::memcpy(header.magic, "SKV1", sizeof(header.magic));
    header.version = 1;
    header.header_bytes = kHeaderBytes;
    header.fence = identity.fence;
    header.chunk_index = identity.chunk_index;
    header.group = identity.group;
    header.layer = identity.layer;
    header.token_first = identity.token_first;
    header.token_count = static_cast<uint16_t>(dims_.tokens);
    header.dtype = static_cast<uint8_t>(dims_.dtype);
    header.flags = dims_.has_v ? 1 : 0;
    header.head_count = static_cast<uint16_t>(dims_.heads);
    header.head_dim = static_cast<uint16_t>(dims_.head_dim);
    header.rotation = static_cast<uint16_t>(RotationOf(dims_.head_dim));
    header.centre_tokens = kCentreTokens;
    header.body_bytes = static_cast<uint32_t>(layout_.chunk_bytes - kHeaderBytes);
    header.head_first = identity.head_first;
    const uint32_t head_crc = Crc32c(0, &header, offsetof(ChunkHeader, crc32c));
    header.crc32c = Crc32c(head_crc, out_ + kHeaderBytes, header.body_bytes);
    std::memcpy(out_, &header, kHeaderBytes);
    return layout_.chunk_bytes;
  }

  const ChunkLayout& layout() const { return layout_; }

 private:
  // A centre is coded as a P8 cell of float32 values, so the cell functions serve for it.
  void WriteCentre(const TokenReader& k, uint32_t first, uint32_t end) {
    const size_t count = size_t{dims_.heads} * dims_.head_dim;
    std::fill_n(means_, count, 0.0f);
    uint32_t rotated = 0;
    for (uint32_t t = first; t < end; ++t) {
      if (!IsRotated(TierOfK(tier_map_[t]))) continue;
      ops_.accumulate(k.Token(t), means_);
      ++rotated;
    }
    if (rotated != 0) {
      const float n = static_cast<float>(rotated);
      for (size_t i = 0; i < count; ++i) means_[i] /= n;
    }
    const size_t run = first / kCentreTokens;
    uint8_t* scales = out_ + layout_.centre_scales.offset + run * dims_.heads * 2;
    uint8_t* codes = out_ + layout_.centre_codes.offset + run * count;
    const int64_t stride = static_cast<int64_t>(dims_.head_dim * sizeof(float));
    uint8_t* bytes = reinterpret_cast<uint8_t*>(means_);
    const CellsIn mean_cells{bytes, stride, dims_.heads, dims_.head_dim, DType::kFloat32};
    ops_.magnitude(mean_cells, scratch_.mean_magnitudes);
    ops_.encode(mean_cells, Tier::kP8, nullptr, scratch_.mean_magnitudes, scales, codes);
    ops_.decode(CellsOut{bytes, stride, dims_.heads, dims_.head_dim, DType::kFloat32}, Tier::kP8, nullptr, scales,
                codes);
  }

  // Keeps the cells' magnitudes. A token that must escape becomes RAW if `change`; if not, false.
  bool ClassifyRange(const TokenReader& plane, uint32_t first, uint32_t end, int shift, bool change,
                     EncodeResult* result) {
    const EscapeLimits limits = EscapeLimitsOf(dims_.dtype);
    for (uint32_t t = first; t < end; ++t) {
      const CellsIn cells = plane.Token(t);
      const EscapeClass escape = ClassOf(ops_.magnitude(cells, Magnitudes(shift, t)), limits);
      if (escape == kEscapeNone) continue;
      if (escape == kEscapeNonFinite) result->nonfinite_values += CountNonFinite(cells);
      if (!Escapes(static_cast<Tier>(tier_map_[t] >> shift & 15), escape)) continue;
      if (!change) return false;
      tier_map_[t] = static_cast<uint8_t>(tier_map_[t] & (shift == 0 ? 0xF0 : 0x0F));  // RAW is 0
      ++result->escaped;
    }
    return true;
  }

  bool WriteTokens(const TokenReader& plane, uint32_t first, uint32_t end, int shift, const float* means,
                   bool classified, SectionCursors<uint8_t>* cursors, EncodeResult* result) {
    constexpr uint64_t kInCacheBytes = 4 << 10;  // far less than a first-level cache
    const uint64_t token_bytes = uint64_t{dims_.heads} * dims_.head_dim * SizeOf(dims_.dtype);
    const uint32_t step = static_cast<uint32_t>(std::max<uint64_t>(1, kInCacheBytes / token_bytes));
    for (uint32_t at = first; at < end; at += step) {
      const uint32_t stop = std::min(at + step, end);
      if (!classified && !ClassifyRange(plane, at, stop, shift, false, result)) return false;
      WriteRange(plane, at, stop, shift, means, cursors);
    }
    return true;
  }

  void WriteRange(const TokenReader& plane, uint32_t first, uint32_t end, int shift, const float* means,
                  SectionCursors<uint8_t>* cursors) {
    for (uint32_t t = first; t < end;) {
      const Tier tier = static_cast<Tier>(tier_map_[t] >> shift & 15);
      uint8_t* codes = cursors->TakeCodes(tier, dims_.heads, CellBytes(tier, dims_.head_dim, dims_.dtype));
      if (tier == Tier::kRaw) {
        t += CopyRaw(plane, t, end, shift, codes, cursors);
        continue;
      }
      uint8_t* scales = cursors->TakeScales(tier, dims_.heads);
      ops_.encode(plane.Token(t), tier, IsRotated(tier) ? means : nullptr, Magnitudes(shift, t), scales, codes);
      ++t;
    }
  }

  // Copies token t, whose place is `to`, and the RAW tokens that follow it in memory; returns how many.
  uint32_t CopyRaw(const TokenReader& plane, uint32_t t, uint32_t end, int shift, uint8_t* to,
                   SectionCursors<uint8_t>* cursors) {
    const size_t head_bytes = size_t{dims_.head_dim} * SizeOf(dims_.dtype);
    const size_t token_bytes = head_bytes * dims_.heads;
    if (!plane.rows_dense()) {
      const CellsIn cells = plane.Token(t);
      for (uint32_t h = 0; h < dims_.heads; ++h) {
        std::memcpy(to + h * head_bytes, cells.data + h * cells.head_stride_bytes, head_bytes);
      }
      return 1;
    }
    uint32_t run = 1;
    while (t + run < end && (tier_map_[t + run] >> shift & 15) == 0 &&
           plane.row(t + run) == plane.row(t) + run * token_bytes) {
      ++run;
    }
    if (run > 1) cursors->TakeCodes(Tier::kRaw, uint64_t{run - 1} * dims_.heads, head_bytes);
    std::memcpy(to, plane.row(t), run * token_bytes);
    return run;
  }

  uint32_t* Magnitudes(int shift, uint32_t token) const {
    return (shift == 0 ? scratch_.k_magnitudes : scratch_.v_magnitudes) + size_t{token} * dims_.heads;
  }

  const CellOps& ops_;
  const ChunkDims& dims_;
  const EncodeScratch& scratch_;
  uint8_t* tier_map_;
  float* means_;
  uint8_t* out_;
  ChunkLayout layout_;
};

}  // namespace

EncodeResult TableBackend::Encode(const ChunkDims& dims, const ChunkIdentity& identity, const SourcePlane& k,
                                  const SourcePlane* v, const uint8_t* tiers, Workspace* workspace, uint8_t* out,
                                  uint64_t capacity) const {
  const EncodeScratch scratch(dims, workspace);
  ChunkWriter writer(ops_, dims, scratch, out);
  const TokenReader keys(dims, k, scratch.row);
  const TokenReader values(dims, dims.has_v ? *v : k, scratch.row);
  // Escapes are rare where the tiers were planned from a scan, so first none is expected and values are read once from
  // memory. If there is one, a second attempt looks at all values before it fixes the layout.
  for (bool classified : {false, true}) {
    EncodeResult result;
    writer.Request(tiers);
    if (classified) {
      writer.Classify(keys, 0, &result);
      if (dims.has_v) writer.Classify(values, 4, &result);
    }
    if (!writer.Begin(capacity)) continue;
    SectionCursors<uint8_t> cursors(out, writer.layout());
    if (!writer.WriteKeys(keys, classified, &cursors, &result)) continue;
    if (dims.has_v && !writer.WriteValues(values, classified, &cursors, &result)) continue;
    result.chunk_bytes = writer.Finish(identity);
    return result;
  }
  return EncodeResult{};
}

void TableBackend::Scan(const ChunkDims& dims, const SourcePlane& plane, TokenScan* out) const {
  const EscapeLimits limits = EscapeLimitsOf(dims.dtype);
  const size_t word = SizeOf(dims.dtype);
  const bool strided = plane.dim_stride_bytes != static_cast<int64_t>(word);
  alignas(64) uint8_t gathered[kMaxHeadDim * sizeof(float)];
  alignas(64) float lanes[kEnergyLanes];
  uint32_t magnitudes[kMaxHeads];
  for (uint32_t t = 0; t < dims.tokens; ++t) {
    std::fill_n(lanes, kEnergyLanes, 0.0f);
    uint32_t magnitude = 0;
    if (!strided) {
      const CellsIn cells{plane.rows[t], plane.head_stride_bytes, dims.heads, dims.head_dim, dims.dtype};
      magnitude = ops_.magnitude(cells, magnitudes);
      ops_.energy(cells, lanes);
    }
    for (uint32_t h = 0; strided && h < dims.heads; ++h) {
      GatherHead(plane.rows[t] + h * plane.head_stride_bytes, plane.dim_stride_bytes, dims.head_dim, word, gathered);
      const CellsIn head{gathered, 0, 1, dims.head_dim, dims.dtype};
      magnitude = std::max(magnitude, ops_.magnitude(head, magnitudes));
      ops_.energy(head, lanes);
    }
    out[t].escape = ClassOf(magnitude, limits);
    out[t].energy_log2 = out[t].escape == kEscapeNonFinite ? 255 : EnergyLog2(FoldEnergy(lanes));
  }
}

}  // namespace spectrumkv
