// WorkerService over a real gRPC channel, with a transfer manager that the test turns.
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include <grpcpp/grpcpp.h>
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backends.h"
#include "server/base/clock.h"
#include "server/base/executor.h"
#include "server/service/worker_service.h"
#include "server/stream/status_codec.h"
#include "spectrumkv/v1/worker_service.grpc.pb.h"
#include "tests/unit/service/fake_transfers.h"

namespace spectrumkv {
namespace {

class Calls : public testing::Test {
 protected:
  Calls() {
    context_.epoch = 5;
    context_.pools = pools_.get();
    context_.transfers = &transfers_;
    context_.metrics = &metrics_;
    context_.caller_of = [this](const std::string&) { return stranger_ ? Caller::Token() : kMe; };
    context_.backend = ScalarBackend();
    context_.calls = &executor_;
    context_.compute = &executor_;
    service_ = NewWorkerService(&context_);
    grpc::ServerBuilder builder;
    builder.RegisterService(service_.get());
    server_ = builder.BuildAndStart();
    stub_ = v1::WorkerService::NewStub(server_->InProcessChannel(grpc::ChannelArguments()));
  }
  ~Calls() override {
    server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1));
    server_->Wait();
  }

  v1::WatchTransferRequest KnownTransfer() {
    v1::WatchTransferRequest request;
    request.mutable_transfer()->set_transfer_id("known");
    return request;
  }
  std::shared_ptr<TransferWatcher> WaitWatcher() {
    while (transfers_.watcher() == nullptr) std::this_thread::yield();
    return transfers_.watcher();
  }
  double Errors(const std::string& code) {
    const std::string text = metrics_.Render();
    const std::string series = "spectrumkv_errors_total{stage=\"queue\",code=\"" + code + "\"} ";
    const size_t at = text.find(series);
    return at == std::string::npos ? -1 : std::stod(text.substr(at + series.size()));
  }

  std::unique_ptr<Clock> clock_ = NewSystemClock();
  ThreadPool executor_{2};
  std::unique_ptr<PoolRegistry> pools_ = PoolRegistry::Create(PoolLimits(), 5, clock_.get(), PoolEvents());
  FakeTransfers transfers_;
  Metrics metrics_;
  std::atomic<bool> stranger_{false};  // who calls is not kMe
  ServiceContext context_;
  std::unique_ptr<grpc::Service> service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<v1::WorkerService::Stub> stub_;
};

TEST_F(Calls, WatchKeepsLayersInOrderAndTheEndLast) {
  grpc::ClientContext context;
  const auto reader = stub_->WatchTransfer(&context, KnownTransfer());
  const auto watcher = WaitWatcher();
  // Far more than the stream takes at once: progress may be merged, layers may not.
  constexpr uint32_t kLayers = 500;
  for (uint32_t layer = 1; layer <= kLayers; ++layer) {
    watcher->OnLayersReady(layer);
    TransferReport report = FakeTransfers::Report(TransferState::kStreaming);
    report.chunks = layer;
    watcher->OnProgress(report);
  }
  TransferReport last = FakeTransfers::Report(TransferState::kCommitted);
  last.layers_ready = kLayers;
  watcher->OnTerminal(last);

  v1::WatchTransferResponse event;
  uint32_t layers = 0, progress = 0, terminals = 0;
  while (reader->Read(&event)) {
    EXPECT_EQ(terminals, 0u);
    if (event.has_layers_ready()) {
      EXPECT_EQ(event.layers_ready().layers(), ++layers);
    } else if (event.has_progress()) {
      EXPECT_GE(event.progress().chunks_done(), progress);
      progress = static_cast<uint32_t>(event.progress().chunks_done());
    } else {
      ++terminals;
      EXPECT_EQ(event.terminal().state(), v1::TRANSFER_STATE_COMMITTED);
    }
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(layers, kLayers);
  EXPECT_EQ(terminals, 1u);
}

TEST_F(Calls, WatchUntilExactGoesOnAfterTheEnd) {
  int watches = 0;
  for (const bool exact : {true, false}) {
    grpc::ClientContext context;
    v1::WatchTransferRequest request = KnownTransfer();
    request.set_until_exact(true);
    const auto reader = stub_->WatchTransfer(&context, request);
    WaitWatcher()->OnTerminal(FakeTransfers::Report(TransferState::kCommitted));
    v1::WatchTransferResponse event;
    ASSERT_TRUE(reader->Read(&event));
    EXPECT_TRUE(event.has_terminal());
    TransferReport report = FakeTransfers::Report(TransferState::kCommitted);
    report.exact = exact;
    transfers_.TellExact(report);
    ASSERT_TRUE(reader->Read(&event));
    EXPECT_EQ(event.has_exact(), exact);
    EXPECT_EQ(event.has_released(), !exact);
    EXPECT_FALSE(reader->Read(&event));
    EXPECT_TRUE(reader->Finish().ok());
    ++watches;
    while (transfers_.unwatched() < watches) std::this_thread::yield();
  }
}

TEST_F(Calls, WatchUntilExactOfWhatFailsEndsAtOnce) {
  grpc::ClientContext context;
  v1::WatchTransferRequest request = KnownTransfer();
  request.set_until_exact(true);
  const auto reader = stub_->WatchTransfer(&context, request);
  WaitWatcher()->OnTerminal(FakeTransfers::Report(TransferState::kFailed));
  v1::WatchTransferResponse event;
  ASSERT_TRUE(reader->Read(&event));
  EXPECT_TRUE(event.has_terminal());
  EXPECT_FALSE(reader->Read(&event));
  EXPECT_TRUE(reader->Finish().ok());
}

TEST_F(Calls, ReleaseSaysWhetherTheCacheHasIt) {
  for (const bool cached : {true, false}) {
    transfers_.has_cache = cached;
    grpc::ClientContext context;
    v1::ReleaseTransferRequest request;
    *request.mutable_transfer() = KnownTransfer().transfer();
    request.set_keep_in_cache(true);
    v1::ReleaseTransferResponse response;
    EXPECT_TRUE(stub_->ReleaseTransfer(&context, request, &response).ok());
    EXPECT_EQ(response.kept_in_cache(), cached);
    EXPECT_EQ(transfers_.releases, cached ? 0 : 1) << "what the cache does not have is released";
  }
}

TEST_F(Calls, WatchThatIsCancelledUnwatches) {
  grpc::ClientContext context;
  const auto reader = stub_->WatchTransfer(&context, KnownTransfer());
  const auto watcher = WaitWatcher();
  context.TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  while (transfers_.unwatched() == 0) std::this_thread::yield();
  // Events that come late go nowhere.
  watcher->OnLayersReady(1);
  watcher->OnTerminal(FakeTransfers::Report(TransferState::kCommitted));
  EXPECT_EQ(transfers_.unwatched(), 1);
}

TEST_F(Calls, EventsFromManyThreads) {
  grpc::ClientContext context;
  const auto reader = stub_->WatchTransfer(&context, KnownTransfer());
  const auto watcher = WaitWatcher();
  std::vector<std::thread> threads;
  std::atomic<int> running{4};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) watcher->OnProgress(FakeTransfers::Report(TransferState::kStreaming));
      if (running.fetch_sub(1) == 1) watcher->OnTerminal(FakeTransfers::Report(TransferState::kFailed));
    });
  }
  v1::WatchTransferResponse event;
  bool ended = false;
  while (reader->Read(&event)) ended = ended || event.has_terminal();
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(ended);
  EXPECT_TRUE(reader->Finish().ok());
}

