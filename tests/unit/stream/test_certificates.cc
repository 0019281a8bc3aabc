#include "tests/unit/stream/test_certificates.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace spectrumkv {

TestCa::TestCa(const std::string& name) {
  std::string folder = (std::filesystem::temp_directory_path() / "spectrumkv_ca_XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) return;
  folder_ = folder;
  ok_ = Run("openssl ecparam -name prime256v1 -genkey -noout -out ca.key") &&
        Run("openssl req -x509 -new -key ca.key -days 2 -subj /CN=" + name + " -out ca.pem");
}

TestCa::~TestCa() {
  std::error_code ignored;
  if (!folder_.empty()) std::filesystem::remove_all(folder_, ignored);
}

bool TestCa::Run(const std::string& command) {
  return std::system(("cd " + folder_ + " && " + command + " >log 2>&1").c_str()) == 0;
}

void TestCa::BecomeIntermediateOf(const TestCa& root) {
  std::ofstream(folder_ + "/ca.ext") << "basicConstraints=critical,CA:TRUE\n";
  ok_ = ok_ && Run("openssl req -new -key ca.key -subj /CN=intermediate -out ca.csr") &&
        Run("openssl x509 -req -in ca.csr -CA " + root.folder_ + "/ca.pem -CAkey " + root.folder_ +
            "/ca.key -CAcreateserial -days 2 -extfile ca.ext -out ca.pem");
}

PeerSecurity TestCa::Issue(const std::string& identity, const std::string& expected, int days) {
  const std::string name = "cert" + std::to_string(issued_++);
  std::ofstream(folder_ + "/" + name + ".ext") << "subjectAltName=DNS:" << identity << "\n";
  ok_ = ok_ && Run("openssl ecparam -name prime256v1 -genkey -noout -out " + name + ".key") &&
        Run("openssl req -new -key " + name + ".key -subj /CN=" + identity + " -out " + name + ".csr") &&
        Run("openssl x509 -req -in " + name + ".csr -CA ca.pem -CAkey ca.key -CAcreateserial -days " +
            std::to_string(days) + " -extfile " + name + ".ext -out " + name + ".pem");
  PeerSecurity security;
  security.mode = PeerSecurity::Mode::kMtls;
  security.cert_file = folder_ + "/" + name + ".pem";
  security.key_file = folder_ + "/" + name + ".key";
  security.ca_file = ca_file();
  security.identities = {expected};
  return security;
}

}  // namespace spectrumkv
