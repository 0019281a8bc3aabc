#include "client/ctl/dispatch.h"

#include <algorithm>
#include <cstdio>

#include "client/cpp/status.h"
#include "client/ctl/command.h"
#include "client/ctl/output.h"
#include "cmake/version.h"

namespace spectrumkv::ctl {
namespace {

constexpr char kAdminSocket[] = "/run/spectrumkv/admin.sock";
constexpr char kWorkerSocket[] = "/run/spectrumkv/worker.sock";

const std::vector<Flag>& CommonFlags() {
  static const std::vector<Flag> flags = {
      {"json", "", "print JSON"},
      {"admin-socket", "PATH", "AdminService; also SPECTRUMKV_ADMIN_SOCKET; default " + std::string(kAdminSocket)},
      {"worker-socket", "PATH",
       "WorkerService, or host:port; also SPECTRUMKV_WORKER_SOCKET; default " + std::string(kWorkerSocket)},
      {"worker-token-file", "PATH",
       "of a host:port, the daemon's worker.tcp_token_file; also SPECTRUMKV_WORKER_TOKEN_FILE"},
      {"timeout", "SECONDS", "of each call, and of its repetitions where the daemon is full; default 30"},
      {"help", "", "print this"}};
  return flags;
}

const std::vector<Command>& Commands() {
  static const std::vector<Command> commands = [] {
    std::vector<Command> all;
    for (const auto& group : {AdminCommands(), PoolCommands(), BlockCommands(), TransferCommands(), RefineCommands(), SendCommands(),
                              CodecCommands(), SegmentCommands(), DoctorCommands(), TopCommands(), ProfileCommands()}) {
      all.insert(all.end(), group.begin(), group.end());
    }
    return all;
  }();
  return commands;
}

std::string FlagLines(const std::vector<Flag>& flags) {
  std::vector<std::vector<std::string>> rows;
  for (const Flag& flag : flags) {
    rows.push_back({"  --" + flag.name + (flag.value.empty() ? "" : " " + flag.value), flag.help});
  }
  return Table(rows);
}

std::string Help() {
  std::vector<std::vector<std::string>> rows;
  for (const Command& command : Commands()) {
    rows.push_back({"  " + command.name + (command.arguments.empty() ? "" : " " + command.arguments), command.help});
  }
  return "usage: spectrumkvctl COMMAND [ARGUMENTS] [FLAGS]\n\nCommands (spectrumkvctl COMMAND --help says more):\n" +
         Table(rows) + "\nFlags of every command:\n" + FlagLines(CommonFlags()) +
         "  --version             print the version\n"
         "\nExit codes:\n"
         "  0  done\n"
         "  1  the answer is no: a check failed, not ready, the transfer did not commit\n"
         "  2  wrong usage, or a file that cannot be used\n"
         "  3  no daemon answers\n"
         "  4  the daemon answered with an error\n";
}

std::string Help(const Command& command) {
  return "usage: spectrumkvctl " + command.name + (command.arguments.empty() ? "" : " " + command.arguments) +
         " [FLAGS]\n\n" + command.help + "\n\n" + (command.flags.empty() ? "" : "Flags:\n" + FlagLines(command.flags)) +
         "Flags of every command:\n" + FlagLines(CommonFlags());
}

// The command whose name is the longest prefix of the words; null if none is.
const Command* Find(const std::vector<std::string>& words, size_t* consumed) {
  const Command* found = nullptr;
  *consumed = 0;
  std::string name;
  for (size_t i = 0; i < words.size() && i < 2; ++i) {
    name += (i == 0 ? "" : " ") + words[i];
    for (const Command& command : Commands()) {
      if (command.name != name) continue;
      found = &command;
      *consumed = i + 1;
    }
  }
  return found;
}

int Fail(const absl::Status& status) {
  const std::string reason = client::ReasonOf(status);
  const bool usage = reason == "USAGE" || reason == "BAD_FILE" || reason == "BAD_NPY";
  const bool unreachable = status.code() == absl::StatusCode::kUnavailable && reason.empty();
  std::string text = "spectrumkvctl: " + std::string(status.message()) + "\n";
  if (!usage && !unreachable) {
    text = "spectrumkvctl: " + absl::StatusCodeToString(status.code()) + (reason.empty() ? "" : " " + reason) + ": " +
           std::string(status.message()) + "\n";
  }
  for (const auto& [key, value] : client::MetadataOf(status)) text += "  " + key + ": " + value + "\n";
  const int64_t retry_ms = client::RetryAfterMsOf(status);
  if (retry_ms >= 0) text += "  try again after " + std::to_string(retry_ms) + " ms\n";
  std::fputs(text.c_str(), stderr);
  return usage ? kUsage : unreachable ? kUnreachable : kDaemonError;
}

std::string EnvOr(const std::map<std::string, std::string>& env, const std::string& name, const std::string& value) {
  const auto found = env.find(name);
  return found == env.end() || found->second.empty() ? value : found->second;
}

int RunCommand(const Command& command, const std::vector<std::string>& words,
               const std::map<std::string, std::string>& env) {
  std::vector<Flag> flags = command.flags;
  flags.insert(flags.end(), CommonFlags().begin(), CommonFlags().end());
  absl::StatusOr<Args> args = Args::Parse(words, flags);
  if (!args.ok()) return Fail(args.status());
  if (args->Switch("help")) {
    std::fputs(Help(command).c_str(), stdout);
    return kOk;
  }
  Context context;
  context.json = args->Switch("json");
  context.connection.admin_socket = args->Text("admin-socket", EnvOr(env, "SPECTRUMKV_ADMIN_SOCKET", kAdminSocket));
  context.connection.worker_socket = args->Text("worker-socket", EnvOr(env, "SPECTRUMKV_WORKER_SOCKET", kWorkerSocket));
  context.connection.worker_token_file =
      args->Text("worker-token-file", EnvOr(env, "SPECTRUMKV_WORKER_TOKEN_FILE", ""));
  context.connection.timeout_ms = args->Milliseconds("timeout", context.connection.timeout_ms);
  const absl::StatusOr<int> code = command.run(context, *std::move(args));
  std::fflush(stdout);
  return code.ok() ? *code : Fail(code.status());
}

}  // namespace

int Main(const std::vector<std::string>& words, const std::map<std::string, std::string>& env) {
  if (!words.empty() && words[0] == "--version") {
    std::printf("spectrumkvctl %s\n", VersionText());
    return kOk;
  }
  if (words.empty() || words[0] == "--help" || words[0] == "-h" || words[0] == "help") {
    std::fputs(Help().c_str(), words.empty() ? stderr : stdout);
    return words.empty() ? kUsage : kOk;
  }
  size_t consumed = 0;
  if (const Command* command = Find(words, &consumed); command != nullptr) {
    return RunCommand(*command, {words.begin() + static_cast<std::ptrdiff_t>(consumed), words.end()}, env);
  }
  std::string similar;
  for (const Command& command : Commands()) {
    if (command.name.compare(0, words[0].size(), words[0]) == 0) similar += "\n  " + command.name;
  }
  return Fail(UsageError("no command \"" + words[0] + "\"" +
                         (similar.empty() ? "; see spectrumkvctl --help" : "; there is:" + similar)));
}

}  // namespace spectrumkv::ctl
