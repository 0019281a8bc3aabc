#include "server/lifecycle/grpc_log.h"

#include <cstring>
#include <mutex>
#include <string>

#include <grpc/support/log.h>
#include "server/base/log.h"

namespace spectrumkv {
namespace {

constexpr char kHandshakeFailed[] = "Handshake failed with fatal error";
// Said of each connection whose server has a certificate for another name than it was asked for. We check names
// ourselves.
constexpr char kOtherName[] = "No match found for server name";

std::mutex& MetricsMutex() {
  static std::mutex* const mutex = new std::mutex;  // never destroyed: gRPC's threads may log until the process ends
  return *mutex;
}
Metrics* g_metrics = nullptr;

void Log(gpr_log_func_args* args) {
  if (std::strstr(args->message, kHandshakeFailed) != nullptr) {
    std::lock_guard<std::mutex> lock(MetricsMutex());
    if (g_metrics != nullptr) g_metrics->CountHandshakeFailure();
  }
  const std::string place = std::string(args->file) + ":" + std::to_string(args->line);
  const bool noise = std::strstr(args->message, kOtherName) != nullptr;
  if (args->severity == GPR_LOG_SEVERITY_ERROR && !noise) {
    SPECTRUMKV_LOG(kError, "grpc", args->message, {"at", place});
  } else if (args->severity == GPR_LOG_SEVERITY_INFO) {
    SPECTRUMKV_LOG(kInfo, "grpc", args->message, {"at", place});
  } else {
    SPECTRUMKV_LOG(kDebug, "grpc", args->message, {"at", place});
  }
}

}  // namespace

void InstallGrpcLog() { gpr_set_log_function(Log); }

void CountHandshakeFailuresIn(Metrics* metrics) {
  std::lock_guard<std::mutex> lock(MetricsMutex());
  g_metrics = metrics;
}

}  // namespace spectrumkv
