#include "server/stream/tls_credentials.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>
#include <vector>

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_certificate_verifier.h>
#include <grpcpp/security/tls_credentials_options.h>
#include "server/base/status.h"

namespace spectrumkv {
namespace {

constexpr unsigned kWatchSeconds = 1;  // the least there is

// gRPC has checked the chain; this checks for whom the certificate is.
class IdentityVerifier final : public grpc::experimental::ExternalCertificateVerifier {
 public:
  explicit IdentityVerifier(std::vector<std::string> identities) : identities_(std::move(identities)) {}
  bool Verify(grpc::experimental::TlsCustomVerificationCheckRequest* request, std::function<void(grpc::Status)>,
              grpc::Status* sync_status) override {
    const grpc::string_ref pem = request->peer_cert();
    const absl::StatusOr<PeerNames> names = NamesOfPem(std::string(pem.data(), pem.size()));
    if (!names.ok() || !MatchesIdentity(identities_, *names)) {
      *sync_status = grpc::Status(grpc::StatusCode::PERMISSION_DENIED, std::string(kOtherIdentity) + " it is for " +
                                                                           (names.ok() ? NamesText(*names) : "nobody") +
                                                                           ", not for " + IdentitiesText(identities_));
    }
    return true;  // decided
  }
  void Cancel(grpc::experimental::TlsCustomVerificationCheckRequest*) override {}

 private:
  const std::vector<std::string> identities_;
};

std::string PathOf(int file) { return "/proc/self/fd/" + std::to_string(file); }

absl::Status Rewrite(int file, const std::string& text) {
  // Never empty: whoever reads meanwhile finds the old or the new, or what cannot be read and is not taken.
  const auto bytes = static_cast<ssize_t>(text.size());
  if (pwrite(file, text.data(), text.size(), 0) == bytes && ftruncate(file, bytes) == 0) {
    return absl::OkStatus();
  }
  return MakeError(absl::StatusCode::kUnavailable, "TLS_MEMORY",
                   "certificates cannot be kept in memory: " + std::generic_category().message(errno));
}

}  // namespace

std::shared_ptr<grpc::ChannelCredentials> ChannelCredentialsOf(const Certificates& certificates,
                                                               const PeerSecurity& security) {
  using grpc::experimental::ExternalCertificateVerifier;
  grpc::experimental::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(std::make_shared<grpc::experimental::StaticDataCertificateProvider>(
      certificates.ca(),
      std::vector<grpc::experimental::IdentityKeyCertPair>{{certificates.key(), certificates.cert()}}));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_check_call_host(false);  // peers are dialled by IP
  options.set_certificate_verifier(ExternalCertificateVerifier::Create<IdentityVerifier>(security.identities));
  return grpc::experimental::TlsCredentials(options);
}

absl::StatusOr<std::unique_ptr<ServedCertificates>> ServedCertificates::Create(const Certificates& certificates) {
  std::unique_ptr<ServedCertificates> served(new ServedCertificates());
  served->key_ = memfd_create("spectrumkv-key", MFD_CLOEXEC);
  served->cert_ = memfd_create("spectrumkv-cert", MFD_CLOEXEC);
  served->ca_ = memfd_create("spectrumkv-ca", MFD_CLOEXEC);
  if (absl::Status kept = served->Use(certificates); !kept.ok()) return kept;
  grpc::experimental::TlsServerCredentialsOptions options(
      std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(PathOf(served->key_), PathOf(served->cert_),
                                                                           PathOf(served->ca_), kWatchSeconds));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  // For whom the dialler's certificate is, each stream is asked (Certificates::CheckPeer), and can be answered.
  options.set_certificate_verifier(std::make_shared<grpc::experimental::NoOpCertificateVerifier>());
  served->credentials_ = grpc::experimental::TlsServerCredentials(options);
  return served;
}

ServedCertificates::~ServedCertificates() {
  credentials_.reset();
  for (const int file : {key_, cert_, ca_}) {
    if (file >= 0) close(file);
  }
}

absl::Status ServedCertificates::Use(const Certificates& certificates) {
  absl::Status status = Rewrite(ca_, certificates.ca());
  if (status.ok()) status = Rewrite(key_, certificates.key());
  if (status.ok()) status = Rewrite(cert_, certificates.cert());
  return status;
}

}  // namespace spectrumkv
