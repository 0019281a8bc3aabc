// A daemon that takes connections and calls and answers none, as one that was stopped (SIGSTOP) does.
#pragma once

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>

#include "spectrumkv/v1/admin_service.grpc.pb.h"
#include "spectrumkv/v1/worker_service.grpc.pb.h"

namespace spectrumkv {

class SilentDaemon {
 public:
  SilentDaemon() {
    char folder[] = "/tmp/spectrumkv-silent-XXXXXX";
    if (::mkdtemp(folder) == nullptr) std::abort();
    folder_ = folder;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("unix:" + socket(), grpc::InsecureServerCredentials());
    builder.RegisterService(&worker_);
    builder.RegisterService(&admin_);
    queue_ = builder.AddCompletionQueue();
    server_ = builder.BuildAndStart();
  }
  ~SilentDaemon() {
    server_->Shutdown(std::chrono::system_clock::now());
    queue_->Shutdown();
    void* tag = nullptr;
    for (bool ok = false; queue_->Next(&tag, &ok);) continue;
    ::unlink(socket().c_str());
    ::rmdir(folder_.c_str());
  }

  // Of workers and of admins.
  std::string socket() const { return folder_ + "/daemon.sock"; }

  // Answers the next RegisterPool, which `call` makes.
  template <typename Call>
  auto WhileItRegistersOne(const Call& call) {
    std::thread answering([this] {
      grpc::ServerContext context;
      v1::RegisterPoolRequest request;
      v1::RegisterPoolResponse response;
      grpc::ServerAsyncResponseWriter<v1::RegisterPoolResponse> writer(&context);
      worker_.RequestRegisterPool(&context, &request, &writer, queue_.get(), queue_.get(), this);
      AwaitStep();
      response.mutable_pool()->set_pool_id("pool");
      response.mutable_pool()->set_epoch(1);
      response.set_lease_ttl_ms(60000);
      writer.Finish(response, grpc::Status::OK, this);
      AwaitStep();
    });
    auto result = call();
    answering.join();
    return result;
  }

  // Answers the next UnregisterPool, which `call` makes; milliseconds that its caller would have waited.
  template <typename Call>
  int64_t DeadlineOfUnregister(const Call& call) {
    int64_t left_ms = 0;
    std::thread answering([this, &left_ms] {
      grpc::ServerContext context;
      v1::UnregisterPoolRequest request;
      grpc::ServerAsyncResponseWriter<v1::UnregisterPoolResponse> writer(&context);
      worker_.RequestUnregisterPool(&context, &request, &writer, queue_.get(), queue_.get(), this);
      AwaitStep();
      left_ms =
          std::chrono::duration_cast<std::chrono::milliseconds>(context.deadline() - std::chrono::system_clock::now())
              .count();
      writer.Finish({}, grpc::Status::OK, this);
      AwaitStep();
    });
    call();
    answering.join();
    return left_ms;
  }

 private:
  void AwaitStep() {
    void* tag = nullptr;
    bool ok = false;
    queue_->Next(&tag, &ok);
  }

  std::string folder_;
  // Calls that nobody asks for wait.
  v1::WorkerService::AsyncService worker_;
  v1::AdminService::AsyncService admin_;
  std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace spectrumkv
