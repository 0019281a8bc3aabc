#include "server/lifecycle/bearer_token.h"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <sstream>
#include <utility>

#include <grpcpp/security/auth_metadata_processor.h>
#include "server/base/ids.h"
#include "server/base/status.h"

namespace spectrumkv {
namespace {

constexpr size_t kMinBytes = 16, kMaxBytes = 1024;
constexpr char kScheme[] = "Bearer ";

class TokenCheck final : public grpc::AuthMetadataProcessor {
 public:
  TokenCheck(std::string token, std::function<void(const absl::Status&)> on_refused)
      : token_(std::move(token)), on_refused_(std::move(on_refused)) {}
  bool IsBlocking() const override { return false; }
  grpc::Status Process(const InputMetadata& metadata, grpc::AuthContext*, OutputMetadata* consumed,
                       OutputMetadata*) override {
    const auto range = metadata.equal_range("authorization");
    for (auto it = range.first; it != range.second; ++it) {
      const std::string value(it->second.data(), it->second.size());
      if (!ConstantTimeEqual(value, kScheme + token_)) continue;
      consumed->insert({"authorization", value});
      return grpc::Status::OK;
    }
    const char* words = range.first == range.second
                            ? "NO_TOKEN: worker.tcp_address takes calls with authorization: Bearer TOKEN alone"
                            : "WRONG_TOKEN: the bearer token is not that of worker.tcp_token_file";
    on_refused_(absl::UnauthenticatedError(words));
    return grpc::Status(grpc::StatusCode::UNAUTHENTICATED, words);
  }

 private:
  const std::string token_;
  const std::function<void(const absl::Status&)> on_refused_;
};

absl::Status Wrong(const std::string& path, const std::string& what) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "TOKEN_FILE", "worker.tcp_token_file: " + path + " " + what,
                   {{"file", path}});
}

}  // namespace

absl::StatusOr<std::string> ReadTokenFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  if (file) text << file.rdbuf();
  if (!file) return Wrong(path, "cannot be read or is empty");
  std::string token = text.str();
  if (!token.empty() && token.back() == '\n') token.pop_back();
  if (token.size() < kMinBytes || token.size() > kMaxBytes) {
    return Wrong(path, "has " + std::to_string(token.size()) + " characters, allowed are " + std::to_string(kMinBytes) +
                           " to " + std::to_string(kMaxBytes));
  }
  if (!std::all_of(token.begin(), token.end(), [](unsigned char c) { return c > 0x20 && c < 0x7f; })) {
    return Wrong(path, "has characters that are not visible ASCII");
  }
  return token;
}

std::shared_ptr<grpc::ServerCredentials> BearerCredentials(const std::string& token,
                                                           std::function<void(const absl::Status&)> on_refused) {
  auto credentials = grpc::experimental::LocalServerCredentials(LOCAL_TCP);
  credentials->SetAuthMetadataProcessor(std::make_shared<TokenCheck>(token, std::move(on_refused)));
  return credentials;
}

}  // namespace spectrumkv
