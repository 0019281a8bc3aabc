// Cases of WorkerService about transfers.
#include <string>
#include <thread>

#include "tests/integration/rpc_cases.h"

namespace spectrumkv {
namespace {

std::string FirstBlock(v1::WorkerService::Stub& worker, const v1::PoolRef& pool) {
  v1::GetBlocksRequest request;
  *request.mutable_pool() = pool;
  request.add_runs()->set_count(1);
  grpc::ClientContext context;
  const auto reader = worker.GetBlocks(&context, request);
  v1::GetBlocksResponse response;
  std::string first;
  while (reader->Read(&response)) {
    if (first.empty()) first = response.blocks(0).data();
  }
  EXPECT_RPC_OK(reader->Finish());
  return first;
}

v1::FetchRequest FetchOf(const v1::ExpectRequest& expect, const std::string& peer) {
  v1::FetchRequest fetch;
  fetch.set_transfer_id(expect.transfer_id());
  fetch.set_peer(peer);
  *fetch.mutable_pool() = expect.pool();
  fetch.set_token_count(expect.token_count());
  *fetch.mutable_blocks() = expect.blocks();
  return fetch;
}

v1::PublishRequest PublishOf(const v1::SendRequest& send) {
  v1::PublishRequest publish;
  publish.set_transfer_id(send.transfer_id());
  *publish.mutable_pool() = send.pool();
  publish.set_token_count(send.token_count());
  *publish.mutable_blocks() = send.blocks();
  *publish.mutable_policy() = send.policy();
  return publish;
}

TEST_F(RpcCases, SendExpectWatchGetReport) {
  const v1::PoolRef source = Register(prefill_worker(), "push-source");
  const v1::PoolRef target = Register(decode_worker(), "push-target");
  const std::string filled = Fill(prefill_worker(), source, 21);
  const std::string id = NewTransferId("push");
  v1::ExpectResponse expected;
  EXPECT_RPC_OK(decode_worker().Expect(Context().get(), ExpectOf(target, id), &expected));
  EXPECT_EQ(expected.epoch(), decode().epoch());
  EXPECT_RPC_OK(decode_worker().Expect(Context().get(), ExpectOf(target, id), &expected));  // a repeat
  v1::SendResponse sent;
  EXPECT_RPC_OK(prefill_worker().Send(Context().get(), SendOf(source, id, decode().address("peer")), &sent));
  EXPECT_EQ(sent.epoch(), prefill().epoch());

  const v1::TransferReport received = WaitEnd(decode_worker(), id);
  EXPECT_EQ(received.state(), v1::TRANSFER_STATE_COMMITTED) << received.reason() << " " << received.message();
  EXPECT_EQ(received.role(), v1::TRANSFER_ROLE_RECEIVER);
  const v1::TransferReport sender = WaitEnd(prefill_worker(), id);
  EXPECT_EQ(sender.state(), v1::TRANSFER_STATE_COMMITTED) << sender.reason() << " " << sender.message();
  EXPECT_EQ(sender.wire_bytes(), received.wire_bytes());
  EXPECT_TRUE(FirstBlock(decode_worker(), target) == filled);

  v1::GetTransferRequest get;
  get.mutable_transfer()->set_transfer_id(id);
  v1::GetTransferResponse got;
  EXPECT_RPC_OK(prefill_worker().GetTransfer(Context().get(), get, &got));
  EXPECT_EQ(got.report().state(), v1::TRANSFER_STATE_COMMITTED);
  v1::ReportFirstTokenRequest first_token;
  first_token.mutable_transfer()->set_transfer_id(id);
  first_token.set_time_to_first_token_seconds(0.25);
  v1::ReportFirstTokenResponse reported;
  EXPECT_RPC_OK(decode_worker().ReportFirstToken(Context().get(), first_token, &reported));

  // The id is taken.
  EXPECT_REFUSED(prefill_worker().Send(Context().get(), SendOf(source, id, "127.0.0.1:9"), &sent), ALREADY_EXISTS,
                 "TRANSFER_EXISTS");
  v1::ExpectRequest other = ExpectOf(target, id);
  other.set_accept_dropped(true);
  EXPECT_REFUSED(decode_worker().Expect(Context().get(), other, &expected), ALREADY_EXISTS, "TRANSFER_EXISTS");
}

TEST_F(RpcCases, PublishFetch) {
  const v1::PoolRef source = Register(prefill_worker(), "pull-source");
  const v1::PoolRef target = Register(decode_worker(), "pull-target");
  const std::string filled = Fill(prefill_worker(), source, 22);
  const std::string id = NewTransferId("pull");
  v1::PublishResponse published;
  EXPECT_RPC_OK(prefill_worker().Publish(Context().get(), PublishOf(SendOf(source, id, "")), &published));
  v1::FetchResponse fetched;
  EXPECT_RPC_OK(
      decode_worker().Fetch(Context().get(), FetchOf(ExpectOf(target, id), prefill().address("peer")), &fetched));
  const v1::TransferReport received = WaitEnd(decode_worker(), id);
  EXPECT_EQ(received.state(), v1::TRANSFER_STATE_COMMITTED) << received.reason() << " " << received.message();
  EXPECT_TRUE(FirstBlock(decode_worker(), target) == filled);

  v1::PublishRequest bad = PublishOf(SendOf(source, NewTransferId("pull"), ""));
  bad.set_transfer_token("short");
  EXPECT_REFUSED(prefill_worker().Publish(Context().get(), bad, &published), INVALID_ARGUMENT, "INVALID_TOKEN");
  EXPECT_REFUSED(
      decode_worker().Fetch(Context().get(), FetchOf(ExpectOf(target, NewTransferId("pull")), "nowhere"), &fetched),
      INVALID_ARGUMENT, "INVALID_PEER");
}

TEST_F(RpcCases, Advance) {
  const v1::PoolRef source = Register(prefill_worker(), "layerwise-source");
  const v1::PoolRef target = Register(decode_worker(), "layerwise-target");
  const std::string id = NewTransferId("layerwise");
  v1::ExpectResponse expected;
  EXPECT_RPC_OK(decode_worker().Expect(Context().get(), ExpectOf(target, id), &expected));
  v1::SendRequest send = SendOf(source, id, decode().address("peer"));
  send.set_layerwise(true);
  v1::SendResponse sent;
  EXPECT_RPC_OK(prefill_worker().Send(Context().get(), send, &sent));
  const std::string filled = Fill(decode_worker(), Register(decode_worker(), "unrelated"), 23);
  v1::AdvanceRequest advance;
  v1::AdvanceResponse advanced;
  advance.set_transfer_id(id);
  advance.set_tokens(kTokens);
  for (uint32_t layers = 1; layers <= kPoolLayers; ++layers) {
    advance.set_layers(layers);
    EXPECT_RPC_OK(prefill_worker().Advance(Context().get(), advance, &advanced));
  }
  EXPECT_EQ(WaitEnd(decode_worker(), id).state(), v1::TRANSFER_STATE_COMMITTED);
  EXPECT_TRUE(FirstBlock(decode_worker(), target) == std::string(kPoolBlockBytes, 0)) << "the source held zeros";
  EXPECT_NE(filled, std::string(kPoolBlockBytes, '\0'));

  advance.set_transfer_id("nobody");
  EXPECT_REFUSED(prefill_worker().Advance(Context().get(), advance, &advanced), NOT_FOUND, "UNKNOWN_TRANSFER");
}

TEST_F(RpcCases, CancelTransfer) {
  const v1::PoolRef target = Register(decode_worker(), "cancel-target");
  const std::string id = NewTransferId("cancel");
  v1::ExpectResponse expected;
  EXPECT_RPC_OK(decode_worker().Expect(Context().get(), ExpectOf(target, id), &expected));
  v1::CancelTransferRequest request;
  request.mutable_transfer()->set_transfer_id(id);
  v1::CancelTransferResponse response;
  EXPECT_RPC_OK(decode_worker().CancelTransfer(Context().get(), request, &response));
  EXPECT_EQ(response.report().state(), v1::TRANSFER_STATE_CANCELLED);
  // The blocks are free again.
  EXPECT_RPC_OK(decode_worker().Expect(Context().get(), ExpectOf(target, NewTransferId("cancel")), &expected));

  request.mutable_transfer()->set_transfer_id("nobody");
  EXPECT_REFUSED(decode_worker().CancelTransfer(Context().get(), request, &response), NOT_FOUND, "UNKNOWN_TRANSFER");
}

TEST_F(RpcCases, ReleaseTransfer) {
  const v1::PoolRef source = Register(prefill_worker(), "release-source");
  const std::string id = NewTransferId("release");
  v1::PublishResponse published;
  EXPECT_RPC_OK(prefill_worker().Publish(Context().get(), PublishOf(SendOf(source, id, "")), &published));
  v1::ReleaseTransferRequest request;
  request.mutable_transfer()->set_transfer_id(id);
  v1::ReleaseTransferResponse response;
  EXPECT_RPC_OK(prefill_worker().ReleaseTransfer(Context().get(), request, &response));
  EXPECT_EQ(WaitEnd(prefill_worker(), id).state(), v1::TRANSFER_STATE_CANCELLED);

  const v1::PoolRef target = Register(decode_worker(), "release-target");
  const std::string active = NewTransferId("release");
  v1::ExpectResponse expected;
  EXPECT_RPC_OK(decode_worker().Expect(Context().get(), ExpectOf(target, active), &expected));
  request.mutable_transfer()->set_transfer_id(active);
  EXPECT_REFUSED(decode_worker().ReleaseTransfer(Context().get(), request, &response), FAILED_PRECONDITION,
                 "TRANSFER_ACTIVE");
}

TEST_F(RpcCases, ErrorsOfTheOthers) {
  v1::SendResponse sent;
  v1::SendRequest send = SendOf(Register(prefill_worker(), "errors"), "bad id", "127.0.0.1:1");
  EXPECT_REFUSED(prefill_worker().Send(Context().get(), send, &sent), INVALID_ARGUMENT, "INVALID_TRANSFER_ID");
  send.set_transfer_id(NewTransferId("errors"));
  send.mutable_part()->set_count(65);
  EXPECT_REFUSED(prefill_worker().Send(Context().get(), send, &sent), INVALID_ARGUMENT, "INVALID_PART");
  send.clear_part();
  send.mutable_pool()->set_epoch(1);
  EXPECT_REFUSED(prefill_worker().Send(Context().get(), send, &sent), FAILED_PRECONDITION, "STALE_EPOCH");

  v1::TransferKey nobody;
  nobody.set_transfer_id("nobody");
  v1::GetTransferRequest get;
  *get.mutable_transfer() = nobody;
  v1::GetTransferResponse got;
  EXPECT_REFUSED(prefill_worker().GetTransfer(Context().get(), get, &got), NOT_FOUND, "UNKNOWN_TRANSFER");
  v1::ReportFirstTokenRequest first_token;
  *first_token.mutable_transfer() = nobody;
  v1::ReportFirstTokenResponse reported;
  EXPECT_REFUSED(prefill_worker().ReportFirstToken(Context().get(), first_token, &reported), NOT_FOUND,
                 "UNKNOWN_TRANSFER");
  v1::WatchTransferRequest watch;
  *watch.mutable_transfer() = nobody;
  const auto context = Context();
  const auto reader = prefill_worker().WatchTransfer(context.get(), watch);
  v1::WatchTransferResponse event;
  EXPECT_FALSE(reader->Read(&event));
  EXPECT_REFUSED(reader->Finish(), NOT_FOUND, "UNKNOWN_TRANSFER");
}

// A peer that is not there ends the transfer, and the next one is served.
TEST_F(RpcCases, PeerThatIsNotThere) {
  const v1::PoolRef source = Register(prefill_worker(), "lonely");
  const std::string id = NewTransferId("lonely");
  v1::SendRequest send = SendOf(source, id, "127.0.0.1:1");
  send.set_deadline_ms(1500);
  v1::SendResponse sent;
  EXPECT_RPC_OK(prefill_worker().Send(Context().get(), send, &sent));
  const v1::TransferReport report = WaitEnd(prefill_worker(), id);
  EXPECT_TRUE(report.state() == v1::TRANSFER_STATE_FAILED || report.state() == v1::TRANSFER_STATE_EXPIRED)
      << v1::TransferState_Name(report.state());
  EXPECT_NE(report.reason(), "");
}

TEST_F(RpcCases, RefineAndApplyMakeWhatArrivedExact) {
  const v1::PoolRef source = Register(prefill_worker(), "refine-source");
  const v1::PoolRef target = Register(decode_worker(), "refine-target");
  const std::string filled = Fill(prefill_worker(), source, 29);
  const std::string id = NewTransferId("refined");
  v1::ExpectRequest expect = ExpectOf(target, id);
  expect.set_refinable(true);
  v1::SendRequest send = SendOf(source, id, decode().address("peer"));
  send.mutable_policy()->set_retain_seconds(30);
  send.mutable_policy()->set_allocator(v1::ALLOCATOR_UNIFORM);
  send.mutable_policy()->set_uniform_tier(v1::TIER_Q4);
  v1::ExpectResponse expected;
  EXPECT_RPC_OK(decode_worker().Expect(Context().get(), expect, &expected));
  v1::SendResponse sent;
  EXPECT_RPC_OK(prefill_worker().Send(Context().get(), send, &sent));
  ASSERT_EQ(WaitEnd(decode_worker(), id).state(), v1::TRANSFER_STATE_COMMITTED);
  EXPECT_NE(FirstBlock(decode_worker(), target), filled);
  v1::RefineRequest refine;
  refine.set_transfer_id(id);
  refine.set_refine_id(id + ".r");
  v1::RefineResponse started;
  EXPECT_RPC_OK(decode_worker().Refine(Context().get(), refine, &started));
  EXPECT_EQ(started.epoch(), decode().epoch());
  EXPECT_GT(started.cells(), 0u);
  ASSERT_EQ(WaitEnd(decode_worker(), id + ".r").state(), v1::TRANSFER_STATE_COMMITTED);
  refine.set_transfer_id("no-such-transfer");
  refine.set_refine_id("of-nothing");
  EXPECT_EQ(decode_worker().Refine(Context().get(), refine, &started).error_code(), grpc::StatusCode::NOT_FOUND);
  v1::ApplyRefinementRequest apply;
  apply.set_refine_id(id);
  v1::ApplyRefinementResponse refused;
  EXPECT_EQ(decode_worker().ApplyRefinement(Context().get(), apply, &refused).error_code(),
            grpc::StatusCode::FAILED_PRECONDITION);
  apply.set_refine_id(id + ".r");
  v1::ApplyRefinementResponse applied;
  EXPECT_RPC_OK(decode_worker().ApplyRefinement(Context().get(), apply, &applied));
  EXPECT_TRUE(applied.complete());
  EXPECT_TRUE(applied.exact());
  EXPECT_GT(applied.applied_bytes(), 0u);
  EXPECT_EQ(FirstBlock(decode_worker(), target), filled);
}

}  // namespace
}  // namespace spectrumkv
