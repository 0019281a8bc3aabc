// Peers that are not ours: other services, ordinary clients, messages and streams that are not as they should be.
#include <atomic>
#include <future>
#include <string>

#include <grpcpp/generic/generic_stub.h>
#include "server/base/status.h"
#include "server/stream/status_codec.h"
#include "tests/unit/stream/grpc_fixture.h"

namespace spectrumkv {
namespace {

TEST_F(GrpcTest, ServesItsOwnServiceOnly) {
  StartServer();
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub(
      grpc::CreateChannel(server_->address(), grpc::InsecureChannelCredentials()));
  for (const char* method : {"/grpc.health.v1.Health/Check", "/spectrumkv.v1.WorkerService/Send",
                             "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"}) {
    grpc::ClientContext context;
    grpc::CompletionQueue queue;
    const grpc::Slice nothing;
    const grpc::ByteBuffer request(&nothing, 1);
    auto call = stub.PrepareUnaryCall(&context, method, request, &queue);
    call->StartCall();
    grpc::ByteBuffer response;
    grpc::Status status;
    call->Finish(&response, &status, this);
    void* tag = nullptr;
    bool ok = false;
    ASSERT_TRUE(queue.Next(&tag, &ok));
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED) << method;
  }
}

TEST_F(GrpcTest, AnOrdinaryProtobufClientSpeaksBothStreams) {
  StartServer();
  auto stub = OrdinaryClient();
  grpc::ClientContext context;
  auto call = stub->Data(&context);
  v1::DataRequest request;
  *request.mutable_open() = [] {
    v1::DataOpen open;
    open.set_transfer_id("plain-client");
    open.set_attempt(1);
    open.set_session(42);
    return open;
  }();
  ASSERT_TRUE(call->Write(request));
  for (uint32_t i = 0; i < 20; ++i) {
    std::string bytes(1 + i * 50'000, '\0');
    ChunkSender::Fill(reinterpret_cast<uint8_t*>(bytes.data()), i, bytes.size());
    request.set_chunk(bytes);
    ASSERT_TRUE(call->Write(request));
  }
  auto accepted = acceptor_.WaitData();
  ASSERT_NE(accepted.stream, nullptr);
  EXPECT_EQ(accepted.open.transfer_id, "plain-client");
  EXPECT_EQ(accepted.open.session, 42u);
  ASSERT_TRUE(accepted.listener->WaitChunks(20));
  for (uint32_t i = 0; i < 20; ++i) {
    EXPECT_EQ(accepted.listener->kept()[i].size(), 1 + i * 50'000);
    EXPECT_TRUE(ChunkSender::Matches(accepted.listener->kept()[i], i)) << i;
  }
  ChunkSender sender(&pool_, accepted.stream);
  ASSERT_TRUE(sender.Send(7, size_t{1} << 20));
  v1::DataResponse response;
  ASSERT_TRUE(call->Read(&response));
  const std::string& chunk = response.chunk();
  ASSERT_EQ(chunk.size(), size_t{1} << 20);
  EXPECT_TRUE(ChunkSender::Matches(std::vector<uint8_t>(chunk.begin(), chunk.end()), 7));
  call->WritesDone();
  EXPECT_FALSE(call->Read(&response));
  EXPECT_TRUE(call->Finish().ok());
  EXPECT_TRUE(accepted.listener->WaitClosed().ok());
}

// Sends one message of raw bytes and returns how the server ended the call.
absl::Status SendRaw(const std::string& address, const char* method, const std::string& bytes) {
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub(
      grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  struct Reactor : grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
    void OnReadDone(bool ok) override {
      if (ok) StartRead(&read);
    }
    void OnDone(const grpc::Status& status) override { done.set_value(status); }
    grpc::ByteBuffer read;
    std::promise<grpc::Status> done;
  } reactor;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  const grpc::Slice slice(bytes);
  const grpc::ByteBuffer message(&slice, 1);
  stub.PrepareBidiStreamingCall(&context, method, {}, &reactor);
  reactor.StartWrite(&message);
  reactor.StartRead(&reactor.read);
  reactor.StartCall();
  return FromGrpcStatus(reactor.done.get_future().get());
}

TEST_F(GrpcTest, MalformedMessagesCloseTheStreamAndNothingElse) {
  StartServer();
  const char* control = "/spectrumkv.v1.PeerService/Control";
  const char* data = "/spectrumkv.v1.PeerService/Data";
  using namespace std::string_literals;
  struct Case {
    const char* method;
    std::string bytes;
    const char* field;
  };
  for (const Case& c : {Case{control, "\xff\xff\xff", "frame"}, Case{control, ""s, "frame"},
                        Case{control, "\x0a\x04\x0a\x02\x18\x07"s, "hello.role"}, Case{data, "\xff\xff", "frame"},
                        Case{data, "\x12\x01x", "chunk"}, Case{data, "\x12\x7fx", "chunk"},
                        Case{data, "\x0a\x00"s, "open.transfer_id"}}) {
    const absl::Status status = SendRaw(server_->address(), c.method, c.bytes);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(ReasonOf(status), "MALFORMED_FRAME");
    EXPECT_EQ(MetadataOf(status)["field"], c.field);
  }
  auto transport = NewTransport();
  auto listener = std::make_shared<Recorder>();
  auto stream = transport->OpenData(server_->address(), OpenOf(0), listener);
  EXPECT_NE(acceptor_.WaitData().stream, nullptr);
}

TEST_F(GrpcTest, AMessageAboveTheLimitClosesTheStream) {
  PeerServerOptions options;
  options.max_message_bytes = 100'000;
  StartServer(options);
  auto transport = NewTransport();
  auto listener = std::make_shared<Recorder>();
  auto data = transport->OpenData(server_->address(), OpenOf(0), listener);
  ChunkSender sender(&pool_, data);
  ASSERT_TRUE(sender.Send(0, 90'000));
  ASSERT_TRUE(acceptor_.WaitData().listener->WaitChunks(1));
  ASSERT_TRUE(sender.Send(1, 200'000));
  const absl::Status status = listener->WaitClosed();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(ReasonOf(status), "MESSAGE_TOO_LARGE");
  EXPECT_EQ(acceptor_.WaitData().listener->WaitClosed().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(acceptor_.WaitData().listener->chunks(), 1u);
  EXPECT_TRUE(sender.WaitIdle());
}

// Waits for the end of a call on which nothing is said. The client's own deadline would end it without a reason.
template <typename Response, typename Call>
void ExpectClosed(Call* call, const char* reason) {
  Response response;
  EXPECT_FALSE(call->Read(&response)) << reason;
  const absl::Status status = FromGrpcStatus(call->Finish());
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_EQ(ReasonOf(status), reason) << status;
}

TEST_F(GrpcTest, APeerThatNeverOpensIsClosed) {
  PeerServerOptions options;
  options.open_timeout_ms = 300;
  StartServer(options);
  auto stub = OrdinaryClient();
  grpc::ClientContext data_context, silent_context, speaking_context;
  for (grpc::ClientContext* context : {&data_context, &silent_context, &speaking_context}) {
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  }
  auto speaking = stub->Control(&speaking_context);
  v1::ControlRequest request;
  request.mutable_frame()->mutable_heartbeat()->set_reason("a first frame");
  ASSERT_TRUE(speaking->Write(request));
  auto accepted = acceptor_.WaitControl();
  ASSERT_NE(accepted.stream, nullptr);
  const auto data = stub->Data(&data_context);
  ExpectClosed<v1::DataResponse>(data.get(), "NO_OPEN");
  const auto silent = stub->Control(&silent_context);
  ExpectClosed<v1::ControlResponse>(silent.get(), "NO_HELLO");
  EXPECT_FALSE(accepted.listener->closed()) << "whoever has spoken may go on";
  speaking_context.TryCancel();
}

// A peer that takes chunks from the connection but never from the stream: Close ends it in seconds, slots come home,
// and another stream of the same transport is not held up.
TEST_F(GrpcTest, APeerThatNeverReadsBlocksNobody) {
  StartServer();
  auto stub = OrdinaryClient();
  grpc::ClientContext context;
  auto call = stub->Data(&context);
  v1::DataRequest request;
  request.mutable_open()->set_transfer_id("lazy");
  request.mutable_open()->set_attempt(1);
  ASSERT_TRUE(call->Write(request));
  auto lazy = acceptor_.WaitData();
  ASSERT_NE(lazy.stream, nullptr);
  std::atomic<int> done{0};
  int begun = 0;
  // Until flow control holds a chunk back.
  const auto filling = steady_clock::now();
  while (MsSince(filling) < 1500) {
    if (begun - done < 4) {
      Slot slot = pool_.TryAcquire();
      ASSERT_TRUE(slot);
      ++begun;
      lazy.stream->SendChunk({std::move(slot), size_t{1} << 20, {}, nullptr}, [&](bool) { ++done; });
    } else {
      std::this_thread::sleep_for(milliseconds(1));
    }
    if (begun > 200) break;
  }
  EXPECT_LT(done, begun) << "nothing was ever held back";
  auto transport = NewTransport();
  auto listener = std::make_shared<Recorder>();
  auto data = transport->OpenData(server_->address(), OpenOf(1), listener);
  ChunkSender sender(&pool_, data);
  for (uint32_t i = 0; i < 20; ++i) ASSERT_TRUE(sender.Send(i, 100'000));
  ASSERT_TRUE(acceptor_.WaitData(1).listener->WaitChunks(20));
  const auto closing = steady_clock::now();
  lazy.stream->Close(absl::OkStatus());
  EXPECT_EQ(ReasonOf(lazy.listener->WaitClosed()), "PEER_GONE");
  EXPECT_LT(MsSince(closing), 9000);
  EXPECT_TRUE(WaitUntil([&] { return done == begun; })) << done << " of " << begun;
  EXPECT_TRUE(sender.WaitIdle());
  context.TryCancel();
  call->Finish();
}

}  // namespace
}  // namespace spectrumkv
