#include "tests/bench/cluster.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "google/protobuf/struct.pb.h"
#include "google/protobuf/util/json_util.h"
#include "grpcpp/grpcpp.h"

namespace spectrumkv::bench {

const char kClusterUsage[] =
    "  --daemon PATH      spectrumkvd\n"
    "  --netns A,B        network namespaces of the prefill and the decode side\n"
    "  --hosts A,B        their addresses (127.0.0.1,127.0.0.1)\n"
    "  --tls DIR          mutual TLS with ca.pem, cert.pem and key.pem\n"
    "  --set KEY=VALUE    of the configuration of both daemons; may be repeated\n";

void ClusterOptions::AddFlags(Flags* flags) {
  flags->Add("--daemon", &daemon);
  flags->Add("--netns", &netns);
  flags->Add("--hosts", &hosts);
  flags->Add("--tls", &tls_dir);
  flags->Add("--set", &set);
}

bool ClusterOptions::Finish() {
  for (const auto* list : {&netns, &hosts}) {
    if (list->empty() || list->size() == 2) continue;
    std::fprintf(stderr, "--netns and --hosts take two names each\n");
    return false;
  }
  if (!netns.empty()) prefill.netns = netns[0], decode.netns = netns[1];
  if (!hosts.empty()) prefill.host = hosts[0], decode.host = hosts[1];
  return true;
}

pid_t ForkChild() {
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid != 0) return pid;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);
  return 0;
}

void EndProcess(pid_t pid) {
  kill(pid, SIGCONT);
  kill(pid, SIGTERM);
  for (int i = 0; waitpid(pid, nullptr, WNOHANG) == 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    if (i == 500) kill(pid, SIGKILL);
  }
}

namespace {

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

absl::StatusOr<google::protobuf::Struct> WaitReady(const std::string& path, pid_t pid) {
  for (int i = 0; i < 1000; ++i) {
    std::ifstream in(path);
    std::stringstream text;
    text << in.rdbuf();
    google::protobuf::Struct ready;
    if (!text.str().empty() && google::protobuf::util::JsonStringToMessage(text.str(), &ready).ok()) return ready;
    int status = 0;
    if (waitpid(pid, &status, WNOHANG) == pid) return absl::UnavailableError("the daemon ended before it was ready");
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return absl::DeadlineExceededError("the daemon was not ready within 10 s");
}

std::vector<std::string> CommandLine(const ClusterOptions& options, const Place& place, const std::string& dir) {
  std::vector<std::string> args;
  if (!place.netns.empty()) args = {"ip", "netns", "exec", place.netns};
  args.insert(args.end(), {options.daemon, "--ready-file", dir + "/ready.json"});
  std::vector<std::string> values = {
      absl::StrCat("worker.socket=", dir, "/worker.sock"), absl::StrCat("admin.socket=", dir, "/admin.sock"),
      absl::StrCat("peer.listen_address=", place.host, ":0"), "health.listen_address=127.0.0.1:0",
      "metrics.listen_address=127.0.0.1:0", absl::StrCat("memory.shared_dir=", dir), "log.level=error"};
  if (options.tls_dir.empty()) {
    values.push_back("peer.security=plain");
  } else {
    for (const char* pair : {"ca_file=%s/ca.pem", "certificate_file=%s/cert.pem", "private_key_file=%s/key.pem"}) {
      std::string text = absl::StrCat("peer.tls.", pair);
      values.push_back(text.replace(text.find("%s"), 2, options.tls_dir));
    }
  }
  values.insert(values.end(), options.set.begin(), options.set.end());
  for (const std::string& value : values) {
    args.push_back("--set");
    args.push_back(value);
  }
  return args;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(const ClusterOptions& options, const Place& place) {
  std::unique_ptr<Daemon> daemon(new Daemon);
  char dir[] = "/tmp/spectrumkv_bench_XXXXXX";
  if (mkdtemp(dir) == nullptr) return absl::UnavailableError("mkdtemp failed");
  daemon->dir_ = dir;
  const std::vector<std::string> args = CommandLine(options, place, dir);
  std::vector<char*> argv;
  for (const std::string& arg : args) argv.push_back(const_cast<char*>(arg.c_str()));
  argv.push_back(nullptr);
  daemon->pid_ = ForkChild();
  if (daemon->pid_ == 0) {
    execvp(argv[0], argv.data());
    _exit(127);
  }
  absl::StatusOr<google::protobuf::Struct> info = WaitReady(daemon->dir_ + "/ready.json", daemon->pid_);
  if (!info.ok()) return info.status();
  daemon->peer_ = info->fields().at("peer").string_value();
  // Workers copy no bulk data through gRPC, but requests with 100,000 blocks pass.
  daemon->worker_ = v1::WorkerService::NewStub(grpc::CreateChannel(
      "unix:" + info->fields().at("worker_socket").string_value(), grpc::InsecureChannelCredentials()));
  return daemon;
}

Daemon::~Daemon() {
  // Nothing is under way and nothing of it is needed any more; an orderly stop would take seconds.
  if (pid_ > 0) kill(pid_, SIGKILL), waitpid(pid_, nullptr, 0);
  if (dir_.empty()) return;
  for (const char* file : {"ready.json", "worker.sock", "admin.sock", "worker.sock.lock", "admin.sock.lock"}) {
    unlink(absl::StrCat(dir_, "/", file).c_str());
  }
  rmdir(dir_.c_str());
}

absl::StatusOr<Cluster> Cluster::Start(const ClusterOptions& options) {
  Cluster cluster;
  for (auto [daemon, place] : {std::pair(&cluster.prefill, &options.prefill), std::pair(&cluster.decode, &options.decode)}) {
    absl::StatusOr<std::unique_ptr<Daemon>> started = Daemon::Start(options, *place);
    if (!started.ok()) return started.status();
    *daemon = *std::move(started);
  }
  return cluster;
}

absl::StatusOr<std::unique_ptr<Pool>> Pool::Create(Daemon* daemon, const Shape& shape, uint32_t seed) {
  static int count = 0;
  std::unique_ptr<Pool> pool(new Pool);
  pool->shape_ = shape;
  pool->bytes_ = shape.block_bytes() * shape.num_blocks * 2 * shape.layers;
  pool->name_ = absl::StrCat("/spectrumkv_bench_", getpid(), "_", ++count);
  if (absl::Status mapped = pool->Map(); !mapped.ok()) return mapped;
  // Normal values, drawn once and repeated: the codec's work does not depend on them. The odd length gives each block
  // values of its own, so that a block in a wrong place is seen.
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0, 1);
  std::vector<_Float16> pattern((1 << 20) + 4099);
  for (_Float16& value : pattern) value = static_cast<_Float16>(normal(rng));
  for (uint64_t at = 0; at < pool->bytes_; at += pattern.size() * 2) {
    memcpy(pool->data_ + at, pattern.data(), std::min<uint64_t>(pattern.size() * 2, pool->bytes_ - at));
  }
  pool->daemon_ = daemon;
  if (absl::Status registered = pool->Register(); !registered.ok()) return registered;
  return pool;
}

absl::Status Pool::Map() {
  const int fd = shm_open(name_.c_str(), O_CREAT | O_EXCL | O_RDWR, 0660);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes_)) != 0) return absl::UnavailableError("shm_open failed");
  void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  close(fd);
  if (memory == MAP_FAILED) return absl::ResourceExhaustedError("mmap of the bench pool failed");
  data_ = static_cast<uint8_t*>(memory);
  return absl::OkStatus();
}

