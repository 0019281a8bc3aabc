// Errors of the daemon as absl::Status. The reason (stable, UPPER_SNAKE), the offending values and the retry delay
// travel as google.rpc.ErrorInfo and google.rpc.RetryInfo; here they are payloads of the status.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include <grpcpp/support/status.h>
#include "absl/status/status.h"

namespace spectrumkv::client {

// OK for OK. Details that cannot be read are left out.
absl::Status FromGrpc(const grpc::Status& status);

// "" where the error has none, as when the daemon could not be reached.
std::string ReasonOf(const absl::Status& status);
std::map<std::string, std::string> MetadataOf(const absl::Status& status);
// Milliseconds after which it makes sense to try again; -1 where the daemon did not say.
// At most a day.
int64_t RetryAfterMsOf(const absl::Status& status);

// An error made on this side, with a reason as the daemon's have.
absl::Status MakeError(absl::StatusCode code, const std::string& reason, const std::string& message);

}  // namespace spectrumkv::client
