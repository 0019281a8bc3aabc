// The encoding half of TableBackend.
#include "kernels/codec/table_backend.h"

#include <algorithm>
#include <cstring>

#include "kernels/codec/chunk_head.h"
#include "kernels/codec/codec_math.h"
#include "kernels/codec/escapes.h"
#include "kernels/codec/raw_words.h"
#include "kernels/codec/section_cursors.h"
#include "kernels/codec/token_reader.h"

namespace spectrumkv {
namespace {

// The parts of a Workspace that one Encode uses.
struct EncodeScratch {
  float* means;       // [heads, head_dim]
  uint8_t* row;       // the values of one token
  uint8_t* tier_map;  // [tokens], as on the wire

  EncodeScratch(const ChunkDims& dims, Workspace* workspace) {
    const size_t values = size_t{dims.heads} * dims.head_dim;
    const size_t sizes[] = {values * sizeof(float), values * SizeOf(dims.dtype), dims.tokens};
    constexpr size_t kParts = sizeof(sizes) / sizeof(sizes[0]);
    size_t offsets[kParts], total = 0;
    for (size_t i = 0; i < kParts; ++i) {
      offsets[i] = total;
      total += (sizes[i] + 63) / 64 * 64;
    }
    uint8_t* memory = workspace->Reserve(total);
    means = reinterpret_cast<float*>(memory + offsets[0]);
    row = memory + offsets[1];
    tier_map = memory + offsets[2];
  }
};

// One chunk being written.
class ChunkWriter {
 public:
  ChunkWriter(const CellOps& ops, const ChunkDims& dims, const EncodeScratch& scratch, uint8_t* out)
      : ops_(ops),
        dims_(dims),
        limits_(EscapeLimitsOf(dims.dtype)),
        tier_map_(scratch.tier_map),
        means_(scratch.means),
        out_(out) {}

  // The tiers asked for.
  void Request(const uint8_t* tiers) {
    for (uint32_t t = 0; t < dims_.tokens; ++t) tier_map_[t] = dims_.has_v ? tiers[t] : tiers[t] & 15;
  }

  // Decides the escapes of a whole plane and puts them in the tier map. shift: 0 for K, 4 for V.
  void Classify(TokenReader* plane, int shift, EncodeResult* result) {
    for (uint32_t t = 0; t < dims_.tokens; ++t) {
      const CellsIn cells = plane->Cells(t, 1);
      const EscapeClass escape = ClassOf(ops_.magnitude(cells), limits_);
      if (escape == kEscapeNone) continue;
      if (escape == kEscapeNonFinite) result->nonfinite_values += CountNonFinite(cells);
      if (!Escapes(TierAt(t, shift), escape)) continue;
      tier_map_[t] = static_cast<uint8_t>(tier_map_[t] & (shift == 0 ? 0xF0 : 0x0F));  // RAW is 0
      ++result->escaped;
    }
  }

  // Fixes the layout by the tier map. False where it does not fit.
  bool Begin(uint64_t capacity) {
    layout_ = LayoutOf(dims_, CountTiers(tier_map_, dims_.tokens, dims_.has_v));
    if (layout_.chunk_bytes > capacity || layout_.chunk_bytes - kHeaderBytes > UINT32_MAX) return false;
    const auto clear_padding = [this](const Section& section) {
      uint8_t* end = out_ + section.offset + section.bytes;
      std::memset(end, 0, (16 - section.bytes % 16) % 16);
    };
    for (const Section* section :
         {&layout_.tier_map, &layout_.centre_scales, &layout_.centre_codes, &layout_.scales8, &layout_.scales16}) {
      clear_padding(*section);
    }
    for (const Section& section : layout_.codes) clear_padding(section);
    std::memcpy(out_ + layout_.tier_map.offset, tier_map_, dims_.tokens);
    return true;
  }

  // Writes a plane. classified: Classify was called. If not, escapes are noticed on the way; false where there is one:
  // the layout is wrong then, and all has to be written again.
  bool WriteKeys(TokenReader* k, bool classified, SectionCursors* cursors, EncodeResult* result) {
    const bool centred = layout_.centre_codes.bytes != 0;
    for (uint32_t first = 0; first < dims_.tokens; first += kCentreTokens) {
      const uint32_t end = std::min(first + kCentreTokens, dims_.tokens);
      if (centred && !WriteCentre(k, first, end)) return false;
      if (!WriteTokens(k, first, end, 0, means_, classified, cursors, result)) return false;
    }
    return true;
  }

