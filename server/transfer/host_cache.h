// Exact words of retained sources in the daemon's own memory, for workers that need their blocks back: docs/refinement.md.
// It holds nothing of the worker's, so that neither its pool's end nor its next request concerns it.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "server/encode/encode.h"
#include "server/pool/pool.h"
#include "server/transfer/refinement.h"

namespace spectrumkv {

// Bytes that a copy of the source takes.
uint64_t CachedBytes(const BlockHold& source, const std::vector<PlanLayer>& layers);

// A source of host memory with the words of `source`, tensor by tensor, dense. CachedBytes of `room` have been taken for it; they
// are given back with its last user, or here where this fails: FAILED_PRECONDITION SOURCE_CHANGED (a block's generation
// is odd or has changed meanwhile), SEGMENT_FAILED; CANCELLED where `stopped`; RESOURCE_EXHAUSTED OUT_OF_MEMORY; those of ReadRows.
// Blocks while it copies.
absl::StatusOr<std::shared_ptr<BlockHold>> CopySource(const BlockHold& source, const std::vector<PlanLayer>& layers,
                                                      const std::vector<LayerPlace>& places,
                                                      std::shared_ptr<StagingRoom> room,
                                                      const std::function<bool()>& stopped);

}  // namespace spectrumkv
