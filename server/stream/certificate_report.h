// What is to be said of a daemon's own peer certificate, for people.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/stream/peer_security.h"

namespace spectrumkv {

struct CertificateReport {
  struct One {
    std::string subject, issuer;
    std::vector<std::string> names;           // DNS names and URIs
    int64_t not_before = 0, not_after = 0;    // seconds since 1970
  };
  // Of cert_file, in its order: the daemon's own first.
  std::vector<One> chain;
  // OK, or why the files cannot be used or a peer with the same authorities and identities would refuse the certificate:
  // the errors of Certificates::Read and CheckOwnIdentity, UNAUTHENTICATED PEER_CERTIFICATE.
  absl::Status problem;
};

// Reads the files again. Empty and OK where the mode is kPlain.
CertificateReport InspectCertificates(const PeerSecurity& security);

}  // namespace spectrumkv
