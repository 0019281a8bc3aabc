#include "client/ctl/host_facts.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace spectrumkv::ctl {
namespace {

namespace fs = std::filesystem;

// The first words of a file, at most `most`; none where it cannot be read.
std::vector<std::string> WordsOf(const std::string& path, size_t most = 2) {
  std::ifstream file(path);
  std::vector<std::string> words;
  for (std::string word; words.size() < most && file >> word;) words.push_back(word);
  return words;
}

std::optional<uint64_t> ToNumber(const std::string& word) {
  if (word == "max" || word == "unlimited" || word == "-1") return kUnlimited;
  if (word.empty() || word.find_first_not_of("0123456789") != std::string::npos || word.size() > 19) return std::nullopt;
  return std::stoull(word);
}

std::optional<uint64_t> NumberOf(const std::string& path) {
  const std::vector<std::string> words = WordsOf(path, 1);
  return words.empty() ? std::nullopt : ToNumber(words[0]);
}

// The number after `key` in a file of "key number" lines.
std::optional<uint64_t> FieldOf(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string name, value; file >> name >> value;) {
    if (name == key) return ToNumber(value);
  }
  return std::nullopt;
}

HostFacts::Filesystem FilesystemOf(const std::string& root, const std::string& path) {
  HostFacts::Filesystem out;
  out.path = path;
  struct statvfs info {};
  out.there = !path.empty() && statvfs((root + path).c_str(), &info) == 0;
  out.total_bytes = static_cast<uint64_t>(info.f_blocks) * info.f_frsize;
  out.free_bytes = static_cast<uint64_t>(info.f_bavail) * info.f_frsize;
  return out;
}

// "Max open files  1024  4096  files": the soft limit of /proc/PID/limits.
std::optional<uint64_t> SoftLimit(const std::string& process, const std::string& name) {
  std::ifstream file(process + "/limits");
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, name.size(), name) != 0) continue;
    std::istringstream rest(line.substr(name.size()));
    std::string soft;
    rest >> soft;
    return ToNumber(soft);
  }
  return std::nullopt;
}

std::optional<uint64_t> EntriesOf(const std::string& folder) {
  std::error_code error;
  fs::directory_iterator at(folder, error);
  if (error) return std::nullopt;
  uint64_t count = 0;
  for (; !error && at != fs::directory_iterator(); at.increment(error)) ++count;
  return count;
}

// The folders of the process's cgroup, its own first, as far up as this namespace shows. `controller`: of version 1;
// empty for version 2.
std::vector<std::string> CgroupsOf(const std::string& root, const std::string& process, const std::string& controller) {
  std::string path = "/";
  std::ifstream file(process + "/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string names = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool ours = controller.empty() ? names == ",," : names.find("," + controller + ",") != std::string::npos;
    if (ours) path = line.substr(second + 1);
  }
  // A path out of this namespace is not to be seen here.
  if (path.find("/..") != std::string::npos) path = "/";
  const std::string base = root + "/sys/fs/cgroup" + (controller.empty() ? "" : "/" + controller);
  std::vector<std::string> folders;
  for (fs::path at = path; at.has_relative_path(); at = at.parent_path()) folders.push_back(base + at.string());
  folders.push_back(base);
  return folders;
}

void ReadCpu(const std::string& root, const std::string& process, HostFacts* facts) {
  const auto take = [&](std::optional<uint64_t> quota, std::optional<uint64_t> period, const std::string& folder) {
    if (!quota || *quota == kUnlimited || !period || *period == 0) return;
    const double cores = static_cast<double>(*quota) / static_cast<double>(*period);
    if (facts->cpu_quota && *facts->cpu_quota <= cores) return;
    facts->cpu_quota = cores;
    facts->cpu_periods = FieldOf(folder + "/cpu.stat", "nr_periods");
    facts->cpu_periods_throttled = FieldOf(folder + "/cpu.stat", "nr_throttled");
  };
  for (const std::string& folder : CgroupsOf(root, process, "")) {
    const std::vector<std::string> words = WordsOf(folder + "/cpu.max");
    if (words.size() == 2) take(ToNumber(words[0]), ToNumber(words[1]), folder);
  }
  for (const std::string& folder : CgroupsOf(root, process, "cpu")) {
    take(NumberOf(folder + "/cpu.cfs_quota_us"), NumberOf(folder + "/cpu.cfs_period_us"), folder);
  }
}

