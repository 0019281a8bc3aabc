// Every RPC of every service has been called through a real daemon, once with success and once with an error. The cases
// are in rpc_*_cases.cc; this checks, after them all, that none was forgotten: an RPC that is new and has no cases
// fails.
#include <algorithm>
#include <string>

#include "tests/integration/rpc_fixture.h"

namespace spectrumkv {

// googletest runs suites and tests in the order they are linked; the last word is an environment's, after all of them.
class CoverageCheck : public testing::Environment {
 public:
  void TearDown() override {
    // A run of chosen tests alone proves nothing about the others.
    if (testing::GTEST_FLAG(filter) != "*") return;
    int count = 0;
    for (const char* name :
         {"spectrumkv.v1.WorkerService", "spectrumkv.v1.AdminService", "spectrumkv.v1.PeerService", "spectrumkv.v1.ProbeService"}) {
      const auto* service = google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(name);
      ASSERT_NE(service, nullptr) << name;
      for (int i = 0; i < service->method_count(); ++i, ++count) {
        const std::string method = "/" + std::string(name) + "/" + service->method(i)->name();
        EXPECT_GT(ends_[method].ok, 0) << method << " has no success case";
        EXPECT_GT(ends_[method].failed, 0) << method << " has no error case";
      }
    }
    EXPECT_GE(count, 31);
  }

  std::map<std::string, CallLedger::Ends> ends_;
};

namespace {

CoverageCheck* const g_check = [] {
  auto* check = new CoverageCheck();
  testing::AddGlobalTestEnvironment(check);
  return check;
}();

}  // namespace

// Each suite has a ledger of its own, and tells it after every test.
void KeepLedger(const std::map<std::string, CallLedger::Ends>& ends) {
  for (const auto& [method, count] : ends) {
    CallLedger::Ends& kept = g_check->ends_[method];
    kept.ok = std::max(kept.ok, count.ok);
    kept.failed = std::max(kept.failed, count.failed);
  }
}

}  // namespace spectrumkv
