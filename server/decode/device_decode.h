// Decoding on the GPU that a destination's blocks are on.
#pragma once

#include "absl/status/statusor.h"
#include "server/decode/decode.h"

namespace spectrumkv {

// As DecodeChunk, bit for bit; `chunk` also came from VerifyChunk with this target, and its bytes from `pieces`. The
// values are in place when this returns. After an error they may be there in part. Errors: those of the device.
absl::StatusOr<DecodeResult> DecodeOnDevice(const Pieces& pieces, const ChunkView& chunk, const DecodeTarget& target,
                                            DecodeScratch* scratch);

}  // namespace spectrumkv
