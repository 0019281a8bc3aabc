// A prefill worker and a decode worker in one program: a KV cache goes from one daemon's worker socket to the other's.
//
//   round_trip PREFILL_WORKER_SOCKET DECODE_WORKER_SOCKET DECODE_PEER_HOST:PORT [BUDGET | auto:SECONDS]
//
// Built as build*/client/examples/round_trip by the presets of CONTRIBUTING.md, not by scripts/demo; the addresses that
// scripts/demo --keep prints serve.
// Prints the receiver's report and how far the values are from the originals; exit 0 if the transfer committed.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <unistd.h>

#include "client/cpp/blocks.h"
#include "client/cpp/client.h"
#include "client/cpp/policies.h"
#include "client/cpp/retry.h"
#include "client/cpp/schema.h"
#include "client/cpp/shared_memory.h"
#include "client/cpp/status.h"

namespace {

namespace v1 = spectrumkv::v1;
using namespace spectrumkv::client;  // an example: everything here is the client's

constexpr uint32_t kTokens = 200;
constexpr int64_t kTimeoutMs = 30000;

// A worker: its connection, its shared memory, its registered pool.
struct Worker {
  std::unique_ptr<Client> client;
  DenseLayout layout;
  SharedMemory memory;
  std::unique_ptr<Pool> pool;
};

absl::StatusOr<Worker> StartWorker(const std::string& socket, const std::string& name, uint32_t block_tokens,
                                   uint64_t num_blocks) {
  Client::Options options;
  options.address = socket;
  absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect(options);
  if (!client.ok()) return client.status();
  DenseLayout layout;
  layout.model = "example";
  layout.layers = 4;
  layout.heads = 2;
  layout.head_dim = 64;
  layout.block_tokens = block_tokens;
  layout.num_blocks = num_blocks;
  layout.data_type = v1::DATA_TYPE_FLOAT32;
  const absl::StatusOr<uint64_t> bytes = BytesOf(layout);
  if (!bytes.ok()) return bytes.status();
  absl::StatusOr<SharedMemory> memory =
      SharedMemory::Create("/spectrumkv-example-" + name + "-" + std::to_string(::getpid()), *bytes);
  if (!memory.ok()) return memory.status();
  const absl::StatusOr<v1::PoolSchema> schema = DenseSchema(layout, memory->ToProto());
  if (!schema.ok()) return schema.status();
  absl::StatusOr<std::unique_ptr<Pool>> pool = (*client)->RegisterPool(*schema);
  if (!pool.ok()) return pool.status();
  return Worker{*std::move(client), layout, *std::move(memory), *std::move(pool)};
}

// Address of token `t` of a request whose block table is `blocks`.
float* Token(const Worker& worker, uint32_t layer, uint32_t plane, const std::vector<uint64_t>& blocks, uint32_t t) {
  const uint32_t block_tokens = worker.layout.block_tokens;
  const uint64_t offset = OffsetOf(worker.layout, layer, plane, blocks[t / block_tokens], t % block_tokens);
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

absl::StatusOr<double> RoundTrip(const std::string& prefill_socket, const std::string& decode_socket,
                                 const std::string& decode_peer, const v1::Policy& policy) {
  absl::StatusOr<Worker> prefill = StartWorker(prefill_socket, "prefill", 16, 32);
  if (!prefill.ok()) return prefill.status();
  absl::StatusOr<Worker> decode = StartWorker(decode_socket, "decode", 32, 16);
  if (!decode.ok()) return decode.status();

  // Block tables are the engines' own: these two share neither ids nor block size.
  std::vector<uint64_t> source, destination;
  for (uint64_t i = 0; i < BlocksFor(kTokens, 16); ++i) source.push_back(31 - i);
  for (uint64_t i = 0; i < BlocksFor(kTokens, 32); ++i) destination.push_back(2 * i);
  FillIn(*prefill, source);

  const std::string id = "example-" + std::to_string(::getpid());
  v1::ExpectRequest expect;
  expect.set_transfer_id(id);
  expect.set_token_count(kTokens);
  *expect.add_blocks() = Blocks(0, destination);
  // A daemon that is full says when to come back.
  absl::Status accepted =
      Retry([&](int64_t left_ms) { return decode->client->Expect(decode->pool.get(), expect, left_ms); });
  if (!accepted.ok()) return accepted;

  v1::SendRequest send;
  send.set_transfer_id(id);
  send.set_peer(decode_peer);
  send.set_token_count(kTokens);
  *send.add_blocks() = Blocks(0, source);
  *send.mutable_policy() = policy;
  accepted = Retry([&](int64_t left_ms) { return prefill->client->Send(prefill->pool.get(), send, left_ms); });
  if (!accepted.ok()) return accepted;

  v1::TransferKey key;
  key.set_transfer_id(id);
  key.set_role(v1::TRANSFER_ROLE_RECEIVER);
  const auto on_event = [](const v1::WatchTransferResponse& event) {
    if (event.has_layers_ready()) std::printf("layers ready: %u\n", event.layers_ready().layers());
  };
  const absl::StatusOr<v1::TransferReport> report = decode->client->Wait(key, kTimeoutMs, on_event);
  if (!report.ok()) return report.status();
  if (absl::Status status = OutcomeOf(*report); !status.ok()) return status;
  std::printf("committed: %llu KV bytes, %llu on the wire\n", static_cast<unsigned long long>(report->kv_bytes()),
              static_cast<unsigned long long>(report->wire_bytes()));
  const double error = RelativeError(*prefill, source, *decode, destination);
  for (Worker* worker : {&*prefill, &*decode}) {
    if (absl::Status status = worker->pool->Unregister(); !status.ok()) return status;
  }
  return error;
}

// A number, or auto:SECONDS: the daemon chooses the budget for that time.
v1::Policy PolicyOf(const std::string& budget) {
  if (budget.rfind("auto:", 0) == 0) return AutoBudget(std::atof(budget.c_str() + 5));
  v1::Policy policy;
  policy.set_budget(std::atof(budget.c_str()));
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
  const absl::StatusOr<double> error = RoundTrip(argv[1], argv[2], argv[3], PolicyOf(argc == 5 ? argv[4] : "0.5"));
  if (!error.ok()) {
    std::fprintf(stderr, "round_trip: %s %s\n", spectrumkv::client::ReasonOf(error.status()).c_str(),
                 std::string(error.status().message()).c_str());
    return 1;
  }
  std::printf("relative error: %.5f\n", *error);
  return 0;
}
