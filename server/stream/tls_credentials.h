// Certificates as gRPC takes them. Internal to server/stream.
#pragma once

#include <memory>

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include "server/stream/certificates.h"

namespace spectrumkv {

// For connections that are made from now on; later ones need new credentials.
std::shared_ptr<grpc::ChannelCredentials> ChannelCredentialsOf(const Certificates& certificates,
                                                               const PeerSecurity& security);

// Server credentials that follow Use. gRPC takes new ones from files alone and looks at them once a second; these are
// in memory, so that it sees only what was checked.
class ServedCertificates {
 public:
  // UNAVAILABLE TLS_MEMORY where the system has no anonymous files.
  static absl::StatusOr<std::unique_ptr<ServedCertificates>> Create(const Certificates& certificates);
  ~ServedCertificates();
  // New connections get these within about a second.
  absl::Status Use(const Certificates& certificates);
  std::shared_ptr<grpc::ServerCredentials> credentials() const { return credentials_; }

 private:
  ServedCertificates() = default;
  int key_ = -1, cert_ = -1, ca_ = -1;
  std::shared_ptr<grpc::ServerCredentials> credentials_;
};

}  // namespace spectrumkv
