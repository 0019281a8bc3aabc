// The checks of a received chunk. The bytes are a stranger's: nothing here trusts one before it is compared.
#include <algorithm>
#include <cstring>

#include "kernels/format/chunk.h"
#include "kernels/format/crc32c.h"
#include "kernels/format/version.h"

namespace spectrumkv {
namespace {

constexpr uint8_t kMagic[4] = {'S', 'K', 'V', '1'};
constexpr uint8_t kFlagV = 1;
// Scale bytes from here on are the float16 infinities and NaNs, or negative.
constexpr uint8_t kFirstBadScale8 = 0xF8;

Refusal CheckHeader(const ChunkHeader& header) {
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) return Refusal::kBadMagic;
  if (header.version != kFormatVersion || header.header_bytes != kHeaderBytes) return Refusal::kUnsupportedVersion;
  for (uint8_t byte : header.reserved) {
    if (byte != 0) return Refusal::kBadHeader;
  }
  const bool dims_ok = header.token_count >= 1 && header.token_count <= kMaxChunkTokens && header.head_count >= 1 &&
                       header.head_count <= kMaxHeads && header.head_dim >= 8 && header.head_dim <= kMaxHeadDim &&
                       header.head_dim % 8 == 0;
  const bool dtype_ok = header.dtype >= static_cast<uint8_t>(DType::kFloat16) &&
                        header.dtype <= static_cast<uint8_t>(DType::kFloat32);
  if (!dims_ok || !dtype_ok || (header.flags & ~kFlagV) != 0) return Refusal::kBadHeader;
  if (header.rotation != RotationOf(header.head_dim) || header.centre_tokens != kCentreTokens) {
    return Refusal::kBadHeader;
  }
  return Refusal::kNone;
}

bool ChecksumOk(const ChunkHeader& header, const Pieces& pieces, uint64_t body_bytes) {
  uint32_t crc = Crc32c(0, reinterpret_cast<const uint8_t*>(&header), offsetof(ChunkHeader, crc32c));
  PieceCursor body(pieces, kHeaderBytes);
  while (body_bytes > 0) {
    const size_t step = std::min<uint64_t>(body_bytes, body.InPiece());
    crc = Crc32c(crc, body.Take(step), step);
    body_bytes -= step;
  }
  return crc == header.crc32c;
}

bool TiersOk(const uint8_t* map, uint32_t tokens, bool has_v) {
  const int max_v = has_v ? kTierCount - 1 : 0;
  for (uint32_t t = 0; t < tokens; ++t) {
    if ((map[t] & 15) >= kTierCount || (map[t] >> 4) > max_v) return false;
  }
  return true;
}

// The header is a multiple of 16, so a section's padding ends at a multiple of 16 of the chunk.
uint64_t PaddingOf(const Section& section) { return (16 - (section.offset + section.bytes) % 16) % 16; }

bool PaddingOk(const uint8_t* data, const Section& section) {
  const uint8_t* end = data + section.offset + section.bytes;
  return std::all_of(end, end + PaddingOf(section), [](uint8_t byte) { return byte == 0; });
}

bool PaddingOk(const Pieces& pieces, const Section& section) {
  const uint64_t padding = PaddingOf(section);
  if (padding == 0) return true;
  uint8_t bytes[16] = {};
  PieceCursor(pieces, section.offset + section.bytes).CopyTo(bytes, padding);
  return std::all_of(bytes, bytes + padding, [](uint8_t byte) { return byte == 0; });
}

bool Scales16Ok(const uint8_t* data, const Section& section) {
  for (uint64_t i = 0; i < section.bytes; i += 2) {
    uint16_t bits;
    std::memcpy(&bits, data + section.offset + i, sizeof(bits));
    if ((bits & 0x7C00) == 0x7C00) return false;
  }
  return true;
}

bool Scales8Ok(const uint8_t* data, const Section& section) {
  for (uint64_t i = 0; i < section.bytes; ++i) {
    if (data[section.offset + i] >= kFirstBadScale8) return false;
  }
  return true;
}

Refusal CheckSections(const uint8_t* data, const Pieces& pieces, const ChunkLayout& layout) {
  if (!PaddingOk(data, layout.tier_map)) return Refusal::kBadPadding;
  if (!PaddingOk(data, layout.centre_scales)) return Refusal::kBadPadding;
  if (!Scales16Ok(data, layout.centre_scales)) return Refusal::kBadScale;
  if (!PaddingOk(data, layout.centre_codes)) return Refusal::kBadPadding;
  if (!PaddingOk(data, layout.scales8)) return Refusal::kBadPadding;
  if (!Scales8Ok(data, layout.scales8)) return Refusal::kBadScale;
  if (!PaddingOk(data, layout.scales16)) return Refusal::kBadPadding;
  if (!Scales16Ok(data, layout.scales16)) return Refusal::kBadScale;
  for (const Section& codes : layout.codes) {
    if (!PaddingOk(pieces, codes)) return Refusal::kBadPadding;
  }
  return Refusal::kNone;
}

}  // namespace

