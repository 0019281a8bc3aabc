// Two engines with a transfer "t" that has committed and can be refined.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/unit/transfer/two_engines.h"

namespace spectrumkv {

inline constexpr size_t kRow = 2 * 64 * 2;  // bytes of one token of one plane

class RefineEngineTest : public EngineTest {
 protected:
  static Policy Coarse() {
    Policy policy;
    policy.budget = 0.4;
    return policy;
  }

  // A transfer "t" that is committed on both sides, and whose source is kept.
  void Commit(bool pull = false, int64_t retain_ms = 60000, Policy policy = Coarse(),
              std::optional<Tier> background = std::nullopt, bool direct = false) {
    SenderSpec sender = Send("t", Source(), std::move(policy), pull ? "" : "b");
    sender.retain_ms = retain_ms;
    sender.background_tier = background;
    ReceiverSpec receiver = Expect("t", Target(), pull ? "a" : "");
    receiver.refinable = true;
    receiver.refine_direct = direct;
    ASSERT_TRUE(a_->manager().StartSender(std::move(sender)).ok());
    ASSERT_TRUE(b_->manager().StartReceiver(std::move(receiver)).ok());
    const TransferReport sent = a_->Watch("t", Role::kSender)->WaitTerminal();
    ASSERT_EQ(sent.state, TransferState::kCommitted) << sent.error;
    ASSERT_EQ(b_->Watch("t", Role::kReceiver)->WaitTerminal().state, TransferState::kCommitted);
    if (direct) return;  // the refinement may have the blocks by now
    base_ = Landed();
    ASSERT_FALSE(base_ == sent_);
  }
  static RefineSpec Ask(const std::string& id = "r", Tier tier = Tier::kRaw) {
    RefineSpec spec;
    spec.transfer_id = "t";
    spec.refine_id = id;
    spec.peer = "a";
    spec.owner = kMe;
    spec.tier = tier;
    spec.deadline_ms = 15000;
    spec.fingerprint = "f-" + id;
    return spec;
  }
  TransferReport Await(const std::string& id = "r") { return b_->Watch(id, Role::kReceiver)->WaitTerminal(); }
  std::string ReasonOfRefine(RefineSpec spec) { return ReasonOf(b_->manager().Refine(std::move(spec)).status()); }
  absl::StatusOr<RefinementApplied> Apply(const std::string& id = "r", uint64_t max_bytes = 0, const Caller& caller = kMe) {
    std::optional<absl::StatusOr<RefinementApplied>> answer;  // at once, without an event to wait for
    b_->manager().ApplyRefinement({id, caller, max_bytes, "", {}}, [&](auto applied) { answer = std::move(applied); });
    return answer.has_value() ? *std::move(answer) : absl::InternalError("no answer");
  }
  TransferReport Get(Engine& engine, const std::string& id, Role role) {
    const auto report = engine.manager().Get(kMe, id, role);
    EXPECT_TRUE(report.ok()) << report.status();
    return report.ok() ? *report : TransferReport{};
  }
  bool Eventually(const std::function<bool()>& holds) {
    for (int i = 0; i < 500 && !holds(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return holds();
  }
  // A transfer that has joined and moves nothing until it is cancelled.
  void Occupy() {
    SenderSpec spec = Send("busy", a_->Source(source_pool_, {{7, 1}}, 16), Raw());
    spec.layerwise = true;
    ASSERT_TRUE(b_->manager().StartReceiver(Expect("busy", b_->Target(target_pool_, {{25, 2}}, 16))).ok());
    ASSERT_TRUE(a_->manager().StartSender(std::move(spec)).ok());
    ASSERT_TRUE(Eventually([&] { return Get(*a_, "busy", Role::kSender).state == TransferState::kPlanned; }));
  }
  void Free() {
    a_->manager().Cancel(kMe, "busy", Role::kSender, [](const auto&) {});
    a_->Watch("busy", Role::kSender)->WaitTerminal();
  }

  std::vector<std::string> base_;
};

}  // namespace spectrumkv
