#include "server/stream/pem.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <ctime>

namespace spectrumkv {
namespace {

std::string TextOf(const ASN1_STRING* text) {
  return std::string(reinterpret_cast<const char*>(ASN1_STRING_get0_data(text)),
                     static_cast<size_t>(ASN1_STRING_length(text)));
}

int64_t SecondsOf(const ASN1_TIME* time) {
  std::tm parts = {};
  return ASN1_TIME_to_tm(time, &parts) == 1 ? timegm(&parts) : 0;
}

}  // namespace

PemReader::PemReader(const std::string& pem) : in_(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size()))) {}

Certificate PemReader::Next() {
  Certificate next(PEM_read_bio_X509(in_.get(), nullptr, nullptr, nullptr));
  ERR_clear_error();
  return next;
}

Key PemReader::NextKey() {
  Key next(PEM_read_bio_PrivateKey(
      in_.get(), nullptr, [](char*, int, int, void*) { return 0; }, nullptr));
  ERR_clear_error();
  return next;
}

PeerNames NamesOf(X509* certificate) {
  PeerNames names;
  auto* all = static_cast<GENERAL_NAMES*>(X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr));
  const int count = all == nullptr ? 0 : sk_GENERAL_NAME_num(all);
  for (int i = 0; i < count; ++i) {
    const GENERAL_NAME* name = sk_GENERAL_NAME_value(all, i);
    if (name->type == GEN_DNS) names.dns.push_back(TextOf(name->d.dNSName));
    if (name->type == GEN_URI) names.uris.push_back(TextOf(name->d.uniformResourceIdentifier));
  }
  if (all != nullptr) {
    GENERAL_NAMES_free(all);
    return names;
  }
  char common[256];
  const int bytes =
      X509_NAME_get_text_by_NID(X509_get_subject_name(certificate), NID_commonName, common, sizeof(common));
  if (bytes > 0) names.dns.emplace_back(common, std::min<size_t>(bytes, sizeof(common) - 1));  // a NUL is part of it
  return names;
}

int64_t BeginOf(const X509* certificate) { return SecondsOf(X509_get0_notBefore(certificate)); }
int64_t EndOf(const X509* certificate) { return SecondsOf(X509_get0_notAfter(certificate)); }

}  // namespace spectrumkv
