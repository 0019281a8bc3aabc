// Errors of the daemon: an absl::Status with a stable reason, the offending values, and a retry delay.
//
//   return MakeError(absl::StatusCode::kInvalidArgument, "BUDGET_TOO_SMALL",
//                    "policy.budget 0.05 is below the least possible 0.131", {{"least_budget", "0.131"}});
//
// The reason and metadata become google.rpc.ErrorInfo, the retry delay google.rpc.RetryInfo, at the gRPC edge
// (server/service, server/stream). Messages name the field, the value and the limit.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace spectrumkv {

using Metadata = std::map<std::string, std::string>;

// REQUIRES: code is not OK; reason is UPPER_SNAKE. retry_after_ms < 0: no retry delay.
[[nodiscard]] absl::Status MakeError(absl::StatusCode code, const std::string& reason, const std::string& message,
                                     const Metadata& metadata = {}, int64_t retry_after_ms = -1);

// "" for a status without one.
std::string ReasonOf(const absl::Status& status);
Metadata MetadataOf(const absl::Status& status);
// -1 where there is none.
int64_t RetryAfterMsOf(const absl::Status& status);

}  // namespace spectrumkv
