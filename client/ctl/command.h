// What a command is. Each group of commands is one file that gives its table; dispatch.cc puts them together.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/ctl/args.h"
#include "client/ctl/connection.h"

namespace spectrumkv::ctl {

// Exit codes, as --help lists them.
constexpr int kOk = 0;
constexpr int kCheckFailed = 1;
constexpr int kUsage = 2;
constexpr int kUnreachable = 3;
constexpr int kDaemonError = 4;

struct Context {
  Connection connection;
  bool json = false;
};

// Prints to stdout; gives the exit code, or an error that main prints.
using Run = absl::StatusOr<int> (*)(const Context& context, Args args);

struct Command {
  std::string name;       // "transfers show"
  std::string arguments;  // "ID"
  std::string help;       // one line
  std::vector<Flag> flags;
  Run run;
};

std::vector<Command> AdminCommands();
std::vector<Command> PoolCommands();
std::vector<Command> BlockCommands();
std::vector<Command> TransferCommands();
std::vector<Command> SendCommands();
std::vector<Command> RefineCommands();
std::vector<Command> CodecCommands();
std::vector<Command> SegmentCommands();
std::vector<Command> DoctorCommands();
std::vector<Command> TopCommands();
std::vector<Command> ProfileCommands();

}  // namespace spectrumkv::ctl
