// What only the real transport can get wrong: connections, ports, ends of life.
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
#include <set>
#include <sstream>
#include <thread>

#include "server/base/status.h"
#include "tests/unit/stream/grpc_fixture.h"

namespace spectrumkv {
namespace {

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
