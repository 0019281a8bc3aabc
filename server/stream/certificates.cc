#include "server/stream/certificates.h"

#include <openssl/err.h>
#include <openssl/x509.h>

#include <algorithm>
#include <ctime>
#include <limits>

#include "server/base/status.h"
#include "server/stream/pem.h"

namespace spectrumkv {
namespace {

constexpr size_t kMaxKnown = 1024;

absl::Status Invalid(const std::string& file, const std::string& what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "TLS_FILE_INVALID", file + " " + what, {{"file", file}});
}

}  // namespace

absl::StatusOr<PeerNames> NamesOfPem(const std::string& pem) {
  const Certificate certificate = PemReader(pem).Next();
  if (certificate == nullptr) return Invalid("certificate", "cannot be read");
  return NamesOf(certificate.get());
}

absl::StatusOr<std::shared_ptr<Certificates>> Certificates::Read(const PeerSecurity& security) {
  const absl::StatusOr<PemFiles> files = ReadPemFiles(security);
  if (!files.ok()) return files.status();
  if (const auto expiry = CertificateExpiry(security); !expiry.ok()) return expiry.status();
  std::shared_ptr<Certificates> read(new Certificates());
  read->cert_ = files->cert;
  read->key_ = files->key;
  read->ca_ = files->ca;
  read->identities_ = security.identities;
  const Certificate own = PemReader(files->cert).Next();
  const Key key = PemReader(files->key).NextKey();
  if (own == nullptr) return Invalid(security.cert_file, "holds no certificate that can be read");
  if (key == nullptr) return Invalid(security.key_file, "holds no private key that can be read");
  const bool pair = X509_check_private_key(own.get(), key.get()) == 1;
  ERR_clear_error();
  if (!pair) return Invalid(security.key_file, "is not the key of certificate " + security.cert_file);
  read->store_ = X509_STORE_new();
  // As gRPC's own stores: an authority in the file is one, though another has signed it.
  X509_STORE_set_flags(read->store_, X509_V_FLAG_PARTIAL_CHAIN | X509_V_FLAG_TRUSTED_FIRST);
  int authorities = 0;
  PemReader ca(files->ca);
  for (Certificate one = ca.Next(); one != nullptr; one = ca.Next(), ++authorities) {
    X509_STORE_add_cert(read->store_, one.get());
  }
  ERR_clear_error();
  if (authorities == 0) return Invalid(security.ca_file, "holds no certificate that can be read");
  return read;
}

Certificates::~Certificates() { X509_STORE_free(store_); }

absl::Status Certificates::CheckPeer(const std::string& pem, const std::string& chain_pem) {
  const int64_t now = std::time(nullptr);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = known_.find(pem);
  if (found != known_.end() && now < found->second.until) return found->second.status;
  if (known_.size() >= kMaxKnown) known_.clear();
  Verdict verdict = Judge(pem, chain_pem);
  if (verdict.status.ok()) known_[pem] = verdict;
  return verdict.status;
}

Certificates::Verdict Certificates::Judge(const std::string& pem, const std::string& chain_pem) const {
  const auto refused = [](const std::string& why) {
    return MakeError(absl::StatusCode::kUnauthenticated, "PEER_CERTIFICATE",
                     "the dialling daemon's certificate is not accepted: " + why);
  };
  const Certificate leaf = PemReader(pem).Next();
  if (leaf == nullptr) return {refused("it cannot be read"), 0};
  const std::unique_ptr<STACK_OF(X509), void (*)(STACK_OF(X509)*)> chain(
      sk_X509_new_null(), [](STACK_OF(X509) * all) { sk_X509_pop_free(all, X509_free); });
  PemReader others(chain_pem);
  for (Certificate one = others.Next(); one != nullptr; one = others.Next()) sk_X509_push(chain.get(), one.release());
  const std::unique_ptr<X509_STORE_CTX, Free<X509_STORE_CTX_free>> context(X509_STORE_CTX_new());
  if (context == nullptr || X509_STORE_CTX_init(context.get(), store_, leaf.get(), chain.get()) != 1) {
    return {refused("out of memory"), 0};
  }
  X509_STORE_CTX_set_default(context.get(), "ssl_client");
  const bool valid = X509_verify_cert(context.get()) == 1;
  ERR_clear_error();
  if (!valid) return {refused(X509_verify_cert_error_string(X509_STORE_CTX_get_error(context.get()))), 0};
  const PeerNames names = NamesOf(leaf.get());
  if (!MatchesIdentity(identities_, names)) {
    return {MakeError(absl::StatusCode::kPermissionDenied, "PEER_IDENTITY",
                      "the dialling daemon's certificate is for " + NamesText(names) + ", not for " +
                          IdentitiesText(identities_),
                      {{"expected", IdentitiesText(identities_)}}),
            0};
  }
  int64_t until = std::numeric_limits<int64_t>::max();
  const STACK_OF(X509)* const path = X509_STORE_CTX_get0_chain(context.get());
  for (int i = 0; i < sk_X509_num(path); ++i) until = std::min(until, EndOf(sk_X509_value(path, i)));
  return {absl::OkStatus(), until};
}

}  // namespace spectrumkv
