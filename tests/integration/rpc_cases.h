// The suite all cases of the RPC coverage test belong to.
#pragma once

#include <map>
#include <string>

#include "tests/integration/rpc_fixture.h"

namespace spectrumkv {

// For the check after all tests (rpc_coverage_test.cc).
void KeepLedger(const std::map<std::string, CallLedger::Ends>& ends);

class RpcCases : public RpcFixture {
 protected:
  void TearDown() override { KeepLedger(ledger().all()); }
};

}  // namespace spectrumkv
