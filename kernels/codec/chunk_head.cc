#include "kernels/codec/chunk_head.h"

#include <cstddef>
#include <cstring>

#include "kernels/codec/raw_words.h"
#include "kernels/format/crc32c.h"
#include "kernels/format/version.h"

namespace spectrumkv {

ChunkHeader HeaderOf(const ChunkDims& dims, const ChunkIdentity& identity, uint64_t chunk_bytes) {
  ChunkHeader header{};
  std::memcpy(header.magic, "SKV1", sizeof(header.magic));
  header.version = kFormatVersion;
  header.header_bytes = kHeaderBytes;
  header.fence = identity.fence;
  header.chunk_index = identity.chunk_index;
  header.group = identity.group;
  header.layer = identity.layer;
  header.token_first = identity.token_first;
  header.token_count = static_cast<uint16_t>(dims.tokens);
  header.dtype = static_cast<uint8_t>(dims.dtype);
  header.flags = dims.has_v ? 1 : 0;
  header.head_count = static_cast<uint16_t>(dims.heads);
  header.head_dim = static_cast<uint16_t>(dims.head_dim);
  header.rotation = static_cast<uint16_t>(RotationOf(dims.head_dim));
  header.centre_tokens = kCentreTokens;
  header.body_bytes = static_cast<uint32_t>(chunk_bytes - kHeaderBytes);
  header.head_first = identity.head_first;
  header.crc32c = Crc32c(0, &header, offsetof(ChunkHeader, crc32c));
  return header;
}

void SealChunk(const ChunkDims& dims, const ChunkIdentity& identity, uint64_t chunk_bytes, uint8_t* chunk) {
  ChunkHeader header = HeaderOf(dims, identity, chunk_bytes);
  header.crc32c = Crc32c(header.crc32c, chunk + kHeaderBytes, header.body_bytes);
  std::memcpy(chunk, &header, kHeaderBytes);
}

uint64_t CountNonFinite(const CellsIn& cells) {
  uint64_t found = 0;
  for (uint32_t t = 0; t < cells.tokens; ++t) {
    for (uint32_t h = 0; h < cells.heads; ++h) {
      found += CountNonFinite(cells.rows[t] + h * cells.head_stride_bytes, cells.dtype, cells.head_dim);
    }
  }
  return found;
}

}  // namespace spectrumkv
