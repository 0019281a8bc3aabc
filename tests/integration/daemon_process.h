// A real spectrumkvd for tests: its own folder, sockets and free ports, log kept, ended by its pid.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>

namespace spectrumkv {

// Not thread-safe.
class DaemonProcess {
 public:
  // Configuration keys beside those that give it its own folder and ports: plain peers, small staging.
  using Keys = std::map<std::string, std::string>;

  // Waits until it is ready. Null, and a test failure with the log, if it is not within 60 s.
  static std::unique_ptr<DaemonProcess> Start(const Keys& keys = {});
  // Starts one that must refuse: its exit code, -1 if it got ready or hangs. `log` gets what it said.
  static int StartRefused(const Keys& keys, std::string* log);
  // SIGKILL if it still runs.
  ~DaemonProcess();

  const std::string& folder() const { return folder_; }
  pid_t pid() const { return pid_; }
  // From the ready file: worker_socket, admin_socket, peer, health, metrics, epoch.
  const std::string& address(const std::string& name) const { return addresses_.at(name); }
  std::string worker_target() const { return "unix:" + address("worker_socket"); }
  std::string admin_target() const { return "unix:" + address("admin_socket"); }
  uint64_t epoch() const;
  std::string Log() const;

  void Signal(int signal) const;
  // Exit code, 128 + n for signal n, -1 where it has not ended in time (then it is killed).
  int WaitExit(int timeout_ms);
  // SIGTERM and WaitExit.
  int Stop(int timeout_ms = 30000);
  bool running() const;

 private:
  DaemonProcess() = default;
  static std::unique_ptr<DaemonProcess> Launch(const Keys& keys);
  bool WaitReady(int timeout_ms);

  std::string folder_;
  pid_t pid_ = -1;
  mutable bool reaped_ = false;
  mutable int exit_code_ = -1;
  std::map<std::string, std::string> addresses_;
};

}  // namespace spectrumkv
