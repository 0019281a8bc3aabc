// Decoding on the GPU that a destination's blocks are on.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "server/decode/decode.h"

namespace spectrumkv {

// One chunk of a batch. It came from VerifyChunk with the target, and its bytes from `pieces`.
struct DeviceDecode {
  Pieces pieces;
  const ChunkView* chunk = nullptr;
  DecodeResult result;
};

// As DecodeChunk, bit for bit: one copy there, as few launches as the chunks' kinds allow, and one wait for all of them. The
// values are in place when this returns. After an error they may be there in part. REQUIRES: 1 to gpu::kMaxBatch. Errors:
// those of the device.
absl::Status DecodeOnDevice(const DecodeTarget& target, DecodeScratch* scratch, std::vector<DeviceDecode>* chunks);

}  // namespace spectrumkv
