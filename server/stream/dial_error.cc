#include "server/stream/dial_error.h"

#include "server/base/status.h"
#include "server/stream/peer_security.h"
#include "server/stream/transport.h"

namespace spectrumkv {
namespace {

// gRPC's words where the peer closed the connection before it was made, as a TLS server does that refuses a client.
constexpr char kHungUp[] = "Socket closed";
// The same where words of ours had not been read yet.
constexpr char kHungUpHard[] = "Connection reset";
// The same where the peer's machine says that nobody listens.
constexpr char kRefused[] = "Connection refused";

bool Refused(const absl::Status& wire_status) {
  return wire_status.code() == absl::StatusCode::kUnavailable &&
         std::string(wire_status.message()).find(kRefused) != std::string::npos;
}

}  // namespace

bool HungUp(const absl::Status& wire_status) {
  const std::string words(wire_status.message());
  return wire_status.code() == absl::StatusCode::kUnavailable &&
         (words.find(kHungUp) != std::string::npos || words.find(kHungUpHard) != std::string::npos);
}

absl::Status CallError(const std::string& peer, const absl::Status& wire_status, bool dialling) {
  if (wire_status.ok() || !ReasonOf(wire_status).empty()) return wire_status;
  std::string text = peer + ": " + std::string(wire_status.message());
  if (dialling) {
    absl::Status handshake = HandshakeError(peer, std::string(wire_status.message()));
    if (!handshake.ok()) return handshake;
    if (HungUp(wire_status)) {
      text += " (before the connection was made: does it trust our certificate?)";
    }
  }
  switch (wire_status.code()) {
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kUnknown:
    case absl::StatusCode::kDeadlineExceeded:
      return MakeError(absl::StatusCode::kUnavailable,
                       !dialling              ? "PEER_GONE"
                       : Refused(wire_status) ? kNobodyListens
                                              : "PEER_UNREACHABLE",
                       text, {{"peer", peer}});
    case absl::StatusCode::kResourceExhausted:
      return MakeError(wire_status.code(), "MESSAGE_TOO_LARGE", text, {{"peer", peer}});
    case absl::StatusCode::kUnimplemented: return MakeError(wire_status.code(), "NOT_A_PEER", text, {{"peer", peer}});
    default: return MakeError(wire_status.code(), "PEER_REFUSED", text, {{"peer", peer}});
  }
}

}  // namespace spectrumkv
