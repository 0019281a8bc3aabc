// spectrumkvd: wires configuration, process and daemon together; everything else is in server/lifecycle.
#include <cstdio>
#include <string>
#include <vector>

#include "cmake/version.h"
#include "server/config/command_line.h"
#include "server/config/config.h"
#include "server/lifecycle/run.h"

namespace {

using Action = spectrumkv::CommandLine::Action;

// Takes --ready-file PATH (or =PATH) out of `args`. False where the path is missing.
bool TakeReadyFile(std::vector<std::string>* args, std::string* ready_file) {
  const std::string flag = "--ready-file";
  for (size_t i = 0; i < args->size(); ++i) {
    const std::string& arg = (*args)[i];
    size_t used = 1;
    if (arg.rfind(flag + "=", 0) == 0) {
      *ready_file = arg.substr(flag.size() + 1);
    } else if (arg == flag && i + 1 < args->size()) {
      *ready_file = (*args)[i + 1];
      used = 2;
    } else if (arg != flag) {
      continue;
    }
    if (ready_file->empty()) return false;
    args->erase(args->begin() + static_cast<std::ptrdiff_t>(i), args->begin() + static_cast<std::ptrdiff_t>(i + used));
    return true;
  }
  return true;
}

int Refuse(const std::string& words) {
  std::fprintf(stderr, "spectrumkvd: %s\n", words.c_str());
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  spectrumkv::PrepareProcess();
  std::vector<std::string> args(argv + 1, argv + argc);
  std::string ready_file;
  if (!TakeReadyFile(&args, &ready_file)) return Refuse("--ready-file: needs a file\n" + spectrumkv::Usage());
  const auto line = spectrumkv::ParseCommandLine(args, spectrumkv::ProcessEnvironment());
  if (!line.ok()) return Refuse(std::string(line.status().message()));
  switch (line->action) {
    case Action::kHelp:
      std::printf("%s  --ready-file PATH        write addresses, epoch and pid as JSON when ready\n",
                  spectrumkv::Usage().c_str());
      return 0;
    case Action::kVersion: std::printf("spectrumkvd %s\n", spectrumkv::VersionText()); return 0;
    case Action::kPrintDefaults: std::printf("%s", spectrumkv::PrintConfig(spectrumkv::Config()).c_str()); return 0;
    default: break;
  }
  const auto config = spectrumkv::LoadConfig(line->sources);
  if (!config.ok()) return Refuse(std::string(config.status().message()));
  if (line->action == Action::kValidate) {
    std::printf("the configuration is valid\n");
    return 0;
  }
  if (line->action == Action::kPrintEffective) {
    std::printf("%s", spectrumkv::PrintConfig(*config).c_str());
    return 0;
  }
  return spectrumkv::RunDaemon(*config, ready_file);
}
