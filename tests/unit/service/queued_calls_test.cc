// Calls that take their time: what runs where, what a queue holds, and what becomes of those that nobody waits for.
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/server_interceptor.h>
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backends.h"
#include "server/base/executor.h"
#include "server/base/status.h"
#include "server/service/plan_call.h"
#include "server/service/worker_service.h"
#include "server/stream/status_codec.h"
#include "spectrumkv/v1/worker_service.grpc.pb.h"
#include "tests/unit/pool/pool_fixture.h"
#include "tests/unit/service/fake_transfers.h"

namespace spectrumkv {
namespace {

constexpr auto kPatience = std::chrono::seconds(20);

// Runs only what the test lets run, and knows what waits.
class Steps final : public Executor {
 public:
  void Post(std::function<void()> task) override {
    tasks_.Post(std::move(task));
    ++waiting_;
  }
  bool RunOne() {
    if (!tasks_.RunOne()) return false;
    --waiting_;
    return true;
  }
  // Whether `count` come to wait.
  bool Await(int count) {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (waiting_ < count && std::chrono::steady_clock::now() < until) std::this_thread::yield();
    return waiting_ == count;
  }
  int waiting() const { return waiting_; }

 private:
  ManualExecutor tasks_;
  std::atomic<int> waiting_{0};
};

// Counts the calls whose end, or the going of whose client, the server knows.
class CloseCounter final : public grpc::experimental::Interceptor {
 public:
  explicit CloseCounter(std::atomic<int>* closes) : closes_(closes) {}
  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(grpc::experimental::InterceptionHookPoints::POST_RECV_CLOSE)) ++*closes_;
    methods->Proceed();
  }

  struct Factory final : public grpc::experimental::ServerInterceptorFactoryInterface {
    explicit Factory(std::atomic<int>* closes) : closes_(closes) {}
    grpc::experimental::Interceptor* CreateServerInterceptor(grpc::experimental::ServerRpcInfo*) override {
      return new CloseCounter(closes_);
    }
    std::atomic<int>* const closes_;
  };

 private:
  std::atomic<int>* const closes_;
};

class QueuedCalls : public PoolTest {
 protected:
  QueuedCalls() {
    context_.epoch = kEpoch;
    context_.pools = registry_.get();
    context_.transfers = &transfers_;
    context_.metrics = &metrics_;
    context_.caller_of = [](const std::string&) { return kMe; };
    context_.backend = ScalarBackend();
    context_.calls = &calls_;
    context_.compute = &compute_;
    service_ = NewWorkerService(&context_);
    grpc::ServerBuilder builder;
    builder.RegisterService(service_.get());
    std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> interceptors;
    interceptors.push_back(std::make_unique<CloseCounter::Factory>(&closes_));
    builder.experimental().SetInterceptorCreators(std::move(interceptors));
    server_ = builder.BuildAndStart();
    stub_ = v1::WorkerService::NewStub(server_->InProcessChannel(grpc::ChannelArguments()));
  }
  ~QueuedCalls() override {
    std::atomic<bool> down{false};
    std::thread stops([&] {
      server_->Shutdown(std::chrono::system_clock::now() + kPatience);
      server_->Wait();
      down = true;
    });
    while (!down) {
      while (calls_.RunOne() || compute_.RunOne()) {
      }
      std::this_thread::yield();
    }
    stops.join();
    while (calls_.RunOne() || compute_.RunOne()) {
    }
  }

  // Keys of two layers of two heads, with queries to all of them.
  v1::PlanRequest PlanRequest() {
    v1::PlanRequest request;
    request.mutable_pool()->set_pool_id(Register(MakeSchema("lpbthd")));
    request.mutable_pool()->set_epoch(kEpoch);
    request.set_token_count(8);
    v1::BlockRun* run = request.add_blocks()->add_runs();
    run->set_count(2);
    v1::Importance* importance = request.mutable_policy()->mutable_importance();
    importance->set_source(v1::IMPORTANCE_SOURCE_RECENT_QUERIES);
    v1::RecentQueries* queries = importance->mutable_queries();
    queries->set_data_type(v1::DATA_TYPE_FLOAT16);
    queries->add_positions(7);
    for (const uint32_t layer : {0u, 1u}) {
      v1::LayerQueries* mine = queries->add_layers();
      mine->set_layer(layer);
      mine->set_query_heads(2);
      mine->set_queries(std::string(2 * 16 * 2, '\0'));
    }
    return request;
  }
  std::future<grpc::Status> Plan(const v1::PlanRequest& request, grpc::ClientContext* context) {
    return std::async(std::launch::async, [this, request, context] {
      v1::PlanResponse response;
      return stub_->Plan(context, request, &response);
    });
  }
  // Until the daemon knows that the client has gone.
  void CancelAndWait(grpc::ClientContext* context, std::future<grpc::Status>* call) {
    const int before = closes_;
    context->TryCancel();
    EXPECT_EQ(call->get().error_code(), grpc::StatusCode::CANCELLED);
    AwaitClose(before);
  }
  void AwaitClose(int before) {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (closes_ == before && std::chrono::steady_clock::now() < until) std::this_thread::yield();
    EXPECT_GT(closes_, before);
  }
  double Errors(const std::string& stage, const std::string& code) {
    const std::string text = metrics_.Render();
    const std::string series = "spectrumkv_errors_total{stage=\"" + stage + "\",code=\"" + code + "\"} ";
    const size_t at = text.find(series);
    return at == std::string::npos ? -1 : std::stod(text.substr(at + series.size()));
  }

