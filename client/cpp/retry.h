// Trying again as the daemon asks. A call refused for want of room (TRANSFERS_FULL, a quota, a full staging pool) says
// after which time it makes sense to repeat it (RetryAfterMsOf in status.h).
//
//   absl::Status status = Retry([&](int64_t left_ms) { return client->Send(pool, request, left_ms); });
//
// Only for calls that are idempotent: those with a transfer_id or a request_id are.
#pragma once

#include <chrono>
#include <cstdint>
#include <random>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace spectrumkv::client {

struct RetryOptions {
  // Calls, the first one included; less than 1 counts as 1.
  int attempts = 5;
  // Of all calls and waits together: the caller's own deadline. A wait that would pass it is not begun.
  int64_t timeout_ms = 30000;
  // Each wait is longer than asked by up to this share of it, by chance: who was refused together comes back apart.
  double jitter = 0.2;
};

// How often and how long one caller has tried. Not thread-safe.
class Patience {
 public:
  explicit Patience(const RetryOptions& options);

  // Until the deadline, at least 1: what a call that begins now may take.
  int64_t left_ms() const;
  // Waits as long as `error` asks, at least 10 ms; true: call again. False, at once, where `error` is the last word: it
  // asks for no delay, the attempts are used up, or the wait would pass the deadline.
  bool WaitAfter(const absl::Status& error);

 private:
  int attempts_left_;
  const double jitter_;
  const std::chrono::steady_clock::time_point deadline_;
  std::minstd_rand random_;
};

namespace internal {
inline const absl::Status& StatusOf(const absl::Status& status) { return status; }
template <typename T>
const absl::Status& StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}
}  // namespace internal

// Calls until it succeeds or its error is the last word; the last result. `call` takes left_ms() and gives an
// absl::Status or absl::StatusOr. The deadline holds where `call` keeps to what it is given.
template <typename Call>
auto Retry(const Call& call, const RetryOptions& options = {}) {
  for (Patience patience(options);;) {
    auto result = call(patience.left_ms());
    if (result.ok() || !patience.WaitAfter(internal::StatusOf(result))) return result;
  }
}

}  // namespace spectrumkv::client