void ReadMemory(const std::string& root, const std::string& process, HostFacts* facts) {
  const auto take = [&](const std::string& limit_file, const std::string& used_file) {
    const std::optional<uint64_t> limit = NumberOf(limit_file);
    // Version 1 says "none" by a number of nearly 2^63.
    if (!limit || *limit >= UINT64_MAX / 4) return;
    if (facts->memory_limit_bytes && *facts->memory_limit_bytes <= *limit) return;
    facts->memory_limit_bytes = limit;
    facts->memory_used_bytes = NumberOf(used_file);
  };
  for (const std::string& folder : CgroupsOf(root, process, "")) take(folder + "/memory.max", folder + "/memory.current");
  for (const std::string& folder : CgroupsOf(root, process, "memory")) {
    take(folder + "/memory.limit_in_bytes", folder + "/memory.usage_in_bytes");
  }
}

std::vector<HostFacts::Device> ReadGpus(const std::string& root) {
  std::vector<HostFacts::Device> devices;
  std::error_code error;
  for (fs::directory_iterator at(root + "/dev", error), end; !error && at != end; at.increment(error)) {
    const std::string name = at->path().filename().string();
    if (name.compare(0, 6, "nvidia") != 0) continue;
    if (name.size() == 6 || name.find_first_not_of("0123456789", 6) != std::string::npos) continue;
    devices.push_back({"/dev/" + name, access(at->path().c_str(), R_OK | W_OK) == 0});
  }
  std::sort(devices.begin(), devices.end(), [](const auto& a, const auto& b) { return a.path < b.path; });
  return devices;
}

}  // namespace

HostFacts ReadHost(const std::string& root, pid_t pid, const std::string& shared_dir) {
  HostFacts facts;
  facts.pid = pid;
  const std::string process = root + "/proc/" + (pid > 0 ? std::to_string(pid) : "self");
  // What the daemon sees, where that may be looked at; else what this process does.
  const std::string view = access((process + "/root/dev").c_str(), X_OK) == 0 ? process + "/root" : root;
  facts.shm = FilesystemOf(view, "/dev/shm");
  facts.shared_dir = FilesystemOf(view, shared_dir);
  facts.open_files_limit = SoftLimit(process, "Max open files");
  facts.open_files = EntriesOf(process + "/fd");
  facts.locked_bytes_limit = SoftLimit(process, "Max locked memory");
  ReadMemory(root, process, &facts);
  ReadCpu(root, process, &facts);
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  if (sched_getaffinity(pid, sizeof(cpus), &cpus) == 0) facts.cpus = CPU_COUNT(&cpus);
  facts.gpus = ReadGpus(view);
  const std::vector<std::string> first = WordsOf(root + "/proc/1/comm", 1);
  if (!first.empty()) facts.first_process = first[0];
  return facts;
}

std::vector<HostFacts::Directory> ReadPathOf(const std::string& socket) {
  std::vector<HostFacts::Directory> path;
  for (fs::path at = socket; at.has_relative_path(); at = at.parent_path()) {
    struct stat info {};
    if (stat(at.c_str(), &info) != 0) return {};
    if (path.empty() && !S_ISSOCK(info.st_mode)) return {};
    path.push_back({at.string(), static_cast<unsigned>(info.st_mode & 07777), info.st_uid, info.st_gid});
  }
  return path;
}

bool MayReach(const std::vector<HostFacts::Directory>& path, uint32_t uid, uint32_t gid) {
  if (uid == 0) return true;
  for (size_t i = 0; i < path.size(); ++i) {
    const unsigned wanted = i == 0 ? 02 : 01;
    const unsigned shift = path[i].uid == uid ? 6 : path[i].gid == gid ? 3 : 0;
    if ((path[i].mode >> shift & wanted) != wanted) return false;
  }
  return !path.empty();
}

pid_t ListenerOf(const std::string& socket_path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (socket_path.size() >= sizeof(address.sun_path)) return 0;
  std::memcpy(address.sun_path, socket_path.data(), socket_path.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return 0;
  ucred peer{};
  socklen_t size = sizeof(peer);
  const bool known = connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 &&
                     getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0;
  close(fd);
  return known ? peer.pid : 0;
}

}  // namespace spectrumkv::ctl
