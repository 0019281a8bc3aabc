// What it means that a call to or from a peer has failed. Internal to server/stream.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace spectrumkv {

// Whether the peer closed the connection before it was made, as a TLS server does that refuses a client, or one that
// speaks TLS where we do not.
bool HungUp(const absl::Status& wire_status);

// `wire_status` with a reason: the peer's own where it gave one, else what gRPC's words say. `dialling`: this side dialled
// and the peer had not answered yet: PEER_UNREACHABLE, kNobodyListens (transport.h), and those of HandshakeError
// (peer_security.h); otherwise PEER_GONE.
// Both: MESSAGE_TOO_LARGE, NOT_A_PEER, PEER_REFUSED.
absl::Status CallError(const std::string& peer, const absl::Status& wire_status, bool dialling);

}  // namespace spectrumkv
