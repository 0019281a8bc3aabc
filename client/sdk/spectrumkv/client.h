// A worker's way to the spectrumkvd beside it. client/examples/cpp/round_trip.cc is a whole program.
//
//   auto client = spectrumkv::Client::Connect(options);                     // options.address: the daemon's socket
//   auto memory = spectrumkv::SharedMemory::Create("", *spectrumkv::BytesOf(layout));
//   auto pool = client->Register(*spectrumkv::DenseCache(layout, memory->segment()));
//   auto status = client->Send(*pool, source);                             // source.peer: the other daemon
//   auto report = client->Wait(source.transfer_id);                        // report->outcome says how it ended
//
// C++17. Neither gRPC nor Protobuf nor Abseil is in these headers: they are behind the library. Nothing throws, except
// std::bad_alloc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "spectrumkv/cache.h"
#include "spectrumkv/status.h"
#include "spectrumkv/transfer.h"

namespace spectrumkv {

// A registered pool: keeps its lease with a thread of its own, and registers again when the daemon has restarted.
// Thread-safe; movable. The memory it describes must outlive it; it may outlive the client.
class SPECTRUMKV_EXPORT Pool {
 public:
  Pool(Pool&&) noexcept;
  Pool& operator=(Pool&&) noexcept;
  // Lets go of the pool: the daemon fails what is still under way on it. Unregister first where that matters.
  ~Pool();

  std::string id() const;
  // Times it has been registered. A change means that transfers and reservations made before are gone, and that memory
  // of the daemon is new and zeroed.
  uint64_t generation() const;
  // OK while the lease is held; otherwise why not, while the thread keeps trying to register again.
  Status status() const;
  // Waits until the daemon would notice at once that this process died. False where that takes longer.
  bool WaitHeld(int64_t timeout_ms) const;
  // Waits until no transfer touches the pool, then gives it up. 0: the daemon's default.
  Status Unregister(int64_t timeout_ms = 0);

 private:
  friend class Client;
  struct Impl;
  explicit Pool(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// One block of one tensor, dense: [block_tokens, head_count, head_dim] in the pool's data type.
struct Block {
  uint32_t group = 0;
  uint32_t layer = 0;
  uint32_t plane = 0;  // 0: K, 1: V
  uint64_t block = 0;
  const void* data = nullptr;  // the caller's in Put; in Get valid during the call alone
  size_t size_bytes = 0;
};

struct WaitOptions {
  int64_t timeout_ms = 30000;
  Role role = Role::kUnspecified;
  // Called from the thread that waits.
  std::function<void(uint32_t layers)> on_layers_ready;
  std::function<void(const Progress&)> on_progress;
};

// Thread-safe; movable. Errors are the daemon's, or UNAVAILABLE without a reason where it cannot be reached. Calls that
// take a pool and find that the daemon has restarted register it again and try once more.
class SPECTRUMKV_EXPORT Client {
 public:
  struct Options {
    // A path of a Unix socket, or host:port.
    std::string address = "/run/spectrumkv/worker.sock";
    // Of a host:port: the file that the daemon's worker.tcp_token_file names.
    std::string token_file;
    int64_t connect_timeout_ms = 5000;
    // Of each call that does not wait for a transfer.
    int64_t call_timeout_ms = 30000;
  };

  static Result<Client> Connect(const Options& options);
  Client(Client&&) noexcept;
  Client& operator=(Client&&) noexcept;
  ~Client();

  // lease_ttl_ms 0: the daemon's default.
  Result<Pool> Register(const Cache& cache, int64_t lease_ttl_ms = 0);

  // Bytes in and out of a pool through the daemon; the only way to memory of the daemon. Put gives the bytes written; a
  // sink that answers an error ends Get with it. layers empty: all of the group. Each within call_timeout_ms as a whole,
  // the sink's time included.
  Result<uint64_t> Put(const Pool& pool, const std::vector<Block>& blocks);
  Status Get(const Pool& pool, uint32_t group, const std::vector<uint32_t>& layers,
             const std::vector<uint64_t>& blocks, const std::function<Status(const Block&)>& sink);

  Result<PlanAnswer> Plan(Pool& pool, const Source& source);
  // Push: the decode worker expects, the prefill worker sends. Pull: the prefill worker publishes, the decode worker
  // fetches. All answer at once.
  Status Send(Pool& pool, const Source& source);
  Status Expect(Pool& pool, const Destination& destination);
  Status Publish(Pool& pool, const Source& source);
  Status Fetch(Pool& pool, const Destination& destination);
  // "Layers < layers are written for tokens < tokens." scores: importance of those tokens, or empty.
  Status Advance(const std::string& transfer_id, uint32_t layers, uint32_t tokens,
                 const std::vector<float>& scores = {}, uint32_t part_index = 0);

  // Until the transfer is terminal: its report, whatever the state. DEADLINE_EXCEEDED after timeout_ms; the transfer
  // goes on. A watch that breaks is opened again.
  Result<Report> Wait(const std::string& transfer_id, const WaitOptions& options = {});
  Result<Report> GetTransfer(const std::string& transfer_id, Role role = Role::kUnspecified);
  // Returns when no byte can land any more. The report says kCommitted where the cancel came too late.
  Result<Report> Cancel(const std::string& transfer_id, Role role = Role::kUnspecified);
  Status Release(const std::string& transfer_id, Role role = Role::kUnspecified);
  Status ReportFirstToken(const std::string& transfer_id, double seconds, Role role = Role::kUnspecified);

 private:
  struct Impl;
  explicit Client(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace spectrumkv
