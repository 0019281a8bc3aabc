#include "server/config/command_line.h"

#include <unistd.h>

#include "server/base/status.h"

namespace spectrumkv {
namespace {

absl::Status FlagError(const std::string& flag, const std::string& what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_FLAG", flag + ": " + what + "\n" + Usage(),
                   {{"flag", flag}});
}

}  // namespace

absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& args,
                                             const std::map<std::string, std::string>& env) {
  using Action = CommandLine::Action;
  const std::map<std::string, Action> actions = {{"--validate", Action::kValidate},
                                                 {"--print-config", Action::kPrintEffective},
                                                 {"--print-config=effective", Action::kPrintEffective},
                                                 {"--print-config=defaults", Action::kPrintDefaults},
                                                 {"--help", Action::kHelp},
                                                 {"-h", Action::kHelp},
                                                 {"--version", Action::kVersion}};
  CommandLine line;
  line.sources.env = env;
  const auto file = env.find("SPECTRUMKV_CONFIG");
  if (file != env.end()) line.sources.file = file->second;
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string flag = args[i].substr(0, args[i].find('='));
    const auto action = actions.find(args[i]);
    if (action != actions.end()) {
      if (line.action != Action::kServe && line.action != action->second) {
        return FlagError(flag, "only one of --validate, --print-config, --version, --help at a time");
      }
      line.action = action->second;
      continue;
    }
    if (flag == "--print-config") return FlagError(flag, "takes effective or defaults");
    if (flag != "--config" && flag != "--set") return FlagError(flag, "unknown flag");
    std::string value;
    if (flag.size() < args[i].size()) {
      value = args[i].substr(flag.size() + 1);
    } else if (i + 1 < args.size()) {
      value = args[++i];
    }
    if (value.empty()) return FlagError(flag, flag == "--set" ? "needs KEY=VALUE" : "needs a file");
    if (flag == "--set") {
      line.sources.sets.push_back(value);
    } else {
      line.sources.file = value;
    }
  }
  return line;
}

std::map<std::string, std::string> ProcessEnvironment() {
  std::map<std::string, std::string> env;
  for (char** at = environ; at != nullptr && *at != nullptr; ++at) {
    const std::string entry(*at);
    const size_t equals = entry.find('=');
    if (equals != std::string::npos) env.emplace(entry.substr(0, equals), entry.substr(equals + 1));
  }
  return env;
}

std::string Usage() {
  return "usage: spectrumkvd [--config FILE] [--set KEY=VALUE]... [ACTION]\n"
         "\n"
         "  --config FILE            YAML configuration; also SPECTRUMKV_CONFIG\n"
         "  --set KEY=VALUE          overrides one key, for example --set peer.streams=4; may be repeated\n"
         "  --validate               check the configuration and exit: 0 if it is valid\n"
         "  --print-config           print the configuration in force and exit\n"
         "  --print-config=defaults  print every key with default, unit, limits and reason, and exit\n"
         "  --version                print the version and exit\n"
         "  --help                   print this and exit\n"
         "\n"
         "Each key is also an environment variable: peer.streams is SPECTRUMKV_PEER_STREAMS.\n"
         "Flags win over the environment, the environment over the file, the file over the defaults.\n";
}

}  // namespace spectrumkv
