// How daemons prove who they are to each other.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace grpc {
class ChannelCredentials;
class ServerCredentials;
}  // namespace grpc

namespace spectrumkv {

struct PeerSecurity {
  enum class Mode { kPlain, kMtls };
  Mode mode = Mode::kPlain;
  // PEM files; read once, when an endpoint starts.
  std::string cert_file, key_file, ca_file;
  // Peers are dialled by IP, so their certificates are checked for this name instead, on both sides: it must be among
  // the subject alternative names (or be the common name, where there are none).
  std::string expected_identity = "spectrumkv";
};

// FAILED_PRECONDITION TLS_FILE_UNREADABLE names the file; INVALID_ARGUMENT TLS_FILE_INVALID where it is no PEM.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> PeerChannelCredentials(const PeerSecurity& security);
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> PeerServerCredentials(const PeerSecurity& security);

// When the first certificate of cert_file's chain ends, seconds since 1970; 0 where mode is kPlain. The errors above;
// INVALID_ARGUMENT TLS_FILE_INVALID also where the file holds no certificate or one that cannot be read.
absl::StatusOr<int64_t> CertificateExpiry(const PeerSecurity& security);

}  // namespace spectrumkv
