// How calls end: OK, or a code, a stable reason and the values that were wrong.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

#define SPECTRUMKV_EXPORT [[gnu::visibility("default")]]

namespace spectrumkv {

// Those of google.rpc.Code.
enum class Code {
  kOk = 0,
  kCancelled = 1,
  kUnknown = 2,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kNotFound = 5,
  kAlreadyExists = 6,
  kPermissionDenied = 7,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kAborted = 10,
  kOutOfRange = 11,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
  kDataLoss = 15,
  kUnauthenticated = 16,
};

// "INVALID_ARGUMENT".
SPECTRUMKV_EXPORT const char* NameOf(Code code);

struct [[nodiscard]] SPECTRUMKV_EXPORT Status {
  Code code = Code::kOk;
  // Stable, UPPER_SNAKE ("UNKNOWN_POOL"); empty where no daemon spoke.
  std::string reason;
  // For people.
  std::string message;
  // The offending values.
  std::map<std::string, std::string> metadata;
  // When to try again; -1 where the daemon does not say that trying again helps.
  int64_t retry_after_ms = -1;

  bool ok() const { return code == Code::kOk; }
  // "NOT_FOUND UNKNOWN_POOL: words (name=value, ...)", "OK".
  std::string ToString() const;
};

// A value, or why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}           // NOLINT: made from what a function returns
  Result(Status status) : status_(std::move(status)) {}   // NOLINT: REQUIRES: not OK

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }

  // REQUIRES: ok().
  T& operator*() & { return *value_; }
  const T& operator*() const& { return *value_; }
  T&& operator*() && { return *std::move(value_); }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace spectrumkv
