#include "client/cpp/client.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <fstream>
#include <system_error>
#include <thread>
#include <utility>

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/client_interceptor.h>

#include "client/cpp/deadline.h"
#include "client/cpp/status.h"

namespace spectrumkv::client {
namespace {

using Stub = v1::WorkerService::Stub;

constexpr int64_t kRewatchMs = 100;

template <typename Request, typename Response>
using Method = grpc::Status (Stub::*)(grpc::ClientContext*, const Request&, Response*);

template <typename Request, typename Response>
absl::StatusOr<Response> Call(Stub* stub, Method<Request, Response> method, const Request& request,
                              int64_t timeout_ms) {
  grpc::ClientContext context;
  context.set_deadline(In(timeout_ms));
  Response response;
  const absl::Status status = FromGrpc((stub->*method)(&context, request, &response));
  if (!status.ok()) return status;
  return response;
}

template <typename Request, typename Response>
absl::StatusOr<Response> CallWithPool(Stub* stub, Method<Request, Response> method, Pool* pool, Request request,
                                      int64_t timeout_ms) {
  for (bool again = false;; again = true) {
    const uint64_t generation = pool->generation();
    *request.mutable_pool() = pool->ref();
    absl::StatusOr<Response> response = Call(stub, method, request, timeout_ms);
    if (response.ok() || again || ReasonOf(response.status()) != "STALE_EPOCH") return response;
    if (const absl::Status status = pool->Renew(generation); !status.ok()) return status;
  }
}

int64_t TimeoutOf(const Client::Options& options, int64_t timeout_ms) {
  return timeout_ms > 0 ? timeout_ms : options.call_timeout_ms;
}

// Adds "authorization: Bearer TOKEN" to every call.
class BearerToken final : public grpc::experimental::Interceptor {
 public:
  explicit BearerToken(const std::string& value) : value_(value) {}
  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(grpc::experimental::InterceptionHookPoints::PRE_SEND_INITIAL_METADATA)) {
      methods->GetSendInitialMetadata()->insert({"authorization", value_});
    }
    methods->Proceed();
  }

 private:
  const std::string& value_;
};

class BearerTokenFactory final : public grpc::experimental::ClientInterceptorFactoryInterface {
 public:
  explicit BearerTokenFactory(const std::string& token) : value_("Bearer " + token) {}
  grpc::experimental::Interceptor* CreateClientInterceptor(grpc::experimental::ClientRpcInfo*) override {
    return new BearerToken(value_);
  }

 private:
  const std::string value_;
};

absl::StatusOr<std::string> ReadToken(const std::string& path) {
  std::ifstream file(path);
  std::string token;
  if (std::getline(file, token)) return token;
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_FILE",
                   "token file " + path + " cannot be read or is empty");
}

}  // namespace

std::string TargetOf(const std::string& address) { return address.rfind('/', 0) == 0 ? "unix:" + address : address; }

absl::Status Unreachable(const std::string& address) {
  std::string words = "no daemon answers at " + address;
  sockaddr_un name = {};
  name.sun_family = AF_UNIX;
  if (address.rfind('/', 0) == 0 && address.size() < sizeof(name.sun_path)) {
    address.copy(name.sun_path, sizeof(name.sun_path) - 1);
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && connect(fd, reinterpret_cast<const sockaddr*>(&name), sizeof(name)) != 0) {
      words += ": " + std::generic_category().message(errno);
    }
    if (fd >= 0) close(fd);
  }
  return absl::UnavailableError(words);
}

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const Options& options) {
  std::vector<std::unique_ptr<grpc::experimental::ClientInterceptorFactoryInterface>> interceptors;
  if (!options.token_file.empty()) {
    absl::StatusOr<std::string> token = ReadToken(options.token_file);
    if (!token.ok()) return token.status();
    interceptors.push_back(std::make_unique<BearerTokenFactory>(*std::move(token)));
  }
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  // A worker's own channel: a second client of this process does not share its fate or its locks.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  const auto channel = grpc::experimental::CreateCustomChannelWithInterceptors(
      TargetOf(options.address), grpc::InsecureChannelCredentials(), arguments, std::move(interceptors));
  if (!channel->WaitForConnected(In(options.connect_timeout_ms))) {
    return Unreachable(options.address);
  }
  std::shared_ptr<Stub> stub = v1::WorkerService::NewStub(channel);
  return std::unique_ptr<Client>(new Client(std::move(stub), options));
}

