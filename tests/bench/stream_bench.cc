#include "tests/bench/stream_bench.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <grpcpp/create_channel.h>
#include <grpcpp/impl/rpc_method.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/sync_stream.h>
#include "server/memory/slot_pool.h"
#include "server/stream/data_codec.h"
#include "server/stream/grpc_transport.h"
#include "server/stream/peer_server.h"
#include "server/stream/tune_process.h"

namespace spectrumkv {
namespace {

using Clock = std::chrono::steady_clock;

// GB/s, and CPU seconds of the process (both ends) per GB.
struct Rate {
  double gb_s = 0, cpu_s_per_gb = 0;
};

double Seconds(Clock::time_point since) { return std::chrono::duration<double>(Clock::now() - since).count(); }

double CpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

// `received` grows while the senders run; the first tenth is not counted.
Rate Measure(double seconds, const std::atomic<uint64_t>& received) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds / 10));
  const uint64_t first = received;
  const double cpu = CpuSeconds();
  const auto begin = Clock::now();
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  const double gigabytes = static_cast<double>(received - first) / 1e9;
  return {gigabytes / Seconds(begin), (CpuSeconds() - cpu) / std::max(gigabytes, 1e-9)};
}

bool SendAll(int fd, const uint8_t* data, size_t bytes) {
  while (bytes > 0) {
    const ssize_t n = send(fd, data, bytes, MSG_NOSIGNAL);
    if (n <= 0) return false;
    data += n;
    bytes -= static_cast<size_t>(n);
  }
  return true;
}

// One connection, one sending and one receiving thread each.
Rate PlainTcp(size_t chunk_bytes, int streams, double seconds) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), length) != 0 || listen(listener, 8) != 0) return {};
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length);
  std::atomic<uint64_t> received{0};
  std::vector<int> sockets;
  std::vector<std::thread> threads;
  for (int i = 0; i < streams; ++i) {
    const int to = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(to, reinterpret_cast<sockaddr*>(&address), length) != 0) return {};
    const int from = accept(listener, nullptr, nullptr);
    sockets.push_back(to);
    sockets.push_back(from);
    threads.emplace_back([=] {
      const std::vector<uint8_t> bytes(chunk_bytes, 7);
      while (SendAll(to, bytes.data(), bytes.size())) {
      }
    });
    threads.emplace_back([=, &received] {
      std::vector<uint8_t> bytes(chunk_bytes);
      for (ssize_t n = 1; n > 0; received += static_cast<uint64_t>(std::max<ssize_t>(n, 0))) {
        n = recv(from, bytes.data(), bytes.size(), 0);
      }
    });
  }
  const Rate rate = Measure(seconds, received);
  for (int fd : sockets) shutdown(fd, SHUT_RDWR);
  for (auto& thread : threads) thread.join();
  for (int fd : sockets) close(fd);
  close(listener);
  return rate;
}

class CountingAcceptor final : public PeerAcceptor,
                               public DataListener,
                               public std::enable_shared_from_this<CountingAcceptor> {
 public:
  std::shared_ptr<ControlListener> OnControl(std::shared_ptr<ControlStream>) override { return nullptr; }
  std::shared_ptr<DataListener> OnData(std::shared_ptr<DataStream>, const DataOpenFrame&) override {
    return shared_from_this();
  }
  void OnChunk(std::unique_ptr<ReceivedChunk> chunk) override { received += chunk->size(); }
  void OnClosed(absl::Status) override {}
  std::atomic<uint64_t> received{0};
};

class IgnoringListener final : public DataListener {
 public:
  void OnChunk(std::unique_ptr<ReceivedChunk>) override {}
  void OnClosed(absl::Status) override {}
};

// Keeps four chunks on loan, as the engine does.
class Pumper {
 public:
  Pumper(SlotPool* pool, std::shared_ptr<DataStream> stream, size_t chunk_bytes)
      : pool_(pool), stream_(std::move(stream)), chunk_bytes_(chunk_bytes) {}
  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stop_) {
      changed_.wait(lock, [this] { return stop_ || outstanding_ < 4; });
      if (stop_) break;
      ++outstanding_;
      lock.unlock();
      stream_->SendChunk({pool_->TryAcquire(), chunk_bytes_, {}, nullptr}, [this](bool) {
        std::lock_guard<std::mutex> done_lock(mutex_);
        --outstanding_;
        changed_.notify_all();
      });
      lock.lock();
    }
    changed_.wait(lock, [this] { return outstanding_ == 0; });
  }
  void Stop() {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }

 private:
  SlotPool* const pool_;
  const std::shared_ptr<DataStream> stream_;
  const size_t chunk_bytes_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int outstanding_ = 0;
  bool stop_ = false;
};

