// The C++ client's Retry against a real daemon that has no room: who is told to come back comes back when it was told
// to, gets in once there is room, and keeps to its attempts and its deadline.
#include <signal.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "client/cpp/blocks.h"
#include "client/cpp/client.h"
#include "client/cpp/retry.h"
#include "client/cpp/schema.h"
#include "client/cpp/status.h"
#include "gtest/gtest.h"
#include "tests/integration/daemon_process.h"

namespace spectrumkv::client {
namespace {

using Clock = std::chrono::steady_clock;

int64_t MsSince(Clock::time_point begin) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count();
}

// A daemon with room for one transfer, taken.
class RetryTest : public testing::Test {
 protected:
  void SetUp() override {
    daemon_ = DaemonProcess::Start({{"transfer.max_active", "1"}});
    ASSERT_NE(daemon_, nullptr);
    Client::Options options;
    options.address = daemon_->address("worker_socket");
    auto client = Client::Connect(options);
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    auto pool = client_->RegisterPool(*Schema());
    ASSERT_TRUE(pool.ok()) << pool.status();
    pool_ = *std::move(pool);
    ASSERT_TRUE(client_->Expect(pool_.get(), Request("first")).ok());
  }
  void TearDown() override {
    if (pool_ == nullptr) return;
    EXPECT_TRUE(client_->Cancel(Key("first")).ok());  // or the pool would be waited for
    EXPECT_TRUE(pool_->Unregister().ok());
  }

  static absl::StatusOr<v1::PoolSchema> Schema() {
    DenseLayout layout;
    layout.model = "m";
    layout.layers = 1;
    layout.heads = 1;
    layout.head_dim = 32;
    layout.block_tokens = 16;
    layout.num_blocks = 8;
    return DenseSchema(layout, DaemonOwned(*BytesOf(layout)));
  }
  // Each transfer at a block of its own.
  v1::ExpectRequest Request(const std::string& id) {
    v1::ExpectRequest request;
    request.set_transfer_id(id);
    request.set_token_count(16);
    *request.add_blocks() = Blocks(0, {next_block_++});
    return request;
  }
  static v1::TransferKey Key(const std::string& id) {
    v1::TransferKey key;
    key.set_transfer_id(id);
    return key;
  }
  // One call that notes when it began and how it ended.
  absl::Status Try(const v1::ExpectRequest& request, int64_t left_ms) {
    begun_.push_back(Clock::now());
    const absl::Status status = client_->Expect(pool_.get(), request, left_ms);
    ended_.push_back(Clock::now());
    if (!status.ok()) asked_ms_ = RetryAfterMsOf(status);
    return status;
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Pool> pool_;
  uint64_t next_block_ = 0;
  std::vector<Clock::time_point> begun_, ended_;
  int64_t asked_ms_ = -1;
};

TEST_F(RetryTest, WaitsAsLongAsAskedAndGetsInWhenThereIsRoom) {
  const auto request = Request("second");
  const absl::Status status = Retry([&](int64_t left_ms) {
    EXPECT_TRUE(begun_.size() != 2 || client_->Cancel(Key("first")).ok());
    return Try(request, left_ms);
  });
  EXPECT_TRUE(status.ok()) << status;
  ASSERT_EQ(begun_.size(), 3u);
  EXPECT_GT(asked_ms_, 0);
  for (size_t i = 1; i < begun_.size(); ++i) {
    EXPECT_GE(begun_[i] - ended_[i - 1], std::chrono::milliseconds(asked_ms_)) << "call " << i;
  }
  EXPECT_EQ(client_->Get(Key("second"))->state(), v1::TRANSFER_STATE_WAITING);
  EXPECT_TRUE(client_->Cancel(Key("second")).ok());
}

TEST_F(RetryTest, KeepsToItsAttempts) {
  for (const int attempts : {-1, 0, 1, 2}) {
    begun_.clear();
    RetryOptions options;
    options.attempts = attempts;
    const auto request = Request("refused");
    const absl::Status status = Retry([&](int64_t left_ms) { return Try(request, left_ms); }, options);
    EXPECT_EQ(ReasonOf(status), "TRANSFERS_FULL") << status;
    EXPECT_EQ(begun_.size(), attempts < 2 ? 1u : 2u);
    next_block_ = 1;
  }
}

TEST_F(RetryTest, NeverBeginsAWaitThatPassesItsDeadline) {
  RetryOptions options;
  options.attempts = 1000;
  options.timeout_ms = 1000;
  const auto request = Request("late");
  const auto begin = Clock::now();
  const absl::Status status = Retry([&](int64_t left_ms) { return Try(request, left_ms); }, options);
  EXPECT_EQ(ReasonOf(status), "TRANSFERS_FULL") << "the daemon's word, not a deadline of the client's: " << status;
  // The last wait ends before the deadline; what comes after it is one quick call.
  EXPECT_LT(begun_.back() - begin, std::chrono::milliseconds(options.timeout_ms));
  EXPECT_GE(begun_.size(), 2u);
  EXPECT_LE(static_cast<int64_t>(begun_.size()), options.timeout_ms / asked_ms_ + 1);
  begun_.clear();
  options.timeout_ms = 0;
  EXPECT_FALSE(Retry([&](int64_t) { return Try(request, 1000); }, options).ok());
  EXPECT_EQ(begun_.size(), 1u);
}

TEST_F(RetryTest, AStoppedDaemonCostsNoMoreThanTheDeadline) {
  RetryOptions options;
  options.timeout_ms = 1000;
  const auto request = Request("stopped");
  const auto begin = Clock::now();
  const absl::Status status = Retry(
      [&](int64_t left_ms) {
        if (begun_.size() == 1) daemon_->Signal(SIGSTOP);
        return Try(request, left_ms);
      },
      options);
  const int64_t took_ms = MsSince(begin);
  daemon_->Signal(SIGCONT);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_EQ(begun_.size(), 2u) << "the first call was refused, the second unheard";
  EXPECT_GE(took_ms, 900);
  EXPECT_LT(took_ms, 3000);
}

TEST_F(RetryTest, AnErrorWithoutADelayIsTheLastWord) {
  auto request = Request("wrong");
  request.set_token_count(17);  // one block holds 16
  const absl::Status status = Retry([&](int64_t left_ms) { return Try(request, left_ms); });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_EQ(begun_.size(), 1u);
}

TEST_F(RetryTest, APoolGetsInUnderItsQuota) {
  const auto daemon = DaemonProcess::Start({{"quota.pools_per_user", "1"}});
  ASSERT_NE(daemon, nullptr);
  Client::Options options;
  options.address = daemon->address("worker_socket");
  auto client = Client::Connect(options);
  ASSERT_TRUE(client.ok()) << client.status();
  auto first = (*client)->RegisterPool(*Schema());
  ASSERT_TRUE(first.ok()) << first.status();
  int calls = 0;
  const auto second = Retry([&](int64_t) {
    EXPECT_TRUE(++calls != 2 || (*first)->Unregister().ok());
    return (*client)->RegisterPool(*Schema());
  });
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(calls, 2);
  EXPECT_NE((*second)->ref().pool_id(), (*first)->ref().pool_id());
}

}  // namespace
}  // namespace spectrumkv::client