absl::StatusOr<std::unique_ptr<Pool>> Client::RegisterPool(const v1::PoolSchema& schema, int64_t lease_ttl_ms) {
  return Pool::Register(stub_, schema, lease_ttl_ms, options_.call_timeout_ms);
}

absl::StatusOr<v1::PlanResponse> Client::Plan(Pool* pool, v1::PlanRequest request, int64_t timeout_ms) {
  return CallWithPool(stub_.get(), &Stub::Plan, pool, std::move(request), TimeoutOf(options_, timeout_ms));
}

absl::Status Client::Send(Pool* pool, v1::SendRequest request, int64_t timeout_ms) {
  return CallWithPool(stub_.get(), &Stub::Send, pool, std::move(request), TimeoutOf(options_, timeout_ms)).status();
}

absl::Status Client::Publish(Pool* pool, v1::PublishRequest request, int64_t timeout_ms) {
  return CallWithPool(stub_.get(), &Stub::Publish, pool, std::move(request), TimeoutOf(options_, timeout_ms)).status();
}

absl::Status Client::Expect(Pool* pool, v1::ExpectRequest request, int64_t timeout_ms) {
  return CallWithPool(stub_.get(), &Stub::Expect, pool, std::move(request), TimeoutOf(options_, timeout_ms)).status();
}

absl::Status Client::Fetch(Pool* pool, v1::FetchRequest request, int64_t timeout_ms) {
  return CallWithPool(stub_.get(), &Stub::Fetch, pool, std::move(request), TimeoutOf(options_, timeout_ms)).status();
}

absl::Status Client::Advance(const std::string& transfer_id, uint32_t layers, uint32_t tokens,
                             const std::vector<float>& scores, uint32_t part_index) {
  v1::AdvanceRequest request;
  request.set_part_index(part_index);
  request.set_transfer_id(transfer_id);
  request.set_layers(layers);
  request.set_tokens(tokens);
  request.mutable_scores()->Add(scores.begin(), scores.end());
  return Call(stub_.get(), &Stub::Advance, request, options_.call_timeout_ms).status();
}

absl::Status Client::Advance(const std::string& transfer_id, uint32_t layers, uint32_t tokens,
                             const v1::RecentQueries& queries, uint32_t part_index) {
  v1::AdvanceRequest request;
  request.set_part_index(part_index);
  request.set_transfer_id(transfer_id);
  request.set_layers(layers);
  request.set_tokens(tokens);
  *request.mutable_queries() = queries;
  return Call(stub_.get(), &Stub::Advance, request, options_.call_timeout_ms).status();
}

absl::StatusOr<v1::TransferReport> Client::Wait(const v1::TransferKey& key, int64_t timeout_ms,
                                                const EventCallback& on_event) {
  v1::WatchTransferRequest request;
  *request.mutable_transfer() = key;
  return WatchToTheEnd(request, timeout_ms, on_event);
}

absl::StatusOr<v1::TransferReport> Client::WaitExact(const v1::TransferKey& key, int64_t timeout_ms,
                                                     const EventCallback& on_event) {
  v1::WatchTransferRequest request;
  *request.mutable_transfer() = key;
  request.set_until_exact(true);
  return WatchToTheEnd(request, timeout_ms, on_event);
}

absl::StatusOr<v1::TransferReport> Client::WatchToTheEnd(const v1::WatchTransferRequest& request, int64_t timeout_ms,
                                                         const EventCallback& on_event) {
  const auto deadline = In(timeout_ms);
  for (;;) {
    grpc::ClientContext context;
    context.set_deadline(deadline);
    const auto stream = stub_->WatchTransfer(&context, request);
    v1::WatchTransferResponse event;
    v1::TransferReport report;
    bool over = false;
    while (stream->Read(&event)) {
      if (event.has_terminal()) {
        report = event.terminal();
        over = !request.until_exact() || report.state() != v1::TRANSFER_STATE_COMMITTED;
      } else if (event.has_exact() || event.has_released()) {
        report = event.has_exact() ? event.exact() : event.released();
        over = true;
      } else if (on_event) {
        on_event(event);
      }
    }
    const absl::Status status = FromGrpc(stream->Finish());
    if (over) return report;
    const bool broken = status.ok() || status.code() == absl::StatusCode::kUnavailable;
    if (!broken || std::chrono::system_clock::now() + std::chrono::milliseconds(kRewatchMs) >= deadline) {
      return status.ok() ? absl::UnavailableError("the watch ended without a terminal event") : status;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(kRewatchMs));
  }
}

