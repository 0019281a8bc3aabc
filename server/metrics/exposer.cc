#include <prometheus/exposer.h>

#include <exception>
#include <utility>

#include "server/base/status.h"
#include "server/metrics/metrics.h"

namespace spectrumkv {
namespace {

class HttpExposer final : public MetricsExposer {
 public:
  HttpExposer(std::unique_ptr<prometheus::Exposer> exposer, std::shared_ptr<prometheus::Collectable> collectable)
      : collectable_(std::move(collectable)), exposer_(std::move(exposer)) {
    exposer_->RegisterCollectable(collectable_);
  }

  int port() const override {
    const std::vector<int> ports = exposer_->GetListeningPorts();
    return ports.empty() ? 0 : ports[0];
  }

 private:
  std::shared_ptr<prometheus::Collectable> collectable_;  // the exposer itself holds a weak one
  std::unique_ptr<prometheus::Exposer> exposer_;
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
  // Two threads and short waits: a client that never finishes its request must not hold scrapes up for long.
  const std::vector<std::string> options = {
      "listening_ports", WithoutNames(address), "num_threads", "2", "request_timeout_ms", "5000"};
  try {
    return std::unique_ptr<MetricsExposer>(
        std::make_unique<HttpExposer>(std::make_unique<prometheus::Exposer>(options), CollectableOf(metrics)));
  } catch (const std::exception& exception) {
    return MakeError(absl::StatusCode::kUnavailable, "METRICS_LISTEN",
                     "metrics cannot listen on " + address + ": " + exception.what(), {{"address", address}});
  }
}

}  // namespace spectrumkv
