#include "server/probe/quality_gate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>

#include "kernels/format/version.h"
#include "server/base/status.h"
#include "tests/unit/base/fake_clock.h"

namespace spectrumkv {
namespace {

using Mode = GateOptions::Mode;
const Caller kAdministrator = Caller::Uid(0), kUser = Caller::Uid(1000), kOther = Caller::Uid(1001);
const ModelName kModel = {"llama", "r1"};

class GateTest : public testing::Test {
 protected:
  QualityGate& Make(Mode mode, std::vector<Tier> gated_tiers = GateOptions().gated_tiers) {
    GateOptions options;
    options.gated_tiers = std::move(gated_tiers);
    options.mode = mode;
    options.administrator = kAdministrator;
    options.probe_ttl_ms = 1000;
    QualityGate::Parts parts;
    parts.clock = &clock_;
    parts.verdicts = &verdicts_;
    parts.unix_seconds = [] { return int64_t{42}; };
    parts.judged = [this](TrialKind, const Score& score) { judged_ += score.trials; };
    gate_ = std::make_unique<QualityGate>(options, parts);
    return *gate_;
  }
  void Say(const Caller& owner, Tier tier, bool open, const ModelName& model = kModel) {
    Verdict verdict;
    verdict.key = {owner.Name(), model.model, model.revision, kFormatVersion, tier};
    verdict.open = open;
    ASSERT_TRUE(verdicts_.Put({verdict}).ok());
  }
  static Policy With(Allocator allocator, std::vector<Tier> tiers) {
    Policy policy;
    policy.allocator = allocator;
    policy.tiers = std::move(tiers);
    return policy;
  }
  // What becomes of the default tiers.
  Policy Judged(bool named = false, bool overridden = false, const Caller& caller = kUser,
                const ModelName& model = kModel) {
    Policy policy = With(Allocator::kOptimal, {Tier::kRaw, Tier::kQ8, Tier::kQ4, Tier::kQ3});
    gate_->Judge(caller, model, named, overridden, &policy);
    return policy;
  }
  // A report in which so many trials of each kind are passed, at each tier.
  static std::vector<TrialOutcome> Outcomes(const StartedProbe& probe, const std::vector<Tier>& tiers,
                                            uint32_t passed) {
    std::vector<TrialOutcome> out;
    for (const Tier tier : tiers) {
      std::map<TrialKind, uint32_t> seen;
      for (const Trial& trial : probe.trials) {
        const bool good = seen[trial.kind]++ < passed;
        TrialOutcome outcome{trial.id, tier, trial.id + TierName(tier)};
        outcome.has_answer = trial.kind == TrialKind::kNeedle;
        outcome.answer = good ? trial.expected : "no idea";
        outcome.has_agreement = !outcome.has_answer;
        outcome.positions = 100;
        outcome.agreed = good ? 90 : 89;
        out.push_back(outcome);
      }
    }
    return out;
  }

  FakeClock clock_;
  VerdictBook verdicts_;
  uint32_t judged_ = 0;
  std::unique_ptr<QualityGate> gate_;
};

const QualityGate::CheckTransfer kFine = [](const std::string&, const std::string&, Tier) { return absl::OkStatus(); };

TEST_F(GateTest, OffSaysNothing) {
  Make(Mode::kOff);
  const Policy policy = Judged(true);
  EXPECT_EQ(policy.gate.action, GateAction::kOpen);
  EXPECT_TRUE(policy.gate.closed.empty());
}

TEST_F(GateTest, WarnUsesWhatIsClosedAndSaysSo) {
  Make(Mode::kWarn);
  const Policy policy = Judged();
  EXPECT_EQ(policy.gate.action, GateAction::kWarned);
  EXPECT_EQ(policy.gate.closed, (std::vector<Tier>{Tier::kQ4, Tier::kQ3}));
  EXPECT_EQ(policy.tiers.size(), 4u);
  EXPECT_TRUE(CheckPolicy(policy, 10, 1).ok());
}

TEST_F(GateTest, EnforceNarrowsDefaultsAndRefusesWhatIsNamed) {
  Make(Mode::kEnforce);
  Policy policy = Judged();
  EXPECT_EQ(policy.gate.action, GateAction::kNarrowed);
  EXPECT_EQ(policy.tiers, (std::vector<Tier>{Tier::kRaw, Tier::kQ8}));
  EXPECT_TRUE(CheckPolicy(policy, 10, 1).ok());

  const absl::Status refused = CheckPolicy(Judged(true), 10, 1);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(refused), "QUALITY_GATE_CLOSED");
  EXPECT_EQ(MetadataOf(refused)["gate"], "quality.gate");
  EXPECT_EQ(MetadataOf(refused)["tiers"], "Q4, Q3");

