// What only the real transport can get wrong: connections, ports, strange peers, ends of life.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <set>
#include <sstream>
#include <thread>

#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>
#include "server/base/status.h"
#include "server/stream/grpc_transport.h"
#include "server/stream/peer_server.h"
#include "server/stream/status_codec.h"
#include "spectrumkv/v1/peer_service.grpc.pb.h"
#include "tests/unit/stream/stream_fixtures.h"

namespace spectrumkv {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

int64_t MsSince(steady_clock::time_point begin) {
  return std::chrono::duration_cast<milliseconds>(steady_clock::now() - begin).count();
}

// Established connections whose local port is `port` (gRPC's sockets are IPv6 ones that also take IPv4).
int ConnectionsOf(int port) {
  int found = 0;
  for (const char* name : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream table(name);
    std::string line;
    while (std::getline(table, line)) {
      std::istringstream fields(line);
      std::string slot, local, remote, state;
      fields >> slot >> local >> remote >> state;
      const size_t colon = local.find(':');
      if (colon == std::string::npos || state != "01") continue;
      if (std::stoi(local.substr(colon + 1), nullptr, 16) == port) ++found;
    }
  }
  return found;
}

// Of the connections of this process, at either end of which is `port`: after how many ms without an acknowledgement the
// kernel breaks them off.
std::multiset<unsigned> UserTimeoutsMs(int port) {
  std::multiset<unsigned> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename());
    for (const auto name : {&getsockname, &getpeername}) {
      sockaddr_in6 end{};  // gRPC's sockets are IPv6 ones
      socklen_t length = sizeof end;
      unsigned timeout_ms = 0;
      socklen_t timeout_length = sizeof timeout_ms;
      if (getpeername(fd, reinterpret_cast<sockaddr*>(&end), &length) != 0) break;  // no connection
      length = sizeof end;
      if (name(fd, reinterpret_cast<sockaddr*>(&end), &length) != 0 || ntohs(end.sin6_port) != port) continue;
      if (getsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, &timeout_length) == 0) found.insert(timeout_ms);
    }
  }
  return found;
}

class GrpcTest : public testing::Test {
 protected:
  void StartServer(PeerServerOptions options = {}) { server_ = PeerServer::Start(options, &acceptor_).value(); }
  std::unique_ptr<GrpcTransport> NewTransport(GrpcTransportOptions options = {}) {
    return GrpcTransport::Create(options).value();
  }
  std::unique_ptr<v1::PeerService::Stub> OrdinaryClient() {
    grpc::ChannelArguments args;
    args.SetMaxReceiveMessageSize(-1);
    args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return v1::PeerService::NewStub(
        grpc::CreateCustomChannel(server_->address(), grpc::InsecureChannelCredentials(), args));
  }
  SlotPool pool_{16, size_t{1} << 20};
  RecordingAcceptor acceptor_;
  std::unique_ptr<PeerServer> server_;
};

TEST_F(GrpcTest, EachStreamIndexHasItsOwnConnection) {
  StartServer();
  auto transport = NewTransport();
  auto listeners = std::vector<std::shared_ptr<Recorder>>(4);
  for (auto& listener : listeners) listener = std::make_shared<Recorder>();
  auto control = transport->OpenControl(server_->address(), listeners[0]);
  auto first = transport->OpenData(server_->address(), OpenOf(0), listeners[1]);
  auto second = transport->OpenData(server_->address(), OpenOf(1), listeners[2]);
  ASSERT_NE(acceptor_.WaitData(1).stream, nullptr);
  ASSERT_NE(acceptor_.WaitControl().stream, nullptr);
  EXPECT_EQ(ConnectionsOf(server_->port()), 3);
  auto again = transport->OpenData(server_->address(), OpenOf(1), listeners[3]);
  ASSERT_NE(acceptor_.WaitData(2).stream, nullptr);
  EXPECT_EQ(ConnectionsOf(server_->port()), 3) << "a second stream of one index shares its connection";
}

