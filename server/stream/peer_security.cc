#include "server/stream/peer_security.h"

#include <fstream>
#include <sstream>

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include "server/base/status.h"

namespace spectrumkv {
namespace {

struct PemFiles {
  std::string cert, key, ca;
};

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

absl::StatusOr<PemFiles> ReadPemFiles(const PeerSecurity& security) {
  absl::StatusOr<std::string> cert = ReadPem(security.cert_file, "certificate");
  if (!cert.ok()) return cert.status();
  absl::StatusOr<std::string> key = ReadPem(security.key_file, "private key");
  if (!key.ok()) return key.status();
  absl::StatusOr<std::string> ca = ReadPem(security.ca_file, "CA certificate");
  if (!ca.ok()) return ca.status();
  return PemFiles{*cert, *key, *ca};
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> PeerChannelCredentials(const PeerSecurity& security) {
  if (security.mode == PeerSecurity::Mode::kPlain) return grpc::InsecureChannelCredentials();
  absl::StatusOr<PemFiles> pem = ReadPemFiles(security);
  if (!pem.ok()) return pem.status();
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = pem->ca;
  options.pem_private_key = pem->key;
  options.pem_cert_chain = pem->cert;
  return grpc::SslCredentials(options);
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> PeerServerCredentials(const PeerSecurity& security) {
  if (security.mode == PeerSecurity::Mode::kPlain) return grpc::InsecureServerCredentials();
  absl::StatusOr<PemFiles> pem = ReadPemFiles(security);
  if (!pem.ok()) return pem.status();
  grpc::SslServerCredentialsOptions options(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  options.pem_root_certs = pem->ca;
  options.pem_key_cert_pairs.push_back({pem->key, pem->cert});
  return grpc::SslServerCredentials(options);
}

}  // namespace spectrumkv
