// Stage 5: one planned chunk from a source's blocks into a staging slot, or framed where its words lie.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/codec/backend.h"
#include "server/plan/plan.h"
#include "server/pool/pool.h"

namespace spectrumkv {

// Where layer `layer_index` of a TransferShape lies in a pool: groups[group].layers[layer_slot].
struct LayerPlace {
  uint32_t group = 0;
  uint32_t layer_slot = 0;
  bool values = false;  // the one tensor of the layer is V: a strip of a refinement
  PlaneId plane_of(PlaneId plane) const { return values ? PlaneId::kV : plane; }
};

// A source as the encoder needs it. Borrowed; immutable while chunks are encoded.
struct EncodeSource {
  const BlockHold* hold = nullptr;
  const TransferShape* shape = nullptr;
  const std::vector<LayerPlace>* places = nullptr;
  bool escapes_known = false;  // the chunks were planned from a scan
};

// Scratch of one thread.
struct EncodeScratch {
  Workspace workspace;
  std::vector<uint8_t*> k_rows, v_rows;
  std::vector<uint64_t> generations_before, generations_after;
};

// The calling thread's own, kept for its next chunk.
EncodeScratch& ThreadEncodeScratch();

// The source's plane of a chunk; the addresses lie in `rows`, which grows to the chunk's tokens.
SourcePlane SourcePlaneOf(const EncodeSource& source, const ChunkCut& cut, PlaneId plane, std::vector<uint8_t*>* rows);

// Both planes of a chunk, and its geometry.
struct SourcePlanes {
  ChunkDims dims;
  SourcePlane k, v;
  // Null where there is no V.
  const SourcePlane* values() const { return dims.has_v ? &v : nullptr; }
};

// The addresses lie in `scratch`, until its next use.
SourcePlanes PlanesOf(const EncodeSource& source, const ChunkCut& cut, EncodeScratch* scratch);

// Addresses of kept tokens [first, first + count) of one plane.
void FillKeptRows(const EncodeSource& source, uint32_t layer_index, PlaneId plane, uint32_t first, uint32_t count,
                  uint8_t** rows);

// Encodes blocks in host memory into out[0, capacity). Errors: FAILED_PRECONDITION SOURCE_CHANGED (a block's generation is odd or changed while it was read, or the values are not
// those that were scanned), SEGMENT_FAILED; INTERNAL ENCODE_OVERFLOW. Where escapes were not known, chunk_bytes other than
// the planned ones say that there are some: nothing to send.
//
// A chunk that is RAW throughout is not copied where its layout allows it: `lent` then says where its words
// lie in the source's memory, to be sent after the first chunk_bytes - LentBytes(*lent) bytes of `out`. They must be
// sent as they are now, or the receiver refuses them; a source with generations, which may be written to, is always
// copied.
absl::StatusOr<EncodeResult> EncodeChunk(const Backend& backend, const EncodeSource& source, const PlannedChunk& chunk,
                                         uint64_t fence, EncodeScratch* scratch, uint8_t* out, uint64_t capacity,
                                         std::vector<Piece>* lent);

// The same for several chunks whose blocks are on a GPU, coded there together; none is lent. Errors, chunk by chunk: those of
// EncodeChunk and of the device. REQUIRES: 1 to gpu::kMaxBatch.
struct BatchedChunk {
  const PlannedChunk* chunk = nullptr;
  uint8_t* out = nullptr;
  absl::StatusOr<EncodeResult> result = absl::Status(absl::StatusCode::kCancelled, "");
  std::vector<uint64_t> generations_before;  // as of EncodeScratch
};
void EncodeChunksOnDevice(const EncodeSource& source, uint64_t fence, uint64_t capacity, EncodeScratch* scratch,
                          std::vector<BatchedChunk>* chunks);

// Did a source with generations change since scratch->generations_before was read, by the EncodeChunk of `cut`?
bool SourceWasWritten(const EncodeSource& source, const ChunkCut& cut, EncodeScratch* scratch);

}  // namespace spectrumkv
