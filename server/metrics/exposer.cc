#include <netdb.h>
#include <prometheus/exposer.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include "server/base/host_port.h"
#include "server/base/listen.h"
#include "server/metrics/metrics.h"

namespace spectrumkv {
namespace {

constexpr auto kNudgePause = std::chrono::milliseconds(5);

// One connection to host:port that says nothing; a host that means all addresses is reached over loopback.
void Nudge(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV | AI_PASSIVE;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.empty() ? nullptr : host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return;
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd >= 0) {
    (void)connect(fd, found->ai_addr, found->ai_addrlen);
    close(fd);
  }
  freeaddrinfo(found);
}

class HttpExposer final : public MetricsExposer {
 public:
  HttpExposer(std::unique_ptr<prometheus::Exposer> exposer, std::shared_ptr<prometheus::Collectable> collectable,
              std::string host)
      : collectable_(std::move(collectable)), exposer_(std::move(exposer)), host_(std::move(host)) {
    exposer_->RegisterCollectable(collectable_);
  }

  // civetweb looks every two seconds, or when somebody connects, whether it shall stop.
  ~HttpExposer() override {
    std::atomic<bool> stopped{false};
    std::thread nudger([this, port = port(), &stopped] {
      for (; !stopped; std::this_thread::sleep_for(kNudgePause)) Nudge(host_, port);
    });
    exposer_.reset();
    stopped = true;
    nudger.join();
  }

  int port() const override {
    const std::vector<int> ports = exposer_->GetListeningPorts();
    return ports.empty() ? 0 : ports[0];
  }

 private:
  std::shared_ptr<prometheus::Collectable> collectable_;  // the exposer itself holds a weak one
  std::unique_ptr<prometheus::Exposer> exposer_;
  const std::string host_;
};

// civetweb resolves no names.
std::string WithoutNames(const std::string& address) {
  const std::string localhost = "localhost:";
  return address.compare(0, localhost.size(), localhost) == 0 ? "127.0.0.1:" + address.substr(localhost.size())
                                                              : address;
}

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsExposer>> MetricsExposer::Start(const std::string& address,
                                                                      const Metrics& metrics) {
  // Some threads and short waits: clients that never finish their requests must not hold scrapes up for long. Each read
  // and each write may wait so long, not the whole request.
  const std::vector<std::string> options = {
      "listening_ports", WithoutNames(address), "num_threads", "8", "request_timeout_ms", "1000"};
  try {
    return std::unique_ptr<MetricsExposer>(std::make_unique<HttpExposer>(
        std::make_unique<prometheus::Exposer>(options), CollectableOf(metrics), SplitHostPort(WithoutNames(address)).host));
  } catch (const std::exception&) {  // its words name no cause
    return ListenFailed("metrics.listen_address", WithoutNames(address));
  }
}

}  // namespace spectrumkv