TEST_F(GrpcTest, APeerThatWasGivenUpGetsNewConnections) {
  StartServer();
  auto transport = NewTransport();
  auto listeners = std::vector<std::shared_ptr<Recorder>>(4);
  for (auto& listener : listeners) listener = std::make_shared<Recorder>();
  auto control = transport->OpenControl(server_->address(), listeners[0]);
  auto data = transport->OpenData(server_->address(), OpenOf(0), listeners[1]);
  ASSERT_NE(acceptor_.WaitControl().stream, nullptr);
  ASSERT_NE(acceptor_.WaitData(0).stream, nullptr);
  transport->GiveUp("127.0.0.1:1");  // another peer
  transport->GiveUp(server_->address());
  EXPECT_EQ(ConnectionsOf(server_->port()), 2) << "open streams stay as they are";
  auto control_after = transport->OpenControl(server_->address(), listeners[2]);
  auto data_after = transport->OpenData(server_->address(), OpenOf(0), listeners[3]);
  ASSERT_NE(acceptor_.WaitData(1).stream, nullptr);
  EXPECT_TRUE(WaitUntil([&] { return ConnectionsOf(server_->port()) == 4; })) << ConnectionsOf(server_->port());
  control->Close(absl::OkStatus());
  data->Close(absl::OkStatus());
  EXPECT_TRUE(listeners[0]->WaitClosed().ok());
  EXPECT_TRUE(listeners[1]->WaitClosed().ok());
  EXPECT_TRUE(WaitUntil([&] { return ConnectionsOf(server_->port()) == 2; })) << "and end with their streams";
}

// Or they would hang in TCP's back-off long after the network is well again, and whoever dials on them with them.
TEST_F(GrpcTest, ConnectionsThatDeliverNothingAreBrokenOffByBothEnds) {
  PeerServerOptions served;
  served.undelivered_timeout_ms = 1234;
  StartServer(served);
  GrpcTransportOptions options;
  options.undelivered_timeout_ms = 2345;
  auto transport = NewTransport(options);
  auto control_listener = std::make_shared<Recorder>(), data_listener = std::make_shared<Recorder>();
  auto control = transport->OpenControl(server_->address(), control_listener);
  auto data = transport->OpenData(server_->address(), OpenOf(0), data_listener);
  ASSERT_NE(acceptor_.WaitControl().stream, nullptr);
  ASSERT_NE(acceptor_.WaitData(0).stream, nullptr);
  EXPECT_EQ(UserTimeoutsMs(server_->port()), (std::multiset<unsigned>{1234, 1234, 2345, 2345}));
}

// A peer that vanished without a word would leave its connections for ever: its own end closes none any more.
TEST_F(GrpcTest, ConnectionsWithoutAStreamAreClosedByTheServerToo) {
  PeerServerOptions options;
  options.idle_connection_timeout_ms = 300;
  StartServer(options);
  auto transport = NewTransport();
  auto listener = std::make_shared<Recorder>();
  auto control = transport->OpenControl(server_->address(), listener);
  ASSERT_NE(acceptor_.WaitControl().stream, nullptr);
  std::this_thread::sleep_for(std::chrono::milliseconds(700));
  EXPECT_EQ(ConnectionsOf(server_->port()), 1) << "one with a stream stays, silent as it may be";
  control->Close(absl::OkStatus());
  EXPECT_TRUE(listener->WaitClosed().ok());
  EXPECT_TRUE(WaitUntil([&] { return ConnectionsOf(server_->port()) == 0; })) << ConnectionsOf(server_->port());
}

TEST_F(GrpcTest, ConnectionsAreBounded) {
  StartServer();
  GrpcTransportOptions options;
  options.max_connections = 2;
  auto transport = NewTransport(options);
  for (uint32_t i = 0; i < 6; ++i) {
    auto listener = std::make_shared<Recorder>();
    auto data = transport->OpenData(server_->address(), OpenOf(i), listener);
    ASSERT_NE(acceptor_.WaitData(i).stream, nullptr);
    EXPECT_GE(ConnectionsOf(server_->port()), 1);
    data->Close(absl::OkStatus());
    EXPECT_TRUE(listener->WaitClosed().ok());
  }
  EXPECT_TRUE(WaitUntil([&] { return ConnectionsOf(server_->port()) <= 2; })) << ConnectionsOf(server_->port());
}

