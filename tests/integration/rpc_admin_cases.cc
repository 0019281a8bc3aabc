// Cases of AdminService. Those that need another daemon than the suite's start their own.
#include <algorithm>
#include <cmath>
#include <string>

#include "tests/integration/rpc_cases.h"

namespace spectrumkv {
namespace {

// A call without a wrong argument still has an error: a message above the limit, here of a field nobody knows.
template <typename Request>
Request TooLarge() {
  Request request;
  request.GetReflection()->MutableUnknownFields(&request)->AddLengthDelimited(1000, std::string(17 << 20, 'x'));
  return request;
}

#define EXPECT_TOO_LARGE(call) EXPECT_EQ((call).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED)

TEST_F(RpcCases, GetStatus) {
  v1::GetStatusResponse status;
  EXPECT_RPC_OK(admin().GetStatus(Context().get(), {}, &status));
  EXPECT_EQ(status.epoch(), decode().epoch());
  EXPECT_TRUE(status.ready());
  EXPECT_FALSE(status.draining());
  EXPECT_EQ(status.peer_address(), decode().address("peer"));
  EXPECT_EQ(status.worker_address(), decode().worker_target());
  EXPECT_EQ(status.peer_security(), "plain");
  EXPECT_EQ(status.slots_size(), 2);
  EXPECT_NE(std::find(status.backends_supported().begin(), status.backends_supported().end(), "scalar"),
            status.backends_supported().end());
  EXPECT_TOO_LARGE(admin().GetStatus(Context().get(), TooLarge<v1::GetStatusRequest>(), &status));
}

TEST_F(RpcCases, ListPools) {
  const v1::PoolRef pool = Register(decode_worker(), "listed");
  v1::ListPoolsResponse response;
  EXPECT_RPC_OK(admin().ListPools(Context().get(), {}, &response));
  const auto at = std::find_if(response.pools().begin(), response.pools().end(),
                               [&](const v1::PoolInfo& p) { return p.pool_id() == pool.pool_id(); });
  ASSERT_NE(at, response.pools().end());
  EXPECT_EQ(at->model(), "test-model");
  EXPECT_EQ(at->layers(), kPoolLayers);
  EXPECT_EQ(at->state(), "active");
  EXPECT_GT(at->lease_remaining_ms(), 0u);
  EXPECT_TOO_LARGE(admin().ListPools(Context().get(), TooLarge<v1::ListPoolsRequest>(), &response));
}

TEST_F(RpcCases, ListTransfersAndPeers) {
  const v1::PoolRef target = Register(decode_worker(), "listed-target");
  const std::string id = NewTransferId("listed");
  v1::ExpectResponse expected;
  EXPECT_RPC_OK(decode_worker().Expect(Context().get(), ExpectOf(target, id), &expected));
  v1::ListTransfersRequest request;
  request.set_active_only(true);
  v1::ListTransfersResponse response;
  EXPECT_RPC_OK(admin().ListTransfers(Context().get(), request, &response));
  EXPECT_TRUE(std::any_of(response.transfers().begin(), response.transfers().end(),
                          [&](const v1::TransferReport& report) { return report.transfer_id() == id; }));
  request.set_limit(1000000);
  EXPECT_REFUSED(admin().ListTransfers(Context().get(), request, &response), INVALID_ARGUMENT, "OUT_OF_RANGE");

  v1::ListPeersResponse peers;
  EXPECT_RPC_OK(admin().ListPeers(Context().get(), {}, &peers));
  EXPECT_GT(peers.stages().threads(), 0u);
  EXPECT_GT(peers.stages().encode().rotated_bytes_per_second(), 0);
  EXPECT_GT(peers.stages().decode().raw_bytes_per_second(), 0);
  EXPECT_TOO_LARGE(admin().ListPeers(Context().get(), TooLarge<v1::ListPeersRequest>(), &peers));
}

TEST_F(RpcCases, GetConfig) {
  v1::GetConfigResponse response;
  EXPECT_RPC_OK(admin().GetConfig(Context().get(), {}, &response));
  EXPECT_NE(response.yaml().find(decode().address("worker_socket")), std::string::npos);
  EXPECT_TOO_LARGE(admin().GetConfig(Context().get(), TooLarge<v1::GetConfigRequest>(), &response));
}

TEST_F(RpcCases, SetLogLevel) {
  v1::SetLogLevelRequest request;
  request.set_level("debug");
  v1::SetLogLevelResponse response;
  EXPECT_RPC_OK(admin().SetLogLevel(Context().get(), request, &response));
  EXPECT_EQ(response.previous_level(), "info");
  request.set_level("loud");
  EXPECT_EQ(admin().SetLogLevel(Context().get(), request, &response).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(response.previous_level(), "info");
  request.set_level("info");
  EXPECT_RPC_OK(admin().SetLogLevel(Context().get(), request, &response));
  EXPECT_EQ(response.previous_level(), "debug");
}

TEST_F(RpcCases, RunSelfTest) {
  v1::RunSelfTestResponse response;
  EXPECT_RPC_OK(admin().RunSelfTest(Context().get(), {}, &response));
  EXPECT_GE(response.results_size(), 3);
  for (const v1::SelfTestResult& result : response.results()) {
    EXPECT_EQ(result.passed(), result.supported()) << result.backend() << ": " << result.detail();
  }
  EXPECT_TOO_LARGE(admin().RunSelfTest(Context().get(), TooLarge<v1::RunSelfTestRequest>(), &response));
}

TEST_F(RpcCases, GetMetrics) {
  v1::GetMetricsResponse response;
  EXPECT_RPC_OK(admin().GetMetrics(Context().get(), {}, &response));
  EXPECT_NE(response.text().find("# TYPE spectrumkv_transfers_total counter\n"), std::string::npos);
  EXPECT_NE(response.text().find("\nspectrumkv_draining 0\n"), std::string::npos);
  EXPECT_TOO_LARGE(admin().GetMetrics(Context().get(), TooLarge<v1::GetMetricsRequest>(), &response));
}

TEST_F(RpcCases, ProbePeer) {
  v1::ProbePeerRequest request;
  request.set_peer(prefill().address("peer"));
  v1::ProbePeerResponse response;
  EXPECT_RPC_OK(admin().ProbePeer(Context().get(), request, &response));
  EXPECT_EQ(response.epoch(), prefill().epoch());
  v1::GetStatusResponse status;
  EXPECT_RPC_OK(admin().GetStatus(Context().get(), {}, &status));
  EXPECT_EQ(response.version(), status.version()) << "both are of one build";
  EXPECT_GT(response.round_trip_seconds(), 0);
  EXPECT_GE(response.connect_seconds(), response.round_trip_seconds());
  EXPECT_GT(response.link_bytes_per_second(), 0);
  // One machine, one clock.
  EXPECT_LE(std::abs(response.clock_offset_seconds()), response.clock_error_seconds() + 0.01);

  request.set_peer("127.0.0.1:1");
  request.set_timeout_ms(500);
  EXPECT_REFUSED(admin().ProbePeer(Context().get(), request, &response), UNAVAILABLE, "NOBODY_LISTENS");
  request.set_peer(prefill().address("health"));
  EXPECT_REFUSED(admin().ProbePeer(Context().get(), request, &response), UNIMPLEMENTED, "NOT_A_PEER");
  request.set_peer("nobody");
  EXPECT_REFUSED(admin().ProbePeer(Context().get(), request, &response), INVALID_ARGUMENT, "INVALID_PEER");
  request.set_peer(prefill().address("peer"));
  request.set_timeout_ms(10001);
  EXPECT_REFUSED(admin().ProbePeer(Context().get(), request, &response), INVALID_ARGUMENT, "OUT_OF_RANGE");
}

TEST_F(RpcCases, GetCertificate) {
  v1::GetCertificateResponse response;
  EXPECT_RPC_OK(admin().GetCertificate(Context().get(), {}, &response));
  EXPECT_EQ(response.peer_security(), "plain");
  EXPECT_EQ(response.chain_size(), 0);
  EXPECT_EQ(response.problem() + response.problem_reason(), "");
  EXPECT_TOO_LARGE(admin().GetCertificate(Context().get(), TooLarge<v1::GetCertificateRequest>(), &response));
}

TEST_F(RpcCases, Drain) {
  const std::unique_ptr<DaemonProcess> daemon = DaemonProcess::Start();
  ASSERT_NE(daemon, nullptr);
  const auto worker = v1::WorkerService::NewStub(ledger().Channel(daemon->worker_target()));
  const auto own_admin = v1::AdminService::NewStub(ledger().Channel(daemon->admin_target()));
  const v1::PoolRef pool = Register(*worker, "drain");
  const std::string id = NewTransferId("drain");
  v1::ExpectResponse expected;
  EXPECT_RPC_OK(worker->Expect(Context().get(), ExpectOf(pool, id), &expected));

  v1::DrainRequest request;
  request.set_timeout_ms(50);
  v1::DrainResponse response;
  EXPECT_REFUSED(own_admin->Drain(Context().get(), request, &response), DEADLINE_EXCEEDED, "DRAIN_TIMEOUT");
  v1::GetStatusResponse status;
  EXPECT_RPC_OK(own_admin->GetStatus(Context().get(), {}, &status));
  EXPECT_TRUE(status.draining());
  EXPECT_FALSE(status.ready());
  EXPECT_REFUSED(worker->Expect(Context().get(), ExpectOf(pool, NewTransferId("drain")), &expected),
                 FAILED_PRECONDITION, "BLOCKS_IN_USE");
  v1::CancelTransferRequest cancel;
  cancel.mutable_transfer()->set_transfer_id(id);
  v1::CancelTransferResponse cancelled;
  EXPECT_RPC_OK(worker->CancelTransfer(Context().get(), cancel, &cancelled));
  EXPECT_REFUSED(worker->Expect(Context().get(), ExpectOf(pool, NewTransferId("drain")), &expected), UNAVAILABLE,
                 "DRAINING");
  request.set_timeout_ms(5000);
  EXPECT_RPC_OK(own_admin->Drain(Context().get(), request, &response));
  EXPECT_EQ(response.transfers_finished(), 1u);
  EXPECT_EQ(response.transfers_left(), 0u);
  EXPECT_EQ(daemon->Stop(), 0);
}

}  // namespace
}  // namespace spectrumkv
