// Certificates and keys out of PEM text, by OpenSSL. Internal to server/stream.
#pragma once

#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/x509.h>

#include <cstdint>
#include <memory>
#include <string>

#include "server/base/identity.h"

namespace spectrumkv {

// Deleter of what OpenSSL frees by a function of its own.
template <auto free_function>
struct Free {
  template <typename T>
  void operator()(T* object) const {
    free_function(object);
  }
};
using Certificate = std::unique_ptr<X509, Free<X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Free<EVP_PKEY_free>>;

class PemReader {
 public:
  // `pem` must outlive it.
  explicit PemReader(const std::string& pem);
  // Null at the end, or where the next one cannot be read.
  Certificate Next();
  Key NextKey();

 private:
  const std::unique_ptr<BIO, Free<BIO_free>> in_;
};

// The alternative names; the common name where there are none.
PeerNames NamesOf(X509* certificate);
// Seconds since 1970; 0 where the certificate says no time.
int64_t BeginOf(const X509* certificate);
int64_t EndOf(const X509* certificate);

}  // namespace spectrumkv
