// What doctor makes of facts; how facts are read, from a folder that stands for "/".
#include "client/ctl/doctor.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "client/cpp/status.h"
#include "client/ctl/output.h"

namespace spectrumkv::ctl {
namespace {

namespace fs = std::filesystem;
using Level = Finding::Level;

class Folder {
 public:
  Folder() {
    char path[] = "/tmp/doctor-test-XXXXXX";
    path_ = mkdtemp(path);
  }
  ~Folder() { fs::remove_all(path_); }
  const std::string& path() const { return path_; }
  void Write(const std::string& name, const std::string& text) const {
    fs::create_directories(fs::path(path_ + name).parent_path());
    std::ofstream(path_ + name) << text;
  }

 private:
  std::string path_;
};

constexpr char kConfig[] =
    "# comment: not this\nworker:\n  # socket: nor this\n  socket: /run/w.sock\n  socket_mode: \"0660\"\n"
    "  allowed_uids: [\"7\", 8]\n  max_connections: 512\npeer:\n  tls:\n    ca_file: \"\"\n  allowed_hosts: []\n"
    "memory:\n  max_pools: 64\n  max_owned_bytes: 4GiB\n";

TEST(ConfigText, ReadsTheCanonicalForm) {
  const ConfigText config(kConfig);
  EXPECT_EQ(config.Value("worker.socket"), "/run/w.sock");
  EXPECT_EQ(config.Value("worker.socket_mode"), "0660");
  EXPECT_EQ(config.Value("peer.tls.ca_file"), "");
  EXPECT_EQ(config.Value("socket"), std::nullopt);
  EXPECT_EQ(config.Value("peer.socket"), std::nullopt);
  EXPECT_EQ(config.Number("memory.max_owned_bytes"), uint64_t{4} << 30);
  EXPECT_EQ(config.Number("memory.max_pools"), 64u);
  EXPECT_EQ(config.Number("worker.socket"), std::nullopt);
  EXPECT_EQ(config.List("worker.allowed_uids"), (std::vector<std::string>{"7", "8"}));
  EXPECT_TRUE(config.List("peer.allowed_hosts").empty());
  EXPECT_TRUE(config.List("worker.socket").empty());
}

TEST(ConfigText, ReadsTheShippedFile) {
  std::ifstream file(SPECTRUMKV_SOURCE_DIR "/config/spectrumkvd.yaml");
  const ConfigText config(std::string(std::istreambuf_iterator<char>(file), {}));
  EXPECT_EQ(config.Number("worker.max_connections"), 512u);
  EXPECT_EQ(config.Value("memory.shared_dir"), "/dev/shm/spectrumkv");
  EXPECT_EQ(config.Value("peer.tls.reload_interval_ms"), "10000");
  EXPECT_EQ(config.List("policy.tiers").size(), 5u);
}

TEST(HostFacts, LimitsOfTheDaemonsProcess) {
  const Folder root;
  root.Write("/proc/77/limits",
             "Limit                     Soft Limit           Hard Limit           Units     \n"
             "Max open files            600                  4096                 files     \n"
             "Max locked memory         unlimited            unlimited            bytes     \n");
  for (const char* name : {"0", "1", "2"}) root.Write(std::string("/proc/77/fd/") + name, "");
  root.Write("/proc/1/comm", "pause\n");
  const HostFacts facts = ReadHost(root.path(), 77, "/nowhere");
  EXPECT_EQ(facts.open_files_limit, 600u);
  EXPECT_EQ(facts.open_files, 3u);
  EXPECT_EQ(facts.locked_bytes_limit, kUnlimited);
  EXPECT_EQ(facts.first_process, "pause");
  EXPECT_FALSE(facts.shm.there);
  EXPECT_FALSE(facts.shared_dir.there);
  EXPECT_EQ(facts.cpu_quota, std::nullopt);
  EXPECT_EQ(facts.memory_limit_bytes, std::nullopt);
  EXPECT_TRUE(facts.gpus.empty());
}

TEST(HostFacts, TheTightestCgroupCounts) {
  const Folder root;
  root.Write("/proc/self/cgroup", "0::/pod/box\n");
  root.Write("/sys/fs/cgroup/pod/box/cpu.max", "max 100000\n");
  root.Write("/sys/fs/cgroup/pod/cpu.max", "150000 100000\n");
  root.Write("/sys/fs/cgroup/pod/cpu.stat", "usage_usec 5\nnr_periods 1000\nnr_throttled 200\n");
  root.Write("/sys/fs/cgroup/pod/box/memory.max", "1073741824\n");
  root.Write("/sys/fs/cgroup/pod/box/memory.current", "4096\n");
  root.Write("/sys/fs/cgroup/pod/memory.max", "max\n");
  const HostFacts facts = ReadHost(root.path(), 0, "");
  EXPECT_EQ(facts.cpu_quota, 1.5);
  EXPECT_EQ(facts.cpu_periods, 1000u);
  EXPECT_EQ(facts.cpu_periods_throttled, 200u);
  EXPECT_EQ(facts.memory_limit_bytes, uint64_t{1} << 30);
  EXPECT_EQ(facts.memory_used_bytes, 4096u);
}

TEST(HostFacts, CgroupsOfVersion1) {
  const Folder root;
  root.Write("/proc/self/cgroup", "5:memory:/a\n2:cpu,cpuacct:/b/c\n0::/\n");
  root.Write("/sys/fs/cgroup/cpu/b/c/cpu.cfs_quota_us", "50000\n");
  root.Write("/sys/fs/cgroup/cpu/b/c/cpu.cfs_period_us", "100000\n");
  root.Write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  root.Write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  root.Write("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "9223372036854771712\n");
  const HostFacts facts = ReadHost(root.path(), 0, "");
  EXPECT_EQ(facts.cpu_quota, 0.5);
  EXPECT_EQ(facts.cpu_periods, std::nullopt);
  EXPECT_EQ(facts.memory_limit_bytes, std::nullopt) << "version 1's way to say none";
}

TEST(HostFacts, GpusAreDevicesWithANumber) {
  const Folder root;
  for (const char* name : {"nvidia1", "nvidia0", "nvidiactl", "nvidia-uvm", "null"}) root.Write(std::string("/dev/") + name, "");
  const HostFacts facts = ReadHost(root.path(), 0, "");
  ASSERT_EQ(facts.gpus.size(), 2u);
  EXPECT_EQ(facts.gpus[0].path, "/dev/nvidia0");
  EXPECT_TRUE(facts.gpus[0].usable);
}

TEST(HostFacts, WhoReachesASocket) {
  using Directory = HostFacts::Directory;
  const std::vector<Directory> open = {{"/r/s/w.sock", 0660, 10, 20}, {"/r/s", 0750, 10, 20}, {"/r", 0755, 0, 0}};
  EXPECT_TRUE(MayReach(open, 10, 1));
  EXPECT_TRUE(MayReach(open, 11, 20));
  EXPECT_TRUE(MayReach(open, 0, 0));
  EXPECT_FALSE(MayReach(open, 11, 21));
  const std::vector<Directory> closed = {{"/r/s/w.sock", 0660, 10, 20}, {"/r/s", 0700, 10, 20}};
  EXPECT_TRUE(MayReach(closed, 10, 1));
  EXPECT_FALSE(MayReach(closed, 11, 20));
  EXPECT_FALSE(MayReach({}, 11, 20));

  const Folder folder;
  EXPECT_TRUE(ReadPathOf(folder.path() + "/none.sock").empty());
  folder.Write("/file", "");
  EXPECT_TRUE(ReadPathOf(folder.path() + "/file").empty()) << "no socket";
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = folder.path() + "/w.sock";
  std::memcpy(address.sun_path, path.data(), path.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_EQ(ListenerOf(path), 0) << "bound, but nobody listens";
  ASSERT_EQ(listen(fd, 1), 0);
  ASSERT_EQ(chmod(path.c_str(), 0620), 0);
  EXPECT_EQ(ListenerOf(path), getpid());
  const auto read = ReadPathOf(path);
  ASSERT_EQ(read.size(), 3u);  // socket, folder, /tmp
  EXPECT_EQ(read[0].mode, 0620u);
  EXPECT_EQ(read[2].path, "/tmp");
  close(fd);
  EXPECT_EQ(ListenerOf(path), 0);
}

// A machine and a daemon at which nothing is to be found.
HostFacts GoodHost() {
  HostFacts host;
  host.shm = {"/dev/shm", true, uint64_t{8} << 30, uint64_t{7} << 30};
  host.shared_dir = {"/dev/shm/spectrumkv", true, uint64_t{8} << 30, uint64_t{7} << 30};
  host.open_files_limit = 4096;
  host.open_files = 50;
  host.locked_bytes_limit = 8 << 20;
  host.cpus = 8;
  host.first_process = "pause";
  return host;
}

DaemonFacts GoodDaemon() {
  DaemonFacts daemon;
  daemon.status.set_version("1.0.0 (a)");
  daemon.status.set_ready(true);
  daemon.status.set_backend("avx2");
  daemon.status.add_backends_supported("avx2");
  daemon.status.set_worker_address("unix:/r/w.sock");
  daemon.status.set_peer_security("mtls");
  v1::SlotUsage* slots = daemon.status.add_slots();
  slots->set_partition("send");
  slots->set_slots_total(32);
  slots->set_slot_bytes(2 << 20);
  daemon.peers.mutable_stages()->set_threads(8);
  daemon.config = ConfigText(kConfig);
  daemon.worker_socket = {{"/r/w.sock", 0660, 10, 20}, {"/r", 0750, 10, 20}};
  v1::GetCertificateResponse certificate;
  v1::CertificateInfo* one = certificate.add_chain();
  one->set_subject("CN=spectrumkv");
  one->set_not_after(100 * 86400);
  daemon.certificate = certificate;
  v1::ProbePeerResponse probe;
  probe.set_version("1.0.0 (a)");
  probe.set_connect_seconds(0.003);
  probe.set_round_trip_seconds(0.0002);
  probe.set_link_bytes_per_second(1e9);
  probe.set_clock_error_seconds(0.0001);
  daemon.probed.push_back({"10.0.0.2:7420", probe});
  return daemon;
}

std::vector<Finding> All(const HostFacts& host, const DaemonFacts& daemon, DoctorOptions options = {}) {
  options.own_version = "1.0.0 (a)";
  std::vector<Finding> all = CheckDaemon(daemon, options);
  for (const Finding& f : CheckHost(host, daemon)) all.push_back(f);
  for (const Finding& f : CheckPeers(daemon, options.own_version)) all.push_back(f);
  return all;
}

// The findings that are not fine, "level check subject"; each says what to do.
std::vector<std::string> Bad(const std::vector<Finding>& findings) {
  std::vector<std::string> bad;
  for (const Finding& f : findings) {
    EXPECT_FALSE(f.what.empty()) << f.check;
    if (f.level == Level::kFine) continue;
    bad.push_back(std::string(LevelName(f.level)) + " " + f.check + (f.subject.empty() ? "" : " " + f.subject));
    if (f.level != Level::kUnknown) {
      EXPECT_FALSE(f.advice.empty()) << f.check << ": " << f.what;
    }
  }
  return bad;
}

using Words = std::vector<std::string>;

TEST(Doctor, NothingIsWrong) {
  const std::vector<Finding> all = All(GoodHost(), GoodDaemon());
  EXPECT_EQ(Bad(all), Words{});
  Words checks;
  for (const Finding& f : all) checks.push_back(f.check);
  EXPECT_EQ(checks, (Words{"daemon", "sockets", "certificate", "data-path", "shared-memory", "memory", "open-files",
                           "locked-memory", "cpu", "gpu", "peer", "clock", "link"}));
  EXPECT_NE(DoctorText(all).find("ok       shared-memory  /dev/shm: 8.00 GiB, 7.00 GiB free\n"), std::string::npos);
  EXPECT_NE(DoctorJson(all).find("\"level\": \"ok\""), std::string::npos);
}

TEST(Doctor, SharedMemory) {
  HostFacts host = GoodHost();
  const auto shm = [&](uint64_t total, uint64_t free) {
    host.shm.total_bytes = host.shared_dir.total_bytes = total;
    host.shm.free_bytes = host.shared_dir.free_bytes = free;
    return Bad(All(host, GoodDaemon()));
  };
  EXPECT_EQ(shm(64 << 20, 64 << 20), Words{"problem shared-memory /dev/shm"});
  EXPECT_EQ(shm((64 << 20) + 4096, 64 << 20), Words{"warning shared-memory /dev/shm"});
  EXPECT_EQ(shm(uint64_t{1} << 30, uint64_t{1} << 29), Words{});
  EXPECT_EQ(shm(100ull << 30, 5ull << 30), Words{});
  EXPECT_EQ(shm(100ull << 30, (5ull << 30) - 1), Words{"warning shared-memory /dev/shm"});
  host.shm.there = false;
  EXPECT_EQ(Bad(All(host, GoodDaemon())), Words{"problem shared-memory /dev/shm"});
  host = GoodHost();
  host.shared_dir.there = false;
  EXPECT_EQ(Bad(All(host, GoodDaemon())), Words{"warning shared-memory /dev/shm/spectrumkv"});
  host = GoodHost();
  host.shared_dir.total_bytes = host.shared_dir.free_bytes = 32 << 20;
  EXPECT_EQ(Bad(All(host, GoodDaemon())), Words{"problem shared-memory /dev/shm/spectrumkv"});
}

TEST(Doctor, MemoryFilesAndCpus) {
  HostFacts host = GoodHost();
  host.memory_limit_bytes = uint64_t{8} << 30;
  host.memory_used_bytes = uint64_t{1} << 30;
  EXPECT_EQ(Bad(All(host, GoodDaemon())), Words{});
  host.memory_limit_bytes = uint64_t{4} << 30;
  EXPECT_EQ(Bad(All(host, GoodDaemon())), Words{"warning memory"}) << "DAEMON_OWNED and staging do not fit";
  host.memory_used_bytes = (uint64_t{4} << 30) - (255 << 20);
  EXPECT_EQ(Bad(All(host, GoodDaemon())), Words{"warning memory"});

  host = GoodHost();
  host.open_files_limit = 1023;
  EXPECT_EQ(Bad(All(host, GoodDaemon())), Words{"warning open-files"});
  host.open_files_limit = 1024;
  EXPECT_EQ(Bad(All(host, GoodDaemon())), Words{});
  host.open_files = 930;
  EXPECT_EQ(Bad(All(host, GoodDaemon())), Words{"problem open-files"});

  host = GoodHost();
  host.cpu_quota = 8;
  EXPECT_EQ(Bad(All(host, GoodDaemon())), Words{});
  host.cpu_quota = 2;
  EXPECT_EQ(Bad(All(host, GoodDaemon())), Words{"warning cpu"}) << "eight threads";
  DaemonFacts two = GoodDaemon();
  two.peers.mutable_stages()->set_threads(2);
  EXPECT_EQ(Bad(All(host, two)), Words{});
  host.cpu_periods = 1000;
  host.cpu_periods_throttled = 51;
  EXPECT_EQ(Bad(All(host, two)), Words{"warning cpu"});
  host.cpu_periods_throttled = 50;
  EXPECT_EQ(Bad(All(host, two)), Words{});
  host.cpu_quota = 0.5;
  EXPECT_EQ(Bad(All(host, two)), Words{"warning cpu"});
}

TEST(Doctor, Gpus) {
  HostFacts host = GoodHost();
  host.gpus = {{"/dev/nvidia0", true}};
  DaemonFacts daemon = GoodDaemon();
  daemon.status.set_no_device_reason("this program was built without CUDA");
  EXPECT_EQ(Bad(All(host, daemon)), Words{"warning gpu"});
  daemon.status.clear_no_device_reason();
  daemon.status.add_devices()->set_uuid("GPU-1");
  EXPECT_EQ(Bad(All(host, daemon)), Words{"warning locked-memory"});
  host.locked_bytes_limit = kUnlimited;
  EXPECT_EQ(Bad(All(host, daemon)), Words{});
  host.first_process = "spectrumkvd";
  EXPECT_EQ(Bad(All(host, daemon)), Words{"warning gpu-ipc"});
  host.first_process = "";
  EXPECT_EQ(Bad(All(host, daemon)), Words{"unknown gpu-ipc"});
  host = GoodHost();
  host.locked_bytes_limit = kUnlimited;
  host.gpus = {{"/dev/nvidia0", true}, {"/dev/nvidia1", false}};
  EXPECT_EQ(Bad(All(host, daemon)), Words{"problem gpu"});
}

TEST(Doctor, TheDaemonItself) {
  DaemonFacts daemon = GoodDaemon();
  daemon.status.set_draining(true);
  EXPECT_EQ(Bad(All(GoodHost(), daemon)), Words{"warning daemon"});
  daemon = GoodDaemon();
  daemon.status.set_ready(false);
  EXPECT_EQ(Bad(All(GoodHost(), daemon)), Words{"problem daemon"});
  daemon = GoodDaemon();
  daemon.status.set_version("0.9.0 (b)");
  EXPECT_EQ(Bad(All(GoodHost(), daemon)), (Words{"warning daemon", "warning peer 10.0.0.2:7420"}));
  daemon = GoodDaemon();
  daemon.status.set_backend("scalar");
  daemon.status.mutable_slots(0)->set_slots_used(32);
  EXPECT_EQ(Bad(All(GoodHost(), daemon)), (Words{"warning data-path", "warning staging send"}));
  daemon = DaemonFacts();
  daemon.reached = absl::UnavailableError("no daemon answers at /r/a.sock");
  EXPECT_EQ(Bad(CheckDaemon(daemon, {})), Words{"problem daemon"});
  EXPECT_EQ(Bad(CheckHost(GoodHost(), daemon)), Words{});
}

TEST(Doctor, SocketsAndWorkers) {
  DaemonFacts daemon = GoodDaemon();
  daemon.worker_socket[1].mode = 0700;
  EXPECT_EQ(Bad(All(GoodHost(), daemon)), Words{"problem sockets /r/w.sock"});
  daemon.worker_socket[0].mode = 0600;
  EXPECT_EQ(Bad(All(GoodHost(), daemon)), Words{}) << "nobody else is meant to enter";
  daemon.worker_socket.clear();
  EXPECT_EQ(Bad(All(GoodHost(), daemon)), Words{"problem sockets /r/w.sock"});
  daemon = GoodDaemon();
  DoctorOptions worker;
  worker.worker_uid = 7;
  worker.worker_gid = 20;
  EXPECT_EQ(Bad(All(GoodHost(), daemon, worker)), Words{});
  worker.worker_gid = 21;
  EXPECT_EQ(Bad(All(GoodHost(), daemon, worker)), Words{"problem worker uid 7"});
  worker.worker_uid = 9;
  worker.worker_gid = 20;
  EXPECT_EQ(Bad(All(GoodHost(), daemon, worker)), Words{"problem worker uid 9"}) << "not in worker.allowed_uids";
}

TEST(Doctor, Certificates) {
  DaemonFacts daemon = GoodDaemon();
  DoctorOptions options;
  options.now_unix_seconds = 93 * 86400;
  EXPECT_EQ(Bad(All(GoodHost(), daemon, options)), Words{});
  options.now_unix_seconds += 1;
  EXPECT_EQ(Bad(All(GoodHost(), daemon, options)), Words{"warning certificate"});
  options.now_unix_seconds = 99 * 86400 + 1;
  EXPECT_EQ(Bad(All(GoodHost(), daemon, options)), Words{"problem certificate"});
  daemon.certificate->set_problem_reason("PEER_CERTIFICATE");
  daemon.certificate->set_problem("certificate is not yet valid");
  daemon.certificate->mutable_chain(0)->set_not_before(86400);
  const std::vector<Finding> found = CheckDaemon(daemon, {});
  EXPECT_EQ(Bad(found), (Words{"warning daemon", "problem certificate"}));
  EXPECT_NE(found[2].advice.find("clock"), std::string::npos) << found[2].advice;
  daemon = GoodDaemon();
  daemon.certificate = absl::UnimplementedError("old");
  EXPECT_EQ(Bad(All(GoodHost(), daemon)), Words{"unknown certificate"});
  daemon.status.set_peer_security("plain");
  EXPECT_EQ(Bad(All(GoodHost(), daemon)), Words{"warning certificate"});
}

TEST(Doctor, PeersClocksAndLinks) {
  DaemonFacts daemon = GoodDaemon();
  v1::ProbePeerResponse& probe = *daemon.probed[0].probe;
  probe.set_clock_offset_seconds(1);
  EXPECT_EQ(Bad(All(GoodHost(), daemon)), Words{});
  probe.set_clock_offset_seconds(-1.001);
  EXPECT_EQ(Bad(All(GoodHost(), daemon)), Words{"warning clock 10.0.0.2:7420"});
  probe.set_clock_offset_seconds(61);
  EXPECT_EQ(Bad(All(GoodHost(), daemon)), Words{"problem clock 10.0.0.2:7420"});
  probe.set_clock_error_seconds(61);
  EXPECT_EQ(Bad(All(GoodHost(), daemon)), Words{}) << "the way there is too slow to say";
  probe = *GoodDaemon().probed[0].probe;
  probe.set_link_bytes_per_second(12.4e6);
  EXPECT_EQ(Bad(All(GoodHost(), daemon)), Words{"warning link 10.0.0.2:7420"});
  probe.set_link_bytes_per_second(1e9);
  probe.set_round_trip_seconds(0.02);
  EXPECT_EQ(Bad(All(GoodHost(), daemon)), Words{"warning link 10.0.0.2:7420"});
  for (const char* reason : {"PEER_UNREACHABLE", "NOBODY_LISTENS", "PEER_NOT_ALLOWED", "PEER_SECURITY_MISMATCH", "PEER_IDENTITY",
                             "PEER_HANDSHAKE", "PEER_CERTIFICATE", "NOT_A_PEER", "INVALID_PEER"}) {
    daemon.probed[0].probe = client::MakeError(absl::StatusCode::kUnavailable, reason, "words");
    EXPECT_EQ(Bad(All(GoodHost(), daemon)), Words{"problem peer 10.0.0.2:7420"}) << reason;
  }
  daemon.probed[0].probe = absl::UnavailableError("Cancelling all calls");
  EXPECT_EQ(Bad(All(GoodHost(), daemon)), Words{"problem peer 10.0.0.2:7420"});
  daemon.probed[0].probe = absl::UnimplementedError("");
  EXPECT_EQ(Bad(All(GoodHost(), daemon)), Words{"unknown peer 10.0.0.2:7420"});
  daemon.probed.clear();
  EXPECT_EQ(Bad(All(GoodHost(), daemon)), Words{"unknown peer"});
}

}  // namespace
}  // namespace spectrumkv::ctl