const char* RefusalName(Refusal refusal) {
  switch (refusal) {
    case Refusal::kNone: return "NONE";
    case Refusal::kTruncated: return "TRUNCATED";
    case Refusal::kBadMagic: return "BAD_MAGIC";
    case Refusal::kUnsupportedVersion: return "UNSUPPORTED_VERSION";
    case Refusal::kBadHeader: return "BAD_HEADER";
    case Refusal::kBadLength: return "BAD_LENGTH";
    case Refusal::kBadChecksum: return "BAD_CHECKSUM";
    case Refusal::kBadTier: return "BAD_TIER";
    case Refusal::kBadPadding: return "BAD_PADDING";
    case Refusal::kBadScale: return "BAD_SCALE";
  }
  return "?";
}

namespace {

// room: null where the chunk lies in one piece.
Refusal Parse(const Pieces& pieces, uint8_t* room, ChunkView* view) {
  const uint64_t size = pieces.TotalBytes();
  if (size < kHeaderBytes) return Refusal::kTruncated;
  PieceCursor cursor(pieces, 0);
  cursor.CopyTo(reinterpret_cast<uint8_t*>(&view->header), kHeaderBytes);
  const ChunkHeader& header = view->header;
  if (const Refusal refusal = CheckHeader(header); refusal != Refusal::kNone) return refusal;
  if (header.body_bytes != size - kHeaderBytes) return Refusal::kBadLength;
  if (!ChecksumOk(header, pieces, header.body_bytes)) return Refusal::kBadChecksum;

  view->dims = ChunkDims{header.token_count, header.head_count, header.head_dim, static_cast<DType>(header.dtype),
                         (header.flags & kFlagV) != 0};
  const uint32_t map_bytes = (view->dims.tokens + 15) / 16 * 16;
  if (header.body_bytes < map_bytes) return Refusal::kBadLength;
  view->metadata = room != nullptr ? room : pieces.first[0].data;
  if (room != nullptr) cursor.CopyTo(room + kHeaderBytes, map_bytes);
  const uint8_t* map = view->metadata + kHeaderBytes;
  if (!TiersOk(map, view->dims.tokens, view->dims.has_v)) return Refusal::kBadTier;
  view->counts = CountTiers(map, view->dims.tokens, view->dims.has_v);
  view->layout = LayoutOf(view->dims, view->counts);
  if (view->layout.chunk_bytes != size) return Refusal::kBadLength;
  const uint64_t map_end = kHeaderBytes + map_bytes;
  if (room != nullptr) cursor.CopyTo(room + map_end, view->layout.codes[0].offset - map_end);
  return CheckSections(view->metadata, pieces, view->layout);
}

}  // namespace

Refusal ParseChunk(const uint8_t* data, size_t size, ChunkView* view) {
  ChunkView parsed;
  parsed.whole = Piece{data, size};
  const Refusal refusal = Parse(parsed.pieces(), nullptr, &parsed);
  if (refusal == Refusal::kNone) *view = parsed;
  return refusal;
}

Refusal ParseChunk(const Pieces& pieces, uint8_t* room, ChunkView* view) {
  ChunkView parsed;
  parsed.scattered = pieces;
  const Refusal refusal = Parse(pieces, room, &parsed);
  if (refusal == Refusal::kNone) *view = parsed;
  return refusal;
}

}  // namespace spectrumkv
