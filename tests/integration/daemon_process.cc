#include "tests/integration/daemon_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace spectrumkv {
namespace {

constexpr int kReadyTimeoutMs = 60000;
constexpr int kPollMs = 10;

std::string Binary() {
  const char* path = std::getenv("SPECTRUMKVD");
  return path != nullptr ? path : SPECTRUMKVD_PATH;
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string NewFolder() {
  char name[] = "/tmp/skvtest.XXXXXX";
  return mkdtemp(name) == nullptr ? "" : name;
}

void Pause() { std::this_thread::sleep_for(std::chrono::milliseconds(kPollMs)); }

int ExitCode(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status); }

}  // namespace

std::unique_ptr<DaemonProcess> DaemonProcess::Launch(const Keys& keys) {
  std::unique_ptr<DaemonProcess> daemon(new DaemonProcess());
  daemon->folder_ = NewFolder();
  const std::string& folder = daemon->folder_;
  Keys all = {{"worker.socket", folder + "/worker.sock"},
              {"admin.socket", folder + "/admin.sock"},
              {"peer.security", "plain"},
              {"peer.listen_address", "127.0.0.1:0"},
              {"health.listen_address", "127.0.0.1:0"},
              {"metrics.listen_address", "127.0.0.1:0"},
              {"memory.shared_dir", folder},
              {"memory.send_slots", "8"},
              {"memory.receive_slots", "8"}};
  for (const auto& [key, value] : keys) all[key] = value;
  std::vector<std::string> args = {Binary(), "--ready-file", folder + "/ready.json"};
  for (const auto& [key, value] : all) {
    args.push_back("--set");
    args.push_back(key + "=" + value);
  }
  std::vector<char*> argv;
  for (std::string& arg : args) argv.push_back(arg.data());
  argv.push_back(nullptr);
  const std::string log = folder + "/log";
  const int fd = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  daemon->pid_ = fork();
  if (daemon->pid_ == 0) {
    dup2(fd, 1);
    dup2(fd, 2);
    execv(argv[0], argv.data());
    _exit(127);
  }
  close(fd);
  return daemon;
}

std::unique_ptr<DaemonProcess> DaemonProcess::Start(const Keys& keys) {
  std::unique_ptr<DaemonProcess> daemon = Launch(keys);
  if (daemon->WaitReady(kReadyTimeoutMs)) return daemon;
  ADD_FAILURE() << "spectrumkvd is not ready:\n" << daemon->Log();
  return nullptr;
}

int DaemonProcess::StartRefused(const Keys& keys, std::string* log) {
  std::unique_ptr<DaemonProcess> daemon = Launch(keys);
  const std::string ready = daemon->folder_ + "/ready.json";
  for (int waited = 0; waited < kReadyTimeoutMs && daemon->running(); waited += kPollMs) {
    if (std::filesystem::exists(ready)) break;
    Pause();
  }
  const int code = daemon->running() ? -1 : daemon->WaitExit(0);
  if (log != nullptr) *log = daemon->Log();
  return code;
}

DaemonProcess::~DaemonProcess() {
  if (running()) {
    Signal(SIGKILL);
    WaitExit(10000);
  }
  std::error_code ignored;
  if (!folder_.empty()) std::filesystem::remove_all(folder_, ignored);
}

bool DaemonProcess::WaitReady(int timeout_ms) {
  const std::string path = folder_ + "/ready.json";
  for (int waited = 0; !std::filesystem::exists(path); waited += kPollMs) {
    if (!running() || waited > timeout_ms) return false;
    Pause();
  }
  const std::string json = ReadFile(path);
  const std::regex member("\"(\\w+)\": \"([^\"]*)\"");
  for (std::sregex_iterator at(json.begin(), json.end(), member), end; at != end; ++at) {
    addresses_[(*at)[1]] = (*at)[2];
  }
  return addresses_.count("peer") > 0;
}

uint64_t DaemonProcess::epoch() const { return std::strtoull(address("epoch").c_str(), nullptr, 10); }
std::string DaemonProcess::Log() const { return ReadFile(folder_ + "/log"); }
void DaemonProcess::Signal(int signal) const {
  if (running()) kill(pid_, signal);
}

bool DaemonProcess::running() const {
  if (pid_ <= 0 || reaped_) return false;
  int status = 0;
  if (waitpid(pid_, &status, WNOHANG) != pid_) return true;
  reaped_ = true;
  exit_code_ = ExitCode(status);
  return false;
}

int DaemonProcess::WaitExit(int timeout_ms) {
  for (int waited = 0; running() && waited < timeout_ms; waited += kPollMs) Pause();
  if (!running()) return exit_code_;
  kill(pid_, SIGKILL);
  int status = 0;
  waitpid(pid_, &status, 0);
  reaped_ = true;
  return -1;
}

int DaemonProcess::Stop(int timeout_ms) {
  Signal(SIGTERM);
  return WaitExit(timeout_ms);
}

}  // namespace spectrumkv
