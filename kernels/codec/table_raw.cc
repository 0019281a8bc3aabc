// RAW chunks whose words stay in the planes.
#include <algorithm>
#include <cstring>

#include "kernels/codec/chunk_head.h"
#include "kernels/codec/codec_math.h"
#include "kernels/codec/table_backend.h"
#include "kernels/codec/token_runs.h"
#include "kernels/format/crc32c.h"

namespace spectrumkv {
namespace {

// Values that are looked at twice while they are in the first cache.
constexpr size_t kHotBytes = 16384;

bool Contiguous(const ChunkDims& dims, const SourcePlane& plane) {
  const int64_t word = static_cast<int64_t>(SizeOf(dims.dtype));
  return plane.dim_stride_bytes == word && (dims.heads == 1 || plane.head_stride_bytes == word * dims.head_dim);
}

// Tokens that follow each other in memory are one piece.
void AppendPieces(const ChunkDims& dims, const SourcePlane& plane, size_t token_bytes, std::vector<Piece>* words) {
  for (uint32_t t = 0, run = 0; t < dims.tokens; t += run) {
    run = ContiguousTokens(plane.rows + t, dims.tokens - t, token_bytes);
    words->push_back({plane.rows[t], run * token_bytes});
  }
}

// Continues the checksum over a plane and counts what is not finite in it.
uint32_t CheckPlane(const CellOps& ops, const ChunkDims& dims, const SourcePlane& plane, size_t token_bytes,
                    uint32_t crc, uint64_t* nonfinite_values) {
  const uint32_t limit = EscapeLimitsOf(dims.dtype).nonfinite;
  const auto hot_tokens = static_cast<uint32_t>(std::max<size_t>(1, kHotBytes / token_bytes));
  for (uint32_t t = 0, count = 0; t < dims.tokens; t += count) {
    count = ContiguousTokens(plane.rows + t, std::min(hot_tokens, dims.tokens - t), token_bytes);
    crc = Crc32c(crc, plane.rows[t], count * token_bytes);
    const CellsIn cells{plane.rows + t, count, 0, plane.head_stride_bytes, dims.heads, dims.head_dim, dims.dtype};
    if (ops.magnitude(cells) >= limit) *nonfinite_values += CountNonFinite(cells);
  }
  return crc;
}

}  // namespace

EncodeResult TableBackend::FrameRaw(const ChunkDims& dims, const ChunkIdentity& identity, const SourcePlane& k,
                                    const SourcePlane* v, uint8_t* head, std::vector<Piece>* words) const {
  words->clear();
  EncodeResult result;
  if (!Contiguous(dims, k) || (v != nullptr && !Contiguous(dims, *v))) return result;
  const size_t token_bytes = size_t{dims.heads} * dims.head_dim * SizeOf(dims.dtype);
  const size_t plane_bytes = token_bytes * dims.tokens;
  AppendPieces(dims, k, token_bytes, words);
  if (v != nullptr) AppendPieces(dims, *v, token_bytes, words);
  if (plane_bytes * (v != nullptr ? 2 : 1) < kMinLentBytes * words->size()) return result;

  // head_dim is a multiple of 8, so the words need no padding.
  const size_t map_bytes = (size_t{dims.tokens} + 15) / 16 * 16;
  std::memset(head + kHeaderBytes, 0, map_bytes);  // RAW is 0
  const uint64_t chunk_bytes = kHeaderBytes + map_bytes + plane_bytes * (v != nullptr ? 2 : 1);
  ChunkHeader header = HeaderOf(dims, identity, chunk_bytes);
  uint32_t crc = Crc32c(header.crc32c, head + kHeaderBytes, map_bytes);
  crc = CheckPlane(ops_, dims, k, token_bytes, crc, &result.nonfinite_values);
  if (v != nullptr) crc = CheckPlane(ops_, dims, *v, token_bytes, crc, &result.nonfinite_values);
  header.crc32c = crc;
  std::memcpy(head, &header, kHeaderBytes);
  result.chunk_bytes = chunk_bytes;
  return result;
}

}  // namespace spectrumkv
