// The checks of a received chunk. The bytes are a stranger's: nothing here trusts one before it is compared.
#include <cstring>

#include "kernels/format/chunk.h"
#include "kernels/format/crc32c.h"

namespace spectrumkv {
namespace {

constexpr uint8_t kMagic[4] = {'S', 'K', 'V', '1'};
constexpr uint16_t kVersion = 1;
constexpr uint8_t kFlagV = 1;
// Scale bytes from here on are the float16 infinities and NaNs, or negative.
constexpr uint8_t kFirstBadScale8 = 0xF8;

Refusal CheckHeader(const ChunkHeader& header) {
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) return Refusal::kBadMagic;
  if (header.version != kVersion || header.header_bytes != kHeaderBytes) return Refusal::kUnsupportedVersion;
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

bool ChecksumOk(const uint8_t* data, size_t size, uint32_t expected) {
  const uint32_t head = Crc32c(0, data, offsetof(ChunkHeader, crc32c));
  return Crc32c(head, data + kHeaderBytes, size - kHeaderBytes) == expected;
}

bool TiersOk(const uint8_t* map, uint32_t tokens, bool has_v) {
  const int max_v = has_v ? kTierCount - 1 : 0;
  for (uint32_t t = 0; t < tokens; ++t) {
    if ((map[t] & 15) >= kTierCount || (map[t] >> 4) > max_v) return false;
  }
  return true;
}

bool PaddingOk(const uint8_t* data, const Section& section) {
  const uint64_t end = section.offset + section.bytes;
  for (uint64_t i = end; i % 16 != 0; ++i) {  // the header is a multiple of 16 too
    if (data[i] != 0) return false;
  }
  return true;
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

Refusal CheckSections(const uint8_t* data, const ChunkLayout& layout) {
  if (!PaddingOk(data, layout.tier_map)) return Refusal::kBadPadding;
  if (!PaddingOk(data, layout.centre_scales)) return Refusal::kBadPadding;
  if (!Scales16Ok(data, layout.centre_scales)) return Refusal::kBadScale;
  if (!PaddingOk(data, layout.centre_codes)) return Refusal::kBadPadding;
  if (!PaddingOk(data, layout.scales8)) return Refusal::kBadPadding;
  if (!Scales8Ok(data, layout.scales8)) return Refusal::kBadScale;
  if (!PaddingOk(data, layout.scales16)) return Refusal::kBadPadding;
  if (!Scales16Ok(data, layout.scales16)) return Refusal::kBadScale;
  for (const Section& codes : layout.codes) {
    if (!PaddingOk(data, codes)) return Refusal::kBadPadding;
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

Refusal ParseChunk(const uint8_t* data, size_t size, ChunkView* view) {
  if (size < kHeaderBytes) return Refusal::kTruncated;
  ChunkView parsed;
  parsed.data = data;
  std::memcpy(&parsed.header, data, kHeaderBytes);
  const ChunkHeader& header = parsed.header;
  if (const Refusal refusal = CheckHeader(header); refusal != Refusal::kNone) return refusal;
  if (header.body_bytes != size - kHeaderBytes) return Refusal::kBadLength;
  if (!ChecksumOk(data, size, header.crc32c)) return Refusal::kBadChecksum;

  parsed.dims = ChunkDims{header.token_count, header.head_count, header.head_dim, static_cast<DType>(header.dtype),
                          (header.flags & kFlagV) != 0};
  const uint32_t map_bytes = (parsed.dims.tokens + 15) / 16 * 16;
  if (header.body_bytes < map_bytes) return Refusal::kBadLength;
  const uint8_t* map = data + kHeaderBytes;
  if (!TiersOk(map, parsed.dims.tokens, parsed.dims.has_v)) return Refusal::kBadTier;
  parsed.counts = CountTiers(map, parsed.dims.tokens, parsed.dims.has_v);
  parsed.layout = LayoutOf(parsed.dims, parsed.counts);
  if (parsed.layout.chunk_bytes != size) return Refusal::kBadLength;
  if (const Refusal refusal = CheckSections(data, parsed.layout); refusal != Refusal::kNone) return refusal;
  *view = parsed;
  return Refusal::kNone;
}

}  // namespace spectrumkv