  bool WriteValues(TokenReader* v, bool classified, SectionCursors* cursors, EncodeResult* result) {
    return WriteTokens(v, 0, dims_.tokens, 4, nullptr, classified, cursors, result);
  }

  uint64_t Finish(const ChunkIdentity& identity) {
    SealChunk(dims_, identity, layout_.chunk_bytes, out_);
    return layout_.chunk_bytes;
  }

  const ChunkLayout& layout() const { return layout_; }

 private:
  // A centre is coded as a P8 cell of float32 values, so the cell functions serve for it. False where a value escapes.
  bool WriteCentre(TokenReader* k, uint32_t first, uint32_t end) {
    const size_t count = size_t{dims_.heads} * dims_.head_dim;
    std::fill_n(means_, count, 0.0f);
    uint32_t rotated = 0;
    for (uint32_t t = first; t < end;) {
      if (!IsRotated(TierAt(t, 0))) {
        ++t;
        continue;
      }
      uint32_t run = 1;
      while (run < k->max_run() && t + run < end && IsRotated(TierAt(t + run, 0))) ++run;
      if (ops_.accumulate(k->Cells(t, run), means_) >= limits_.above_rotated) return false;
      rotated += run;
      t += run;
    }
    if (rotated != 0) {
      const float n = static_cast<float>(rotated);
      for (size_t i = 0; i < count; ++i) means_[i] /= n;
    }
    const size_t run = first / kCentreTokens;
    uint8_t* scales = out_ + layout_.centre_scales.offset + run * dims_.heads * 2;
    uint8_t* codes = out_ + layout_.centre_codes.offset + run * count;
    const int64_t stride = static_cast<int64_t>(dims_.head_dim * sizeof(float));
    uint8_t* const row = reinterpret_cast<uint8_t*>(means_);
    const uint8_t* const row_in = row;
    ops_.encode(CellsIn{&row_in, 1, 0, stride, dims_.heads, dims_.head_dim, DType::kFloat32}, Tier::kP8, {}, scales,
                codes);
    ops_.decode(CellsOut{&row, 1, stride, dims_.heads, dims_.head_dim, DType::kFloat32}, Tier::kP8, {}, scales, codes);
    return true;
  }

  // Tokens of one tier are written together.
  bool WriteTokens(TokenReader* plane, uint32_t first, uint32_t end, int shift, const float* means, bool classified,
                   SectionCursors* cursors, EncodeResult* result) {
    for (uint32_t t = first, run = 0; t < end; t += run) {
      const Tier tier = TierAt(t, shift);
      run = 1;
      while (run < plane->max_run() && t + run < end && TierAt(t + run, shift) == tier) ++run;
      const CellsIn cells = plane->Cells(t, run);
      const uint64_t count = uint64_t{run} * dims_.heads;
      uint8_t* codes = cursors->TakeCodes(tier, count, CellBytes(tier, dims_.head_dim, dims_.dtype));
      uint32_t magnitude;
      if (tier == Tier::kRaw) {
        magnitude = ops_.copy(cells, codes);
      } else {
        const Centres centres{IsRotated(tier) ? means : nullptr, 0.0f};
        magnitude = ops_.encode(cells, tier, centres, cursors->TakeScales(tier, count), codes);
      }
      if (classified || magnitude < FirstEscaping(tier, limits_)) continue;
      if (tier != Tier::kRaw) return false;
      result->nonfinite_values += CountNonFinite(cells);
    }
    return true;
  }

  Tier TierAt(uint32_t token, int shift) const { return static_cast<Tier>(tier_map_[token] >> shift & 15); }

  const CellOps& ops_;
  const ChunkDims& dims_;
  const EscapeLimits limits_;
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
  TokenReader keys(dims, k, scratch.row);
  TokenReader values(dims, dims.has_v ? *v : k, scratch.row);
  // Escapes are rare where the tiers were planned from a scan, so first none is expected and values are read once from
  // memory. If there is one, a second attempt looks at all values before it fixes the layout.
  for (bool classified : {false, true}) {
    EncodeResult result;
    writer.Request(tiers);
    if (classified) {
      writer.Classify(&keys, 0, &result);
      if (dims.has_v) writer.Classify(&values, 4, &result);
    }
    if (!writer.Begin(capacity)) continue;
    SectionCursors cursors(out, writer.layout());
    if (!writer.WriteKeys(&keys, classified, &cursors, &result)) continue;
    if (dims.has_v && !writer.WriteValues(&values, classified, &cursors, &result)) continue;
    result.chunk_bytes = writer.Finish(identity);
    return result;
  }
  return EncodeResult{};
}

}  // namespace spectrumkv
