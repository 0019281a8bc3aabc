// What a daemon's PEM files say, read and checked as one: certificate, key and authorities fit each other. Internal to
// server/stream.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/statusor.h"
#include "server/base/identity.h"
#include "server/stream/peer_security.h"

typedef struct x509_st X509;
typedef struct x509_store_st X509_STORE;

namespace spectrumkv {

// Names of a certificate in PEM. INVALID_ARGUMENT TLS_FILE_INVALID without a reason of OpenSSL's where it is none.
absl::StatusOr<PeerNames> NamesOfPem(const std::string& pem);

// One reading of the files. Immutable, but for what it remembers of peers; thread-safe.
class Certificates {
 public:
  // The errors of peer_security.h; INVALID_ARGUMENT TLS_FILE_INVALID also where the key is not that of the certificate.
  static absl::StatusOr<std::shared_ptr<Certificates>> Read(const PeerSecurity& security);
  ~Certificates();

  const std::string& cert() const { return cert_; }
  const std::string& key() const { return key_; }
  const std::string& ca() const { return ca_; }
  bool SameFiles(const Certificates& other) const {
    return cert_ == other.cert_ && key_ == other.key_ && ca_ == other.ca_;
  }

  // Whether a dialler with this certificate is welcome now: UNAUTHENTICATED PEER_CERTIFICATE where it is not of these
  // authorities, or no longer valid; PERMISSION_DENIED PEER_IDENTITY where it is for somebody else. A connection
  // outlives both its certificate and the authorities of its time, so each stream asks.
  absl::Status CheckPeer(const std::string& pem, const std::string& chain_pem);

 private:
  Certificates() = default;
  struct Verdict {
    absl::Status status;
    int64_t until = 0;  // seconds since 1970
  };
  Verdict Judge(const std::string& pem, const std::string& chain_pem) const;

  std::string cert_, key_, ca_;
  std::vector<std::string> identities_;
  X509_STORE* store_ = nullptr;
  std::mutex mutex_;
  std::map<std::string, Verdict> known_;
};

}  // namespace spectrumkv
