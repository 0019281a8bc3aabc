#include "server/stream/tls_probe.h"

#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <memory>

#include "server/base/host_port.h"
#include "server/stream/resolve.h"

namespace spectrumkv {
namespace {

constexpr int64_t kTimeoutMs = 500;
constexpr int64_t kRememberNs = 1'000'000'000;
constexpr size_t kMaxAnswers = 256;
// Types of TLS records, and the first byte of their version.
constexpr uint8_t kAlert = 0x15, kHandshake = 0x16, kVersion = 0x03;

int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct Closer {
  int fd;
  ~Closer() {
    if (fd >= 0) close(fd);
  }
};

bool WaitFor(int fd, short events, int64_t until_ns) {
  for (;;) {
    const int64_t left_ms = (until_ns - NowNs()) / 1'000'000;
    if (left_ms <= 0) return false;
    pollfd waiting{fd, events, 0};
    const int ready = poll(&waiting, 1, static_cast<int>(left_ms));
    if (ready < 0 && errno == EINTR) continue;
    return ready > 0;
  }
}

// What a client says first.
std::string ClientHello() {
  const std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context(SSL_CTX_new(TLS_client_method()), SSL_CTX_free);
  if (context == nullptr) return "";
  const unsigned char http2[] = {2, 'h', '2'};
  SSL_CTX_set_alpn_protos(context.get(), http2, sizeof(http2));
  const std::unique_ptr<SSL, decltype(&SSL_free)> client(SSL_new(context.get()), SSL_free);
  if (client == nullptr) return "";
  BIO* const out = BIO_new(BIO_s_mem());
  SSL_set_bio(client.get(), BIO_new(BIO_s_mem()), out);  // it owns them
  SSL_connect(client.get());                             // stops where it would wait for an answer
  ERR_clear_error();
  char* bytes = nullptr;
  const long size = BIO_get_mem_data(out, &bytes);
  return size > 0 ? std::string(bytes, static_cast<size_t>(size)) : "";
}

bool AnswersAsTls(const Place& place, const std::string& hello, int64_t until_ns) {
  const Closer socket_of{socket(place.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)};
  const int fd = socket_of.fd;
  const auto* to = reinterpret_cast<const sockaddr*>(&place.address);
  if (fd < 0 || (connect(fd, to, place.address_bytes) != 0 && errno != EINPROGRESS)) return false;
  if (!WaitFor(fd, POLLOUT, until_ns)) return false;
  if (send(fd, hello.data(), hello.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(hello.size())) return false;
  uint8_t answer[2] = {};
  size_t have = 0;
  while (have < sizeof(answer) && WaitFor(fd, POLLIN, until_ns)) {
    const ssize_t got = recv(fd, answer + have, sizeof(answer) - have, 0);
    if (got <= 0) break;
    have += static_cast<size_t>(got);
  }
  return have == sizeof(answer) && (answer[0] == kHandshake || answer[0] == kAlert) && answer[1] == kVersion;
}

}  // namespace

bool SpeaksTls(const std::string& address, int64_t timeout_ms) {
  const HostPort peer = SplitHostPort(address);
  if (peer.port.empty()) return false;
  const int64_t until_ns = NowNs() + timeout_ms * 1'000'000;
  const std::vector<Place> places = Resolve(peer.host, peer.port, timeout_ms);
  const std::string hello = places.empty() ? "" : ClientHello();
  return !hello.empty() && std::any_of(places.begin(), places.end(), [&](const Place& place) {
    return AnswersAsTls(place, hello, until_ns);
  });
}

bool TlsProbe::Ask(const std::string& address) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto known = answers_.find(address);
    if (known != answers_.end() && NowNs() - known->second.at_ns < kRememberNs) return known->second.tls;
  }
  const bool tls = SpeaksTls(address, kTimeoutMs);
  std::lock_guard<std::mutex> lock(mutex_);
  if (answers_.size() >= kMaxAnswers) answers_.clear();
  answers_[address] = {NowNs(), tls};
  return tls;
}

}  // namespace spectrumkv
