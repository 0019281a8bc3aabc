#include "server/lifecycle/run.h"

#include <sys/resource.h>
#include <unistd.h>

#include <string>

#include "server/base/log.h"
#include "server/base/status.h"
#include "server/lifecycle/daemon.h"
#include "server/lifecycle/grpc_log.h"
#include "server/lifecycle/signals.h"
#include "server/stream/tune_process.h"

namespace spectrumkv {
namespace {

int Fail(const absl::Status& status) {
  const Metadata metadata = MetadataOf(status);
  const auto named = [&metadata](const char* key) {
    return metadata.count(key) > 0 ? metadata.at(key) : std::string();
  };
  SPECTRUMKV_LOG(kError, "lifecycle", "cannot start", {"reason", ReasonOf(status)}, {"key", named("key")},
                 {"cause", named("cause")}, {"error", std::string(status.message())});
  return 1;
}

}  // namespace

void PrepareProcess() {
  TuneProcess();
  InstallGrpcLog();
  // Every segment of a pool stays open, and systems give 1024 by default for programs that use select.
  struct rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur == files.rlim_max) return;
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);  // where it may not, what needs more files is refused
}

int RunDaemon(const Config& config, const std::string& ready_file, gpu::Runtime* gpus) {
  StopSignals signals;  // before the first thread
  auto daemon = Daemon::Start(config, gpus);
  if (!daemon.ok()) return Fail(daemon.status());
  if (!ready_file.empty()) {
    const absl::Status status = WriteReadyFile(ready_file, (*daemon)->addresses(), (*daemon)->epoch());
    if (!status.ok()) return Fail(status);
  }
  const int signal = signals.Wait();
  SPECTRUMKV_LOG(kInfo, "lifecycle", "stopping", {"signal", signal});
  (*daemon)->Drain([&signals](bool drained) {
    if (!drained) SPECTRUMKV_LOG(kWarning, "lifecycle", "transfers are left after the drain timeout");
    signals.Wake();
  });
  if (signals.Wait() != 0) SPECTRUMKV_LOG(kWarning, "lifecycle", "second signal: not waiting any longer");
  (*daemon)->Stop();
  if (!ready_file.empty()) unlink(ready_file.c_str());
  SPECTRUMKV_LOG(kInfo, "lifecycle", "stopped");
  return 0;
}

}  // namespace spectrumkv
