#include "server/stream/peer_security.h"

#include <openssl/asn1.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <algorithm>
#include <ctime>
#include <fstream>
#include <limits>
#include <memory>
#include <sstream>

#include "server/base/status.h"
#include "server/stream/certificates.h"
#include "server/stream/pem.h"

namespace spectrumkv {
namespace {

absl::StatusOr<std::string> ReadPem(const std::string& path, const char* what) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  if (file) text << file.rdbuf();
  if (!file || text.str().empty()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "TLS_FILE_UNREADABLE",
                     std::string(what) + " " + path + " cannot be read or is empty", {{"file", path}});
  }
  if (text.str().find("-----BEGIN ") == std::string::npos) {
    return MakeError(absl::StatusCode::kInvalidArgument, "TLS_FILE_INVALID",
                     std::string(what) + " " + path + " is no PEM file", {{"file", path}});
  }
  return text.str();
}

absl::Status InvalidFile(const std::string& path, const std::string& what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "TLS_FILE_INVALID", "certificate " + path + " " + what,
                   {{"file", path}});
}

bool Says(const std::string& words, const char* part) { return words.find(part) != std::string::npos; }

}  // namespace

absl::StatusOr<PemFiles> ReadPemFiles(const PeerSecurity& security) {
  absl::StatusOr<std::string> cert = ReadPem(security.cert_file, "certificate");
  if (!cert.ok()) return cert.status();
  absl::StatusOr<std::string> key = ReadPem(security.key_file, "private key");
  if (!key.ok()) return key.status();
  absl::StatusOr<std::string> ca = ReadPem(security.ca_file, "CA certificate");
  if (!ca.ok()) return ca.status();
  return PemFiles{*cert, *key, *ca};
}

std::string IdentitiesText(const std::vector<std::string>& identities) {
  std::string text;
  for (const std::string& one : identities) text += (text.empty() ? "" : " or ") + one;
  return text;
}

absl::Status CheckOwnIdentity(const PeerSecurity& security) {
  if (security.mode == PeerSecurity::Mode::kPlain) return absl::OkStatus();
  const absl::StatusOr<std::string> pem = ReadPem(security.cert_file, "certificate");
  if (!pem.ok()) return pem.status();
  const absl::StatusOr<PeerNames> names = NamesOfPem(*pem);
  if (!names.ok()) return InvalidFile(security.cert_file, "holds no certificate that can be read");
  if (MatchesIdentity(security.identities, *names)) return absl::OkStatus();
  const std::string expected = IdentitiesText(security.identities);
  return MakeError(absl::StatusCode::kPermissionDenied, "PEER_IDENTITY",
                   "certificate " + security.cert_file + " is not for " + expected + " (peer.identities) but for " +
                       NamesText(*names) + ": no peer would accept it",
                   {{"file", security.cert_file}, {"expected", expected}});
}

absl::Status SecurityMismatch(const std::string& peer, const std::string& how) {
  return MakeError(
      absl::StatusCode::kUnauthenticated, "PEER_SECURITY_MISMATCH",
      "no connection with the peer " + peer + ": " + how + "; peer.security must be the same on both sides",
      {{"peer", peer}});
}

absl::Status HandshakeError(const std::string& peer, const std::string& words) {
  if (Says(words, kOtherIdentity)) {
    return MakeError(absl::StatusCode::kPermissionDenied, "PEER_IDENTITY",
                     "the certificate of the peer " + peer + " is for another name: " + words, {{"peer", peer}});
  }
  // Without SSL_ERROR_SSL the connection broke during the handshake, which may be the network.
  if (!Says(words, "handshake failed: SSL_ERROR_SSL")) return absl::OkStatus();
  if (Says(words, "wrong version number")) return SecurityMismatch(peer, "it does not speak TLS, this daemon does");
  const std::string cause =
      Says(words, "certificate verify failed")
          ? "the certificate of the peer " + peer + " has expired or is not of an authority in peer.tls.ca_file: "
          : "no TLS with the peer " + peer + ": ";
  return MakeError(absl::StatusCode::kUnauthenticated, "PEER_HANDSHAKE", cause + words, {{"peer", peer}});
}

absl::StatusOr<int64_t> CertificateExpiry(const PeerSecurity& security) {
  if (security.mode == PeerSecurity::Mode::kPlain) return 0;
  const absl::StatusOr<std::string> pem = ReadPem(security.cert_file, "certificate");
  if (!pem.ok()) return pem.status();
  const std::unique_ptr<BIO, Free<BIO_free>> in(BIO_new_mem_buf(pem->data(), static_cast<int>(pem->size())));
  int64_t earliest = std::numeric_limits<int64_t>::max();
  int certificates = 0;
  while (true) {
    const Certificate certificate(PEM_read_bio_X509(in.get(), nullptr, nullptr, nullptr));
    if (certificate == nullptr) break;
    std::tm end = {};
    if (ASN1_TIME_to_tm(X509_get0_notAfter(certificate.get()), &end) != 1) {
      return InvalidFile(security.cert_file, "has an end of validity that is no time");
    }
    earliest = std::min<int64_t>(earliest, timegm(&end));
    ++certificates;
  }
  // The end of the file is told like an error: no further "BEGIN" line.
  const bool at_end = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  ERR_clear_error();
  if (certificates == 0 || !at_end) return InvalidFile(security.cert_file, "holds no certificate that can be read");
  return earliest;
}

}  // namespace spectrumkv
