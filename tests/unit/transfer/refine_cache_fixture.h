// Two engines, the sending one with a cache for retained sources.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "tests/unit/transfer/hooked_hold.h"
#include "tests/unit/transfer/refine_fixture.h"

namespace spectrumkv {

// Of the source of "t": three layers, K and V.
inline constexpr uint64_t kSourceBytes = 80 * 6 * kRow;

class RefineCacheTest : public RefineEngineTest {
 protected:
  void BuildWithCache(uint64_t cache_bytes) {
    EngineSettings settings;
    settings.options.cache_bytes = cache_bytes;
    Build(settings);
  }
  // What MoveToCache answers.
  absl::StatusOr<bool> Move(const std::string& id = "t", std::optional<Role> role = Role::kSender) {
    std::optional<absl::StatusOr<bool>> answer;
    std::mutex mutex;
    a_->manager().MoveToCache(kMe, id, role, [&](absl::StatusOr<bool> cached) {
      std::lock_guard<std::mutex> lock(mutex);
      answer = std::move(cached);
    });
    const auto answered = [&] {
      std::lock_guard<std::mutex> lock(mutex);
      return answer.has_value();
    };
    return Eventually(answered) ? *std::move(answer) : absl::InternalError("no answer");
  }
  // What one call that runs on its own answers.
  enum class Moved { kNotYet, kReleased, kCached, kError };
  std::shared_ptr<std::atomic<Moved>> StartMove(const std::string& id = "t") {
    auto answer = std::make_shared<std::atomic<Moved>>(Moved::kNotYet);
    a_->manager().MoveToCache(kMe, id, Role::kSender, [answer](absl::StatusOr<bool> cached) {
      EXPECT_EQ(answer->load(), Moved::kNotYet) << "answered twice";
      *answer = !cached.ok() ? Moved::kError : *cached ? Moved::kCached : Moved::kReleased;
    });
    return answer;
  }
  // As Commit, of a source that the test looks into.
  std::shared_ptr<ReadHooks> CommitHooked(const std::string& id = "t", uint64_t first_block = 10,
                                          std::optional<Tier> background = std::nullopt) {
    auto hooks = std::make_shared<ReadHooks>();
    SenderSpec sender = Send(id, std::make_unique<HookedHold>(Source(), hooks), Coarse(), background.has_value() ? "" : "b");
    sender.retain_ms = 60000;
    sender.background_tier = background;
    ReceiverSpec receiver = Expect(id, Target(80, first_block), background.has_value() ? "a" : "");
    receiver.refinable = true;
    receiver.refine_direct = background.has_value();
    EXPECT_TRUE(a_->manager().StartSender(std::move(sender)).ok());
    EXPECT_TRUE(b_->manager().StartReceiver(std::move(receiver)).ok());
    EXPECT_EQ(a_->Watch(id, Role::kSender)->WaitTerminal().state, TransferState::kCommitted);
    EXPECT_EQ(b_->Watch(id, Role::kReceiver)->WaitTerminal().state, TransferState::kCommitted);
    return hooks;
  }
  // The first refinement in the background has met its sender, and waits for its turn.
  bool BackgroundHasBegun() {
    return Eventually([&] {
      const auto first = b_->manager().Get(kMe, "t.refine-1", Role::kReceiver);
      return first.ok() && first->state >= TransferState::kPlanned;
    });
  }
  bool SourceIsFree() {
    return a_->pools().ReserveTarget(kMe, source_pool_, a_->epoch(), {{0, {{7, 1}, {3, 2}, {20, 1}, {1, 1}}}}, 80).ok();
  }
  void RefineToTheSource(const std::string& id = "r") {
    const auto started = b_->manager().Refine(Ask(id));
    ASSERT_TRUE(started.ok()) << started.status();
    ASSERT_EQ(Await(id).state, TransferState::kCommitted);
    const auto applied = Apply(id);
    ASSERT_TRUE(applied.ok()) << applied.status();
    EXPECT_TRUE(applied->exact);
    EXPECT_TRUE(Landed() == sent_);
  }
  // What told the one who waits for exactness; nothing yet where it has not been told.
  struct Ear {
    std::mutex mutex;
    std::optional<TransferReport> told;
    bool heard() {
      std::lock_guard<std::mutex> lock(mutex);
      return told.has_value();
    }
  };
  static std::shared_ptr<Ear> ListenFor(Engine& engine, Role role, uint64_t watch_id = 900) {
    auto ear = std::make_shared<Ear>();
    const absl::Status awaited = engine.manager().AwaitExact(kMe, "t", role, watch_id, [ear](const TransferReport& report) {
      std::lock_guard<std::mutex> lock(ear->mutex);
      EXPECT_FALSE(ear->told.has_value()) << "told twice";
      ear->told = report;
    });
    EXPECT_TRUE(awaited.ok()) << awaited;
    return ear;
  }
};

}  // namespace spectrumkv
