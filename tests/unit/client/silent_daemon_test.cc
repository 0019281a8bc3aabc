// No call of Client or Pool outlasts its time limit where the daemon does not answer.
#include "tests/unit/client/silent_daemon.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "client/cpp/client.h"

namespace spectrumkv::client {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr int64_t kCallMs = 150, kLongestMs = 10'000;

class SilentDaemonTest : public testing::Test {
 protected:
  SilentDaemonTest() {
    Client::Options options;
    options.address = daemon_.socket();
    options.call_timeout_ms = kCallMs;
    client_ = *Client::Connect(options);
    pool_ = *daemon_.WhileItRegistersOne([&] { return client_->RegisterPool(v1::PoolSchema(), 60000); });
  }

  // Ends by its limit: neither sooner nor much later.
  static void ExpectEnds(const std::string& what, int64_t limit_ms, const std::function<absl::Status()>& call) {
    const auto begin = steady_clock::now();
    const absl::Status status = call();
    const auto took = steady_clock::now() - begin;
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << what << ": " << status;
    EXPECT_GE(took, milliseconds(limit_ms - 50)) << what;
    EXPECT_LT(took, milliseconds(kLongestMs)) << what;
  }

  SilentDaemon daemon_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Pool> pool_;
};

absl::Status Nothing(const v1::BlockData&) { return absl::OkStatus(); }

TEST_F(SilentDaemonTest, EveryCallEnds) {
  Client& client = *client_;
  Pool* const pool = pool_.get();
  const v1::TransferKey key;
  const std::vector<std::pair<const char*, std::function<absl::Status()>>> calls = {
      {"RegisterPool", [&] { return client.RegisterPool(v1::PoolSchema()).status(); }},
      {"Renew", [&] { return pool->Renew(pool->generation()); }},
      {"Plan", [&] { return client.Plan(pool, {}).status(); }},
      {"Send", [&] { return client.Send(pool, {}); }},
      {"Publish", [&] { return client.Publish(pool, {}); }},
      {"Expect", [&] { return client.Expect(pool, {}); }},
      {"Fetch", [&] { return client.Fetch(pool, {}); }},
      {"Advance", [&] { return client.Advance("t", 1, 1); }},
      {"Advance by queries", [&] { return client.Advance("t", 1, 1, v1::RecentQueries()); }},
      {"Wait", [&] { return client.Wait(key, kCallMs).status(); }},
      {"WaitExact", [&] { return client.WaitExact(key, kCallMs).status(); }},
      {"Refine", [&] { return client.Refine({}).status(); }},
      {"ApplyRefinement", [&] { return client.ApplyRefinement("t").status(); }},
      {"Get", [&] { return client.Get(key).status(); }},
      {"Cancel", [&] { return client.Cancel(key).status(); }},
      {"Release", [&] { return client.Release(key); }},
      {"ReleaseToCache", [&] { return client.ReleaseToCache(key).status(); }},
      {"ReportFirstToken", [&] { return client.ReportFirstToken(key, 1); }},
      {"GetBlocks", [&] { return client.GetBlocks({}, Nothing); }},
      {"PutBlocks without a block",
       [&] { return client.PutBlocks(pool->ref(), [](v1::PutBlocksRequest*) { return false; }).status(); }},
      // More than the connection takes in: it is a Write that waits.
      {"PutBlocks without end",
       [&] {
         const std::string data(1 << 20, 'x');
         return client
             .PutBlocks(pool->ref(),
                        [&](v1::PutBlocksRequest* message) {
                          message->add_blocks()->set_data(data);
                          return true;
                        })
             .status();
       }},
  };
  for (const auto& [what, call] : calls) ExpectEnds(what, kCallMs, call);
}

TEST_F(SilentDaemonTest, ALimitOfTheCallGoesBeforeThatOfTheClient) {
  constexpr int64_t kLonger = 3 * kCallMs;
  ExpectEnds("GetBlocks", kLonger, [&] { return client_->GetBlocks({}, Nothing, kLonger); });
  ExpectEnds("PutBlocks", kLonger, [&] {
    return client_
        ->PutBlocks(
            pool_->ref(), [](v1::PutBlocksRequest*) { return false; }, kLonger)
        .status();
  });
  ExpectEnds("Send", kLonger, [&] { return client_->Send(pool_.get(), {}, kLonger); });
}

TEST_F(SilentDaemonTest, UnregisterEndsAndSoDoesThePool) {
  ExpectEnds("Unregister", 100 + kCallMs, [&] { return pool_->Unregister(100); });
  const auto begin = steady_clock::now();
  pool_.reset();
  EXPECT_LT(steady_clock::now() - begin, milliseconds(kLongestMs)) << "its hold is not answered either";
}

// The daemon's own default is a minute: too long to be waited for here, so it is the server that tells, by what gRPC
// sends (which rounds up).
TEST_F(SilentDaemonTest, UnregisterHasADeadlineWhereTheDaemonChoosesTheTime) {
  const int64_t deadline_ms = daemon_.DeadlineOfUnregister([&] { (void)pool_->Unregister(); });
  EXPECT_GT(deadline_ms, 60'000 - kLongestMs);
  EXPECT_LE(deadline_ms, 60'000 + kLongestMs);
}

TEST_F(SilentDaemonTest, TheLongestTimeIsNotOver) {
  // Not answered, but not over at once either: it would be where the sum went beyond the clock's range.
  constexpr int64_t kForever = std::numeric_limits<int64_t>::max();
  const int64_t deadline_ms = daemon_.DeadlineOfUnregister([&] { (void)pool_->Unregister(kForever); });
  EXPECT_GT(deadline_ms, int64_t{300} * 24 * 3600 * 1000);
}

}  // namespace
}  // namespace spectrumkv::client
