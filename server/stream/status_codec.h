// absl::Status <-> grpc::Status. The reason and metadata of MakeError travel as google.rpc.ErrorInfo (domain
// "spectrumkv"), the retry delay as google.rpc.RetryInfo, inside the google.rpc.Status of the error details.
//
// Trailing metadata is bounded by HTTP/2 peers (8 KiB): messages are cut at 768 bytes, metadata entries that do not fit
// in 2 KiB together are left out, bytes that are no UTF-8 become '?'.
#pragma once

#include <grpcpp/support/status.h>
#include "absl/status/status.h"

namespace spectrumkv {

grpc::Status ToGrpcStatus(const absl::Status& status);

// Whatever a peer sent: details that do not parse, another domain, or a reason that is not UPPER_SNAKE are ignored.
absl::Status FromGrpcStatus(const grpc::Status& status);

}  // namespace spectrumkv
