// What is read of a source before it is planned, by chunks: on the calling thread, or on the GPU that its blocks are on, and
// there several chunks in one launch.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "server/encode/encode.h"

namespace spectrumkv {

struct ScanWish {
  bool scans = false;    // energies and escape classes of all tokens
  bool samples = false;  // how far tokens lie from the mean of their run, with
  uint32_t pinned = 0;   // this many of the source's first that will be RAW
};

// The most chunks that ScanChunks takes, so that launching is the lesser part and yet other lanes have something to do: 1
// for blocks in host memory.
size_t ChunksAtATime(const EncodeSource& source);

// Into (*scans)[layer_index] of each chunk, which must have room for its tokens. A layer that is RAW in any case is
// not sampled alone. Thread-safe for different chunks. REQUIRES: ChunksAtATime at most. Errors: those of the device.
absl::Status ScanChunks(const Backend& backend, const EncodeSource& source, absl::Span<const ChunkCut> cuts,
                        const ScanWish& wish, std::vector<LayerScan>* scans);
// The same for any number, one call of it after the other.
absl::Status ScanAllChunks(const Backend& backend, const EncodeSource& source, absl::Span<const ChunkCut> cuts,
                           const ScanWish& wish, std::vector<LayerScan>* scans);

// Room in `scans` for `tokens` tokens of each layer.
void MakeRoomForScans(const std::vector<PlanLayer>& layers, uint32_t tokens, const ScanWish& wish,
                      std::vector<LayerScan>* scans);

}  // namespace spectrumkv
