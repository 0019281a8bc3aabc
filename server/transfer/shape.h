// What two pools must agree on, and where the layers of a transfer lie in each.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/decode/decode.h"
#include "server/encode/encode.h"
#include "server/plan/plan.h"
#include "server/pool/schema.h"
#include "server/stream/frames.h"
#include "server/transfer/rates.h"

namespace spectrumkv {

PoolShapeFrame ShapeOf(const PoolSchema& schema);

// What reads and codes these blocks.
inline CodedBy CoderOf(const BlockHold& hold) { return hold.device() != nullptr ? CodedBy::kGpu : CodedBy::kCpu; }

// All layers of a schema in ascending layer index, and their places.
std::vector<PlanLayer> PlanLayersOf(const PoolSchema& schema, std::vector<LayerPlace>* places);

// FAILED_PRECONDITION SCHEMA_MISMATCH naming the first field that differs and both values. Data types may differ
// unless `exact_conversion` and the source's cannot be converted to the target's without rounding.
absl::Status CompareShapes(const PoolShapeFrame& source, const PoolShapeFrame& target, bool exact_conversion);

// The transfer a manifest describes, checked against the destination's schema. INVALID_ARGUMENT BAD_MANIFEST.
absl::StatusOr<TransferShape> ShapeOfManifest(const ManifestFrame& manifest, const PoolSchema& target);

ManifestFrame ManifestOf(const TransferShape& shape, const PoolSchema& source, uint64_t chunk_count, uint32_t streams);

}  // namespace spectrumkv
