// Cases of WorkerService about pools and their blocks.
#include <memory>
#include <string>

#include "tests/integration/rpc_cases.h"

namespace spectrumkv {
namespace {

TEST_F(RpcCases, RegisterPool) {
  const v1::PoolRef pool = Register(prefill_worker(), "register");
  EXPECT_EQ(pool.epoch(), prefill().epoch());
  EXPECT_EQ(Register(prefill_worker(), "register").pool_id(), pool.pool_id()) << "not idempotent by request_id";

  v1::RegisterPoolRequest request;
  v1::RegisterPoolResponse response;
  request.set_request_id("register");
  *request.mutable_schema() = SmallPool();
  request.mutable_schema()->set_model("another");
  EXPECT_EQ(prefill_worker().RegisterPool(Context().get(), request, &response).error_code(),
            grpc::StatusCode::ALREADY_EXISTS);

  request.set_request_id("");
  EXPECT_REFUSED(prefill_worker().RegisterPool(Context().get(), request, &response), INVALID_ARGUMENT,
                 "INVALID_REQUEST_ID");
  request.set_request_id("short segment");
  EXPECT_REFUSED(prefill_worker().RegisterPool(Context().get(), request, &response), INVALID_ARGUMENT,
                 "INVALID_REQUEST_ID");
  request.set_request_id("float8");
  request.mutable_schema()->mutable_groups(0)->set_data_type(v1::DATA_TYPE_FLOAT8_E4M3);
  EXPECT_REFUSED(prefill_worker().RegisterPool(Context().get(), request, &response), UNIMPLEMENTED,
                 "UNSUPPORTED_DTYPE");
  request.mutable_schema()->mutable_groups(0)->set_data_type(v1::DATA_TYPE_FLOAT16);
  request.mutable_schema()->mutable_groups(0)->set_kind(v1::GROUP_KIND_OPAQUE_STATE);
  EXPECT_REFUSED(prefill_worker().RegisterPool(Context().get(), request, &response), INVALID_ARGUMENT,
                 "INVALID_SCHEMA");  // it has a V
  request.mutable_schema()->mutable_groups(0)->set_kind(v1::GROUP_KIND_ATTENTION);
  request.mutable_schema()->mutable_segments(0)->mutable_cuda_ipc()->set_size_bytes(1);
  EXPECT_REFUSED(prefill_worker().RegisterPool(Context().get(), request, &response), INVALID_ARGUMENT,
                 "INVALID_SCHEMA");  // of no device
}

TEST_F(RpcCases, HoldPool) {
  const v1::PoolRef pool = Register(prefill_worker(), "hold");
  {
    const auto context = Context();
    const auto stream = prefill_worker().HoldPool(context.get());
    v1::HoldPoolRequest ping;
    *ping.mutable_pool() = pool;
    v1::HoldPoolResponse answer;
    for (int i = 0; i < 2; ++i) {
      ASSERT_TRUE(stream->Write(ping));
      ASSERT_TRUE(stream->Read(&answer));
      EXPECT_GT(answer.lease_ttl_ms(), 0u);
      EXPECT_EQ(answer.event(), "");
    }
    stream->WritesDone();
    EXPECT_FALSE(stream->Read(&answer));
    EXPECT_RPC_OK(stream->Finish());
  }
  // The last hold has gone, and the pool with it.
  v1::RenewLeaseRequest renew;
  *renew.mutable_pool() = pool;
  v1::RenewLeaseResponse renewed;
  EXPECT_EQ(prefill_worker().RenewLease(Context().get(), renew, &renewed).error_code(), grpc::StatusCode::NOT_FOUND);

  const auto context = Context();
  const auto stream = prefill_worker().HoldPool(context.get());
  v1::HoldPoolRequest ping;
  ping.mutable_pool()->set_pool_id("nobody");
  ping.mutable_pool()->set_epoch(prefill().epoch());
  stream->Write(ping);
  EXPECT_REFUSED(stream->Finish(), NOT_FOUND, "UNKNOWN_POOL");
}

// The status of a hold is the worker's word that the pool has been let go of; many times, because only a race could
// tell otherwise.
TEST_F(RpcCases, HoldPoolHasLetGoWhenItsStreamEnds) {
  for (int i = 0; i < 100; ++i) {
    const v1::PoolRef pool = Register(prefill_worker(), "let-go-" + std::to_string(i));
    const auto context = Context();
    const auto stream = prefill_worker().HoldPool(context.get());
    v1::HoldPoolRequest ping;
    *ping.mutable_pool() = pool;
    v1::HoldPoolResponse answer;
    ASSERT_TRUE(stream->Write(ping));
    ASSERT_TRUE(stream->Read(&answer));
    if (i % 2 == 0) {
      stream->WritesDone();
      EXPECT_RPC_OK(stream->Finish());
    } else {
      ping.mutable_pool()->set_pool_id("another");
      ASSERT_TRUE(stream->Write(ping));
      EXPECT_REFUSED(stream->Finish(), INVALID_ARGUMENT, "INVALID_POOL_REF");
    }
    v1::RenewLeaseRequest renew;
    *renew.mutable_pool() = pool;
    v1::RenewLeaseResponse renewed;
    EXPECT_REFUSED(prefill_worker().RenewLease(Context().get(), renew, &renewed), NOT_FOUND, "UNKNOWN_POOL");
  }
}

TEST_F(RpcCases, HoldPoolTellsThatThePoolIsUnregistered) {
  const v1::PoolRef pool = Register(prefill_worker(), "hold-event");
  const auto context = Context();
  const auto stream = prefill_worker().HoldPool(context.get());
  v1::HoldPoolRequest ping;
  *ping.mutable_pool() = pool;
  v1::HoldPoolResponse answer;
  ASSERT_TRUE(stream->Write(ping));
  ASSERT_TRUE(stream->Read(&answer));
  v1::UnregisterPoolRequest request;
  *request.mutable_pool() = pool;
  v1::UnregisterPoolResponse response;
  EXPECT_RPC_OK(prefill_worker().UnregisterPool(Context().get(), request, &response));
  ASSERT_TRUE(stream->Read(&answer));
  EXPECT_EQ(answer.event(), "UNREGISTERED");
  EXPECT_FALSE(stream->Read(&answer));
  EXPECT_RPC_OK(stream->Finish());
}

TEST_F(RpcCases, RenewLease) {
  v1::RenewLeaseRequest request;
  *request.mutable_pool() = Register(prefill_worker(), "renew");
  v1::RenewLeaseResponse response;
  EXPECT_RPC_OK(prefill_worker().RenewLease(Context().get(), request, &response));
  EXPECT_GT(response.lease_ttl_ms(), 0u);
  request.mutable_pool()->set_epoch(prefill().epoch() + 1);
  EXPECT_REFUSED(prefill_worker().RenewLease(Context().get(), request, &response), FAILED_PRECONDITION, "STALE_EPOCH");
}

TEST_F(RpcCases, UnregisterPool) {
  v1::UnregisterPoolRequest request;
  *request.mutable_pool() = Register(prefill_worker(), "unregister");
  v1::UnregisterPoolResponse response;
  EXPECT_RPC_OK(prefill_worker().UnregisterPool(Context().get(), request, &response));
  EXPECT_REFUSED(prefill_worker().UnregisterPool(Context().get(), request, &response), NOT_FOUND, "UNKNOWN_POOL");

  // A pool that a transfer uses stays.
  const v1::PoolRef pool = Register(decode_worker(), "unregister-busy");
  const std::string id = NewTransferId("unregister");
  v1::ExpectResponse expected;
  EXPECT_RPC_OK(decode_worker().Expect(Context().get(), ExpectOf(pool, id), &expected));
  *request.mutable_pool() = pool;
  request.set_timeout_ms(50);
  EXPECT_REFUSED(decode_worker().UnregisterPool(Context().get(), request, &response), DEADLINE_EXCEEDED, "POOL_BUSY");
  v1::CancelTransferRequest cancel;
  cancel.mutable_transfer()->set_transfer_id(id);
  v1::CancelTransferResponse cancelled;
  EXPECT_RPC_OK(decode_worker().CancelTransfer(Context().get(), cancel, &cancelled));
  request.set_timeout_ms(5000);
  EXPECT_RPC_OK(decode_worker().UnregisterPool(Context().get(), request, &response));
}

TEST_F(RpcCases, PutBlocks) {
  const v1::PoolRef pool = Register(prefill_worker(), "put");
  Fill(prefill_worker(), pool, 7);

  v1::PutBlocksRequest request;
  *request.mutable_pool() = pool;
  v1::BlockData* block = request.add_blocks();
  block->set_plane(v1::PLANE_K);
  block->set_data("too short");
  v1::PutBlocksResponse response;
  {
    const auto context = Context();
    const auto writer = prefill_worker().PutBlocks(context.get(), &response);
    writer->Write(request);
    writer->WritesDone();
    EXPECT_REFUSED(writer->Finish(), INVALID_ARGUMENT, "INVALID_BLOCKS");
  }
  {
    // Above the limit of one message: refused by gRPC itself.
    block->set_data(std::string(17 << 20, 'x'));
    const auto context = Context();
    const auto writer = prefill_worker().PutBlocks(context.get(), &response);
    writer->Write(request);
    writer->WritesDone();
    EXPECT_EQ(writer->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  }
  Fill(prefill_worker(), pool, 8);
}

TEST_F(RpcCases, GetBlocks) {
  const v1::PoolRef pool = Register(prefill_worker(), "get");
  const std::string first = Fill(prefill_worker(), pool, 9);
  v1::GetBlocksRequest request;
  *request.mutable_pool() = pool;
  *request.mutable_runs() = Blocks().runs();
  {
    const auto context = Context();
    const auto reader = prefill_worker().GetBlocks(context.get(), request);
    v1::GetBlocksResponse response;
    int blocks = 0;
    while (reader->Read(&response)) {
      EXPECT_LE(response.ByteSizeLong(), size_t{1} << 20 | 4096);
      if (blocks == 0) {
        EXPECT_EQ(response.blocks(0).data(), first);
      }
      blocks += response.blocks_size();
    }
    EXPECT_RPC_OK(reader->Finish());
    EXPECT_EQ(blocks, static_cast<int>(3 * kPoolLayers * 2));
  }
  request.mutable_runs(0)->set_first(kPoolBlocks);
  const auto context = Context();
  const auto reader = prefill_worker().GetBlocks(context.get(), request);
  v1::GetBlocksResponse response;
  EXPECT_FALSE(reader->Read(&response));
  EXPECT_REFUSED(reader->Finish(), NOT_FOUND, "UNKNOWN_BLOCK");
}

TEST_F(RpcCases, Plan) {
  v1::PlanRequest request;
  *request.mutable_pool() = Register(prefill_worker(), "plan");
  Fill(prefill_worker(), request.pool(), 10);
  request.set_token_count(kTokens);
  *request.add_blocks() = Blocks();
  request.mutable_policy()->set_budget(0.5);
  v1::PlanResponse response;
  EXPECT_RPC_OK(prefill_worker().Plan(Context().get(), request, &response));
  EXPECT_EQ(response.kv_bytes(), uint64_t{kTokens} * kPoolLayers * 2 * kPoolHeads * kPoolHeadDim * 2);
  EXPECT_GT(response.wire_bytes(), 0u);
  EXPECT_LE(response.wire_bytes(), response.kv_bytes() / 2);
  EXPECT_LE(response.least_budget(), 0.5);
  EXPECT_GT(response.predicted_distortion(), 0);
  uint64_t cells = 0;
  for (const v1::TierCount& tier : response.tiers()) cells += tier.k_tokens() + tier.v_tokens();
  EXPECT_EQ(cells, uint64_t{kTokens} * kPoolLayers * 2);
  EXPECT_FALSE(response.has_predicted_seconds());
  EXPECT_EQ(response.prediction_missing(), "NO_LINK_ASKED");

  request.set_link_bytes_per_second(1e6);
  EXPECT_RPC_OK(prefill_worker().Plan(Context().get(), request, &response));
  EXPECT_GT(response.predicted_seconds(), static_cast<double>(response.wire_bytes()) / 1e6);
  EXPECT_EQ(response.predicted_limited_by(), v1::LIMITED_BY_LINK);
  request.set_link_bytes_per_second(-1);
  EXPECT_REFUSED(prefill_worker().Plan(Context().get(), request, &response), INVALID_ARGUMENT, "OUT_OF_RANGE");
  request.clear_link_bytes_per_second();

  request.mutable_policy()->set_budget(0.01);
  EXPECT_REFUSED(prefill_worker().Plan(Context().get(), request, &response), INVALID_ARGUMENT, "BUDGET_TOO_SMALL");
}

}  // namespace
}  // namespace spectrumkv
