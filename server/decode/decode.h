// Stage 7: one received chunk into a destination's blocks.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/codec/backend.h"
#include "server/plan/plan.h"
#include "server/pool/pool.h"

namespace spectrumkv {

// A destination as the decoder needs it. Borrowed; immutable while chunks are decoded. places[i] says where layer i of
// the shape lies in the pool.
struct DecodeTarget {
  const BlockHold* hold = nullptr;
  const TransferShape* shape = nullptr;
  const std::vector<ChunkCut>* cuts = nullptr;
  struct Place {
    uint32_t group = 0;
    uint32_t layer_slot = 0;
    bool values = false;  // the one tensor of the layer is V: a strip of a refinement
    PlaneId plane_of(PlaneId plane) const { return values ? PlaneId::kV : plane; }
  };
  std::vector<Place> places;
  // Of a refinement: where the tokens of each layer that travel lie in the destination. Null: at 0, 1, ...
  const std::vector<std::vector<TokenRange>>* rows = nullptr;
  std::vector<uint32_t> group_head_first;  // by group
  uint64_t fence = 0;
};

struct DecodeScratch {
  Workspace workspace;
  std::vector<uint8_t*> k_rows, v_rows;
};

// Addresses of the destination's rows for tokens [first, first + count) that travel of a layer.
void FillTargetRows(const DecodeTarget& target, uint32_t layer_index, PlaneId plane, uint32_t first, uint32_t count,
                    uint8_t** rows);

// Every check before a byte is written: format, checksum, fence, and each field against the manifest. `room`: as for
// ParseChunk. Errors: UNIMPLEMENTED UNSUPPORTED_VERSION; DATA_LOSS TRUNCATED, BAD_MAGIC, BAD_HEADER, BAD_LENGTH,
// BAD_CHECKSUM, BAD_TIER, BAD_PADDING, BAD_SCALE; ABORTED FENCE_MISMATCH; DATA_LOSS MANIFEST_MISMATCH (names the field).
absl::StatusOr<ChunkView> VerifyChunk(const Pieces& pieces, uint8_t* room, const DecodeTarget& target);

// REQUIRES: `chunk` came from VerifyChunk with this target, and the caller has claimed it.
DecodeResult DecodeChunk(const Backend& backend, const ChunkView& chunk, const DecodeTarget& target,
                         DecodeScratch* scratch);

}  // namespace spectrumkv
