// One chunk: header, sections, exact sizes, and the checks a decoder makes before it writes anything.
// Source: proto/WIRE_FORMAT.md. Pure functions; all size arithmetic is 64-bit.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/format/pieces.h"
#include "kernels/format/types.h"

namespace spectrumkv {

constexpr size_t kHeaderBytes = 64;
constexpr uint32_t kCentreTokens = 64;
constexpr uint32_t kMaxChunkTokens = 4096;
constexpr uint32_t kMaxHeads = 1024;
constexpr uint32_t kMaxHeadDim = 1024;
constexpr uint64_t kMaxChunkKvBytes = 1 << 20;

// The header as it lies on the wire (little-endian machines only).
struct ChunkHeader {
  uint8_t magic[4];
  uint16_t version;
  uint16_t header_bytes;
  uint64_t fence;
  uint32_t chunk_index;
  uint16_t group;
  uint16_t layer;
  uint32_t token_first;
  uint16_t token_count;
  uint8_t dtype;
  uint8_t flags;
  uint16_t head_count;
  uint16_t head_dim;
  uint16_t rotation;
  uint16_t centre_tokens;
  uint32_t body_bytes;
  uint16_t head_first;
  uint8_t reserved[14];
  uint32_t crc32c;
};
static_assert(sizeof(ChunkHeader) == kHeaderBytes);

// What decides the sizes of a chunk.
struct ChunkDims {
  uint32_t tokens = 0;
  uint32_t heads = 0;
  uint32_t head_dim = 0;
  DType dtype = DType::kFloat16;
  bool has_v = true;
};

// Tokens at each tier, by tier id.
struct TierCounts {
  std::array<uint32_t, kTierCount> k{};
  std::array<uint32_t, kTierCount> v{};
};

// Largest power of two dividing head_dim, at most 256.
uint32_t RotationOf(uint32_t head_dim);

// Code bytes of one cell of `head_dim` values.
size_t CellBytes(Tier tier, uint32_t head_dim, DType dtype);

// Raw bytes of the chunk's values.
uint64_t KvBytes(const ChunkDims& dims);

// Header and body, exactly, for a chunk whose tier map on the wire has these counts.
uint64_t ChunkBytes(const ChunkDims& dims, const TierCounts& counts);

// No tier map of these dims needs more (header included).
uint64_t MaxChunkBytes(const ChunkDims& dims);

// Tokens per chunk by the rule of section "Size".
uint32_t TokensPerChunk(uint32_t heads, uint32_t head_dim, DType dtype, bool has_v);

// Index into ChunkLayout::codes, in wire order.
enum CodeSection { kCodesRaw, kCodesQ8, kCodesP8, kCodesP4, kCodesQ4, kCodesQ3, kCodesQ2, kCodeSections };

// Offsets from the first byte of the chunk; `bytes` without padding.
struct Section {
  uint64_t offset = 0;
  uint64_t bytes = 0;
};
struct ChunkLayout {
  Section tier_map, centre_scales, centre_codes, scales8, scales16;
  std::array<Section, kCodeSections> codes;
  uint64_t chunk_bytes = 0;
};
ChunkLayout LayoutOf(const ChunkDims& dims, const TierCounts& counts);
CodeSection CodeSectionOf(Tier tier);

TierCounts CountTiers(const uint8_t* tier_map, uint32_t tokens, bool has_v);

enum class Refusal {
  kNone,
  kTruncated,
  kBadMagic,
  kUnsupportedVersion,
  kBadHeader,
  kBadLength,
  kBadChecksum,
  kBadTier,
  kBadPadding,
  kBadScale,
};
// "TRUNCATED", "BAD_MAGIC", ...
const char* RefusalName(Refusal refusal);

// A chunk that passed every check. Borrows the bytes.
struct ChunkView {
  // Everything in front of the codes, in one piece: offsets of `layout` up to layout.codes[0].
  const uint8_t* metadata = nullptr;
  Piece whole;       // the chunk, if it lies in one piece
  Pieces scattered;  // its pieces, if not
  Pieces pieces() const { return scattered.count != 0 ? scattered : Pieces{&whole, 1}; }
  ChunkHeader header{};
  ChunkDims dims;
  TierCounts counts;
  ChunkLayout layout;
  const uint8_t* tier_map() const { return metadata + layout.tier_map.offset; }
};

// All checks of section "A decoder must refuse", in its order. `view` is set only for kNone. Never reads outside
// [data, data + size), whatever the bytes.
[[nodiscard]] Refusal ParseChunk(const uint8_t* data, size_t size, ChunkView* view);
// The same of a chunk in pieces. `room`: as many bytes as the chunk has, for the metadata. The view borrows `room` and
// the array of pieces.
[[nodiscard]] Refusal ParseChunk(const Pieces& pieces, uint8_t* room, ChunkView* view);

}  // namespace spectrumkv
