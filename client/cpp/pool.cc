#include "client/cpp/pool.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <utility>

#include "client/cpp/deadline.h"
#include "client/cpp/status.h"

namespace spectrumkv::client {
namespace {

constexpr int64_t kFirstRetryMs = 50, kMaxRetryMs = 2000;
constexpr int64_t kMaxAskedMs = 60'000;  // of a delay that the daemon asks for
// What the daemon takes an UnregisterPool of timeout_ms 0 for (RequestDefaults::unregister_timeout_ms).
constexpr int64_t kDaemonUnregisterMs = 60'000;

std::string RandomId() {
  std::random_device device;
  std::string id = "cpp-";
  for (int i = 0; i < 4; ++i) id += std::to_string(device()) + (i < 3 ? "." : "");
  return id;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Pool>> Pool::Register(std::shared_ptr<Stub> stub, const v1::PoolSchema& schema,
                                                     int64_t lease_ttl_ms, int64_t call_timeout_ms) {
  std::unique_ptr<Pool> pool(new Pool(std::move(stub), schema, lease_ttl_ms, call_timeout_ms));
  if (const absl::Status status = pool->RegisterNow(); !status.ok()) return status;
  pool->thread_ = std::thread([raw = pool.get()] { raw->Run(); });
  return pool;
}

Pool::Pool(std::shared_ptr<Stub> stub, const v1::PoolSchema& schema, int64_t lease_ttl_ms, int64_t call_timeout_ms)
    : stub_(std::move(stub)),
      schema_(schema),
      asked_lease_ttl_ms_(lease_ttl_ms),
      call_timeout_ms_(call_timeout_ms),
      request_id_(RandomId()) {}

Pool::~Pool() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Stop();
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Pool::Stop() {
  stopping_ = true;
  for (const auto& context : {hold_context_, register_context_}) {
    if (context) context->TryCancel();
  }
}

v1::PoolRef Pool::ref() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return ref_;
}

uint64_t Pool::generation() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return generation_;
}

absl::Status Pool::status() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return status_;
}

bool Pool::WaitHeld(int64_t timeout_ms) const {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [this] { return held_ || stopping_; }) && held_;
}

absl::Status Pool::RegisterNow() {
  v1::RegisterPoolRequest request;
  // A new number each time: an id that is used again would answer the pool that is no more.
  request.set_request_id(request_id_ + ":" + std::to_string(generation() + 1));
  *request.mutable_schema() = schema_;
  request.set_lease_ttl_ms(static_cast<uint64_t>(asked_lease_ttl_ms_));
  v1::RegisterPoolResponse response;
  const auto context = std::make_shared<grpc::ClientContext>();
  context->set_deadline(In(call_timeout_ms_));
  const absl::Status stopped =
      MakeError(absl::StatusCode::kFailedPrecondition, "UNREGISTERED", "the pool was given up");
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) return stopped;
    register_context_ = context;
  }
  const absl::Status status = FromGrpc(stub_->RegisterPool(context.get(), request, &response));
  const std::lock_guard<std::mutex> lock(mutex_);
  register_context_ = nullptr;
  if (stopping_) return stopped;  // what was registered all the same ends with its lease: nobody holds it
  status_ = status;
  if (!status.ok()) return status;
  ref_ = response.pool();
  lease_ttl_ms_ = static_cast<int64_t>(response.lease_ttl_ms());
  ++generation_;
  return absl::OkStatus();
}

absl::Status Pool::Renew(uint64_t seen_generation) {
  const std::lock_guard<std::mutex> registering(register_mutex_);
  if (generation() != seen_generation) return absl::OkStatus();
  if (const absl::Status status = RegisterNow(); !status.ok()) return status;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (hold_context_) hold_context_->TryCancel();  // the thread then holds the new one
  return absl::OkStatus();
}

absl::Status Pool::Unregister(int64_t timeout_ms) {
  v1::UnregisterPoolRequest request;
  *request.mutable_pool() = ref();
  request.set_timeout_ms(static_cast<uint64_t>(timeout_ms));
  v1::UnregisterPoolResponse response;
  grpc::ClientContext context;
  context.set_deadline(In(timeout_ms > 0 ? timeout_ms : kDaemonUnregisterMs, call_timeout_ms_));
  const absl::Status status = FromGrpc(stub_->UnregisterPool(&context, request, &response));
  if (!status.ok()) return status;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Stop();
    status_ = MakeError(absl::StatusCode::kFailedPrecondition, "UNREGISTERED", "the pool was unregistered");
  }
  changed_.notify_all();
  return absl::OkStatus();
}

void Pool::Run() {
  int64_t retry_ms = kFirstRetryMs;
  for (;;) {
    v1::PoolRef ref;
    uint64_t held_generation = 0;
    std::shared_ptr<grpc::ClientContext> context;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (stopping_) return;
      context = hold_context_ = std::make_shared<grpc::ClientContext>();
      ref = ref_;
      held_generation = generation_;
    }
    grpc::Status status;
    const std::string event = Hold(context.get(), ref, &status);
    {
      std::unique_lock<std::mutex> lock(mutex_);
      hold_context_ = nullptr;
      if (stopping_) return;
      if (generation_ != held_generation) {  // Renew was first
        retry_ms = kFirstRetryMs;
        continue;
      }
      status_ = event.empty() ? FromGrpc(status)
                              : MakeError(absl::StatusCode::kFailedPrecondition, event, "the daemon ended the pool");
      if (status_.ok()) status_ = MakeError(absl::StatusCode::kUnavailable, "HOLD_ENDED", "the daemon ended the hold");
      if (event == "UNREGISTERED") return;
      changed_.wait_for(lock, std::chrono::milliseconds(retry_ms), [this] { return stopping_; });
    }
    const absl::Status renewed = Renew(held_generation);
    retry_ms = renewed.ok() ? kFirstRetryMs
                            : std::max(std::min(retry_ms * 2, kMaxRetryMs),
                                       std::min(RetryAfterMsOf(renewed), kMaxAskedMs));
  }
}

std::string Pool::Hold(grpc::ClientContext* context, const v1::PoolRef& ref, grpc::Status* status) {
  const auto stream = stub_->HoldPool(context);
  bool ended = false;
  std::thread pings([&] { Ping(stream.get(), ref, &ended); });
  v1::HoldPoolResponse response;
  std::string event;
  while (stream->Read(&response)) {
    if (!response.event().empty()) event = response.event();
    const std::lock_guard<std::mutex> lock(mutex_);
    if (response.lease_ttl_ms() > 0) lease_ttl_ms_ = static_cast<int64_t>(response.lease_ttl_ms());
    if (!std::exchange(held_, true)) changed_.notify_all();
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ended = true;
    held_ = false;
  }
  changed_.notify_all();
  pings.join();
  *status = stream->Finish();
  return event;
}

void Pool::Ping(grpc::ClientReaderWriter<v1::HoldPoolRequest, v1::HoldPoolResponse>* stream, const v1::PoolRef& ref,
                const bool* ended) {
  v1::HoldPoolRequest request;
  *request.mutable_pool() = ref;
  for (;;) {
    if (!stream->Write(request)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    const auto period = std::chrono::milliseconds(std::max<int64_t>(lease_ttl_ms_ / 3, 10));
    if (changed_.wait_for(lock, period, [&] { return *ended || stopping_; })) return;
  }
}

}  // namespace spectrumkv::client
