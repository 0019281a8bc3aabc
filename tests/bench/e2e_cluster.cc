#include "tests/bench/e2e_cluster.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <random>
#include <sstream>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "google/protobuf/struct.pb.h"
#include "google/protobuf/util/json_util.h"
#include "grpcpp/grpcpp.h"

namespace spectrumkv {
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

}  // namespace

absl::StatusOr<std::unique_ptr<BenchDaemon>> BenchDaemon::Start(const std::string& binary, const std::string& name) {
  std::unique_ptr<BenchDaemon> daemon(new BenchDaemon);
  char dir[] = "/tmp/spectrumkv_bench_XXXXXX";
  if (mkdtemp(dir) == nullptr) return absl::UnavailableError("mkdtemp failed");
  daemon->dir_ = dir;
  const std::string ready = daemon->dir_ + "/ready.json";
  const std::vector<std::string> args = {
      binary, "--ready-file", ready, "--set", absl::StrCat("worker.socket=", dir, "/worker.sock"),
      "--set", absl::StrCat("admin.socket=", dir, "/admin.sock"), "--set", "peer.security=plain",
      "--set", "peer.listen_address=127.0.0.1:0", "--set", "health.listen_address=127.0.0.1:0",
      "--set", "metrics.listen_address=127.0.0.1:0", "--set", absl::StrCat("memory.shared_dir=", dir),
      "--set", "log.level=warning"};
  daemon->pid_ = fork();
  if (daemon->pid_ == 0) {
    std::vector<char*> argv;
    for (const std::string& arg : args) argv.push_back(const_cast<char*>(arg.c_str()));
    argv.push_back(nullptr);
    execv(binary.c_str(), argv.data());
    _exit(127);
  }
  absl::StatusOr<google::protobuf::Struct> info = WaitReady(ready, daemon->pid_);
  if (!info.ok()) return absl::Status(info.status().code(), absl::StrCat(name, ": ", std::string(info.status().message())));
  daemon->peer_ = info->fields().at("peer").string_value();
  daemon->worker_ = v1::WorkerService::NewStub(grpc::CreateChannel(
      "unix:" + info->fields().at("worker_socket").string_value(), grpc::InsecureChannelCredentials()));
  return daemon;
}

BenchDaemon::~BenchDaemon() {
  if (pid_ > 0) {
    kill(pid_, SIGTERM);
    int status = 0;
    for (int i = 0; i < 500 && waitpid(pid_, &status, WNOHANG) == 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      if (i == 400) kill(pid_, SIGKILL);
    }
  }
  for (const char* file : {"ready.json", "worker.sock", "admin.sock", "worker.sock.lock", "admin.sock.lock"}) {
    unlink(absl::StrCat(dir_, "/", file).c_str());
  }
  rmdir(dir_.c_str());
}

absl::StatusOr<std::unique_ptr<BenchPool>> BenchPool::Create(BenchDaemon* daemon, const Shape& shape, uint32_t seed) {
  std::unique_ptr<BenchPool> pool(new BenchPool);
  const uint64_t cell = uint64_t{shape.head_dim} * 2;
  const uint64_t block = cell * shape.heads * shape.block_tokens;
  pool->bytes_ = block * shape.num_blocks * 2 * shape.layers;
  pool->name_ = absl::StrCat("/spectrumkv_bench_", getpid(), "_", seed);
  const int fd = shm_open(pool->name_.c_str(), O_CREAT | O_EXCL | O_RDWR, 0660);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(pool->bytes_)) != 0) return absl::UnavailableError("shm_open failed");
  void* memory = mmap(nullptr, pool->bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  close(fd);
  if (memory == MAP_FAILED) return absl::ResourceExhaustedError("mmap of the bench pool failed");
  pool->data_ = static_cast<uint8_t*>(memory);
  // Normal values, drawn once and repeated: the codec's work does not depend on them.
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0, 1);
  std::vector<_Float16> pattern(1 << 20);
  for (_Float16& value : pattern) value = static_cast<_Float16>(normal(rng));
  for (uint64_t at = 0; at < pool->bytes_; at += pattern.size() * 2) {
    memcpy(pool->data_ + at, pattern.data(), std::min<uint64_t>(pattern.size() * 2, pool->bytes_ - at));
  }
  v1::RegisterPoolRequest request;
  request.set_request_id(pool->name_.substr(1));
  request.set_lease_ttl_ms(600000);
  v1::PoolSchema* schema = request.mutable_schema();
  schema->set_model("bench");
  schema->set_tensor_parallel_size(1);
  v1::LayerGroup* group = schema->add_groups();
  group->set_kind(v1::GROUP_KIND_ATTENTION);
  group->set_data_type(v1::DATA_TYPE_FLOAT16);
  group->set_heads_total(shape.heads);
  group->set_head_count(shape.heads);
  group->set_head_dim(shape.head_dim);
  group->set_block_tokens(shape.block_tokens);
  group->set_num_blocks(shape.num_blocks);
  uint64_t at = 0;
  for (uint32_t i = 0; i < shape.layers; ++i) {
    v1::LayerTensors* layer = group->add_layers();
    layer->set_layer(i);
    for (v1::TensorView* view : {layer->mutable_k(), layer->mutable_v()}) {
      view->set_offset_bytes(at);
      view->set_block_stride_bytes(block);
      view->set_token_stride_bytes(cell * shape.heads);
      view->set_head_stride_bytes(cell);
      view->set_dim_stride_bytes(2);
      at += block * shape.num_blocks;
    }
  }
  v1::PosixShmSegment* segment = schema->add_segments()->mutable_posix_shm();
  segment->set_name(pool->name_);
  segment->set_size_bytes(pool->bytes_);
  v1::RegisterPoolResponse response;
  grpc::ClientContext context;
  if (grpc::Status status = daemon->worker()->RegisterPool(&context, request, &response); !status.ok()) {
    return FromGrpc(status);
  }
  pool->ref_ = response.pool();
  return pool;
}

BenchPool::~BenchPool() {
  if (data_ != nullptr) munmap(data_, bytes_);
  shm_unlink(name_.c_str());
}

}  // namespace spectrumkv
