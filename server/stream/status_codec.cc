#include "server/stream/status_codec.h"

#include <algorithm>
#include <cctype>
#include <string>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "server/base/status.h"
#include "server/base/text.h"

namespace spectrumkv {
namespace {

constexpr char kDomain[] = "spectrumkv";
constexpr size_t kMaxMessageBytes = 768;
constexpr size_t kMaxMetadataBytes = 2048;
constexpr size_t kMaxReasonBytes = 63;

bool IsReason(const std::string& reason) {
  if (reason.empty() || reason.size() > kMaxReasonBytes) return false;
  return std::all_of(reason.begin(), reason.end(),
                     [](char c) { return (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_'; });
}

void AddErrorInfo(const absl::Status& status, google::rpc::Status* details) {
  const std::string reason = ReasonOf(status);
  if (!IsReason(reason)) return;
  google::rpc::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain(kDomain);
  size_t used = 0;
  for (const auto& [key, value] : MetadataOf(status)) {
    used += key.size() + value.size();
    if (used > kMaxMetadataBytes) break;
    (*info.mutable_metadata())[CleanText(key, key.size())] = CleanText(value, value.size());
  }
  details->add_details()->PackFrom(info);
}

void AddRetryInfo(const absl::Status& status, google::rpc::Status* details) {
  const int64_t retry_ms = RetryAfterMsOf(status);
  if (retry_ms < 0) return;
  google::rpc::RetryInfo retry;
  retry.mutable_retry_delay()->set_seconds(retry_ms / 1000);
  retry.mutable_retry_delay()->set_nanos(static_cast<int32_t>(retry_ms % 1000) * 1'000'000);
  details->add_details()->PackFrom(retry);
}

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const std::string message = CleanText(std::string(status.message()), kMaxMessageBytes);
  google::rpc::Status details;
  details.set_code(static_cast<int>(status.code()));
  details.set_message(message);
  AddErrorInfo(status, &details);
  AddRetryInfo(status, &details);
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), message, details.SerializeAsString());
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const int raw_code = static_cast<int>(status.error_code());
  const auto code =
      raw_code >= 1 && raw_code <= 16 ? static_cast<absl::StatusCode>(raw_code) : absl::StatusCode::kUnknown;
  const std::string message = CleanText(status.error_message(), kMaxMessageBytes);
  std::string reason;
  Metadata metadata;
  int64_t retry_ms = -1;
  google::rpc::Status details;
  if (!status.error_details().empty() && details.ParseFromString(status.error_details())) {
    for (const auto& any : details.details()) {
      google::rpc::ErrorInfo info;
      google::rpc::RetryInfo retry;
      if (any.Is<google::rpc::ErrorInfo>() && any.UnpackTo(&info)) {
        if (info.domain() != kDomain || !IsReason(info.reason())) continue;
        reason = info.reason();
        for (const auto& [key, value] : info.metadata()) {
          metadata[CleanText(key, kMaxMetadataBytes)] = CleanText(value, kMaxMetadataBytes);
        }
      } else if (any.Is<google::rpc::RetryInfo>() && any.UnpackTo(&retry)) {
        const int64_t seconds = std::clamp<int64_t>(retry.retry_delay().seconds(), 0, 86'400);
        retry_ms = seconds * 1000 + std::clamp<int64_t>(retry.retry_delay().nanos(), 0, 999'999'999) / 1'000'000;
      }
    }
  }
  if (reason.empty()) return absl::Status(code, message);
  return MakeError(code, reason, message, metadata, retry_ms);
}

}  // namespace spectrumkv