TEST_F(Calls, CancelAnswersOnlyWhenTheManagerSaysSo) {
  std::atomic<bool> answered{false};
  v1::CancelTransferResponse response;
  std::thread caller([&] {
    grpc::ClientContext context;
    v1::CancelTransferRequest request;
    request.mutable_transfer()->set_transfer_id("known");
    EXPECT_TRUE(stub_->CancelTransfer(&context, request, &response).ok());
    answered = true;
  });
  while (transfers_.cancels() == 0) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_FALSE(answered);
  transfers_.FinishCancels();
  caller.join();
  EXPECT_EQ(response.report().state(), v1::TRANSFER_STATE_CANCELLED);
}

TEST_F(Calls, FailuresCarryTheirReasonAndAreCountedOnce) {
  const double before = Errors("not_found");
  ASSERT_GE(before, 0) << "the series is missing";
  v1::GetTransferRequest request;
  request.mutable_transfer()->set_transfer_id("nobody");
  v1::GetTransferResponse response;
  grpc::ClientContext context;
  const grpc::Status status = stub_->GetTransfer(&context, request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(ReasonOf(FromGrpcStatus(status)), "UNKNOWN_TRANSFER");
  EXPECT_EQ(Errors("not_found"), before + 1);
}

TEST_F(Calls, HoldPoolWithoutAPoolIsRefused) {
  grpc::ClientContext context;
  const auto stream = stub_->HoldPool(&context);
  stream->Write(v1::HoldPoolRequest());
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(ReasonOf(FromGrpcStatus(status)), "INVALID_POOL_REF");
}

TEST_F(Calls, PutBlocksWithoutAMessageIsRefused) {
  grpc::ClientContext context;
  v1::PutBlocksResponse response;
  const auto writer = stub_->PutBlocks(&context, &response);
  writer->WritesDone();
  EXPECT_EQ(writer->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(Calls, TheCallerIsHandedDown) {
  v1::GetTransferRequest request;
  request.mutable_transfer()->set_transfer_id("known");
  const auto get = [&] {
    grpc::ClientContext context;
    v1::GetTransferResponse response;
    return stub_->GetTransfer(&context, request, &response);
  };
  EXPECT_TRUE(get().ok());
  stranger_ = true;
  EXPECT_EQ(ReasonOf(FromGrpcStatus(get())), "NOT_OWNER");
  EXPECT_EQ(Errors("permission_denied"), 1);
}

}  // namespace
}  // namespace spectrumkv
