// Checks of the machine and the container.
#include <algorithm>

#include "client/ctl/doctor.h"
#include "client/ctl/output.h"

namespace spectrumkv::ctl {
namespace {

using Level = Finding::Level;

// What container runtimes give where nobody asks for more.
constexpr uint64_t kContainerShmBytes = 64 << 20;
constexpr uint64_t kSmallShmBytes = uint64_t{1} << 30;
// Descriptors beside those of workers and pools: connections to peers, listeners, gRPC's own.
constexpr uint64_t kOtherDescriptors = 256, kDescriptorsOfAPool = 4;
constexpr uint64_t kLittleMemoryBytes = 256 << 20;
constexpr uint64_t kEnoughPeriods = 100;
constexpr double kMuchThrottled = 0.05;
// A file system with less free than one part in so many is full.
constexpr uint64_t kFullParts = 20;

std::string Limit(uint64_t value) { return value == kUnlimited ? "unlimited" : std::to_string(value); }

Finding SharedMemory(const HostFacts::Filesystem& shm) {
  Finding f{"shared-memory", shm.path, Level::kFine, "", ""};
  if (!shm.there) {
    f.level = Level::kProblem;
    f.what = "is not there";
    f.advice = "mount a tmpfs: an emptyDir with medium Memory, in the worker's container too; workers' KV lies there";
    return f;
  }
  f.what = Bytes(shm.total_bytes) + ", " + Bytes(shm.free_bytes) + " free";
  if (shm.total_bytes <= kContainerShmBytes) {
    f.level = Level::kProblem;
    f.what += ": the default of container runtimes";
    f.advice = "an emptyDir with medium Memory and a sizeLimit as large as the KV cache (docker, podman: --shm-size)";
  } else if (shm.free_bytes < shm.total_bytes / kFullParts) {
    f.level = Level::kWarning;
    f.what += ": nearly full";
    f.advice = "spectrumkvctl segments sweep takes away what killed workers left; else a larger sizeLimit";
  } else if (shm.total_bytes < kSmallShmBytes) {
    f.level = Level::kWarning;
    f.advice = "too small for the KV cache of most models: a larger sizeLimit of the emptyDir";
  }
  return f;
}

Finding Memory(const HostFacts& host, const DaemonFacts& daemon) {
  Finding f{"memory", "", Level::kFine, "no limit", ""};
  if (!host.memory_limit_bytes) return f;
  const uint64_t limit = *host.memory_limit_bytes, used = std::min(limit, host.memory_used_bytes.value_or(0));
  f.what = "limit " + Bytes(limit) + ", " + Bytes(limit - used) + " free";
  uint64_t staging = 0;
  for (const v1::SlotUsage& usage : daemon.status.slots()) staging += usage.slots_total() * usage.slot_bytes();
  const uint64_t owned = daemon.config.Number("memory.max_owned_bytes").value_or(0);
  if (limit - used < kLittleMemoryBytes) {
    f.level = Level::kWarning;
    f.advice = "the daemon may be killed for memory: raise the container's limit; shared memory its process touches counts";
  } else if (owned + staging > limit) {
    f.level = Level::kWarning;
    f.what += "; staging and memory.max_owned_bytes may take " + Bytes(owned + staging);
    f.advice = "lower memory.max_owned_bytes (0 where no worker uses DAEMON_OWNED), or raise the limit";
  }
  return f;
}

Finding OpenFiles(const HostFacts& host, const DaemonFacts& daemon) {
  Finding f{"open-files", "", Level::kUnknown, "the limit cannot be read", ""};
  if (!host.open_files_limit) return f;
  const uint64_t limit = *host.open_files_limit;
  f.level = Level::kFine;
  f.what = "limit " + Limit(limit) + (host.open_files ? ", " + std::to_string(*host.open_files) + " open" : "");
  const std::optional<uint64_t> connections = daemon.config.Number("worker.max_connections");
  const std::optional<uint64_t> pools = daemon.config.Number("memory.max_pools");
  if (host.open_files && static_cast<double>(*host.open_files) > 0.9 * static_cast<double>(limit)) {
    f.level = Level::kProblem;
    f.advice = "connections are refused soon: raise the limit (LimitNOFILE, ulimit -n) and restart the daemon";
  } else if (connections && pools) {
    const uint64_t needed = *connections + *pools * kDescriptorsOfAPool + kOtherDescriptors;
    if (limit >= needed) return f;
    f.level = Level::kWarning;
    f.what += "; as many workers and pools as it lets in need about " + std::to_string(needed);
    f.advice = "raise the limit (LimitNOFILE, ulimit -n), or lower worker.max_connections and memory.max_pools";
  }
  return f;
}

Finding LockedMemory(const HostFacts& host, const DaemonFacts& daemon) {
  Finding f{"locked-memory", "", Level::kUnknown, "the limit cannot be read", ""};
  if (!host.locked_bytes_limit) return f;
  const uint64_t limit = *host.locked_bytes_limit;
  f.level = Level::kFine;
  f.what = limit == kUnlimited ? "unlimited" : "limit " + Bytes(limit);
  uint64_t staging = 0;
  for (const v1::SlotUsage& usage : daemon.status.slots()) staging += usage.slots_total() * usage.slot_bytes();
  if (daemon.status.devices().empty()) {
    f.what += "; nothing is locked on the host path";
  } else if (limit < staging) {
    f.level = Level::kWarning;
    f.what += ", staging has " + Bytes(staging);
    f.advice = "where pinned staging is refused, copies to the GPU are slow: raise it (LimitMEMLOCK, ulimit -l unlimited)";
  }
  return f;
}

Finding Cpu(const HostFacts& host, const DaemonFacts& daemon) {
  Finding f{"cpu", "", Level::kFine, std::to_string(host.cpus) + " CPUs", ""};
  f.what += host.cpu_quota ? ", quota " + Real(*host.cpu_quota, 2) : ", no quota";
  const uint32_t threads = daemon.peers.stages().threads();
  const double cores = host.cpu_quota ? std::min(*host.cpu_quota, static_cast<double>(host.cpus)) : host.cpus;
  const uint64_t periods = host.cpu_periods.value_or(0), throttled = host.cpu_periods_throttled.value_or(0);
  const double share = periods >= kEnoughPeriods ? static_cast<double>(throttled) / static_cast<double>(periods) : 0;
  if (share > 0) f.what += ", throttled in " + Percent(share) + " of the periods";
  if (threads > 0) f.what += ", " + std::to_string(threads) + " threads code";
  if (host.cpu_quota && *host.cpu_quota < 1) {
    f.level = Level::kWarning;
    f.advice = "less than one core: transfers stall in the middle of a chunk; request whole CPUs";
  } else if (threads > cores + 0.5) {
    f.level = Level::kWarning;
    f.advice = "set codec.threads to " + Real(std::max(1.0, cores), 0) +
               ": more threads than cores are stopped together when the quota of a period is used up";
  } else if (share > kMuchThrottled) {
    f.level = Level::kWarning;
    f.advice = "raise the CPU limit, or take it away and keep the request";
  }
  return f;
}

std::vector<Finding> Gpu(const HostFacts& host, const DaemonFacts& daemon) {
  if (host.gpus.empty()) {
    return {{"gpu", "", Level::kFine, "none visible: pools in host memory, coded on the CPU", ""}};
  }
  std::vector<Finding> found;
  Finding f{"gpu", "", Level::kFine, "", ""};
  for (const HostFacts::Device& device : host.gpus) {
    f.what += (f.what.empty() ? "" : ", ") + device.path;
    if (device.usable) continue;
    f.level = Level::kProblem;
    f.what += " (may not be opened)";
    f.advice = "the container needs the device: a resource claim, or NVIDIA_VISIBLE_DEVICES and the group that owns it";
  }
  if (f.level == Level::kFine && daemon.reached.ok() && daemon.status.devices().empty()) {
    f.level = Level::kWarning;
    f.what += "; the daemon uses none: " + daemon.status.no_device_reason();
    f.advice = "GPU memory cannot be registered; pools in host memory work. A build with CUDA is needed, or a driver for it";
  }
  found.push_back(f);
  // A GPU's memory handle opens in another process only if both see each other's process ids.
  const bool alone = host.first_process == "spectrumkvd" || host.first_process == "spectrumkvctl";
  Finding ipc{"gpu-ipc", "", alone ? Level::kWarning : Level::kFine,
              alone ? "the daemon has a process namespace of its own" : "process namespace shared (process 1 is " +
                                                                            host.first_process + ")",
              alone ? "handles of a worker's GPU memory cannot be opened: shareProcessNamespace: true in the pod" : ""};
  if (host.first_process.empty()) ipc = {"gpu-ipc", "", Level::kUnknown, "process 1 cannot be looked at", ""};
  found.push_back(ipc);
  return found;
}

}  // namespace

std::vector<Finding> CheckHost(const HostFacts& host, const DaemonFacts& daemon) {
  std::vector<Finding> found = {SharedMemory(host.shm)};
  const HostFacts::Filesystem& shared = host.shared_dir;
  if (!shared.path.empty() && !shared.there) {
    found.push_back({"shared-memory", shared.path, Level::kWarning, "memory.shared_dir is not there",
                     "FILE segments are refused: make it, writable for the workers' group, or set another"});
  } else if (shared.total_bytes != host.shm.total_bytes && shared.there) {
    found.push_back(SharedMemory(shared));  // another file system than /dev/shm
  }
  found.push_back(Memory(host, daemon));
  found.push_back(OpenFiles(host, daemon));
  found.push_back(LockedMemory(host, daemon));
  found.push_back(Cpu(host, daemon));
  for (Finding& f : Gpu(host, daemon)) found.push_back(std::move(f));
  return found;
}

}  // namespace spectrumkv::ctl
