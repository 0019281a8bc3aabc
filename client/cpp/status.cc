#include "client/cpp/status.h"

#include <algorithm>
#include <optional>

#include "absl/strings/cord.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace spectrumkv::client {
namespace {

const char kErrorInfoUrl[] = "type.googleapis.com/google.rpc.ErrorInfo";
const char kRetryInfoUrl[] = "type.googleapis.com/google.rpc.RetryInfo";
constexpr int64_t kMaxDelaySeconds = 86'400;

template <typename Message>
Message PayloadOf(const absl::Status& status, const char* url) {
  Message message;
  const auto payload = status.GetPayload(url);
  if (payload.has_value() && !message.ParseFromString(std::string(*payload))) message.Clear();
  return message;
}

}  // namespace

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  absl::Status result(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  google::rpc::Status details;
  if (!details.ParseFromString(status.error_details())) return result;
  for (const auto& detail : details.details()) result.SetPayload(detail.type_url(), absl::Cord(detail.value()));
  return result;
}

std::string ReasonOf(const absl::Status& status) {
  return PayloadOf<google::rpc::ErrorInfo>(status, kErrorInfoUrl).reason();
}

std::map<std::string, std::string> MetadataOf(const absl::Status& status) {
  const auto info = PayloadOf<google::rpc::ErrorInfo>(status, kErrorInfoUrl);
  return {info.metadata().begin(), info.metadata().end()};
}

int64_t RetryAfterMsOf(const absl::Status& status) {
  if (!status.GetPayload(kRetryInfoUrl).has_value()) return -1;
  const auto delay = PayloadOf<google::rpc::RetryInfo>(status, kRetryInfoUrl).retry_delay();
  return std::clamp<int64_t>(delay.seconds(), 0, kMaxDelaySeconds) * 1000 +
         std::clamp(delay.nanos(), 0, 999'999'999) / 1'000'000;
}

absl::Status MakeError(absl::StatusCode code, const std::string& reason, const std::string& message) {
  absl::Status status(code, message);
  google::rpc::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain("spectrumkv");
  status.SetPayload(kErrorInfoUrl, absl::Cord(info.SerializeAsString()));
  return status;
}

}  // namespace spectrumkv::client
