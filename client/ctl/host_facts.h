// What the machine and the container allow a daemon, as the kernel's files say it. Facts only; what they mean, doctor says.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace spectrumkv::ctl {

// No limit, where a number is one.
constexpr uint64_t kUnlimited = UINT64_MAX;

struct HostFacts {
  struct Filesystem {
    std::string path;
    bool there = false;
    uint64_t total_bytes = 0, free_bytes = 0;
  };
  struct Directory {
    std::string path;
    unsigned mode = 0;  // permission bits
    uint32_t uid = 0, gid = 0;
  };
  struct Device {
    std::string path;
    bool usable = false;  // this process may open it
  };

  pid_t pid = 0;  // of the daemon; 0: not known, and what follows is of this process
  Filesystem shm, shared_dir;
  std::optional<uint64_t> open_files_limit, open_files;
  std::optional<uint64_t> locked_bytes_limit;
  std::optional<uint64_t> memory_limit_bytes, memory_used_bytes;  // of the cgroup; a limit is never kUnlimited
  std::optional<double> cpu_quota;                                // cores; nothing: no quota
  std::optional<uint64_t> cpu_periods, cpu_periods_throttled;
  int cpus = 0;  // the process may run on
  std::vector<Device> gpus;
  // Command of process 1 as this namespace has it; empty where it cannot be read.
  std::string first_process;
};

// `root` goes before every path ("" but for tests). `shared_dir`: memory.shared_dir.
HostFacts ReadHost(const std::string& root, pid_t pid, const std::string& shared_dir);

// The socket and the directories above it, from the socket up to below "/". Empty where there is no such socket.
std::vector<HostFacts::Directory> ReadPathOf(const std::string& socket);

// Whether a process of this user and group may pass, or for the first (the socket) write. Root may, as it has by default.
bool MayReach(const std::vector<HostFacts::Directory>& path, uint32_t uid, uint32_t gid);

// The process that listens on a Unix socket; 0 where none does or it is in another namespace.
pid_t ListenerOf(const std::string& socket);

}  // namespace spectrumkv::ctl
