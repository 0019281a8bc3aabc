// Certificates for tests, made by the openssl program.
#pragma once

#include <string>

#include "server/stream/peer_security.h"

namespace spectrumkv {

// A CA and certificates it signed, in a folder of its own that goes with the object.
class TestCa {
 public:
  explicit TestCa(const std::string& name = "test-ca");
  ~TestCa();
  TestCa(const TestCa&) = delete;
  TestCa& operator=(const TestCa&) = delete;
  bool ok() const { return ok_; }
  // mTLS with a certificate whose subject alternative name is `identity`; peers are expected to be `expected`.
  PeerSecurity Issue(const std::string& identity, const std::string& expected = "spectrumkv", int days = 2);
  // Becomes an authority that `root` has signed: what it issues from then on names no authority but this one.
  void BecomeIntermediateOf(const TestCa& root);
  std::string ca_file() const { return folder_ + "/ca.pem"; }
  const std::string& folder() const { return folder_; }

 private:
  bool Run(const std::string& command);
  std::string folder_;
  bool ok_ = false;
  int issued_ = 0;
};

}  // namespace spectrumkv