  std::atomic<int> closes_{0};
  Steps calls_, compute_;
  FakeTransfers transfers_;
  Metrics metrics_;
  ServiceContext context_;
  std::unique_ptr<grpc::Service> service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<v1::WorkerService::Stub> stub_;
};

TEST_F(QueuedCalls, RefinementsAreAppliedOnThreadsForCalls) {
  grpc::ClientContext context;
  v1::ApplyRefinementRequest request;
  request.set_refine_id("known");
  request.set_max_bytes(11);
  v1::ApplyRefinementResponse response;
  auto call = std::async(std::launch::async, [&] { return stub_->ApplyRefinement(&context, request, &response); });
  ASSERT_TRUE(calls_.Await(1)) << "it copies on a thread of gRPC";
  EXPECT_EQ(transfers_.applies, 0);
  calls_.RunOne();
  EXPECT_TRUE(call.get().ok());
  EXPECT_EQ(transfers_.applies, 1);
  EXPECT_EQ(response.applied_bytes(), 11u);
}

TEST_F(QueuedCalls, NothingIsAppliedForOneWhoHasGone) {
  grpc::ClientContext context;
  v1::ApplyRefinementRequest request;
  request.set_refine_id("known");
  v1::ApplyRefinementResponse response;
  auto call = std::async(std::launch::async, [&] { return stub_->ApplyRefinement(&context, request, &response); });
  ASSERT_TRUE(calls_.Await(1));
  CancelAndWait(&context, &call);
  calls_.RunOne();
  EXPECT_EQ(transfers_.applies, 0);
  EXPECT_EQ(Errors("queue", "cancelled"), 1);
}

TEST_F(QueuedCalls, AnAdvanceWithMuchToDoRunsThereToo) {
  for (const bool heavy : {false, true}) {
    grpc::ClientContext context;
    v1::AdvanceRequest request;
    request.set_transfer_id("known");
    if (heavy) request.set_written_event("event");
    v1::AdvanceResponse response;
    auto call = std::async(std::launch::async, [&] { return stub_->Advance(&context, request, &response); });
    if (heavy) {
      ASSERT_TRUE(calls_.Await(1)) << "an event is opened on a thread of gRPC";
      calls_.RunOne();
    }
    EXPECT_TRUE(call.get().ok());
  }
}

TEST_F(QueuedCalls, APoolWhoseWorkerHasGoneIsGivenBackThereToo) {
  grpc::ClientContext context;
  const auto stream = stub_->HoldPool(&context);
  v1::HoldPoolRequest ping;
  ping.mutable_pool()->set_pool_id(Register(MakeSchema("lpbthd")));
  ping.mutable_pool()->set_epoch(kEpoch);
  stream->Write(ping);
  v1::HoldPoolResponse answer;
  ASSERT_TRUE(stream->Read(&answer));
  stream->WritesDone();
  ASSERT_TRUE(calls_.Await(1)) << "the pool is unmapped on a thread of gRPC";
  EXPECT_EQ(registry_->List().size(), 1u);
  calls_.RunOne();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_TRUE(registry_->List().empty() || registry_->List()[0].state != "active") << "told before it is so";
}

TEST_F(QueuedCalls, APlanWorksAStepAtATime) {
  grpc::ClientContext context;
  auto call = Plan(PlanRequest(), &context);
  ASSERT_TRUE(compute_.Await(1));
  int steps = 0;
  while (compute_.RunOne()) {
    ++steps;
    EXPECT_LE(compute_.waiting(), 1);
  }
  const grpc::Status status = call.get();
  EXPECT_TRUE(status.ok()) << status.error_message();
  // Opened; two heads of two layers; scanned; planned.
  EXPECT_EQ(steps, 1 + 2 * 2 + 1 + 1);
}

