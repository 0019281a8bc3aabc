// Who may talk to a daemon whose peers use mTLS.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iterator>
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
  const absl::Status plain = Dial(PeerSecurity{}, ca_.Issue("spectrumkv"));
  EXPECT_EQ(plain.code(), absl::StatusCode::kUnauthenticated) << "server without TLS: " << plain;
  EXPECT_EQ(ReasonOf(plain), "PEER_HANDSHAKE");
  PeerSecurity foreign = other_ca_.Issue("spectrumkv");
  const absl::Status distrusted = Dial(server, foreign);
  EXPECT_EQ(distrusted.code(), absl::StatusCode::kUnauthenticated) << "the client distrusts the server: " << distrusted;
  EXPECT_EQ(ReasonOf(distrusted), "PEER_HANDSHAKE");
  EXPECT_THAT(std::string(distrusted.message()), testing::HasSubstr("peer.tls.ca_file"));
  foreign.ca_file = ca_.ca_file();
  EXPECT_EQ(Dial(server, foreign).code(), absl::StatusCode::kUnavailable) << "the server distrusts the client";
}

TEST_F(SecurityTest, IdentitiesAreChecked) {
  const absl::Status server = Dial(ca_.Issue("somebody"), ca_.Issue("spectrumkv"));
  EXPECT_EQ(server.code(), absl::StatusCode::kPermissionDenied) << "the server's certificate is for another name";
  EXPECT_EQ(ReasonOf(server), "PEER_IDENTITY");
  const absl::Status status = Dial(ca_.Issue("spectrumkv"), ca_.Issue("somebody"));
  EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied) << status;
  EXPECT_EQ(ReasonOf(status), "PEER_IDENTITY");
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("for somebody, not for spectrumkv"));
}

TEST_F(SecurityTest, OwnIdentityIsChecked) {
  EXPECT_TRUE(CheckOwnIdentity(PeerSecurity{}).ok()) << "plain";
  EXPECT_TRUE(CheckOwnIdentity(ca_.Issue("spectrumkv")).ok());
  EXPECT_TRUE(CheckOwnIdentity(ca_.Issue("kv.example", "kv.example")).ok());
  for (const char* name : {"somebody", "*.spectrumkv", "spectrumkv.example", "*"}) {
    const PeerSecurity security = ca_.Issue(name);
    const absl::Status status = CheckOwnIdentity(security);
    EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied) << name << ": " << status;
    EXPECT_EQ(ReasonOf(status), "PEER_IDENTITY") << name;
    EXPECT_EQ(MetadataOf(status)["file"], security.cert_file) << name;
    EXPECT_EQ(ReasonOf(Dial(ca_.Issue("spectrumkv"), security)), "PEER_IDENTITY") << name << ", as a peer sees it";
  }
}

