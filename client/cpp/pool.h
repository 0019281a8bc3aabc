// A registered pool: keeps its lease with a thread of its own, and registers again when the daemon has restarted.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "spectrumkv/v1/worker_service.grpc.pb.h"

namespace spectrumkv::client {

// Made by Client::RegisterPool. Thread-safe. The memory it describes must outlive it.
class Pool {
 public:
  using Stub = v1::WorkerService::Stub;

  static absl::StatusOr<std::unique_ptr<Pool>> Register(std::shared_ptr<Stub> stub, const v1::PoolSchema& schema,
                                                        int64_t lease_ttl_ms, int64_t call_timeout_ms);
  // Lets go of the pool: the daemon fails what is still under way on it. Unregister first where that matters. Waits for
  // no answer of the daemon.
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // What requests name the pool by; changes when it is registered again.
  v1::PoolRef ref() const;
  // Times it has been registered. A change means that transfers and reservations made before are gone, and that memory
  // of the daemon (daemon_owned) is new and zeroed.
  uint64_t generation() const;
  // OK while the lease is held; otherwise why not, while the thread keeps trying to register again.
  absl::Status status() const;

  // Waits until the daemon has answered this pool's stream: from then on it notices at once when this process dies;
  // before, and while the stream is broken, only the end of the lease tells it. False where that takes longer.
  bool WaitHeld(int64_t timeout_ms) const;

  // Registers again, unless somebody has since `seen_generation`. For calls that were answered STALE_EPOCH.
  // FAILED_PRECONDITION UNREGISTERED once it has been unregistered.
  absl::Status Renew(uint64_t seen_generation);

  // Waits until no transfer touches the pool, then gives it up. timeout_ms 0: the daemon's default, a minute.
  // DEADLINE_EXCEEDED after that time, and call_timeout_ms more where the daemon does not answer; the pool stays.
  absl::Status Unregister(int64_t timeout_ms = 0);

 private:
  Pool(std::shared_ptr<Stub> stub, const v1::PoolSchema& schema, int64_t lease_ttl_ms, int64_t call_timeout_ms);

  absl::Status RegisterNow();
  // No registration and no hold from here on. REQUIRES mutex_.
  void Stop();
  // The thread: one Hold stream after the other.
  void Run();
  // Until the stream ends; gives the daemon's last event, "" for a broken stream.
  std::string Hold(grpc::ClientContext* context, const v1::PoolRef& ref, grpc::Status* status);
  void Ping(grpc::ClientReaderWriter<v1::HoldPoolRequest, v1::HoldPoolResponse>* stream, const v1::PoolRef& ref,
            const bool* ended);

  const std::shared_ptr<Stub> stub_;
  const v1::PoolSchema schema_;
  const int64_t asked_lease_ttl_ms_;
  const int64_t call_timeout_ms_;
  const std::string request_id_;  // of this object; each registration appends its number

  std::mutex register_mutex_;  // one registration at a time; taken before mutex_
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  v1::PoolRef ref_;
  uint64_t generation_ = 0;
  int64_t lease_ttl_ms_ = 0;
  absl::Status status_;
  bool stopping_ = false;
  bool held_ = false;  // the stream now open was answered
  // Of the stream now open and of the registration under way, to cancel them.
  std::shared_ptr<grpc::ClientContext> hold_context_, register_context_;
  std::thread thread_;
};

}  // namespace spectrumkv::client
