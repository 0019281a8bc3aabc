// ControlFrame <-> proto, and the bounds of everything a peer can say. Frames that pass FrameFromProto hold to:
//   transfer_id an id (server/base/ids.h); token empty or 16 bytes; reasons <= 128 and messages <= 1024 bytes; model, revision <=
//   256; at most 64 groups, 1024 layers per group, 2^20 runs; runs non-empty, ascending, apart, below 2^32 (and, in a
//   Manifest, below token_count); enums in range; part_index < part_count <= 4096; attempt >= 1; streams <= 64; credits
//   <= 2^20.
// What the numbers mean for a transfer is the engine's to check.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/stream/frames.h"
#include "spectrumkv/v1/peer_service.pb.h"

namespace spectrumkv {

// Reasons and messages longer than the bounds are cut.
v1::ControlFrame FrameToProto(const ControlFrame& frame);
// INVALID_ARGUMENT MALFORMED_FRAME; metadata `field` names the first field that is wrong.
absl::StatusOr<ControlFrame> FrameFromProto(const v1::ControlFrame& proto);

v1::DataOpen DataOpenToProto(const DataOpenFrame& open);
absl::StatusOr<DataOpenFrame> DataOpenFromProto(const v1::DataOpen& proto);

// The error above.
absl::Status MalformedFrame(const std::string& field, const std::string& what);

}  // namespace spectrumkv
