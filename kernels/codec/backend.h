// The codec contract: what every backend (scalar, avx2, avx512, cuda) does, byte for byte the same.
// Source: proto/WIRE_FORMAT.md, sections Body and Arithmetic.
//
// Planes are given as one address per token, so any paged layout works without a gather copy: cell (t, h) of head_dim
// values begins at rows[t] + h * head_stride_bytes, value d at + d * dim_stride_bytes. Addresses need only the
// alignment of a byte; dim_stride_bytes == SizeOf(dtype) is the fast path.
//
// Backends are immutable and thread-safe; each thread brings its own Workspace. No backend allocates outside its
// Workspace, throws, or reads the clock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/codec/attend_queries.h"
#include "kernels/format/chunk.h"
#include "kernels/format/pieces.h"

namespace spectrumkv {

// [tokens, heads, head_dim] to read.
struct SourcePlane {
  const uint8_t* const* rows = nullptr;
  int64_t head_stride_bytes = 0;
  int64_t dim_stride_bytes = 0;
};

// [tokens, heads, head_dim] to write.
struct TargetPlane {
  uint8_t* const* rows = nullptr;
  int64_t head_stride_bytes = 0;
  int64_t dim_stride_bytes = 0;
};

// Header fields the caller chooses.
struct ChunkIdentity {
  uint64_t fence = 0;
  uint32_t chunk_index = 0;
  uint16_t group = 0;
  uint16_t layer = 0;
  uint32_t token_first = 0;
  uint16_t head_first = 0;
};

// Scratch memory of one thread; grows to the largest chunk it has seen and stays.
class Workspace {
 public:
  // At least `bytes`, 64-byte aligned, contents undefined; earlier pointers become invalid.
  uint8_t* Reserve(size_t bytes);

 private:
  std::vector<uint8_t> memory_;
};

struct EncodeResult {
  // 0: `capacity` was too small (never for capacity >= MaxChunkBytes(dims)); nothing useful was written.
  uint64_t chunk_bytes = 0;
  // (token, plane) pairs that became RAW although another tier was asked for.
  uint32_t escaped = 0;
  // Values that are not finite, in both planes.
  uint64_t nonfinite_values = 0;
};

struct DecodeResult {
  // RAW words whose value changed when rounded to the target's dtype.
  uint64_t rounded_words = 0;
};

enum EscapeClass : uint8_t {
  kEscapeNone = 0,
  kEscapeRotated = 1,  // some |x| > 1024: no rotated tier
  kEscapeAll = 2,      // some |x| > 65504: no tier but RAW
  kEscapeNonFinite = 3,
};

// Of one (token, plane) over all heads. Equal on all backends.
struct TokenScan {
  EscapeClass escape = kEscapeNone;
  // 8-bit log2 of the sum of squares over heads and dims: 0 for a sum of 0, else
  // clamp(128 + round(4 * log2(sum)) , 1, 255), the sum taken in the order stated in kernels/codec/scan_math.h;
  // 255 where a value is not finite.
  uint8_t energy_log2 = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  // "scalar", "avx2", "avx512".
  virtual const char* name() const = 0;
  // Can this machine run it? Other calls REQUIRE supported().
  virtual bool supported() const = 0;

  // Encodes one chunk: header, CRC and body to out. tiers: [dims.tokens] requested tier map bytes. v may be null
  // exactly where !dims.has_v. REQUIRES: dims in the ranges of the header, tiers valid.
  virtual EncodeResult Encode(const ChunkDims& dims, const ChunkIdentity& identity, const SourcePlane& k,
                              const SourcePlane* v, const uint8_t* tiers, Workspace* workspace, uint8_t* out,
                              uint64_t capacity) const = 0;

  // As Encode for a chunk that is RAW throughout, with its words left where they are: writes header and tier map to
  // `head` and sets `words` to the pieces of the planes that follow them on the wire. The checksum is of what the planes
  // held, so they must not change until the chunk is sent. chunk_bytes 0: a token's values are not contiguous, or the
  // pieces would be shorter than kMinLentBytes on average. REQUIRES: capacity of head >= kHeaderBytes + tokens + 16.
  static constexpr size_t kMinLentBytes = 8192;
  virtual EncodeResult FrameRaw(const ChunkDims& dims, const ChunkIdentity& identity, const SourcePlane& k,
                                const SourcePlane* v, uint8_t* head, std::vector<Piece>* words) const = 0;

  // Decodes a checked chunk into planes of dtype `target`: coded values are narrowed straight to it, RAW words are
  // rounded to it (saturating) and counted where that changes them. v REQUIRED where the chunk has V.
  virtual DecodeResult Decode(const ChunkView& chunk, DType target, const TargetPlane& k, const TargetPlane* v,
                              Workspace* workspace) const = 0;

  // One read pass over one plane: out[tokens].
  virtual void Scan(const ChunkDims& dims, const SourcePlane& plane, TokenScan* out) const = 0;

  // Reads a sample of one plane: out[tokens], the 8-bit log2 of each token's spread (kernels/codec/scan_math.h).
  // centred: around the mean of its run, as the codec will centre K; the first `skip` tokens, which will be RAW, are
  // left out of the mean.
  virtual void Spread(const ChunkDims& dims, const SourcePlane& plane, bool centred, uint32_t skip,
                      Workspace* workspace, uint8_t* out) const = 0;

  // What the queries attend to in one head of K: out[tokens], for each token the sum of its softmax weights over the
  // queries. dims.tokens may be that of a whole request. The workspace grows to about 16 MiB, more from 174,000 tokens on.
  virtual void Attend(const ChunkDims& dims, const SourcePlane& k, uint32_t head, const AttendQueries& queries,
                      Workspace* workspace, float* out) const = 0;
};

}  // namespace spectrumkv