absl::Status Pool::Register() {
  v1::RegisterPoolRequest request;
  request.set_request_id(name_.substr(1));
  request.set_lease_ttl_ms(600000);
  v1::PoolSchema* schema = request.mutable_schema();
  schema->set_model("bench");
  schema->set_tensor_parallel_size(1);
  v1::LayerGroup* group = schema->add_groups();
  group->set_kind(v1::GROUP_KIND_ATTENTION);
  group->set_data_type(v1::DATA_TYPE_FLOAT16);
  group->set_heads_total(shape_.heads);
  group->set_head_count(shape_.heads);
  group->set_head_dim(shape_.head_dim);
  group->set_block_tokens(shape_.block_tokens);
  group->set_num_blocks(shape_.num_blocks);
  const uint64_t cell = uint64_t{shape_.head_dim} * 2;
  uint64_t at = 0;
  for (uint32_t i = 0; i < shape_.layers; ++i) {
    v1::LayerTensors* layer = group->add_layers();
    layer->set_layer(i);
    for (v1::TensorView* view : {layer->mutable_k(), layer->mutable_v()}) {
      view->set_offset_bytes(at);
      view->set_block_stride_bytes(shape_.block_bytes());
      view->set_token_stride_bytes(cell * shape_.heads);
      view->set_head_stride_bytes(cell);
      view->set_dim_stride_bytes(2);
      at += shape_.block_bytes() * shape_.num_blocks;
    }
  }
  v1::PosixShmSegment* segment = schema->add_segments()->mutable_posix_shm();
  segment->set_name(name_);
  segment->set_size_bytes(bytes_);
  v1::RegisterPoolResponse response;
  grpc::ClientContext context;
  if (grpc::Status status = daemon_->worker()->RegisterPool(&context, request, &response); !status.ok()) {
    return FromGrpc(status);
  }
  ref_ = response.pool();
  shm_unlink(name_.c_str());  // both have it mapped; nothing is left behind however this process ends
  return absl::OkStatus();
}

Pool::~Pool() {
  if (!ref_.pool_id().empty()) {
    v1::UnregisterPoolRequest request;
    *request.mutable_pool() = ref_;
    v1::UnregisterPoolResponse response;
    grpc::ClientContext context;
    const grpc::Status status = daemon_->worker()->UnregisterPool(&context, request, &response);
    if (!status.ok()) std::fprintf(stderr, "UnregisterPool: %s\n", status.error_message().c_str());
  }
  if (data_ != nullptr) munmap(data_, bytes_);
  shm_unlink(name_.c_str());
}

int RunOnCluster(const char* name, const ClusterOptions& options, const std::function<absl::Status(const Cluster&)>& run) {
  const absl::StatusOr<Cluster> cluster = Cluster::Start(options);
  const absl::Status status = cluster.ok() ? run(*cluster) : cluster.status();
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s: %s\n", name, status.ToString().c_str());
  return 1;
}

}  // namespace spectrumkv::bench