Rate OurStreams(size_t chunk_bytes, int streams, double seconds) {
  auto acceptor = std::make_shared<CountingAcceptor>();
  auto server = PeerServer::Start({}, acceptor.get());
  auto transport = GrpcTransport::Create({});
  if (!server.ok() || !transport.ok()) return {};
  SlotPool pool(static_cast<size_t>(streams) * 5, chunk_bytes);
  std::vector<std::unique_ptr<Pumper>> pumpers;
  std::vector<std::thread> threads;
  for (int i = 0; i < streams; ++i) {
    const DataOpenFrame open{"bench", 0, 1, static_cast<uint32_t>(i), 1};
    auto stream = (*transport)->OpenData((*server)->address(), open, std::make_shared<IgnoringListener>());
    pumpers.push_back(std::make_unique<Pumper>(&pool, std::move(stream), chunk_bytes));
    threads.emplace_back([pumper = pumpers.back().get()] { pumper->Run(); });
  }
  const Rate rate = Measure(seconds, acceptor->received);
  for (auto& pumper : pumpers) pumper->Stop();
  for (auto& thread : threads) thread.join();
  (*transport)->Shutdown();
  (*server)->Shutdown();
  return rate;
}

// The same bytes from gRPC's blocking client, to see what the callback client costs.
Rate BlockingWriter(size_t chunk_bytes, double seconds) {
  auto acceptor = std::make_shared<CountingAcceptor>();
  auto server = PeerServer::Start({}, acceptor.get());
  if (!server.ok()) return {};
  auto channel = grpc::CreateChannel((*server)->address(), grpc::InsecureChannelCredentials());
  const grpc::internal::RpcMethod method("/spectrumkv.v1.PeerService/Data", grpc::internal::RpcMethod::BIDI_STREAMING);
  grpc::ClientContext context;
  using Factory = grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, grpc::ByteBuffer>;
  std::unique_ptr<grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>> call(
      Factory::Create(channel.get(), method, &context));
  const grpc::Slice open(SerializeDataOpen({"bench", 0, 1, 0, 1}));
  call->Write(grpc::ByteBuffer(&open, 1));
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    const std::vector<uint8_t> bytes(chunk_bytes, 7);
    uint8_t prefix[kMaxChunkPrefixBytes];
    const size_t prefix_bytes = WriteChunkPrefix(chunk_bytes, prefix);
    while (!stop) {
      const grpc::Slice slices[2] = {grpc::Slice(prefix, prefix_bytes),
                                     grpc::Slice(bytes.data(), bytes.size(), grpc::Slice::STATIC_SLICE)};
      if (!call->Write(grpc::ByteBuffer(slices, 2))) return;
    }
    call->WritesDone();
    call->Finish();  // nothing of `bytes` is on loan afterwards
  });
  const Rate rate = Measure(seconds, acceptor->received);
  stop = true;
  writer.join();
  (*server)->Shutdown();
  return rate;
}

}  // namespace

int RunStreamBench(int argc, char** argv) {
  double seconds = 1;
  for (int i = 0; i < argc; ++i) {
    if (std::strcmp(argv[i], "--seconds") == 0 && i + 1 < argc) {
      seconds = std::strtod(argv[++i], nullptr);
    } else {
      std::fprintf(stderr, "usage: spectrumkv_bench stream [--seconds S]\n");
      return 2;
    }
  }
  if (!(seconds > 0 && seconds <= 60)) {
    std::fprintf(stderr, "--seconds must be above 0 and at most 60\n");
    return 2;
  }
  TuneProcess();
  std::printf("Loopback, both ends in this process. GB/s (CPU seconds per GB, both ends).\n");
  std::printf("%8s %8s %16s %16s %7s %16s\n", "chunk", "streams", "plain TCP", "chunk streams", "ratio",
              "blocking writer");
  for (size_t kib : {1024, 512, 256}) {
    for (int streams : {1, 2}) {
      const size_t bytes = kib << 10;
      const Rate tcp = PlainTcp(bytes, streams, seconds);
      const Rate ours = OurStreams(bytes, streams, seconds);
      std::printf("%4zu KiB %8d %8.2f (%5.3f) %8.2f (%5.3f) %7.2f", kib, streams, tcp.gb_s, tcp.cpu_s_per_gb, ours.gb_s,
                  ours.cpu_s_per_gb, ours.gb_s / std::max(tcp.gb_s, 1e-9));
      if (streams == 1) {
        const Rate blocking = BlockingWriter(bytes, seconds);
        std::printf(" %8.2f (%5.3f)", blocking.gb_s, blocking.cpu_s_per_gb);
      }
      std::printf("\n");
      std::fflush(stdout);
      if (tcp.gb_s <= 0 || ours.gb_s <= 0) {
        std::fprintf(stderr, "no bytes moved\n");
        return 1;
      }
    }
  }
  return 0;
}

}  // namespace spectrumkv
