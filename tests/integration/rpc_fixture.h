// Two real daemons, channels that note how each call ended, and a small pool. For tests that call RPCs by hand.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <grpcpp/grpcpp.h>
#include "gtest/gtest.h"
#include "spectrumkv/v1/admin_service.grpc.pb.h"
#include "spectrumkv/v1/peer_service.grpc.pb.h"
#include "spectrumkv/v1/worker_service.grpc.pb.h"
#include "tests/integration/daemon_process.h"

namespace spectrumkv {

// How often each method ended well and with an error, over all channels. Thread-safe.
class CallLedger {
 public:
  struct Ends {
    int ok = 0, failed = 0;
  };
  void Count(const std::string& method, bool ok);
  // By full name, "/spectrumkv.v1.WorkerService/Send".
  std::map<std::string, Ends> all() const;
  std::shared_ptr<grpc::Channel> Channel(const std::string& target);

 private:
  mutable std::mutex mutex_;
  std::map<std::string, Ends> ends_;
};

constexpr uint32_t kPoolLayers = 2, kPoolHeads = 2, kPoolHeadDim = 64, kPoolBlockTokens = 16, kPoolBlocks = 8;
constexpr uint32_t kTokens = 40;  // three blocks, the last partly filled
constexpr size_t kPoolBlockBytes = size_t{kPoolBlockTokens} * kPoolHeads * kPoolHeadDim * 2;

// Float16, DAEMON_OWNED, layer after layer, K then V.
v1::PoolSchema SmallPool();

class RpcFixture : public ::testing::Test {
 protected:
  static void SetUpTestSuite();
  static void TearDownTestSuite();

  static CallLedger& ledger();
  static DaemonProcess& prefill();
  static DaemonProcess& decode();
  static v1::WorkerService::Stub& prefill_worker();
  static v1::WorkerService::Stub& decode_worker();
  static v1::AdminService::Stub& admin();
  static v1::PeerService::Stub& decode_peer();

  // With a deadline, so that no test hangs.
  static std::unique_ptr<grpc::ClientContext> Context(int timeout_ms = 20000);
  static v1::PoolRef Register(v1::WorkerService::Stub& worker, const std::string& request_id);
  // Puts values that depend on `seed` into the first blocks; answers K of layer 0, block 0.
  static std::string Fill(v1::WorkerService::Stub& worker, const v1::PoolRef& pool, uint32_t seed);
  // Blocks 0, 1, 2 of group 0.
  static v1::GroupBlocks Blocks();
  static std::string NewTransferId(const std::string& name);
  static v1::ExpectRequest ExpectOf(const v1::PoolRef& pool, const std::string& id);
  static v1::SendRequest SendOf(const v1::PoolRef& pool, const std::string& id, const std::string& peer);
  // Watches until the terminal event.
  static v1::TransferReport WaitEnd(v1::WorkerService::Stub& worker, const std::string& id);
};

// The reason of google.rpc.ErrorInfo; "" where there is none.
std::string ReasonOfRpc(const grpc::Status& status);

// A call that must fail so.
#define EXPECT_REFUSED(call, expected_code, expected_reason)                                                   \
  do {                                                                                                         \
    const grpc::Status refused_status = (call);                                                                \
    EXPECT_EQ(refused_status.error_code(), grpc::StatusCode::expected_code) << refused_status.error_message(); \
    EXPECT_EQ(::spectrumkv::ReasonOfRpc(refused_status), expected_reason) << refused_status.error_message();   \
  } while (false)
#define EXPECT_RPC_OK(call)                                                                                      \
  do {                                                                                                           \
    const grpc::Status rpc_status = (call);                                                                      \
    EXPECT_TRUE(rpc_status.ok()) << ::spectrumkv::ReasonOfRpc(rpc_status) << ": " << rpc_status.error_message(); \
  } while (false)

}  // namespace spectrumkv
