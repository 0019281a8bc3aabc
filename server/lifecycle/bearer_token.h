// The token that callers of a TCP port must have.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <grpcpp/security/server_credentials.h>
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace spectrumkv {

// The file's text without a newline at its end. FAILED_PRECONDITION TOKEN_FILE names the file and what is wrong with
// it, never its content: not readable, or not 16 to 1024 visible characters.
absl::StatusOr<std::string> ReadTokenFile(const std::string& path);

// Of a loopback port whose calls are refused (UNAUTHENTICATED) unless they have "authorization: Bearer TOKEN";
// `on_refused` once for each that is, from threads of gRPC's.
std::shared_ptr<grpc::ServerCredentials> BearerCredentials(const std::string& token,
                                                           std::function<void(const absl::Status&)> on_refused);

}  // namespace spectrumkv
