// The daemon's flags, as far as they choose and print the configuration.
//
//   spectrumkvd [--config FILE] [--set KEY=VALUE]... [--validate | --print-config[=defaults|=effective] | --version]
//
// The file may also be named by SPECTRUMKV_CONFIG; --config wins.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/config/config.h"

namespace spectrumkv {

struct CommandLine {
  enum class Action { kServe, kValidate, kPrintEffective, kPrintDefaults, kHelp, kVersion };
  Action action = Action::kServe;
  ConfigSources sources;
};

// `args` without the program's name. InvalidArgument, reason INVALID_FLAG, names the flag.
absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& args,
                                             const std::map<std::string, std::string>& env);

// The environment of this process.
std::map<std::string, std::string> ProcessEnvironment();

std::string Usage();

}  // namespace spectrumkv
