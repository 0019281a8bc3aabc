#include "kernels/format/chunk.h"

#include <algorithm>

namespace spectrumkv {
namespace {

constexpr uint64_t kSectionAlign = 16;

uint64_t RoundUp(uint64_t bytes) { return (bytes + kSectionAlign - 1) / kSectionAlign * kSectionAlign; }

uint64_t Runs(const ChunkDims& dims) { return (uint64_t{dims.tokens} + kCentreTokens - 1) / kCentreTokens; }

Tier TierOf(int id) { return static_cast<Tier>(id); }

constexpr uint32_t kCountBlock = 128;  // a count in it fits a byte, so that 16 are compared at a time

uint32_t CountEqual(const uint8_t* bytes, uint32_t count, uint8_t mask, uint8_t wanted) {
  uint32_t found = 0;
  for (; count >= kCountBlock; count -= kCountBlock, bytes += kCountBlock) {
    uint8_t in_block = 0;
    for (uint32_t i = 0; i < kCountBlock; ++i) {
      in_block = static_cast<uint8_t>(in_block + ((bytes[i] & mask) == wanted ? 1 : 0));
    }
    found += in_block;
  }
  for (uint32_t i = 0; i < count; ++i) found += (bytes[i] & mask) == wanted ? 1 : 0;
  return found;
}

void AddTokens(uint8_t map_byte, uint32_t count, bool has_v, TierCounts* counts) {
  const int k = map_byte & 15, v = map_byte >> 4;
  if (k < kTierCount) counts->k[k] += count;
  if (has_v && v < kTierCount) counts->v[v] += count;
}

}  // namespace

uint32_t RotationOf(uint32_t head_dim) {
  const uint32_t lowest_bit = head_dim & (~head_dim + 1);
  return std::min<uint32_t>(lowest_bit, 256);
}

size_t CellBytes(Tier tier, uint32_t head_dim, DType dtype) {
  switch (tier) {
    case Tier::kRaw: return size_t{head_dim} * SizeOf(dtype);
    case Tier::kP8:
    case Tier::kQ8: return head_dim;
    case Tier::kP4:
    case Tier::kQ4: return head_dim / 2;
    case Tier::kQ3: return head_dim / 4 + head_dim / 8;
    case Tier::kQ2: return head_dim / 4;
  }
  return 0;
}

uint64_t KvBytes(const ChunkDims& dims) {
  return uint64_t{dims.tokens} * dims.heads * dims.head_dim * SizeOf(dims.dtype) * (dims.has_v ? 2 : 1);
}

CodeSection CodeSectionOf(Tier tier) {
  switch (tier) {
    case Tier::kRaw: return kCodesRaw;
    case Tier::kQ8: return kCodesQ8;
    case Tier::kP8: return kCodesP8;
    case Tier::kP4: return kCodesP4;
    case Tier::kQ4: return kCodesQ4;
    case Tier::kQ3: return kCodesQ3;
    case Tier::kQ2: return kCodesQ2;
  }
  return kCodeSections;
}

ChunkLayout LayoutOf(const ChunkDims& dims, const TierCounts& counts) {
  ChunkLayout layout;
  uint64_t at = kHeaderBytes;
  const auto place = [&at](Section* section, uint64_t bytes) {
    section->offset = at;
    section->bytes = bytes;
    at += RoundUp(bytes);
  };

  uint64_t rotated_keys = 0, cells8 = 0, cells16 = 0;
  std::array<uint64_t, kCodeSections> code_bytes{};
  for (int id = 0; id < kTierCount; ++id) {
    const Tier tier = TierOf(id);
    const uint64_t cells = (uint64_t{counts.k[id]} + counts.v[id]) * dims.heads;
    if (IsRotated(tier)) rotated_keys += counts.k[id];
    if (HasScale8(tier)) cells8 += cells;
    if (HasScale16(tier)) cells16 += cells;
    code_bytes[CodeSectionOf(tier)] = cells * CellBytes(tier, dims.head_dim, dims.dtype);
  }
  const uint64_t centres = rotated_keys != 0 ? Runs(dims) * dims.heads : 0;

  place(&layout.tier_map, dims.tokens);
  place(&layout.centre_scales, centres * 2);
  place(&layout.centre_codes, centres * dims.head_dim);
  place(&layout.scales8, cells8);
  place(&layout.scales16, cells16 * 2);
  for (int i = 0; i < kCodeSections; ++i) place(&layout.codes[i], code_bytes[i]);
  layout.chunk_bytes = at;
  return layout;
}

uint64_t ChunkBytes(const ChunkDims& dims, const TierCounts& counts) { return LayoutOf(dims, counts).chunk_bytes; }

uint64_t MaxChunkBytes(const ChunkDims& dims) {
  // No cell of a coded tier, its scale included, is longer than a RAW one (head_dim >= 8). Centres come on top, and
  // every scale or code section may need padding.
  const uint64_t centres = Runs(dims) * dims.heads;
  const uint64_t padding = (2 + kCodeSections) * (kSectionAlign - 1);
  return kHeaderBytes + RoundUp(dims.tokens) + RoundUp(centres * 2) + RoundUp(centres * dims.head_dim) +
         RoundUp(KvBytes(dims) + padding);
}

uint32_t TokensPerChunk(uint32_t heads, uint32_t head_dim, DType dtype, bool has_v) {
  const uint64_t token_bytes = KvBytes(ChunkDims{1, heads, head_dim, dtype, has_v});
  const uint64_t fit = token_bytes == 0 ? kMaxChunkTokens : kMaxChunkKvBytes / token_bytes;
  if (fit >= kCentreTokens) {
    return static_cast<uint32_t>(std::min<uint64_t>(fit / kCentreTokens * kCentreTokens, kMaxChunkTokens));
  }
  uint32_t tokens = 1;
  while (tokens * 2 <= fit) tokens *= 2;
  return tokens;
}

TierCounts CountTiers(const uint8_t* tier_map, uint32_t tokens, bool has_v) {
  // Mostly few bytes are in use: one pass for each that is met first.
  constexpr int kFew = 3;
  TierCounts counts;
  uint32_t left = tokens, at = 0;
  uint8_t met[kFew];
  for (int n = 0; n < kFew && left != 0; ++n) {
    while (std::find(met, met + n, tier_map[at]) != met + n) ++at;
    met[n] = tier_map[at];
    const uint32_t found = CountEqual(tier_map, tokens, 0xFF, met[n]);
    AddTokens(met[n], found, has_v, &counts);
    left -= found;
  }
  if (left == 0) return counts;
  counts = TierCounts();
  for (int id = 0; id < kTierCount; ++id) {
    counts.k[id] = CountEqual(tier_map, tokens, 0x0F, static_cast<uint8_t>(id));
    if (has_v) counts.v[id] = CountEqual(tier_map, tokens, 0xF0, static_cast<uint8_t>(id << 4));
  }
  return counts;
}

}  // namespace spectrumkv