  policy = Judged(true, true);
  EXPECT_EQ(policy.gate.action, GateAction::kOverridden);
  EXPECT_TRUE(CheckPolicy(policy, 10, 1).ok());
}

TEST_F(GateTest, OnlyWhatTheAllocatorUsesCounts) {
  Make(Mode::kEnforce);
  const auto reason = [&](Policy policy) {
    gate_->Judge(kUser, kModel, true, false, &policy);
    return ReasonOf(CheckPolicy(policy, 10, 1));
  };
  EXPECT_EQ(reason(With(Allocator::kRaw, {Tier::kQ4})), "");
  EXPECT_EQ(reason(With(Allocator::kTwoTier, {Tier::kRaw, Tier::kQ8, Tier::kQ4})), "");
  EXPECT_EQ(reason(With(Allocator::kPdTrim, {Tier::kRaw, Tier::kQ4})), "");
  Policy uniform = With(Allocator::kUniform, {Tier::kRaw});
  uniform.uniform_tier = Tier::kP4;
  EXPECT_EQ(reason(uniform), "QUALITY_GATE_CLOSED");
  uniform.uniform_tier = Tier::kP8;
  EXPECT_EQ(reason(uniform), "");
  EXPECT_EQ(reason(With(Allocator::kGreedy, {Tier::kRaw, Tier::kP4})), "QUALITY_GATE_CLOSED");
}

// Whatever is gated and whatever are the tiers: what is not refused has no closed tier in use.
TEST_F(GateTest, WhatIsNarrowedUsesNothingClosed) {
  const std::vector<Tier> every = {Tier::kRaw, Tier::kP8, Tier::kQ8, Tier::kQ4, Tier::kP4};
  const auto some = [&](unsigned bits) {
    std::vector<Tier> tiers;
    for (size_t i = 0; i < every.size(); ++i) {
      if (bits >> i & 1) tiers.push_back(every[i]);
    }
    return tiers;
  };
  for (unsigned gated = 0; gated < 32; gated += 2) {  // RAW never is
    Make(Mode::kEnforce, some(gated));
    for (unsigned tiers = 1; tiers < 32; ++tiers) {
      for (const Allocator allocator :
           {Allocator::kTwoTier, Allocator::kGreedy, Allocator::kOptimal, Allocator::kRaw}) {
        if (!HasTiersFor(allocator, some(tiers))) continue;
        Policy policy = With(allocator, some(tiers));
        gate_->Judge(kUser, kModel, /*named=*/false, false, &policy);
        const absl::Status status = CheckPolicy(policy, 10, 1);
        const std::string what = std::string(AllocatorName(allocator)) + " gated " + std::to_string(gated) + " tiers " +
                                 std::to_string(tiers);
        // Refused, and for this reason, only where nothing the allocator could do with is open.
        EXPECT_EQ(ReasonOf(status), HasTiersFor(allocator, some(tiers & ~gated)) || allocator == Allocator::kRaw
                                        ? ""
                                        : "QUALITY_GATE_CLOSED")
            << what;
        if (!status.ok()) continue;
        for (const Tier tier : TiersInUse(policy)) {
          EXPECT_EQ(std::count(gate_->options().gated_tiers.begin(), gate_->options().gated_tiers.end(), tier), 0)
              << what;
        }
      }
    }
  }
}

TEST_F(GateTest, NarrowedTiersThatComeIntoUseAreJudgedToo) {
  Make(Mode::kEnforce, {Tier::kP8, Tier::kQ8});
  const auto judged = [&](std::vector<Tier> tiers) {
    Policy policy = With(Allocator::kTwoTier, std::move(tiers));
    gate_->Judge(kUser, kModel, /*named=*/false, false, &policy);
    return policy;
  };
  absl::Status refused = CheckPolicy(judged({Tier::kRaw, Tier::kP8, Tier::kQ8}), 10, 1);
  EXPECT_EQ(ReasonOf(refused), "QUALITY_GATE_CLOSED");
  EXPECT_EQ(MetadataOf(refused)["tiers"], "P8, Q8") << "a probe of one would not do";
  refused = CheckPolicy(judged({Tier::kRaw, Tier::kP8, Tier::kQ4}), 10, 1);
  EXPECT_EQ(ReasonOf(refused), "QUALITY_GATE_CLOSED") << "no INVALID_TIERS: the request named none";
  Say(kUser, Tier::kQ8, true);
  const Policy policy = judged({Tier::kRaw, Tier::kP8, Tier::kQ8});
  EXPECT_EQ(policy.tiers, (std::vector<Tier>{Tier::kRaw, Tier::kQ8}));
  EXPECT_EQ(policy.gate.closed, (std::vector<Tier>{Tier::kP8}));
  EXPECT_TRUE(CheckPolicy(policy, 10, 1).ok());
}

TEST_F(GateTest, NothingLeftIsARefusal) {
  Make(Mode::kEnforce);
  Policy policy = With(Allocator::kGreedy, {Tier::kQ4, Tier::kQ3});
  gate_->Judge(kUser, kModel, /*named=*/false, false, &policy);
  EXPECT_EQ(ReasonOf(CheckPolicy(policy, 10, 1)), "QUALITY_GATE_CLOSED");
}

TEST_F(GateTest, VerdictsAreOfTheirUserAndRevisionAndTheAdministratorsOfAll) {
  Make(Mode::kEnforce);
  Say(kUser, Tier::kQ4, true);
  EXPECT_EQ(Judged().gate.closed, (std::vector<Tier>{Tier::kQ3}));
  EXPECT_EQ(Judged(false, false, kOther).gate.closed.size(), 2u) << "another user's";
  EXPECT_EQ(Judged(false, false, kUser, {"llama", "r2"}).gate.closed.size(), 2u) << "another revision";
  Say(kAdministrator, Tier::kQ3, true);
  EXPECT_EQ(Judged().gate.action, GateAction::kOpen);
  EXPECT_EQ(Judged(false, false, kOther).gate.closed, (std::vector<Tier>{Tier::kQ4}));
  Say(kUser, Tier::kQ3, false);
  EXPECT_EQ(Judged().gate.closed, (std::vector<Tier>{Tier::kQ3})) << "the user's own verdict goes first";
  EXPECT_EQ(gate_->ListFor(kOther, "llama").size(), 1u);
  EXPECT_EQ(gate_->ListFor(kUser, "").size(), 2u);
  EXPECT_EQ(gate_->ListFor(kUser, "other").size(), 0u);
  EXPECT_EQ(*gate_->Delete(kUser, "llama", "r1"), 2u);
  EXPECT_EQ(gate_->ListFor(kUser, "").size(), 1u) << "the administrator's stays";
}

TEST_F(GateTest, TwoOfThreeOfEachKindOpen) {
  Make(Mode::kEnforce);
  for (uint32_t passed = 0; passed <= 3; ++passed) {
    const auto probe = gate_->Start(kUser, "pool", kModel, {Tier::kQ4}, 1500, 5);
    ASSERT_TRUE(probe.ok()) << probe.status();
    const auto verdicts = gate_->Report(kUser, probe->id, Outcomes(*probe, {Tier::kQ4}, passed), kFine);
    ASSERT_TRUE(verdicts.ok()) << verdicts.status();
    EXPECT_EQ((*verdicts)[0].open, passed >= 2);
    EXPECT_EQ((*verdicts)[0].scores[0], (Score{passed, 3}));
    EXPECT_EQ((*verdicts)[0].unix_seconds, 42);
    EXPECT_EQ(judged_, 9 * (passed + 1));
    EXPECT_EQ(Judged().gate.closed.size(), passed >= 2 ? 1u : 2u);
    EXPECT_EQ(ReasonOf(gate_->Report(kUser, probe->id, {}, kFine).status()), "UNKNOWN_PROBE") << "it has ended";
  }
}

TEST_F(GateTest, OneKindThatFailsKeepsItClosed) {
  Make(Mode::kEnforce);
  const auto probe = gate_->Start(kUser, "pool", kModel, {Tier::kQ4, Tier::kP4}, 1500, 5);
  std::vector<TrialOutcome> outcomes = Outcomes(*probe, {Tier::kQ4, Tier::kP4}, 3);
  for (TrialOutcome& outcome : outcomes) {
    if (outcome.tier == Tier::kP4 && outcome.has_agreement && outcome.trial_id > "6") outcome.agreed = 0;
  }
  const auto verdicts = gate_->Report(kUser, probe->id, outcomes, kFine);
  EXPECT_TRUE((*verdicts)[0].open);
  EXPECT_FALSE((*verdicts)[1].open);
}

TEST_F(GateTest, ReportsThatDoNotFitChangeNothing) {
  Make(Mode::kEnforce);
  const auto probe = gate_->Start(kUser, "pool", kModel, {Tier::kQ4}, 1500, 5);
  const auto good = Outcomes(*probe, {Tier::kQ4}, 3);
  const auto reason = [&](std::vector<TrialOutcome> outcomes, const Caller& caller = kUser) {
    return ReasonOf(gate_->Report(caller, probe->id, outcomes, kFine).status());
  };
  EXPECT_EQ(reason(good, kOther), "UNKNOWN_PROBE");
  EXPECT_EQ(reason({}), "INVALID_TRIAL");
  auto bad = good;
  bad.push_back(good[0]);
  EXPECT_EQ(reason(bad), "INVALID_TRIAL") << "one is there twice";
  bad = good;
  bad[1].transfer_id = bad[0].transfer_id;
  EXPECT_EQ(reason(bad), "INVALID_TRIAL") << "one transfer for two trials";
  bad = good;
  bad[0].tier = Tier::kQ3;
  EXPECT_EQ(reason(bad), "INVALID_TRIAL") << "a tier that is not tried";
  bad = good;
  bad[0].trial_id = "99";
  EXPECT_EQ(reason(bad), "INVALID_TRIAL");
  bad = good;
  bad[0].has_answer = false;
  EXPECT_EQ(reason(bad), "INVALID_TRIAL");
  bad = good;
  bad[8].has_agreement = false;
  EXPECT_EQ(reason(bad), "INVALID_TRIAL");
  bad = good;
  bad[8].positions = kMinAgreementPositions - 1;
  bad[8].agreed = 0;
  EXPECT_EQ(reason(bad), "OUT_OF_RANGE");
  bad[8] = good[8];
  bad[8].agreed = 101;
  EXPECT_EQ(reason(bad), "OUT_OF_RANGE");
  const auto refuse = [](const std::string&, const std::string& pool_id, Tier tier) {
    EXPECT_EQ(pool_id, "pool");
    EXPECT_EQ(tier, Tier::kQ4);
    return absl::FailedPreconditionError("not a trial");
  };
  EXPECT_EQ(gate_->Report(kUser, probe->id, good, refuse).status().message(), "not a trial");
  EXPECT_EQ(judged_, 0u);
  EXPECT_TRUE(gate_->ListFor(kUser, "").empty());
  EXPECT_EQ(reason(good), "") << "the probe went on";
}

TEST_F(GateTest, TrialsCanBeReportedOneByOne) {
  Make(Mode::kEnforce);
  const auto probe = gate_->Start(kUser, "pool", kModel, {Tier::kQ4}, 1500, 5);
  const auto good = Outcomes(*probe, {Tier::kQ4}, 3);
  for (size_t i = 0; i < good.size(); ++i) {
    clock_.AdvanceMs(900);  // of 1000 since the last report
    const auto verdicts = gate_->Report(kUser, probe->id, {good[i]}, kFine);
    ASSERT_TRUE(verdicts.ok()) << verdicts.status();
    ASSERT_EQ(verdicts->size(), i + 1 < good.size() ? 0u : 1u);
    EXPECT_EQ(judged_, i + 1 < good.size() ? 0u : 9u);
    if (i + 1 == good.size()) break;
    EXPECT_EQ(ReasonOf(gate_->Report(kUser, probe->id, {good[i]}, kFine).status()), "INVALID_TRIAL") << "again";
    auto stolen = good[i + 1];
    stolen.transfer_id = good[0].transfer_id;
    EXPECT_EQ(ReasonOf(gate_->Report(kUser, probe->id, {stolen}, kFine).status()), "INVALID_TRIAL") << "of an earlier one";
  }
  EXPECT_EQ(Judged().gate.closed, (std::vector<Tier>{Tier::kQ3}));
}

TEST_F(GateTest, WhatMayBeProbed) {
  Make(Mode::kWarn);
  const auto reason = [&](const ModelName& model, std::vector<Tier> tiers, uint32_t characters) {
    return ReasonOf(gate_->Start(kUser, "pool", model, tiers, characters, 0).status());
  };
  EXPECT_EQ(reason({"m", ""}, {Tier::kQ4}, 1500), "NO_REVISION");
  EXPECT_EQ(reason({"", "r"}, {Tier::kQ4}, 1500), "NO_REVISION");
  EXPECT_EQ(reason({std::string(kMaxVerdictNameBytes + 1, 'm'), "r"}, {Tier::kQ4}, 1500), "OUT_OF_RANGE");
  EXPECT_EQ(reason(kModel, {}, 1500), "INVALID_TIERS");
  EXPECT_EQ(reason(kModel, {Tier::kRaw}, 1500), "INVALID_TIERS");
  EXPECT_EQ(reason(kModel, {Tier::kQ4, Tier::kQ4}, 1500), "INVALID_TIERS");
  EXPECT_EQ(reason(kModel, {Tier::kQ4}, kMinPromptCharacters - 1), "OUT_OF_RANGE");
  EXPECT_EQ(reason(kModel, {Tier::kQ4}, kMaxPromptCharacters + 1), "OUT_OF_RANGE");
}

TEST_F(GateTest, ProbesAreBoundedAndEnd) {
  Make(Mode::kWarn);
  std::string last;
  const auto start = [&](const Caller& caller) {
    const auto probe = gate_->Start(caller, "pool", kModel, {Tier::kQ4}, 1500, 0);
    if (probe.ok()) last = probe->id;
    return ReasonOf(probe.status());
  };
  std::vector<std::string> own;
  for (size_t i = 0; i <= kMaxProbesOfOwner; ++i) {
    clock_.AdvanceMs(1);
    EXPECT_EQ(start(kUser), "");
    own.push_back(last);
  }
  const auto known = [&](const std::string& id) {
    return ReasonOf(gate_->Report(kUser, id, {}, kFine).status()) != "UNKNOWN_PROBE";
  };
  EXPECT_FALSE(known(own[0])) << "the oldest made room";
  EXPECT_TRUE(known(own[1]));
  EXPECT_EQ(start(kOther), "");
  for (uint32_t uid = 2000; uid < 2000 + kMaxProbes - kMaxProbesOfOwner - 1; ++uid)
    EXPECT_EQ(start(Caller::Uid(uid)), "");
  EXPECT_EQ(start(Caller::Uid(3000)), "PROBES_FULL");
  const std::string expired = last;
  clock_.AdvanceMs(1000);
  EXPECT_EQ(start(kUser), "");
  EXPECT_EQ(ReasonOf(gate_->Report(kUser, expired, {}, kFine).status()), "UNKNOWN_PROBE");
}

}  // namespace
}  // namespace spectrumkv