TEST_F(QueuedCalls, APlanEndsAtItsNextStepWhenItsCallerHasGone) {
  // Before its first step, with its source held, between heads, between those and the scan, before it is planned.
  for (int before = 0; before < 7; ++before) {
    SCOPED_TRACE(before);
    if (before > 0) Restart(DefaultLimits());
    context_.pools = registry_.get();
    grpc::ClientContext context;
    auto call = Plan(PlanRequest(), &context);
    ASSERT_TRUE(compute_.Await(1));
    for (int step = 0; step < before; ++step) ASSERT_TRUE(compute_.RunOne());
    CancelAndWait(&context, &call);
    EXPECT_TRUE(compute_.RunOne());
    EXPECT_EQ(compute_.waiting(), 0) << "it goes on";
    EXPECT_EQ(Errors("plan", "cancelled"), before + 1);
    for (const PoolStatus& pool : registry_->List()) EXPECT_EQ(pool.blocks_sending, 0u) << "its source is held";
  }
}

TEST_F(QueuedCalls, NoMorePlansThanThereArePlacesFor) {
  context_.max_plans = 6;  // of one caller no more than are left
  const v1::PlanRequest request = PlanRequest();
  std::vector<grpc::ClientContext> contexts(3);
  std::vector<std::future<grpc::Status>> calls;
  for (grpc::ClientContext& context : contexts) calls.push_back(Plan(request, &context));
  ASSERT_TRUE(compute_.Await(3));
  grpc::ClientContext one_more;
  const absl::Status refused = FromGrpcStatus(Plan(request, &one_more).get());
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(refused), "PLANS_FULL");
  EXPECT_GT(RetryAfterMsOf(refused), 0);
  EXPECT_EQ(Errors("queue", "resource_exhausted"), 1);
  EXPECT_EQ(compute_.waiting(), 3);

  while (compute_.RunOne()) {
  }
  for (auto& call : calls) EXPECT_TRUE(call.get().ok());
  // Their places are free again, also those of Plans that fail.
  v1::PlanRequest fails = request;
  fails.mutable_pool()->set_pool_id("nobody");
  for (int i = 0; i < 5; ++i) {
    grpc::ClientContext context;
    auto call = Plan(fails, &context);
    ASSERT_TRUE(compute_.Await(1));
    compute_.RunOne();
    EXPECT_NE(call.get().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  }
}

TEST(PlanPlaces, NobodyHasMoreThanAreLeft) {
  PlanPlaces places;
  const Caller other = Caller::Uid(4711);
  int own = 0;
  while (places.Take(kMe, 8).ok()) ++own;
  EXPECT_EQ(own, 4);
  EXPECT_EQ(ReasonOf(places.Take(kMe, 8)), "PLANS_FULL");
  EXPECT_TRUE(places.Take(other, 8).ok());
  for (int i = 0; i < own; ++i) places.GiveBack(kMe);
  EXPECT_TRUE(places.Take(kMe, 8).ok());
  PlanPlaces small;
  EXPECT_TRUE(small.Take(kMe, 1).ok());
  EXPECT_FALSE(small.Take(other, 1).ok());
}

// Registrations map under one lock, for seconds: of all threads of `calls` they take one.
TEST_F(QueuedCalls, RegistrationsWaitForOneAnotherAndForNobodyElse) {
  std::vector<std::future<grpc::Status>> registrations;
  for (int i = 0; i < 4; ++i) {
    registrations.push_back(std::async(std::launch::async, [&] {
      grpc::ClientContext context;
      v1::RegisterPoolRequest request;
      v1::RegisterPoolResponse response;
      return stub_->RegisterPool(&context, request, &response);
    }));
  }
  ASSERT_TRUE(calls_.Await(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(calls_.waiting(), 1);
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(calls_.Await(1));
    EXPECT_TRUE(calls_.RunOne());
  }
  for (auto& registration : registrations) EXPECT_FALSE(registration.get().ok()) << "it says nothing of a pool";
}

TEST_F(QueuedCalls, QueuedPlansEndWithTheServer) {
  grpc::ClientContext context;
  auto call = Plan(PlanRequest(), &context);
  ASSERT_TRUE(compute_.Await(1));
  std::thread stops([&] { server_->Shutdown(std::chrono::system_clock::now()); });
  EXPECT_FALSE(call.get().ok());
  AwaitClose(0);
  EXPECT_TRUE(compute_.RunOne());
  EXPECT_EQ(compute_.waiting(), 0) << "the shutdown waits for its work";
  stops.join();
}

}  // namespace
}  // namespace spectrumkv
