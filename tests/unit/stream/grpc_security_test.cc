// Who may talk to a daemon whose peers use mTLS.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <iterator>
#include <thread>

#include "server/base/status.h"
#include "server/stream/grpc_transport.h"
#include "server/stream/peer_server.h"
#include "server/stream/tls_probe.h"
#include "tests/unit/stream/stream_fixtures.h"
#include "tests/unit/stream/test_certificates.h"

namespace spectrumkv {
namespace {

std::string Text(const std::string& file) {
  std::ifstream in(file);
  return {std::istreambuf_iterator<char>(in), {}};
}

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

// An authority in ca_file is one, though the authority that signed it is not there.
TEST_F(SecurityTest, AnIntermediateAuthorityAloneIsEnough) {
  ca_.BecomeIntermediateOf(other_ca_);
  const PeerSecurity server = ca_.Issue("spectrumkv"), client = ca_.Issue("spectrumkv");
  ASSERT_TRUE(ca_.ok());
  const absl::Status status = Dial(server, client);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_FALSE(Dial(server, other_ca_.Issue("spectrumkv")).ok()) << "its own signer is not in the file";
}

TEST_F(SecurityTest, StrangersAreRefused) {
  const PeerSecurity server = ca_.Issue("spectrumkv");
  for (const absl::Status& mismatch : {Dial(server, PeerSecurity{}), Dial(PeerSecurity{}, ca_.Issue("spectrumkv"))}) {
    EXPECT_EQ(mismatch.code(), absl::StatusCode::kUnauthenticated) << mismatch;
    EXPECT_EQ(ReasonOf(mismatch), "PEER_SECURITY_MISMATCH") << mismatch;
    EXPECT_THAT(std::string(mismatch.message()), testing::HasSubstr("peer.security must be the same on both sides"));
  }
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

// The same rule on both sides: what a dialler takes an acceptor takes, and the other way round.
TEST_F(SecurityTest, PatternsCountOnBothSides) {
  const struct {
    const char* identity;
    const char* pattern;
    bool fits;
  } cases[] = {{"prefill-0.kv.example", "*.kv.example", true},
               {"prefill-0.kv.example", "prefill-0.kv.example", true},
               {"PREFILL-0.kv.example", "prefill-0.KV.example", true},
               {"a.b.kv.example", "*.kv.example", false},
               {"kv.example", "*.kv.example", false},
               {"prefill-0.kv.example", "prefill-1.kv.example", false}};
  for (const auto& c : cases) {
    PeerSecurity good = ca_.Issue("spectrumkv"), other = ca_.Issue(c.identity);
    good.identities = {"spectrumkv", c.pattern};
    other.identities = {"spectrumkv"};
    const absl::Status as_client = Dial(good, other), as_server = Dial(other, good);
    EXPECT_EQ(as_client.ok(), c.fits) << c.identity << " dials " << c.pattern << ": " << as_client;
    EXPECT_EQ(as_server.ok(), c.fits) << c.pattern << " dials " << c.identity << ": " << as_server;
    if (c.fits) continue;
    for (const absl::Status& refused : {as_client, as_server}) {
      EXPECT_EQ(refused.code(), absl::StatusCode::kPermissionDenied) << refused;
      EXPECT_EQ(ReasonOf(refused), "PEER_IDENTITY") << refused;
    }
  }
}

// Files are swapped as an operator does it: authorities of both times first, then certificates, then the new one alone.
TEST_F(SecurityTest, SwappedFilesAreUsedAndOldOnesRefused) {
  const PeerSecurity files = ca_.Issue("spectrumkv"), old = ca_.Issue("spectrumkv");
  const PeerSecurity fresh = other_ca_.Issue("spectrumkv");
  PeerSecurity served = files;
  served.ca_file = ca_.folder() + "/bundle.pem";
  const auto copy = [](const std::string& from, const std::string& to) {
    std::filesystem::copy_file(from, to, std::filesystem::copy_options::overwrite_existing);
  };
  copy(ca_.ca_file(), served.ca_file);
  RecordingAcceptor acceptor;
  PeerServerOptions options;
  options.security = served;
  auto server = PeerServer::Start(options, &acceptor).value();
  GrpcTransportOptions dial;
  dial.security = served;
  auto transport = GrpcTransport::Create(dial).value();
  dial.security = old;
  auto old_transport = GrpcTransport::Create(dial).value();
  size_t streams = 0;
  const auto open = [&](GrpcTransport& by) {
    auto listener = std::make_shared<Recorder>();
    auto stream = by.OpenControl(server->address(), listener);
    stream->Send(HeartbeatFrame{"sending"});
    bool accepted = false;
    WaitUntil([&] {
      accepted = acceptor.controls() > streams;
      return accepted || listener->closed();
    });
    if (accepted) ++streams;
    stream->Close(absl::OkStatus());
    return accepted ? absl::OkStatus() : listener->WaitClosed();
  };
  EXPECT_TRUE(open(*transport).ok());
  EXPECT_TRUE(open(*old_transport).ok());
  EXPECT_FALSE(server->ReloadSecurity().value()) << "nothing has changed";
  EXPECT_FALSE(transport->ReloadSecurity().value());

  std::ofstream(served.ca_file) << Text(ca_.ca_file()) << Text(other_ca_.ca_file());
  EXPECT_TRUE(server->ReloadSecurity().value());
  EXPECT_TRUE(transport->ReloadSecurity().value());
  EXPECT_TRUE(open(*transport).ok());

  // Half a swap is none: the key is not that of the certificate, so all is as it was.
  copy(fresh.cert_file, served.cert_file);
  EXPECT_EQ(ReasonOf(server->ReloadSecurity().status()), "TLS_FILE_INVALID");
  EXPECT_EQ(ReasonOf(transport->ReloadSecurity().status()), "TLS_FILE_INVALID");
  EXPECT_TRUE(open(*transport).ok());
  copy(fresh.key_file, served.key_file);
  EXPECT_TRUE(server->ReloadSecurity().value());
  EXPECT_TRUE(transport->ReloadSecurity().value());
  // gRPC looks at what is served once a second.
  dial.security = fresh;  // trusts the new authority alone
  auto fresh_transport = GrpcTransport::Create(dial).value();
  EXPECT_TRUE(WaitUntil([&] { return open(*fresh_transport).ok(); }));
  EXPECT_TRUE(open(*transport).ok());
  EXPECT_TRUE(open(*old_transport).ok()) << "its authority is still one of two";

  copy(other_ca_.ca_file(), served.ca_file);
  EXPECT_TRUE(server->ReloadSecurity().value());
  EXPECT_TRUE(transport->ReloadSecurity().value());
  const absl::Status refused = open(*old_transport);  // on a connection that was made when it was welcome
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnauthenticated) << refused;
  EXPECT_EQ(ReasonOf(refused), "PEER_CERTIFICATE") << refused;
  EXPECT_TRUE(open(*transport).ok());

  // A certificate for somebody else, which peers would not take, is not taken here either.
  const PeerSecurity stranger = other_ca_.Issue("somebody");
  copy(stranger.cert_file, served.cert_file);
  copy(stranger.key_file, served.key_file);
  EXPECT_EQ(ReasonOf(server->ReloadSecurity().status()), "PEER_IDENTITY");
  EXPECT_EQ(ReasonOf(transport->ReloadSecurity().status()), "PEER_IDENTITY");
  EXPECT_TRUE(open(*transport).ok());
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
      {"failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:1: Custom verification check failed with "
       "error: PERMISSION_DENIED: SPECTRUMKV_PEER_IDENTITY it is for x",
       absl::StatusCode::kPermissionDenied, "PEER_IDENTITY"},
      {"UNKNOWN: a: Tls handshake failed: SSL_ERROR_SSL: error:0A000086:SSL routines::certificate verify failed",
       absl::StatusCode::kUnauthenticated, "PEER_HANDSHAKE"},
      {"UNKNOWN: a: Tls handshake failed: SSL_ERROR_SSL: error:0A00010B:SSL routines::wrong version number",
       absl::StatusCode::kUnauthenticated, "PEER_SECURITY_MISMATCH"},
      {"UNKNOWN: a: Tls handshake failed: SSL_ERROR_SSL: error:0A000438:SSL routines::tlsv1 alert internal error",
       absl::StatusCode::kUnauthenticated, "PEER_HANDSHAKE"},
      {"UNKNOWN: a: Tls handshake failed: SSL_ERROR_SYSCALL", absl::StatusCode::kOk, ""},
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

// A peer that does to each connection what `serve` says, one after the other.
class RawPeer {
 public:
  explicit RawPeer(std::function<void(int fd)> serve) {
    listen_ = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in place = {};
    place.sin_family = AF_INET;
    place.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(place);
    EXPECT_EQ(bind(listen_, reinterpret_cast<sockaddr*>(&place), size), 0);
    EXPECT_EQ(listen(listen_, 16), 0);
    EXPECT_EQ(getsockname(listen_, reinterpret_cast<sockaddr*>(&place), &size), 0);
    address_ = "127.0.0.1:" + std::to_string(ntohs(place.sin_port));
    thread_ = std::thread([this, serve = std::move(serve)] {
      for (int fd = accept(listen_, nullptr, nullptr); fd >= 0; fd = accept(listen_, nullptr, nullptr)) {
        ++connections_;
        serve(fd);
        close(fd);
      }
    });
  }
  ~RawPeer() {
    shutdown(listen_, SHUT_RDWR);
    thread_.join();
    close(listen_);
  }
  const std::string& address() const { return address_; }
  int connections() const { return connections_; }

 private:
  int listen_ = -1;
  std::string address_;
  std::atomic<int> connections_{0};
  std::thread thread_;
};

void Answer(int fd, const std::string& bytes) {
  char heard[64];
  EXPECT_GT(recv(fd, heard, sizeof(heard), 0), 0);
  EXPECT_EQ(send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
}

TEST_F(SecurityTest, OnlyTlsCountsAsTls) {
  RecordingAcceptor acceptor;
  PeerServerOptions options;
  options.security = ca_.Issue("spectrumkv");
  EXPECT_TRUE(SpeaksTls(PeerServer::Start(options, &acceptor).value()->address(), 15'000)) << "a daemon with TLS";
  EXPECT_FALSE(SpeaksTls(PeerServer::Start({}, &acceptor).value()->address(), 15'000)) << "a daemon without";
  using namespace std::string_literals;
  EXPECT_TRUE(SpeaksTls(RawPeer([](int fd) { Answer(fd, "\x15\x03\x01\x00\x02\x02\x28"s); }).address(), 15'000));
  EXPECT_FALSE(SpeaksTls(RawPeer([](int fd) { Answer(fd, "\x15\x04"); }).address(), 15'000));
  EXPECT_FALSE(SpeaksTls(RawPeer([](int fd) { Answer(fd, "\x16"); }).address(), 15'000)) << "one byte, then the end";
  EXPECT_FALSE(SpeaksTls(RawPeer([](int fd) { Answer(fd, "HTTP/1.1 400 Bad Request\r\n"); }).address(), 15'000));
  EXPECT_FALSE(SpeaksTls(RawPeer([](int) {}).address(), 15'000)) << "hangs up at once";
  EXPECT_FALSE(SpeaksTls("127.0.0.1:1", 15'000)) << "nobody";
  EXPECT_FALSE(SpeaksTls("no address", 15'000));
  const auto begin = std::chrono::steady_clock::now();
  std::promise<void> over;
  RawPeer silent([&](int) { over.get_future().wait(); });
  EXPECT_FALSE(SpeaksTls(silent.address(), 50)) << "says nothing";
  over.set_value();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
}

// A peer that hangs up and does not speak TLS is one that cannot be reached; it is asked once a second at most, however
// many streams it hangs up on.
TEST_F(SecurityTest, AHangUpIsNoMismatchOfItself) {
  RawPeer peer([](int) {});
  auto transport = GrpcTransport::Create({}).value();
  constexpr int kStreams = 20;
  std::vector<std::shared_ptr<Recorder>> listeners;
  std::vector<std::shared_ptr<ControlStream>> streams;
  for (int i = 0; i < kStreams; ++i) {
    listeners.push_back(std::make_shared<Recorder>());
    streams.push_back(transport->OpenControl(peer.address(), listeners.back()));
    const absl::Status status = listeners.back()->WaitClosed();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_EQ(ReasonOf(status), "PEER_UNREACHABLE") << status;
    EXPECT_EQ(listeners.back()->faults(), 0);
  }
  EXPECT_LT(peer.connections(), 2 * kStreams) << "each stream asked on its own";
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
