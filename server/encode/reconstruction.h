// What coding lost: a coded chunk is decoded again on the sender and compared with its source. For sampled chunks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "server/encode/encode.h"

namespace spectrumkv {

// Tokens of a chunk that are compared, at equal distances: plain code for a few values.
inline constexpr uint32_t kSampledTokens = 64;
inline uint32_t ComparedStep(uint32_t tokens) { return (tokens + kSampledTokens - 1) / kSampledTokens; }
// Moves the rows of those to the front.
void KeepCompared(uint32_t tokens, std::vector<uint8_t*>* rows);

// By tier id, of the tokens compared whose K (or V) travels at that tier: root mean square error over the root mean square of
// the originals, as decoded to the source's data type. Nothing for a tier without tokens. Values that are not finite
// are left out; a plane of zeros that stay zeros has error 0.
struct ReconstructionError {
  std::array<std::optional<double>, kTierCount> k, v;
};

// `data` is what EncodeChunk made of `cut`. All empty where that cannot be said: a source with generations was written
// since (they differ from scratch->generations_before of that EncodeChunk), the bytes are no chunk of these dims, or the GPU
// that the source is on fails.
// REQUIRES: `scratch` was last used by that EncodeChunk; the source as there.
ReconstructionError MeasureReconstruction(const Backend& backend, const EncodeSource& source, const ChunkCut& cut,
                                          const uint8_t* data, size_t size, EncodeScratch* scratch);

// The same for several chunks whose blocks are on a GPU, read back together. `generations_before`: as of EncodeScratch,
// for each. REQUIRES: 1 to gpu::kMaxBatch.
struct MeasuredChunk {
  const ChunkCut* cut = nullptr;
  const uint8_t* data = nullptr;
  size_t size = 0;
  std::vector<uint64_t> generations_before;
  ReconstructionError error;
};
void MeasureReconstructionsOnDevice(const EncodeSource& source, EncodeScratch* scratch,
                                    std::vector<MeasuredChunk>* chunks);

}  // namespace spectrumkv
