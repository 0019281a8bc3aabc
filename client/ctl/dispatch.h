// Finds the command, runs it, turns errors into exit codes.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace spectrumkv::ctl {

// `words`: the command line without the program. `env`: SPECTRUMKV_ADMIN_SOCKET, SPECTRUMKV_WORKER_SOCKET.
int Main(const std::vector<std::string>& words, const std::map<std::string, std::string>& env);

}  // namespace spectrumkv::ctl
