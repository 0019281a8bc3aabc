// Cases of PeerService: the test is the sending daemon, frame by frame.
#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/cpu/cpu_backends.h"
#include "tests/integration/rpc_cases.h"

namespace spectrumkv {
namespace {

using ControlStreamPtr = std::unique_ptr<grpc::ClientReaderWriter<v1::ControlRequest, v1::ControlResponse>>;

v1::PoolShape ShapeOfSmallPool() {
  const v1::PoolSchema schema = SmallPool();
  v1::PoolShape shape;
  shape.set_model(schema.model());
  shape.set_revision(schema.revision());
  v1::GroupShape* group = shape.add_groups();
  group->set_kind(v1::GROUP_KIND_ATTENTION);
  group->set_data_type(v1::DATA_TYPE_FLOAT16);
  group->set_heads_total(kPoolHeads);
  group->set_head_count(kPoolHeads);
  group->set_head_dim(kPoolHeadDim);
  for (uint32_t layer = 0; layer < kPoolLayers; ++layer) group->add_layers(layer);
  group->set_has_v(true);
  return shape;
}

v1::ControlRequest HelloOf(const std::string& id) {
  v1::ControlRequest request;
  v1::Hello* hello = request.mutable_frame()->mutable_hello();
  hello->set_format_version(1);
  hello->set_epoch(4711);
  hello->set_role(v1::TRANSFER_ROLE_SENDER);
  hello->set_transfer_id(id);
  hello->set_part_count(1);
  hello->set_attempt(1);
  hello->set_deadline_ms(20000);
  *hello->mutable_shape() = ShapeOfSmallPool();
  hello->set_token_count(kTokens);
  return request;
}

v1::ControlRequest ManifestOfAll() {
  v1::ControlRequest request;
  v1::Manifest* manifest = request.mutable_frame()->mutable_manifest();
  manifest->set_token_count(kTokens);
  manifest->add_kept_tokens()->set_count(kTokens);
  *manifest->mutable_shape() = ShapeOfSmallPool();
  manifest->set_chunk_count(kPoolLayers);
  manifest->set_streams(1);
  return request;
}

// The next frame that is no heartbeat; false where the stream ends first.
bool NextFrame(ControlStreamPtr& control, v1::ControlFrame* frame) {
  v1::ControlResponse response;
  while (control->Read(&response)) {
    if (response.frame().has_heartbeat()) continue;
    *frame = response.frame();
    return true;
  }
  return false;
}

// One layer, all tokens, RAW; every word is `word`.
std::string ChunkOf(uint32_t layer, uint64_t fence, uint16_t word) {
  const ChunkDims dims{kTokens, kPoolHeads, kPoolHeadDim, DType::kFloat16, true};
  std::vector<uint16_t> row(kPoolHeads * kPoolHeadDim, word);
  const std::vector<const uint8_t*> rows(kTokens, reinterpret_cast<const uint8_t*>(row.data()));
  const SourcePlane plane{rows.data(), kPoolHeadDim * 2, 2};
  const std::vector<uint8_t> tiers(kTokens, TierMapByte(Tier::kRaw, Tier::kRaw));
  ChunkIdentity identity;
  identity.fence = fence;
  identity.chunk_index = layer;
  identity.layer = static_cast<uint16_t>(layer);
  std::string chunk(MaxChunkBytes(dims), '\0');
  Workspace workspace;
  const EncodeResult result = ScalarBackend()->Encode(dims, identity, plane, &plane, tiers.data(), &workspace,
                                                      reinterpret_cast<uint8_t*>(chunk.data()), chunk.size());
  chunk.resize(result.chunk_bytes);
  return chunk;
}

TEST_F(RpcCases, ControlAndData) {
  const v1::PoolRef target = Register(decode_worker(), "peer-target");
  const std::string id = NewTransferId("peer");
  v1::ExpectResponse expected;
  EXPECT_RPC_OK(decode_worker().Expect(Context().get(), ExpectOf(target, id), &expected));

  const auto control_context = Context();
  ControlStreamPtr control = decode_peer().Control(control_context.get());
  ASSERT_TRUE(control->Write(HelloOf(id)));
  v1::ControlFrame frame;
  ASSERT_TRUE(NextFrame(control, &frame));
  ASSERT_TRUE(frame.has_hello_reply()) << frame.ShortDebugString();
  const uint64_t session = frame.hello_reply().session();
  EXPECT_EQ(frame.hello_reply().epoch(), decode().epoch());
  ASSERT_TRUE(control->Write(ManifestOfAll()));
  ASSERT_TRUE(NextFrame(control, &frame));
  ASSERT_TRUE(frame.has_accept()) << frame.ShortDebugString();
  EXPECT_GE(frame.accept().credits(), 1u);
  EXPECT_NE(frame.accept().fence(), 0u);

  const auto data_context = Context();
  const auto data = decode_peer().Data(data_context.get());
  v1::DataRequest message;
  message.mutable_open()->set_transfer_id(id);
  message.mutable_open()->set_attempt(1);
  message.mutable_open()->set_session(session);
  ASSERT_TRUE(data->Write(message));
  for (uint32_t layer = 0; layer < kPoolLayers; ++layer) {
    message.set_chunk(ChunkOf(layer, frame.accept().fence(), static_cast<uint16_t>(0x3c00 + layer)));
    ASSERT_TRUE(data->Write(message));
  }
  data->WritesDone();
  while (NextFrame(control, &frame) && !frame.has_receipt()) {
  }
  ASSERT_TRUE(frame.has_receipt()) << frame.ShortDebugString();
  EXPECT_EQ(frame.receipt().state(), v1::TRANSFER_STATE_COMMITTED) << frame.receipt().message();
  control->WritesDone();
  v1::DataResponse none;
  EXPECT_FALSE(data->Read(&none));
  EXPECT_RPC_OK(data->Finish());
  while (NextFrame(control, &frame)) {
  }
  EXPECT_RPC_OK(control->Finish());
  EXPECT_EQ(WaitEnd(decode_worker(), id).state(), v1::TRANSFER_STATE_COMMITTED);

  v1::GetBlocksRequest get;
  *get.mutable_pool() = target;
  get.add_layers(1);
  get.add_runs()->set_count(1);
  const auto context = Context();
  const auto reader = decode_worker().GetBlocks(context.get(), get);
  v1::GetBlocksResponse blocks;
  ASSERT_TRUE(reader->Read(&blocks));
  EXPECT_EQ(blocks.blocks(0).data().substr(0, 4), std::string("\x01\x3c\x01\x3c", 4));
  EXPECT_RPC_OK(reader->Finish());
}

TEST_F(RpcCases, Probe) {
  v1::ProbeRequest request;
  request.set_filler(std::string(1 << 20, 'x'));
  v1::ProbeResponse response;
  const int64_t before_ns = std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
  EXPECT_RPC_OK(decode_peer().Probe(Context().get(), request, &response));
  EXPECT_EQ(response.epoch(), decode().epoch());
  EXPECT_FALSE(response.version().empty());
  EXPECT_GE(response.unix_time_ns(), before_ns);
  EXPECT_LT(response.unix_time_ns(), before_ns + 20'000'000'000);
  request.set_filler(std::string(17 << 20, 'x'));
  EXPECT_EQ(decode_peer().Probe(Context().get(), request, &response).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST_F(RpcCases, ControlRefusesAnotherFormatVersion) {
  const auto context = Context();
  ControlStreamPtr control = decode_peer().Control(context.get());
  v1::ControlRequest hello = HelloOf("version");
  hello.mutable_frame()->mutable_hello()->set_format_version(2);
  control->Write(hello);
  v1::ControlFrame frame;
  EXPECT_FALSE(NextFrame(control, &frame));
  EXPECT_REFUSED(control->Finish(), UNIMPLEMENTED, "UNSUPPORTED_VERSION");
}

TEST_F(RpcCases, DataRefusesAnUnknownSession) {
  const auto context = Context();
  const auto data = decode_peer().Data(context.get());
  v1::DataRequest message;
  message.mutable_open()->set_transfer_id("nobody");
  message.mutable_open()->set_attempt(1);
  message.mutable_open()->set_session(42);
  data->Write(message);
  v1::DataResponse none;
  EXPECT_FALSE(data->Read(&none));
  EXPECT_REFUSED(data->Finish(), NOT_FOUND, "UNKNOWN_SESSION");
}

}  // namespace
}  // namespace spectrumkv
