#include "server/stream/certificate_report.h"

#include "server/stream/certificates.h"
#include "server/stream/pem.h"

namespace spectrumkv {
namespace {

// "CN=spectrumkv, O=example".
std::string TextOf(const X509_NAME* name) {
  const std::unique_ptr<BIO, Free<BIO_free>> out(BIO_new(BIO_s_mem()));
  if (out == nullptr || X509_NAME_print_ex(out.get(), name, 0, XN_FLAG_RFC2253) < 0) return "";
  char* text = nullptr;
  const long bytes = BIO_get_mem_data(out.get(), &text);
  return bytes > 0 ? std::string(text, static_cast<size_t>(bytes)) : "";
}

// Alternative names may hold any byte.
std::string Printable(std::string name) {
  for (char& c : name) {
    if (c < ' ' || c > '~') c = '?';
  }
  return name;
}

CertificateReport::One Describe(X509* certificate) {
  CertificateReport::One one;
  one.subject = TextOf(X509_get_subject_name(certificate));
  one.issuer = TextOf(X509_get_issuer_name(certificate));
  const PeerNames names = NamesOf(certificate);
  for (const std::string& name : names.dns) one.names.push_back(Printable(name));
  for (const std::string& name : names.uris) one.names.push_back(Printable(name));
  one.not_before = BeginOf(certificate);
  one.not_after = EndOf(certificate);
  return one;
}

}  // namespace

CertificateReport InspectCertificates(const PeerSecurity& security) {
  CertificateReport report;
  if (security.mode == PeerSecurity::Mode::kPlain) return report;
  const absl::StatusOr<PemFiles> files = ReadPemFiles(security);
  if (!files.ok()) {
    report.problem = files.status();
    return report;
  }
  PemReader reader(files->cert);
  for (Certificate one = reader.Next(); one != nullptr; one = reader.Next()) report.chain.push_back(Describe(one.get()));
  const absl::StatusOr<std::shared_ptr<Certificates>> read = Certificates::Read(security);
  report.problem = read.ok() ? CheckOwnIdentity(security) : read.status();
  // As a peer would: the whole file is what it is shown.
  if (report.problem.ok()) report.problem = (*read)->CheckPeer(files->cert, files->cert);
  return report;
}

}  // namespace spectrumkv
