// Pool and Client against a fake daemon on a Unix socket: leases, restarts, stale epochs, watches that break.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "client/cpp/client.h"
#include "client/cpp/schema.h"
#include "client/cpp/status.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace spectrumkv::client {
namespace {

grpc::Status Error(grpc::StatusCode code, const std::string& reason, int retry_ms = -1) {
  google::rpc::ErrorInfo info;
  info.set_reason(reason);
  google::rpc::Status details;
  details.add_details()->PackFrom(info);
  if (retry_ms >= 0) {
    google::rpc::RetryInfo retry;
    retry.mutable_retry_delay()->set_nanos(retry_ms * 1'000'000);
    details.add_details()->PackFrom(retry);
  }
  return grpc::Status(code, reason, details.SerializeAsString());
}

constexpr int kAskedMs = 700;

// What a test sees and steers; outlives the servers that stand for restarts of the daemon.
struct FakeState {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t epoch = 1;
  int registrations = 0;
  bool answers_registrations = true;
  int refuse_registrations = 0;  // the next ones, with a delay of kAskedMs
  std::vector<std::chrono::steady_clock::time_point> asked_at;  // of every RegisterPool
  int pings = 0;
  int holds = 0;
  bool answers_holds = true;
  std::set<std::string> request_ids;
  std::string next_event;  // sent to the hold at its next ping, and ends its pool
  std::set<std::string> ended;
  int stale_sends = 0;     // refused so far
  std::vector<std::string> sent_to_pools;
  int watches = 0;
  int watches_to_break = 0;

  template <typename Condition>
  bool Await(const Condition& condition) {
    std::unique_lock<std::mutex> lock(mutex);
    return changed.wait_for(lock, std::chrono::seconds(20), condition);
  }
};

class FakeWorkerService final : public v1::WorkerService::Service {
 public:
  explicit FakeWorkerService(FakeState* state) : state_(*state) {}

  grpc::Status RegisterPool(grpc::ServerContext* context, const v1::RegisterPoolRequest* request,
                            v1::RegisterPoolResponse* response) override {
    std::unique_lock<std::mutex> lock(state_.mutex);
    state_.asked_at.push_back(std::chrono::steady_clock::now());
    state_.changed.notify_all();
    while (!state_.answers_registrations && !context->IsCancelled()) {
      state_.changed.wait_for(lock, std::chrono::milliseconds(5));
    }
    if (context->IsCancelled()) return grpc::Status(grpc::StatusCode::CANCELLED, "nobody asks any more");
    if (state_.refuse_registrations > 0) {
      --state_.refuse_registrations;
      return Error(grpc::StatusCode::RESOURCE_EXHAUSTED, "POOLS_QUOTA", kAskedMs);
    }
    if (!state_.request_ids.insert(request->request_id()).second) {
      return Error(grpc::StatusCode::ALREADY_EXISTS, "REQUEST_REUSED");
    }
    ++state_.registrations;
    response->mutable_pool()->set_pool_id("pool-" + std::to_string(state_.registrations));
    response->mutable_pool()->set_epoch(state_.epoch);
    response->set_lease_ttl_ms(request->lease_ttl_ms());
    state_.changed.notify_all();
    return grpc::Status::OK;
  }

  grpc::Status HoldPool(grpc::ServerContext*,
                        grpc::ServerReaderWriter<v1::HoldPoolResponse, v1::HoldPoolRequest>* stream) override {
    {
      const std::lock_guard<std::mutex> lock(state_.mutex);
      ++state_.holds;
    }
    state_.changed.notify_all();
    EXPECT_TRUE(state_.Await([&] { return state_.answers_holds; }));
    for (v1::HoldPoolRequest request; stream->Read(&request);) {
      v1::HoldPoolResponse response;
      {
        const std::lock_guard<std::mutex> lock(state_.mutex);
        if (state_.ended.count(request.pool().pool_id()) != 0) return Error(grpc::StatusCode::NOT_FOUND, "UNKNOWN_POOL");
        if (!state_.next_event.empty()) state_.ended.insert(request.pool().pool_id());
        ++state_.pings;
        response.set_event(state_.next_event);
        state_.next_event.clear();
      }
      state_.changed.notify_all();
      stream->Write(response);
      if (!response.event().empty()) return grpc::Status::OK;
    }
    return grpc::Status::OK;
  }

  grpc::Status Send(grpc::ServerContext*, const v1::SendRequest* request, v1::SendResponse*) override {
    const std::lock_guard<std::mutex> lock(state_.mutex);
    if (request->pool().epoch() != state_.epoch) {
      ++state_.stale_sends;
      return Error(grpc::StatusCode::FAILED_PRECONDITION, "STALE_EPOCH");
    }
    if (request->transfer_id() == "refuse") return Error(grpc::StatusCode::INVALID_ARGUMENT, "BUDGET_TOO_SMALL");
    state_.sent_to_pools.push_back(request->pool().pool_id());
    return grpc::Status::OK;
  }

