#include "tests/bench/peer_system.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"

namespace spectrumkv::bench {

absl::StatusOr<std::unique_ptr<PeerSystem>> PeerSystem::Start(const Options& options) {
  std::unique_ptr<PeerSystem> system(new PeerSystem);
  system->name_ = options.name;
  system->log_ = absl::StrCat("/tmp/spectrumkv_bench_", getpid(), "_", options.name, ".log");
  absl::Status started = system->StartSide(options, "target", options.to, "", &system->target_);
  if (!started.ok()) return started;
  absl::StatusOr<std::string> address = system->Answer(&system->target_, "address");
  if (!address.ok()) return address.status();
  started = system->StartSide(options, "initiator", options.from, *address, &system->initiator_);
  if (!started.ok()) return started;
  if (absl::StatusOr<std::string> ready = system->Answer(&system->initiator_, "ready"); !ready.ok()) return ready.status();
  system->Signal(SIGSTOP);
  return system;
}

absl::Status PeerSystem::StartSide(const Options& options, const std::string& role, const Place& place,
                                   const std::string& connect, Process* process) {
  std::vector<std::string> args;
  if (!place.netns.empty()) args = {"ip", "netns", "exec", place.netns};
  args.insert(args.end(), {options.python, absl::StrCat(options.folder, "/", options.name, "_peer.py"), role, "--pages",
                           std::to_string(options.pages), "--page-bytes", std::to_string(options.page_bytes), "--host",
                           place.host});
  if (!connect.empty()) args.insert(args.end(), {"--connect", connect});
  std::vector<char*> argv;
  for (const std::string& arg : args) argv.push_back(const_cast<char*>(arg.c_str()));
  argv.push_back(nullptr);
  int in[2], out[2];
  if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0) return absl::UnavailableError("pipe2 failed");
  process->pid = ForkChild();
  if (process->pid == 0) {
    const int log = open(log_.c_str(), O_CREAT | O_WRONLY | O_APPEND, 0600);
    dup2(in[0], 0);
    dup2(out[1], 1);
    if (log >= 0) dup2(log, 2);
    execvp(argv[0], argv.data());
    _exit(127);
  }
  close(in[0]);
  close(out[1]);
  process->in = fdopen(in[1], "w");
  process->out = fdopen(out[0], "r");
  return absl::OkStatus();
}

absl::StatusOr<std::string> PeerSystem::Answer(Process* process, const std::string& key) {
  const std::string begin = "{\"" + key + "\": ";
  char line[4096];
  while (std::fgets(line, sizeof line, process->out) != nullptr) {
    if (strncmp(line, begin.c_str(), begin.size()) != 0) continue;
    std::string value = line + begin.size();
    value.erase(value.find('}'));
    if (value.front() == '"') value = value.substr(1, value.size() - 2);
    return value;
  }
  failed_ = true;
  return absl::UnavailableError(absl::StrCat(name_, " ended before it answered '", key, "'; see ", log_));
}

absl::StatusOr<std::string> PeerSystem::Ask(const char* command, const std::string& key) {
  std::fprintf(initiator_.in, "%s\n", command);
  std::fflush(initiator_.in);
  return Answer(&initiator_, key);
}

void PeerSystem::Signal(int signal) {
  for (const Process* process : {&target_, &initiator_}) {
    if (process->pid > 0) kill(process->pid, signal);
  }
}

absl::StatusOr<Cost> PeerSystem::Move() {
  const double cpu = ProcessCpuSeconds(target_.pid) + ProcessCpuSeconds(initiator_.pid);
  Signal(SIGCONT);
  absl::StatusOr<std::string> seconds = Ask("go", "seconds");
  Signal(SIGSTOP);
  if (!seconds.ok()) return seconds.status();
  return Cost{std::atof(seconds->c_str()), ProcessCpuSeconds(target_.pid) + ProcessCpuSeconds(initiator_.pid) - cpu};
}

absl::StatusOr<bool> PeerSystem::Verified() {
  Signal(SIGCONT);
  absl::StatusOr<std::string> verified = Ask("check", "verified");
  Signal(SIGSTOP);
  if (!verified.ok()) return verified.status();
  return *verified == "true";
}

PeerSystem::~PeerSystem() {
  for (Process* process : {&initiator_, &target_}) {
    if (process->in != nullptr) std::fclose(process->in);
    if (process->out != nullptr) std::fclose(process->out);
    if (process->pid > 0) EndProcess(process->pid);
  }
  if (!failed_) unlink(log_.c_str());
}

}  // namespace spectrumkv::bench
