// Looks at the peer certificate files every so often, and has what changed used.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "server/base/clock.h"
#include "server/base/executor.h"
#include "server/metrics/metrics.h"

namespace spectrumkv {

class CertificateWatch {
 public:
  struct Parts {  // borrowed
    Clock* clock = nullptr;
    Executor* executor = nullptr;  // reads files
    Metrics* metrics = nullptr;
    int64_t interval_ms = 0;
    // Each answers whether its files have changed and are in use. All are asked, also after one that fails.
    std::vector<std::function<absl::StatusOr<bool>()>> reloads;
    // Seconds since 1970, for the gauge.
    std::function<absl::StatusOr<int64_t>()> expiry;
  };
  explicit CertificateWatch(Parts parts);
  // Nothing of the parts is touched after it.
  ~CertificateWatch();
  CertificateWatch(const CertificateWatch&) = delete;
  CertificateWatch& operator=(const CertificateWatch&) = delete;

 private:
  struct State;
  static void Arm(const std::shared_ptr<State>& state);
  static void Look(const std::shared_ptr<State>& state);
  std::shared_ptr<State> state_;
};

}  // namespace spectrumkv
