#include "server/base/status.h"

#include <cassert>
#include <charconv>
#include <utility>

#include "absl/strings/cord.h"

namespace spectrumkv {
namespace {

// Payload names. The values are text, so that Status::ToString stays readable.
constexpr char kReasonUrl[] = "spectrumkv/reason";
constexpr char kRetryUrl[] = "spectrumkv/retry_after_ms";
constexpr char kMetadataPrefix[] = "spectrumkv/metadata/";

std::string PayloadOr(const absl::Status& status, const char* url, const std::string& fallback) {
  auto payload = status.GetPayload(url);
  return payload.has_value() ? std::string(*payload) : fallback;
}

}  // namespace

absl::Status MakeError(absl::StatusCode code, const std::string& reason, const std::string& message,
                       const Metadata& metadata, int64_t retry_after_ms) {
  assert(code != absl::StatusCode::kOk);
  assert(!reason.empty());
  // An error must never turn into success, not even by a bug of the caller.
  if (code == absl::StatusCode::kOk) code = absl::StatusCode::kInternal;
  absl::Status status(code, message);
  status.SetPayload(kReasonUrl, absl::Cord(reason));
  for (const auto& [key, value] : metadata) status.SetPayload(kMetadataPrefix + key, absl::Cord(value));
  if (retry_after_ms >= 0) status.SetPayload(kRetryUrl, absl::Cord(std::to_string(retry_after_ms)));
  return status;
}

std::string ReasonOf(const absl::Status& status) { return PayloadOr(status, kReasonUrl, ""); }

Metadata MetadataOf(const absl::Status& status) {
  Metadata metadata;
  status.ForEachPayload([&metadata](absl::string_view url, const absl::Cord& value) {
    const std::string name(url);
    const std::string prefix(kMetadataPrefix);
    if (name.compare(0, prefix.size(), prefix) == 0) metadata[name.substr(prefix.size())] = std::string(value);
  });
  return metadata;
}

int64_t RetryAfterMsOf(const absl::Status& status) {
  const std::string text = PayloadOr(status, kRetryUrl, "");
  int64_t value = -1;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  return result.ec == std::errc() && !text.empty() ? value : -1;
}

}  // namespace spectrumkv
