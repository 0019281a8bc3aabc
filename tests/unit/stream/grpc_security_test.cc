// Who may talk to a daemon whose peers use mTLS.
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <thread>

#include "server/base/status.h"
#include "server/stream/grpc_transport.h"
#include "server/stream/peer_server.h"
#include "tests/unit/stream/stream_fixtures.h"
#include "tests/unit/stream/test_certificates.h"

namespace spectrumkv {
namespace {

class SecurityTest : public testing::Test {
 protected:
  // How a stream from `client` to `server` begins: OK when it was accepted, else why it closed.
  absl::Status Dial(const PeerSecurity& server, const PeerSecurity& client) {
    RecordingAcceptor acceptor;
    PeerServerOptions server_options;
    server_options.security = server;
    auto peer_server = PeerServer::Start(server_options, &acceptor).value();
    GrpcTransportOptions options;
    options.security = client;
    options.connect_timeout_ms = 2000;
    auto transport = GrpcTransport::Create(options).value();
    auto listener = std::make_shared<Recorder>();
    auto stream = transport->OpenControl(peer_server->address(), listener);
    stream->Send(HeartbeatFrame{"sending"});
    std::atomic<bool> accepted{false};
    std::thread wait([&] { accepted = acceptor.WaitControl().stream != nullptr; });
    absl::Status status;
    WaitUntil([&] { return listener->closed() || accepted; });
    if (listener->closed()) status = listener->WaitClosed(0);
    if (!status.ok()) acceptor.GiveUp();
    wait.join();
    EXPECT_EQ(accepted, status.ok());
    stream->Close(absl::OkStatus());
    return status;
  }
  TestCa ca_{"ours"};
  TestCa other_ca_{"theirs"};
};

TEST_F(SecurityTest, PeersOfOneCaTalk) {
  EXPECT_TRUE(Dial(ca_.Issue("spectrumkv"), ca_.Issue("spectrumkv")).ok());
  EXPECT_TRUE(Dial(ca_.Issue("kv.example", "kv.example"), ca_.Issue("kv.example", "kv.example")).ok());
}

TEST_F(SecurityTest, StrangersAreRefused) {
  const PeerSecurity server = ca_.Issue("spectrumkv");
  EXPECT_EQ(Dial(server, PeerSecurity{}).code(), absl::StatusCode::kUnavailable) << "no TLS";
  EXPECT_EQ(Dial(PeerSecurity{}, ca_.Issue("spectrumkv")).code(), absl::StatusCode::kUnavailable)
      << "server without TLS";
  PeerSecurity foreign = other_ca_.Issue("spectrumkv");
  EXPECT_EQ(Dial(server, foreign).code(), absl::StatusCode::kUnavailable) << "the client distrusts the server";
  foreign.ca_file = ca_.ca_file();
  EXPECT_EQ(Dial(server, foreign).code(), absl::StatusCode::kUnavailable) << "the server distrusts the client";
}

TEST_F(SecurityTest, IdentitiesAreChecked) {
  EXPECT_EQ(Dial(ca_.Issue("somebody"), ca_.Issue("spectrumkv")).code(), absl::StatusCode::kUnavailable)
      << "the server's certificate is for another name";
  const absl::Status status = Dial(ca_.Issue("spectrumkv"), ca_.Issue("somebody"));
  EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied) << status;
  EXPECT_EQ(ReasonOf(status), "PEER_IDENTITY");
}

TEST_F(SecurityTest, BadFilesAreNamed) {
  RecordingAcceptor acceptor;
  PeerServerOptions options;
  options.security = ca_.Issue("spectrumkv");
  options.security.key_file = ca_.folder() + "/missing.key";
  auto missing = PeerServer::Start(options, &acceptor).status();
  EXPECT_EQ(ReasonOf(missing), "TLS_FILE_UNREADABLE");
  EXPECT_EQ(MetadataOf(missing)["file"], options.security.key_file);
  GrpcTransportOptions dial;
  dial.security = ca_.Issue("spectrumkv");
  dial.security.ca_file = ca_.folder() + "/text.pem";
  std::ofstream(dial.security.ca_file) << "not a certificate\n";
  EXPECT_EQ(ReasonOf(GrpcTransport::Create(dial).status()), "TLS_FILE_INVALID");
}

}  // namespace
}  // namespace spectrumkv
