#include "client/cpp/retry.h"

#include <algorithm>
#include <thread>

#include "client/cpp/status.h"

namespace spectrumkv::client {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kLeastWaitMs = 10;  // a daemon that asks for none must not be asked without a pause
constexpr int64_t kLongestTimeoutMs = int64_t{365} * 24 * 3600 * 1000;

}  // namespace

Patience::Patience(const RetryOptions& options)
    : attempts_left_(std::max(options.attempts, 1)),
      jitter_(std::clamp(options.jitter, 0.0, 1.0)),
      deadline_(Clock::now() +
                std::chrono::milliseconds(std::clamp<int64_t>(options.timeout_ms, 0, kLongestTimeoutMs))),
      random_(std::random_device{}()) {}

int64_t Patience::left_ms() const {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline_ - Clock::now()).count();
  return std::max<int64_t>(left, 1);
}

bool Patience::WaitAfter(const absl::Status& error) {
  const int64_t asked_ms = RetryAfterMsOf(error);
  if (asked_ms < 0 || --attempts_left_ <= 0) return false;
  const double share = std::uniform_real_distribution<double>(0.0, jitter_)(random_);
  const std::chrono::duration<double, std::milli> wait(static_cast<double>(std::max(asked_ms, kLeastWaitMs)) *
                                                       (1 + share));
  if (wait > deadline_ - Clock::now()) return false;
  std::this_thread::sleep_for(wait);
  return true;
}

}  // namespace spectrumkv::client
