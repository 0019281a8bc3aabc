// The life of the daemon's process after its configuration is known.
#pragma once

#include <string>

#include "server/config/config.h"

namespace spectrumkv {

namespace gpu {
class Runtime;
}

// Process-wide settings that must come before any thread and any large allocation. First thing in main().
void PrepareProcess();

// Serves until SIGTERM or SIGINT, then drains for at most drain.timeout_ms, or until a second signal, and stops. Writes
// `ready_file` ("": none) when ready and removes it at the end. Answers the exit code: 0 after a signal, 1 where the
// daemon could not start (the reason is logged). `gpus` as for Daemon::Start.
int RunDaemon(const Config& config, const std::string& ready_file, gpu::Runtime* gpus = nullptr);

}  // namespace spectrumkv
