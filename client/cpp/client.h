// A worker's way to the daemon beside it.
//
//   absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect({.address = "/run/spectrumkv/worker.sock"});
//   absl::StatusOr<SharedMemory> memory = SharedMemory::Create("/engine-kv", bytes);
//   absl::StatusOr<std::unique_ptr<Pool>> pool = (*client)->RegisterPool(*DenseSchema(layout, memory->ToProto()));
//   v1::SendRequest request;  // transfer_id, peer, token_count, blocks, policy; the pool is filled in
//   absl::Status status = (*client)->Send(pool->get(), request);
//   absl::StatusOr<v1::TransferReport> report = (*client)->Wait(key, 30000);
//
// Calls that take a Pool fill in its reference; answered STALE_EPOCH (the daemon has restarted), they register the pool
// again and try once more. What is refused for want of room is the caller's to repeat: Retry in retry.h. Errors are
// those of the daemon (ReasonOf in status.h), or UNAVAILABLE without a reason where it cannot be reached.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/pool.h"
#include "spectrumkv/v1/worker_service.grpc.pb.h"

namespace spectrumkv::client {

// Thread-safe.
class Client {
 public:
  struct Options {
    // A path of a Unix socket, or host:port.
    std::string address = "/run/spectrumkv/worker.sock";
    // Of a host:port: the file that the daemon's worker.tcp_token_file names; "": none.
    std::string token_file;
    int64_t connect_timeout_ms = 5000;
    // Of each call that does not wait for a transfer.
    int64_t call_timeout_ms = 30000;
  };

  // UNAVAILABLE where no daemon answers within connect_timeout_ms; INVALID_ARGUMENT BAD_FILE for a token_file that
  // cannot be read.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const Options& options);

  // lease_ttl_ms 0: the daemon's default. The pool holds its own share of the connection and may outlive the client.
  absl::StatusOr<std::unique_ptr<Pool>> RegisterPool(const v1::PoolSchema& schema, int64_t lease_ttl_ms = 0);

  // timeout_ms 0: Options::call_timeout_ms. It does not count the registering after a STALE_EPOCH.
  absl::StatusOr<v1::PlanResponse> Plan(Pool* pool, v1::PlanRequest request, int64_t timeout_ms = 0);
  absl::Status Send(Pool* pool, v1::SendRequest request, int64_t timeout_ms = 0);
  absl::Status Publish(Pool* pool, v1::PublishRequest request, int64_t timeout_ms = 0);
  absl::Status Expect(Pool* pool, v1::ExpectRequest request, int64_t timeout_ms = 0);
  absl::Status Fetch(Pool* pool, v1::FetchRequest request, int64_t timeout_ms = 0);

  // "Layers < layers are written for tokens < tokens." scores: importance of tokens 0..tokens-1, or empty.
  absl::Status Advance(const std::string& transfer_id, uint32_t layers, uint32_t tokens,
                       const std::vector<float>& scores = {}, uint32_t part_index = 0);
  // With the last queries of written layers, of a transfer opened with IMPORTANCE_SOURCE_RECENT_QUERIES.
  absl::Status Advance(const std::string& transfer_id, uint32_t layers, uint32_t tokens,
                       const v1::RecentQueries& queries, uint32_t part_index = 0);

  // Sees LayersReady and Progress. Called from the thread that waits.
  using EventCallback = std::function<void(const v1::WatchTransferResponse& event)>;
  // Until the transfer is terminal: its report, whatever the state (OutcomeOf below). DEADLINE_EXCEEDED after
  // timeout_ms; the transfer goes on. A broken watch is opened again.
  absl::StatusOr<v1::TransferReport> Wait(const v1::TransferKey& key, int64_t timeout_ms,
                                          const EventCallback& on_event = nullptr);
  // As Wait; and of one that has committed, until refinement is over: the destination equals the source (`exact`), or
  // nothing is retained any more. At the sender: the source's blocks are not read from then on.
  absl::StatusOr<v1::TransferReport> WaitExact(const v1::TransferKey& key, int64_t timeout_ms,
                                               const EventCallback& on_event = nullptr);

  // Better precision for what has arrived (docs/refinement.md): a transfer `refine_id` of its own, and what it has received
  // into the blocks, when nobody reads them. No cells, no transfer.
  absl::StatusOr<v1::RefineResponse> Refine(const v1::RefineRequest& request);
  // read_event: of blocks on a GPU, a CUDA IPC event behind the last reads; empty: nobody reads them.
  absl::StatusOr<v1::ApplyRefinementResponse> ApplyRefinement(const std::string& refine_id, uint64_t max_bytes = 0,
                                                              const std::string& read_event = {});

  absl::StatusOr<v1::TransferReport> Get(const v1::TransferKey& key);
  // Returns when no byte can land any more. The report says COMMITTED where the cancel came too late.
  absl::StatusOr<v1::TransferReport> Cancel(const v1::TransferKey& key);
  absl::Status Release(const v1::TransferKey& key);
  // Of a retained source: its blocks are the worker's again; true: its words are in the daemon's cache, and may be asked for.
  absl::StatusOr<bool> ReleaseToCache(const v1::TransferKey& key);
  absl::Status ReportFirstToken(const v1::TransferKey& key, double seconds);

  // Of both: timeout_ms 0: Options::call_timeout_ms. It counts all blocks, and the time that `next` or `sink` takes.
  // Writes blocks; `next` fills in a message and says whether there was one. Not repeated by itself.
  using BlockSource = std::function<bool(v1::PutBlocksRequest* message)>;
  absl::StatusOr<v1::PutBlocksResponse> PutBlocks(const v1::PoolRef& pool, const BlockSource& next,
                                                  int64_t timeout_ms = 0);
  // Reads blocks; `sink` sees each, and ends the call with an error of its own.
  using BlockSink = std::function<absl::Status(const v1::BlockData& block)>;
  absl::Status GetBlocks(const v1::GetBlocksRequest& request, const BlockSink& sink, int64_t timeout_ms = 0);

  // For calls that this class does not wrap.
  v1::WorkerService::Stub& stub() { return *stub_; }

 private:
  absl::StatusOr<v1::TransferReport> WatchToTheEnd(const v1::WatchTransferRequest& request, int64_t timeout_ms,
                                                   const EventCallback& on_event);
  Client(std::shared_ptr<v1::WorkerService::Stub> stub, const Options& options)
      : stub_(std::move(stub)), options_(options) {}

  const std::shared_ptr<v1::WorkerService::Stub> stub_;
  const Options options_;
};

// The gRPC target of a path ("unix:...") or host:port.
std::string TargetOf(const std::string& address);
// UNAVAILABLE "no daemon answers at ADDRESS", with the system's reason where it is a socket's path.
absl::Status Unreachable(const std::string& address);

// OK for COMMITTED; otherwise the report's code and reason as an error.
absl::Status OutcomeOf(const v1::TransferReport& report);

}  // namespace spectrumkv::client