// gRPC tells of a handshake in words alone; others than these may be the network, and are tried again.
TEST(HandshakeErrorTest, KnowsOnlyWhatCannotChange) {
  const struct {
    const char* words;
    absl::StatusCode code;
    const char* reason;
  } cases[] = {
      {"failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:1: Peer name x is not in peer "
       "certificate",
       absl::StatusCode::kPermissionDenied, "PEER_IDENTITY"},
      {"UNKNOWN: a: Ssl handshake failed: SSL_ERROR_SSL: error:0A000086:SSL routines::certificate verify failed",
       absl::StatusCode::kUnauthenticated, "PEER_HANDSHAKE"},
      {"UNKNOWN: a: Ssl handshake failed: SSL_ERROR_SSL: error:0A00010B:SSL routines::wrong version number",
       absl::StatusCode::kUnauthenticated, "PEER_HANDSHAKE"},
      {"UNKNOWN: a: Ssl handshake failed: SSL_ERROR_SYSCALL", absl::StatusCode::kOk, ""},
      {"UNAVAILABLE: ipv4:1.2.3.4:1: Socket closed", absl::StatusCode::kOk, ""},
      {"UNKNOWN: ipv4:1.2.3.4:1: Failed to connect to remote host: Connection refused", absl::StatusCode::kOk, ""},
      {"", absl::StatusCode::kOk, ""},
  };
  for (const auto& known : cases) {
    const absl::Status status = HandshakeError("1.2.3.4:1", known.words);
    EXPECT_EQ(status.code(), known.code) << known.words;
    EXPECT_EQ(ReasonOf(status), known.reason) << known.words;
    EXPECT_EQ(MetadataOf(status)["peer"], status.ok() ? "" : "1.2.3.4:1") << known.words;
  }
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

// As the openssl program says it.
int64_t EndOf(const std::string& file) {
  FILE* program =
      popen(("date -d \"$(openssl x509 -enddate -noout -in " + file + " | cut -d= -f2)\" +%s").c_str(), "r");
  char line[64] = {};
  EXPECT_NE(fgets(line, sizeof(line), program), nullptr);
  EXPECT_EQ(pclose(program), 0);
  return std::atoll(line);
}

std::string Text(const std::string& file) {
  std::ifstream in(file);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST_F(SecurityTest, ExpiryIsThatOfTheFirstCertificateToEnd) {
  EXPECT_EQ(CertificateExpiry(PeerSecurity{}).value(), 0) << "plain";
  PeerSecurity security = ca_.Issue("spectrumkv");
  const int64_t two_days = EndOf(security.cert_file);
  EXPECT_NEAR(static_cast<double>(two_days - time(nullptr)), 2 * 86400, 600);
  EXPECT_EQ(CertificateExpiry(security).value(), two_days);

  const PeerSecurity early = ca_.Issue("spectrumkv", "spectrumkv", /*days=*/1);
  const int64_t one_day = EndOf(early.cert_file);
  ASSERT_LT(one_day, two_days);
  security.cert_file = ca_.folder() + "/chain.pem";
  for (const bool early_first : {true, false}) {
    std::ofstream(security.cert_file) << "subject=with text before\n"
                                      << Text(early_first ? early.cert_file : ca_.ca_file())
                                      << Text(early_first ? ca_.ca_file() : early.cert_file);
    EXPECT_EQ(CertificateExpiry(security).value(), one_day);
  }
  // Behind 2049 the time is written in another way.
  const PeerSecurity late = ca_.Issue("spectrumkv", "spectrumkv", /*days=*/20000);
  EXPECT_EQ(CertificateExpiry(late).value(), EndOf(late.cert_file));
}

TEST_F(SecurityTest, ExpiryOfWhatIsNoCertificateIsRefused) {
  const PeerSecurity good = ca_.Issue("spectrumkv");
  const std::string pem = Text(good.cert_file);
  const std::string begin = "-----BEGIN CERTIFICATE-----\n", end = "-----END CERTIFICATE-----\n";
  const struct {
    const char* what;
    std::string text;
    const char* reason;
  } cases[] = {{"no file", "", "TLS_FILE_UNREADABLE"},
               {"no PEM", "certificate", "TLS_FILE_INVALID"},
               {"a key", Text(good.key_file), "TLS_FILE_INVALID"},
               {"no base64", begin + "!!!!\n" + end, "TLS_FILE_INVALID"},
               {"no DER", begin + "AAAA\n" + end, "TLS_FILE_INVALID"},
               {"cut off", pem.substr(0, pem.size() / 2), "TLS_FILE_INVALID"},
               {"a good one, then one cut off", pem + pem.substr(0, pem.size() / 2), "TLS_FILE_INVALID"}};
  for (const auto& bad : cases) {
    PeerSecurity security = good;
    security.cert_file = ca_.folder() + "/bad.pem";
    std::ofstream(security.cert_file) << bad.text;
    const auto expiry = CertificateExpiry(security);
    EXPECT_EQ(ReasonOf(expiry.status()), bad.reason) << bad.what;
    EXPECT_EQ(MetadataOf(expiry.status())["file"], security.cert_file) << bad.what;
  }
  EXPECT_TRUE(CertificateExpiry(good).ok()) << "an earlier failure leaves nothing behind";
}

}  // namespace
}  // namespace spectrumkv