absl::StatusOr<v1::RefineResponse> Client::Refine(const v1::RefineRequest& request) {
  return Call(stub_.get(), &Stub::Refine, request, options_.call_timeout_ms);
}

absl::StatusOr<v1::ApplyRefinementResponse> Client::ApplyRefinement(const std::string& refine_id, uint64_t max_bytes,
                                                                    const std::string& read_event) {
  v1::ApplyRefinementRequest request;
  request.set_refine_id(refine_id);
  request.set_max_bytes(max_bytes);
  request.set_read_event(read_event);
  return Call(stub_.get(), &Stub::ApplyRefinement, request, options_.call_timeout_ms);
}

absl::StatusOr<v1::TransferReport> Client::Get(const v1::TransferKey& key) {
  v1::GetTransferRequest request;
  *request.mutable_transfer() = key;
  auto response = Call(stub_.get(), &Stub::GetTransfer, request, options_.call_timeout_ms);
  if (!response.ok()) return response.status();
  return response->report();
}

absl::StatusOr<v1::TransferReport> Client::Cancel(const v1::TransferKey& key) {
  v1::CancelTransferRequest request;
  *request.mutable_transfer() = key;
  auto response = Call(stub_.get(), &Stub::CancelTransfer, request, options_.call_timeout_ms);
  if (!response.ok()) return response.status();
  return response->report();
}

absl::Status Client::Release(const v1::TransferKey& key) {
  v1::ReleaseTransferRequest request;
  *request.mutable_transfer() = key;
  return Call(stub_.get(), &Stub::ReleaseTransfer, request, options_.call_timeout_ms).status();
}

absl::StatusOr<bool> Client::ReleaseToCache(const v1::TransferKey& key) {
  v1::ReleaseTransferRequest request;
  *request.mutable_transfer() = key;
  request.set_keep_in_cache(true);
  const auto response = Call(stub_.get(), &Stub::ReleaseTransfer, request, options_.call_timeout_ms);
  if (!response.ok()) return response.status();
  return response->kept_in_cache();
}

absl::Status Client::ReportFirstToken(const v1::TransferKey& key, double seconds) {
  v1::ReportFirstTokenRequest request;
  *request.mutable_transfer() = key;
  request.set_time_to_first_token_seconds(seconds);
  return Call(stub_.get(), &Stub::ReportFirstToken, request, options_.call_timeout_ms).status();
}

absl::StatusOr<v1::PutBlocksResponse> Client::PutBlocks(const v1::PoolRef& pool, const BlockSource& next,
                                                        int64_t timeout_ms) {
  grpc::ClientContext context;
  context.set_deadline(In(TimeoutOf(options_, timeout_ms)));
  v1::PutBlocksResponse response;
  const auto writer = stub_->PutBlocks(&context, &response);
  bool first = true;
  for (v1::PutBlocksRequest message; next(&message); message.Clear()) {
    if (first) *message.mutable_pool() = pool;
    first = false;
    if (!writer->Write(message)) break;  // Finish says why
  }
  writer->WritesDone();
  const absl::Status status = FromGrpc(writer->Finish());
  if (!status.ok()) return status;
  return response;
}

absl::Status Client::GetBlocks(const v1::GetBlocksRequest& request, const BlockSink& sink, int64_t timeout_ms) {
  grpc::ClientContext context;
  context.set_deadline(In(TimeoutOf(options_, timeout_ms)));
  const auto reader = stub_->GetBlocks(&context, request);
  v1::GetBlocksResponse message;
  absl::Status refused;
  while (refused.ok() && reader->Read(&message)) {
    for (const v1::BlockData& block : message.blocks()) {
      if (refused = sink(block); !refused.ok()) break;
    }
  }
  if (!refused.ok()) context.TryCancel();
  const absl::Status status = FromGrpc(reader->Finish());
  return refused.ok() ? status : refused;
}

absl::Status OutcomeOf(const v1::TransferReport& report) {
  if (report.state() == v1::TRANSFER_STATE_COMMITTED) return absl::OkStatus();
  const auto code = static_cast<absl::StatusCode>(report.code());
  const std::string message = report.message().empty()
                                  ? "transfer " + report.transfer_id() + " is " + v1::TransferState_Name(report.state())
                                  : report.message();
  return MakeError(code == absl::StatusCode::kOk ? absl::StatusCode::kUnknown : code, report.reason(), message);
}

}  // namespace spectrumkv::client