TEST_F(GrpcTest, UnreachablePeersAreToldInTime) {
  StartServer();
  const std::string closed_port = server_->address();
  server_ = nullptr;
  // Accepts connections and never says a word.
  const int silent = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(silent, reinterpret_cast<sockaddr*>(&any), sizeof any), 0);
  ASSERT_EQ(listen(silent, 8), 0);
  socklen_t length = sizeof any;
  getsockname(silent, reinterpret_cast<sockaddr*>(&any), &length);
  GrpcTransportOptions options;
  options.connect_timeout_ms = 400;
  auto transport = NewTransport(options);
  for (const std::string& address : {closed_port, "127.0.0.1:" + std::to_string(ntohs(any.sin_port)),
                                     std::string("no port"), std::string("does-not-exist.invalid:1")}) {
    const auto begin = steady_clock::now();
    auto control = std::make_shared<Recorder>();
    auto data = std::make_shared<Recorder>();
    auto control_stream = transport->OpenControl(address, control);
    auto data_stream = transport->OpenData(address, OpenOf(0), data);
    Slot slot = pool_.TryAcquire();
    std::atomic<int> unsent{0};
    data_stream->SendChunk({std::move(slot), 1000, {}, nullptr}, [&](bool sent) { unsent += sent ? 100 : 1; });
    for (Recorder* recorder : {control.get(), data.get()}) {
      const absl::Status status = recorder->WaitClosed();
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << address << ": " << status;
      EXPECT_EQ(ReasonOf(status), address == closed_port ? kNobodyListens : "PEER_UNREACHABLE") << address << ": " << status;
    }
    EXPECT_LT(MsSince(begin), 3000) << address;
    EXPECT_TRUE(WaitUntil([&] { return unsent == 1; })) << unsent;
  }
  EXPECT_EQ(pool_.used(), 0u);
  close(silent);
}

TEST_F(GrpcTest, ServerRestartsOnItsPortAndIsFoundAtOnce) {
  StartServer();
  auto transport = NewTransport();
  PeerServerOptions options;
  options.listen_address = server_->address();
  for (int life = 0; life < 3; ++life) {
    auto listener = std::make_shared<Recorder>();
    auto stream = transport->OpenControl(options.listen_address, listener);
    ASSERT_NE(acceptor_.WaitControl(static_cast<size_t>(life)).stream, nullptr) << listener->WaitClosed(0);
    server_ = nullptr;
    EXPECT_EQ(listener->WaitClosed().code(), absl::StatusCode::kUnavailable);
    auto lost = std::make_shared<Recorder>();
    auto nothing = transport->OpenControl(options.listen_address, lost);
    EXPECT_EQ(ReasonOf(lost->WaitClosed()), kNobodyListens);
    StartServer(options);
  }
}

TEST_F(GrpcTest, ASecondServerOnThePortIsRefused) {
  StartServer();
  PeerServerOptions options;
  options.listen_address = server_->address();
  RecordingAcceptor other;
  const auto second = PeerServer::Start(options, &other);
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(ReasonOf(second.status()), "LISTEN_FAILED");
  EXPECT_NE(std::string(second.status().message()).find(server_->address()), std::string::npos);
  auto transport = NewTransport();
  auto listener = std::make_shared<Recorder>();
  auto stream = transport->OpenControl(server_->address(), listener);
  EXPECT_NE(acceptor_.WaitControl().stream, nullptr) << "the first no longer serves";
  options.listen_address = "192.0.2.1:0";
  EXPECT_EQ(ReasonOf(PeerServer::Start(options, &other).status()), "LISTEN_FAILED");
}

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

TEST_F(GrpcTest, NothingIsCalledAfterShutdown) {
  StartServer();
  for (bool server_first : {false, true}) {
    auto transport = NewTransport();
    std::vector<std::shared_ptr<Recorder>> listeners;
    std::vector<std::shared_ptr<ControlStream>> controls;
    std::vector<std::shared_ptr<DataStream>> datas;
    std::atomic<int> done{0};
    for (uint32_t i = 0; i < 8; ++i) {
      listeners.push_back(std::make_shared<Recorder>());
      controls.push_back(transport->OpenControl(server_->address(), listeners.back()));
      listeners.push_back(std::make_shared<Recorder>());
      datas.push_back(transport->OpenData(server_->address(), OpenOf(i), listeners.back()));
      datas.back()->SendChunk({pool_.TryAcquire(), size_t{1} << 20, {}, nullptr}, [&](bool) { ++done; });
    }
    const auto begin = steady_clock::now();
    if (server_first) server_->Shutdown();
    transport->Shutdown();
    EXPECT_LT(MsSince(begin), 10'000);
    EXPECT_EQ(done, 8);
    EXPECT_EQ(pool_.used(), 0u);
    for (const auto& listener : listeners) {
      EXPECT_TRUE(listener->closed());
      EXPECT_EQ(listener->faults(), 0);
    }
    auto late = std::make_shared<Recorder>();
    auto stream = transport->OpenControl(server_->address(), late);
    EXPECT_EQ(ReasonOf(late->WaitClosed(0)), "SHUTTING_DOWN");
    stream->Send(HeartbeatFrame{"late"});
    transport = nullptr;
    // Streams outlive their transport harmlessly.
    controls[0]->Send(HeartbeatFrame{"late"});
    controls[0]->Close(absl::OkStatus());
    stream->Close(absl::OkStatus());
  }
}

}  // namespace
}  // namespace spectrumkv
