// A prefill worker and a decode worker in one program: a KV cache goes from one daemon's worker socket to the other's.
//
//   round_trip PREFILL_WORKER_SOCKET DECODE_WORKER_SOCKET DECODE_PEER_HOST:PORT [BUDGET | auto:SECONDS]
//
// How it is built: CMakeLists.txt. The addresses that scripts/demo --keep prints serve.
// Prints the receiver's report and how far the values are from the originals; exit 0 if the transfer committed.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

#include "spectrumkv/client.h"

namespace {

namespace skv = spectrumkv;

constexpr uint32_t kTokens = 200;

// A worker: its connection, its shared memory, its registered pool.
struct Worker {
  skv::Client client;
  skv::DenseLayout layout;
  skv::SharedMemory memory;
  skv::Pool pool;
};

skv::Result<Worker> StartWorker(const std::string& socket, const std::string& name, uint32_t block_tokens,
                                uint64_t num_blocks) {
  skv::Client::Options options;
  options.address = socket;
  skv::Result<skv::Client> client = skv::Client::Connect(options);
  if (!client.ok()) return client.status();
  skv::DenseLayout layout;
  layout.model = "example";
  layout.layers = 4;
  layout.heads = 2;
  layout.head_dim = 64;
  layout.block_tokens = block_tokens;
  layout.num_blocks = num_blocks;
  layout.data_type = skv::DataType::kFloat32;
  const skv::Result<uint64_t> bytes = skv::BytesOf(layout);
  if (!bytes.ok()) return bytes.status();
  skv::Result<skv::SharedMemory> memory =
      skv::SharedMemory::Create("/spectrumkv-example-" + name + "-" + std::to_string(::getpid()), *bytes);
  if (!memory.ok()) return memory.status();
  const skv::Result<skv::Cache> cache = skv::DenseCache(layout, memory->segment());
  if (!cache.ok()) return cache.status();
  skv::Result<skv::Pool> pool = client->Register(*cache);
  if (!pool.ok()) return pool.status();
  return Worker{*std::move(client), layout, *std::move(memory), *std::move(pool)};
}

// Address of token `t` of a request whose block table is `blocks`.
float* Token(const Worker& worker, uint32_t layer, uint32_t plane, const std::vector<uint64_t>& blocks, uint32_t t) {
  const uint32_t block_tokens = worker.layout.block_tokens;
  const uint64_t offset = skv::OffsetOf(worker.layout, layer, plane, blocks[t / block_tokens], t % block_tokens);
  return reinterpret_cast<float*>(worker.memory.data() + offset);
}

// The sum of squared differences over the sum of squares, of all values.
double RelativeError(const Worker& a, const std::vector<uint64_t>& blocks_a, const Worker& b,
                     const std::vector<uint64_t>& blocks_b) {
  const uint32_t values = a.layout.heads * a.layout.head_dim;
  double error = 0, norm = 0;
  for (uint32_t layer = 0; layer < a.layout.layers; ++layer) {
    for (uint32_t plane = 0; plane < 2; ++plane) {
      for (uint32_t t = 0; t < kTokens; ++t) {
        const float* x = Token(a, layer, plane, blocks_a, t);
        const float* y = Token(b, layer, plane, blocks_b, t);
        for (uint32_t i = 0; i < values; ++i) {
          error += (double{x[i]} - y[i]) * (double{x[i]} - y[i]);
          norm += double{x[i]} * x[i];
        }
      }
    }
  }
  return std::sqrt(error / norm);
}

void FillIn(const Worker& worker, const std::vector<uint64_t>& blocks) {
  const uint32_t values = worker.layout.heads * worker.layout.head_dim;
  for (uint32_t layer = 0; layer < worker.layout.layers; ++layer) {
    for (uint32_t plane = 0; plane < 2; ++plane) {
      for (uint32_t t = 0; t < kTokens; ++t) {
        float* token = Token(worker, layer, plane, blocks, t);
        for (uint32_t i = 0; i < values; ++i) token[i] = std::sin(0.37f * static_cast<float>(i + 1) * (t + 1) + layer);
      }
    }
  }
}

skv::Result<double> RoundTrip(const std::string& prefill_socket, const std::string& decode_socket,
                              const std::string& decode_peer, const skv::Policy& policy) {
  skv::Result<Worker> prefill = StartWorker(prefill_socket, "prefill", 16, 32);
  if (!prefill.ok()) return prefill.status();
  skv::Result<Worker> decode = StartWorker(decode_socket, "decode", 32, 16);
  if (!decode.ok()) return decode.status();

  // Block tables are the engines' own: these two share neither ids nor block size.
  skv::Source source;
  skv::Destination destination;
  source.transfer_id = destination.transfer_id = "example-" + std::to_string(::getpid());
  source.token_count = destination.token_count = kTokens;
  source.blocks.resize(1);
  destination.blocks.resize(1);
  for (uint64_t i = 0; i < skv::BlocksFor(kTokens, 16); ++i) source.blocks[0].push_back(31 - i);
  for (uint64_t i = 0; i < skv::BlocksFor(kTokens, 32); ++i) destination.blocks[0].push_back(2 * i);
  source.peer = decode_peer;
  source.policy = policy;
  FillIn(*prefill, source.blocks[0]);

  if (skv::Status status = decode->client.Expect(decode->pool, destination); !status.ok()) return status;
  if (skv::Status status = prefill->client.Send(prefill->pool, source); !status.ok()) return status;

  skv::WaitOptions options;
  options.role = skv::Role::kReceiver;
  options.on_layers_ready = [](uint32_t layers) { std::printf("layers ready: %u\n", layers); };
  const skv::Result<skv::Report> report = decode->client.Wait(source.transfer_id, options);
  if (!report.ok()) return report.status();
  if (!report->outcome.ok()) return report->outcome;
  std::printf("committed: %llu KV bytes, %llu on the wire\n", static_cast<unsigned long long>(report->kv_bytes),
              static_cast<unsigned long long>(report->wire_bytes));
  const double error = RelativeError(*prefill, source.blocks[0], *decode, destination.blocks[0]);
  for (Worker* worker : {&*prefill, &*decode}) {
    if (skv::Status status = worker->pool.Unregister(); !status.ok()) return status;
  }
  return error;
}

// A number, or auto:SECONDS: the daemon chooses the budget for that time.
skv::Policy PolicyOf(const std::string& budget) {
  skv::Policy policy;
  if (budget.rfind("auto:", 0) == 0) {
    policy.target_seconds = std::atof(budget.c_str() + 5);
  } else {
    policy.budget = std::atof(budget.c_str());
  }
  return policy;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4 || argc > 5) {
    std::fprintf(stderr,
                 "usage: round_trip PREFILL_WORKER_SOCKET DECODE_WORKER_SOCKET DECODE_PEER_HOST:PORT "
                 "[BUDGET | auto:SECONDS]\n");
    return 2;
  }
  const skv::Result<double> error = RoundTrip(argv[1], argv[2], argv[3], PolicyOf(argc == 5 ? argv[4] : "0.5"));
  if (!error.ok()) {
    std::fprintf(stderr, "round_trip: %s\n", error.status().ToString().c_str());
    return 1;
  }
  std::printf("relative error: %.5f\n", *error);
  return 0;
}