  grpc::Status UnregisterPool(grpc::ServerContext*, const v1::UnregisterPoolRequest*,
                              v1::UnregisterPoolResponse*) override {
    return grpc::Status::OK;
  }

  grpc::Status WatchTransfer(grpc::ServerContext*, const v1::WatchTransferRequest* request,
                             grpc::ServerWriter<v1::WatchTransferResponse>* writer) override {
    const std::lock_guard<std::mutex> lock(state_.mutex);
    ++state_.watches;
    if (request->transfer().transfer_id() == "unknown") return Error(grpc::StatusCode::NOT_FOUND, "UNKNOWN_TRANSFER");
    v1::WatchTransferResponse event;
    event.mutable_layers_ready()->set_layers(static_cast<uint32_t>(state_.watches));
    writer->Write(event);
    if (state_.watches <= state_.watches_to_break) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "broken");
    event.mutable_terminal()->set_state(v1::TRANSFER_STATE_COMMITTED);
    writer->Write(event);
    return grpc::Status::OK;
  }

 private:
  FakeState& state_;
};

class ClientPoolTest : public testing::Test {
 protected:
  void SetUp() override {
    char folder[] = "/tmp/spectrumkv-client-XXXXXX";
    ASSERT_NE(::mkdtemp(folder), nullptr);
    folder_ = folder;
    socket_ = folder_ + "/worker.sock";
    StartDaemon();
  }

  void TearDown() override {
    StopDaemon();
    ::unlink(socket_.c_str());
    ::rmdir(folder_.c_str());
  }

  void StartDaemon() {
    service_ = std::make_unique<FakeWorkerService>(&state_);
    grpc::ServerBuilder builder;
    builder.AddListeningPort("unix:" + socket_, grpc::InsecureServerCredentials());
    builder.RegisterService(service_.get());
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
  }

  void StopDaemon() {
    if (server_) server_->Shutdown(std::chrono::system_clock::now());
    server_.reset();
  }

  std::unique_ptr<Client> Connect() {
    Client::Options options;
    options.address = socket_;
    auto client = Client::Connect(options);
    EXPECT_TRUE(client.ok()) << client.status();
    return client.ok() ? *std::move(client) : nullptr;
  }

  static std::unique_ptr<Pool> Register(Client* client, int64_t lease_ttl_ms = 90) {
    auto pool = client->RegisterPool(v1::PoolSchema(), lease_ttl_ms);
    EXPECT_TRUE(pool.ok()) << pool.status();
    return pool.ok() ? *std::move(pool) : nullptr;
  }

  FakeState state_;
  std::string folder_, socket_;
  std::unique_ptr<FakeWorkerService> service_;
  std::unique_ptr<grpc::Server> server_;
};

TEST_F(ClientPoolTest, PingsWhileItLives) {
  const auto client = Connect();
  ASSERT_NE(client, nullptr);
  {
    const auto pool = Register(client.get());
    EXPECT_EQ(pool->ref().pool_id(), "pool-1");
    EXPECT_EQ(pool->generation(), 1u);
    EXPECT_TRUE(state_.Await([&] { return state_.pings >= 4; }));
    EXPECT_TRUE(pool->status().ok());
  }
  EXPECT_EQ(state_.registrations, 1);
}

TEST_F(ClientPoolTest, WaitHeldSaysWhetherTheDaemonWouldNoticeADeath) {
  const auto set_answers = [&](bool answers) {
    const std::lock_guard<std::mutex> lock(state_.mutex);
    state_.answers_holds = answers;
    if (!answers) state_.next_event = "LEASE_EXPIRED";
    state_.changed.notify_all();
  };
  const auto client = Connect();
  ASSERT_NE(client, nullptr);
  state_.answers_holds = false;
  const auto pool = Register(client.get());
  EXPECT_FALSE(pool->WaitHeld(100));
  set_answers(true);
  EXPECT_TRUE(pool->WaitHeld(20000));
  set_answers(false);  // the hold is lost, and the next one is not answered
  EXPECT_TRUE(state_.Await([&] { return state_.holds >= 2; }));
  EXPECT_FALSE(pool->WaitHeld(100));
  set_answers(true);
  EXPECT_TRUE(pool->WaitHeld(20000));
}

TEST_F(ClientPoolTest, RegistersAgainAfterARestart) {
  const auto client = Connect();
  ASSERT_NE(client, nullptr);
  const auto pool = Register(client.get());
  ASSERT_TRUE(state_.Await([&] { return state_.pings >= 1; }));
  StopDaemon();
  state_.epoch = 2;
  StartDaemon();
  EXPECT_TRUE(state_.Await([&] { return state_.registrations >= 2 && state_.holds >= 2; }));
  EXPECT_EQ(pool->ref().epoch(), 2u);
  EXPECT_EQ(pool->generation(), 2u);
}

TEST_F(ClientPoolTest, RegistersAgainWhenTheLeaseExpired) {
  const auto client = Connect();
  ASSERT_NE(client, nullptr);
  const auto pool = Register(client.get());
  {
    const std::lock_guard<std::mutex> lock(state_.mutex);
    state_.next_event = "LEASE_EXPIRED";
  }
  EXPECT_TRUE(state_.Await([&] { return state_.registrations >= 2 && state_.holds >= 2; }));
  EXPECT_EQ(pool->generation(), 2u);
}

