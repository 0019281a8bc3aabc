// How daemons prove who they are to each other.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace spectrumkv {

struct PeerSecurity {
  enum class Mode { kPlain, kMtls };
  Mode mode = Mode::kPlain;
  // PEM files; read when an endpoint starts, and by its ReloadSecurity.
  std::string cert_file, key_file, ca_file;
  // Peers are dialled by IP, so their certificates are checked for these patterns (server/base/identity.h) instead, by
  // the same rule on both sides.
  std::vector<std::string> identities = {"spectrumkv"};
};

struct PemFiles {
  std::string cert, key, ca;
};
// FAILED_PRECONDITION TLS_FILE_UNREADABLE names the file; INVALID_ARGUMENT TLS_FILE_INVALID where it is no PEM.
absl::StatusOr<PemFiles> ReadPemFiles(const PeerSecurity& security);

// "a or b".
std::string IdentitiesText(const std::vector<std::string>& identities);

// What a verifier of ours says of a certificate for somebody else, for HandshakeError to find.
inline constexpr char kOtherIdentity[] = "SPECTRUMKV_PEER_IDENTITY";

// PERMISSION_DENIED PEER_IDENTITY where cert_file's first certificate fits none of `identities`: no peer would take it.
// OK where mode is kPlain; else the errors above and those of CertificateExpiry.
absl::Status CheckOwnIdentity(const PeerSecurity& security);

// UNAUTHENTICATED PEER_SECURITY_MISMATCH: one side has peer.security mtls, the other plain; `how` says which.
absl::Status SecurityMismatch(const std::string& peer, const std::string& how);

// What gRPC's words about a connection that could not be made say of the handshake with `peer`, where trying again
// cannot help: PERMISSION_DENIED PEER_IDENTITY, its certificate is for another name; UNAUTHENTICATED PEER_HANDSHAKE,
// its certificate does not verify; SecurityMismatch, it speaks no TLS. OK where they say nothing of the kind.
absl::Status HandshakeError(const std::string& peer, const std::string& words);

// When the first certificate of cert_file's chain ends, seconds since 1970; 0 where mode is kPlain. The errors above;
// INVALID_ARGUMENT TLS_FILE_INVALID also where the file holds no certificate or one that cannot be read.
absl::StatusOr<int64_t> CertificateExpiry(const PeerSecurity& security);

}  // namespace spectrumkv