TEST_F(ClientPoolTest, RegistersAgainWhenTheDaemonSaysThatItMay) {
  const auto client = Connect();
  ASSERT_NE(client, nullptr);
  const auto pool = Register(client.get());
  {
    const std::lock_guard<std::mutex> lock(state_.mutex);
    state_.refuse_registrations = 2;
    state_.next_event = "LEASE_EXPIRED";
  }
  EXPECT_TRUE(state_.Await([&] { return state_.registrations >= 2; }));
  const std::lock_guard<std::mutex> lock(state_.mutex);
  ASSERT_EQ(state_.asked_at.size(), 4u);
  for (size_t i = 2; i < 4; ++i) {
    EXPECT_GE(state_.asked_at[i] - state_.asked_at[i - 1], std::chrono::milliseconds(kAskedMs));
  }
}

TEST_F(ClientPoolTest, StaysAwayOnceUnregistered) {
  const auto client = Connect();
  ASSERT_NE(client, nullptr);
  const auto pool = Register(client.get());
  ASSERT_TRUE(state_.Await([&] { return state_.pings >= 1; }));
  EXPECT_TRUE(pool->Unregister().ok());
  EXPECT_EQ(ReasonOf(pool->status()), "UNREGISTERED");
  EXPECT_EQ(state_.registrations, 1);
}

// Neither its end nor giving it up waits for a registration that is not answered, nor leaves one behind.
TEST_F(ClientPoolTest, ItsEndCancelsARegistrationUnderWay) {
  for (const bool unregister : {false, true}) {
    const auto client = Connect();
    ASSERT_NE(client, nullptr);
    auto pool = Register(client.get());
    size_t asked = 0;
    {
      const std::lock_guard<std::mutex> lock(state_.mutex);
      asked = state_.asked_at.size();
      state_.answers_registrations = false;
      state_.next_event = "LEASE_EXPIRED";
    }
    ASSERT_TRUE(state_.Await([&] { return state_.asked_at.size() > asked; }));
    const int registrations = state_.registrations;
    const auto begin = std::chrono::steady_clock::now();
    if (unregister) {
      EXPECT_TRUE(pool->Unregister().ok());
      EXPECT_EQ(ReasonOf(pool->Renew(pool->generation())), "UNREGISTERED");
      EXPECT_EQ(ReasonOf(pool->status()), "UNREGISTERED");
    }
    pool.reset();
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10)) << "of 30 of call_timeout_ms";
    const std::lock_guard<std::mutex> lock(state_.mutex);
    EXPECT_EQ(state_.registrations, registrations);
    state_.answers_registrations = true;
  }
}

TEST_F(ClientPoolTest, StaleEpochIsTriedAgainOnce) {
  const auto client = Connect();
  ASSERT_NE(client, nullptr);
  const auto pool = Register(client.get(), 60000);
  {
    const std::lock_guard<std::mutex> lock(state_.mutex);
    state_.epoch = 7;
  }
  EXPECT_TRUE(client->Send(pool.get(), v1::SendRequest()).ok());
  EXPECT_EQ(state_.stale_sends, 1);
  EXPECT_EQ(state_.sent_to_pools, std::vector<std::string>{"pool-2"});
  EXPECT_EQ(pool->ref().epoch(), 7u);
  // Somebody else had registered it already: nothing happens.
  EXPECT_TRUE(pool->Renew(1).ok());
  EXPECT_EQ(pool->generation(), 2u);

  v1::SendRequest refused;
  refused.set_transfer_id("refuse");
  EXPECT_EQ(ReasonOf(client->Send(pool.get(), refused)), "BUDGET_TOO_SMALL");
}

TEST_F(ClientPoolTest, WaitOpensABrokenWatchAgain) {
  const auto client = Connect();
  ASSERT_NE(client, nullptr);
  state_.watches_to_break = 2;
  std::vector<uint32_t> layers;
  v1::TransferKey key;
  key.set_transfer_id("t");
  const auto report = client->Wait(
      key, 20000, [&](const v1::WatchTransferResponse& event) { layers.push_back(event.layers_ready().layers()); });
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->state(), v1::TRANSFER_STATE_COMMITTED);
  EXPECT_EQ(layers, (std::vector<uint32_t>{1, 2, 3}));
}

TEST_F(ClientPoolTest, WaitSaysWhatTheDaemonSays) {
  const auto client = Connect();
  ASSERT_NE(client, nullptr);
  v1::TransferKey key;
  key.set_transfer_id("unknown");
  EXPECT_EQ(ReasonOf(client->Wait(key, 20000).status()), "UNKNOWN_TRANSFER");
  key.set_transfer_id("t");
  state_.watches_to_break = 1 << 30;
  EXPECT_EQ(client->Wait(key, 300).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace spectrumkv::client
