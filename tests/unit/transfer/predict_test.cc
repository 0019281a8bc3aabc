// How long a transfer takes by what is known, and which budget that leads to.
#include "server/transfer/predict.h"

#include "gtest/gtest.h"
#include "server/base/status.h"

namespace spectrumkv {
namespace {

constexpr double kMB = 1e6;

// RAW is cheap, rotated tiers cost ten times as much.
Measured Machine(double link) {
  Measured measured;
  measured.link = link;
  measured.encode = {4000 * kMB, 1000 * kMB, 400 * kMB};
  measured.own_decode = {4000 * kMB, 1000 * kMB, 400 * kMB};
  measured.threads = 2;
  return measured;
}

TransferWork Rotated(double kv_bytes, double wire_bytes, double chunks) {
  TransferWork work;
  work.kv_bytes = {0, 0, kv_bytes};
  work.wire_bytes = wire_bytes;
  work.chunks = chunks;
  return work;
}

TEST(Predict, IsTheSlowestStageAndTheFill) {
  // Encode 80 MB at 2 * 400 MB/s: 0.1 s; decode the same; link 20 MB at 100 MB/s: 0.2 s. One of 100 chunks: encode and
  // decode 2 ms each at one thread's pace.
  Measured measured = Machine(100 * kMB);
  measured.peer_decode = {std::nullopt, std::nullopt, 800 * kMB};
  const Prediction p = Predict(Rotated(80 * kMB, 20 * kMB, 100), measured);
  ASSERT_EQ(p.missing, Missing::kNothing);
  EXPECT_NEAR(p.seconds, 0.2 + 0.002 + 0.001, 1e-9);
  EXPECT_EQ(p.limited_by, Limit::kLink);
  measured.link = 10000 * kMB;
  measured.peer_decode[2] = 200 * kMB;
  const Prediction slow = Predict(Rotated(80 * kMB, 20 * kMB, 100), measured);
  EXPECT_NEAR(slow.seconds, 0.4 + 0.002 + 0.00002, 1e-9);
  EXPECT_EQ(slow.limited_by, Limit::kDecode);
  measured.peer_decode[2] = 8000 * kMB;
  EXPECT_EQ(Predict(Rotated(80 * kMB, 20 * kMB, 100), measured).limited_by, Limit::kEncode);
}

TEST(Predict, OneChunkOverlapsNothing) {
  const Prediction p = Predict(Rotated(0.8 * kMB, 0.2 * kMB, 1), Machine(100 * kMB));
  EXPECT_NEAR(p.seconds, 0.002 + 0.002 + 0.002, 1e-9);
}

TEST(Predict, SmallChunksAreCodedOneAfterTheOther) {
  Measured measured = Machine(10000 * kMB);
  measured.peer_decode = {8000 * kMB, 8000 * kMB, 8000 * kMB};
  const double parallel = Predict(Rotated(80 * kMB, 20 * kMB, 100), measured).seconds;
  measured.inline_chunk_bytes = 800000;
  EXPECT_GT(Predict(Rotated(80 * kMB, 20 * kMB, 100), measured).seconds, 1.9 * parallel) << "chunks of exactly 800000";
  measured.inline_chunk_bytes = 799999;
  EXPECT_DOUBLE_EQ(Predict(Rotated(80 * kMB, 20 * kMB, 100), measured).seconds, parallel);
}

TEST(Predict, WhatComesBeforeIsAdded) {
  Measured measured = Machine(100 * kMB);
  const double without = Predict(Rotated(80 * kMB, 20 * kMB, 100), measured).seconds;
  measured.setup_seconds = 0.05;
  EXPECT_NEAR(Predict(Rotated(80 * kMB, 20 * kMB, 100), measured).seconds, without + 0.05, 1e-9);
  measured.scan = 1000 * kMB;
  measured.plan = 8000 * kMB;
  TransferWork work = Rotated(80 * kMB, 20 * kMB, 100);
  EXPECT_NEAR(Predict(work, measured).seconds, without + 0.05, 1e-9) << "planning overlaps the handshake";
  work.reads.scans = true;
  EXPECT_NEAR(Predict(work, measured).seconds, without + 0.09, 1e-9);
  work.reads.samples = true;
  measured.sample = 4000 * kMB;
  EXPECT_NEAR(Predict(work, measured).seconds, without + 0.11, 1e-9);
  work.reads.attended_bytes = 200 * kMB;
  measured.attend = 2000 * kMB;
  EXPECT_NEAR(Predict(work, measured).seconds, without + 0.21, 1e-9);
  measured.scan = 100 * kMB;
  EXPECT_EQ(Predict(work, measured).limited_by, Limit::kScan);
}

TEST(Predict, SaysWhatIsMissingInsteadOfANumber) {
  Measured measured = Machine(100 * kMB);
  measured.link.reset();
  EXPECT_EQ(Predict(Rotated(80 * kMB, 20 * kMB, 100), measured).missing, Missing::kLink);
  measured = Machine(100 * kMB);
  measured.encode[2].reset();
  EXPECT_EQ(Predict(Rotated(80 * kMB, 20 * kMB, 100), measured).missing, Missing::kStage);
  TransferWork work = Rotated(80 * kMB, 20 * kMB, 100);
  work.kv_bytes = {79.3 * kMB, 0, 0.7 * kMB};
  EXPECT_EQ(Predict(work, measured).missing, Missing::kNothing) << "less than a hundredth";
  work.kv_bytes = {79 * kMB, 0, 1 * kMB};
  EXPECT_EQ(Predict(work, measured).missing, Missing::kStage);
  measured = Machine(100 * kMB);
  measured.own_decode[2].reset();
  EXPECT_EQ(Predict(Rotated(80 * kMB, 20 * kMB, 100), measured).missing, Missing::kStage);
  measured = Machine(100 * kMB);
  work = Rotated(80 * kMB, 20 * kMB, 100);
  work.reads.scans = true;
  EXPECT_EQ(Predict(work, measured).missing, Missing::kStage) << "the scan was never measured";
  work.reads = {false, true};
  EXPECT_EQ(Predict(work, measured).missing, Missing::kStage) << "the sample was never measured";
  work.reads = {false, false, 1};
  EXPECT_EQ(Predict(work, measured).missing, Missing::kStage) << "attention was never measured";
}

// 32 layers of 8 heads of 128 float16 values.
std::vector<PlanLayer> Layers() {
  std::vector<PlanLayer> layers(32);
  for (uint16_t i = 0; i < layers.size(); ++i) {
    layers[i].layer = i;
    layers[i].heads = 8;
    layers[i].head_dim = 128;
  }
  return layers;
}
constexpr uint32_t kTokens = 4096;
constexpr double kKv = 32.0 * kTokens * 8 * 128 * 2 * 2;  // 512 MiB

BudgetCurve Curve(Policy policy = {}) { return BudgetCurveOf(policy, Layers(), kTokens, {}); }

TEST(BudgetCurve, HasAPointForEachRung) {
  const BudgetCurve curve = Curve();
  EXPECT_DOUBLE_EQ(curve.kv_bytes, kKv);
  EXPECT_DOUBLE_EQ(curve.chunks, 32 * 16);
  EXPECT_TRUE(curve.raw_allowed);
  ASSERT_EQ(curve.points.size(), 7u);  // Q2/Q2 ... Q8/Q8, RAW
  for (size_t i = 0; i < curve.points.size(); ++i) {
    const BudgetCurve::Point& point = curve.points[i];
    if (i > 0) {
      EXPECT_GT(point.wire_bytes, curve.points[i - 1].wire_bytes);
    }
    EXPECT_NEAR(point.kv_bytes[0] + point.kv_bytes[1] + point.kv_bytes[2], kKv, 1);
    // Four sinks are RAW on every rung.
    EXPECT_NEAR(point.kv_bytes[0], i + 1 == curve.points.size() ? kKv : kKv * 4 / kTokens, 1);
  }
  Policy plain;
  plain.tiers = {Tier::kP8, Tier::kQ4};
  EXPECT_FALSE(Curve(plain).raw_allowed);
  EXPECT_EQ(Curve(plain).points.size(), 2u);
}

// What the planner then sends is what the curve says.
TEST(BudgetCurve, AgreesWithThePlanner) {
  for (const double budget : {0.17, 0.2, 0.3, 0.45, 0.6, 0.9, 1.05}) {
    Policy policy;
    policy.budget = budget;
    auto planner = Planner::Create(policy, Layers(), kTokens);
    ASSERT_TRUE(planner.ok()) << planner.status();
    std::vector<uint32_t> all(planner->cuts().size());
    for (uint32_t i = 0; i < all.size(); ++i) all[i] = i;
    const auto batch = planner->Plan(all, {});
    ASSERT_TRUE(batch.ok()) << batch.status();
    const TransferWork work = WorkAt(Curve(), budget);
    EXPECT_NEAR(work.wire_bytes, static_cast<double>(batch->wire_bytes), 0.01 * kKv) << budget;
    double raw = 0, planes = 0;
    for (size_t tier = 0; tier < kTierCount; ++tier) {
      const auto count = static_cast<double>(batch->totals.k[tier] + batch->totals.v[tier]);
      planes += count;
      if (FamilyOf(static_cast<Tier>(tier)) == TierFamily::kRaw) raw += count;
    }
    EXPECT_NEAR(work.kv_bytes[0] / kKv, raw / planes, 0.02) << budget;
  }
}

TEST(ChooseBudget, TakesTheLeastLossyThatMeetsTheTarget) {
  const Measured measured = Machine(125 * kMB);  // 1 Gbit/s: RAW takes 4.3 s
  const BudgetChoice choice = ChooseBudget(Curve(), measured, 2.0, 0.2, 0.5);
  EXPECT_EQ(choice.reason, BudgetReason::kMeetsTarget);
  EXPECT_LE(*choice.predicted_seconds, 2.0);
  EXPECT_DOUBLE_EQ(*choice.link_bytes_per_second, 125 * kMB);
  EXPECT_GT(choice.budget, 0.4);
  EXPECT_LT(choice.budget, 0.5);
  EXPECT_GT(Predict(WorkAt(Curve(), choice.budget + 0.01), measured).seconds, 2.0) << "the next would not";
  EXPECT_FALSE(choice.raw());
}

TEST(ChooseBudget, TakesRawWhereRawMeetsTheTarget) {
  const BudgetChoice choice = ChooseBudget(Curve(), Machine(125 * kMB), 5.0, 0.2, 0.5);
  EXPECT_EQ(choice.reason, BudgetReason::kRawMeetsTarget);
  EXPECT_EQ(choice.budget, 1);
  EXPECT_TRUE(choice.raw());
}

TEST(ChooseBudget, TakesRawWhereCodingDoesNotPay) {
  // Nothing reaches a millisecond; the link is faster than the codec.
  const BudgetChoice choice = ChooseBudget(Curve(), Machine(10000 * kMB), 0.001, 0.2, 0.5);
  EXPECT_EQ(choice.reason, BudgetReason::kRawNotSlower);
  EXPECT_TRUE(choice.raw());
  Policy no_raw;
  no_raw.tiers = {Tier::kQ8, Tier::kQ4, Tier::kQ3, Tier::kQ2};
  const BudgetChoice coded = ChooseBudget(Curve(no_raw), Machine(10000 * kMB), 0.001, 0.2, 0.5);
  EXPECT_EQ(coded.reason, BudgetReason::kOutOfReach) << "RAW is not allowed";
  EXPECT_FALSE(coded.raw());
}

TEST(ChooseBudget, TakesTheSmallestAllowedWhereNothingMeetsTheTarget) {
  for (const double least : {0.2, 0.205, 0.3, 1.0}) {
    const BudgetChoice choice = ChooseBudget(Curve(), Machine(125 * kMB), 0.1, least, 0.5);
    EXPECT_EQ(choice.reason, BudgetReason::kOutOfReach);
    EXPECT_DOUBLE_EQ(choice.budget, least);
    EXPECT_GT(*choice.predicted_seconds, 0.1);
  }
}

TEST(ChooseBudget, WithoutMeasurementsKeepsTheDefault) {
  Measured measured = Machine(125 * kMB);
  measured.link.reset();
  BudgetChoice choice = ChooseBudget(Curve(), measured, 2, 0.2, 0.45);
  EXPECT_EQ(choice.reason, BudgetReason::kLinkUnknown);
  EXPECT_EQ(choice.budget, 0.45);
  EXPECT_FALSE(choice.predicted_seconds.has_value());
  EXPECT_FALSE(choice.link_bytes_per_second.has_value());
  measured = Machine(125 * kMB);
  measured.encode[2].reset();
  choice = ChooseBudget(Curve(), measured, 2, 0.2, 0.45);
  EXPECT_EQ(choice.reason, BudgetReason::kStageUnknown);
  EXPECT_EQ(choice.budget, 0.45);
  EXPECT_FALSE(choice.predicted_seconds.has_value());
}

// More time or a faster link never means a smaller budget; and what is promised is kept or said to be out of reach.
TEST(ChooseBudget, IsMonotonic) {
  const BudgetCurve curve = Curve();
  for (double target = 0.05; target < 10; target *= 1.3) {
    double before = 0;
    for (double link = 10 * kMB; link < 20000 * kMB; link *= 1.5) {
      const BudgetChoice choice = ChooseBudget(curve, Machine(link), target, 0.2, 0.5);
      ASSERT_GE(choice.budget, before) << link << " " << target;
      before = choice.budget;
      ASSERT_GE(choice.budget, 0.2);
      ASSERT_LE(choice.budget, 1);
      const bool in_reach =
          choice.reason == BudgetReason::kMeetsTarget || choice.reason == BudgetReason::kRawMeetsTarget;
      if (in_reach) {
        ASSERT_LE(*choice.predicted_seconds, target);
      } else {
        ASSERT_GT(*choice.predicted_seconds, target);
      }
    }
  }
  for (double link = 10 * kMB; link < 20000 * kMB; link *= 1.5) {
    double before = 0;
    for (double target = 0.05; target < 10; target *= 1.3) {
      const BudgetChoice choice = ChooseBudget(curve, Machine(link), target, 0.2, 0.5);
      if (choice.reason == BudgetReason::kRawNotSlower) continue;
      ASSERT_GE(choice.budget, before) << link << " " << target;
      before = choice.budget;
    }
  }
}

// The time of OPTIMAL's sample is part of what a budget is chosen for; RAW does without.
TEST(ResolveAutoBudget, CountsTheSample) {
  Policy policy;
  policy.allocator = Allocator::kOptimal;
  policy.auto_target_seconds = 2;
  Measured measured = Machine(125 * kMB);
  measured.sample = kKv / 0.5;
  const SourceReads reads = ReadsFirst(policy, false, nullptr, Layers(), kTokens);
  EXPECT_TRUE(reads.samples);
  EXPECT_FALSE(reads.scans);
  BudgetChoice with, without;
  ResolveAutoBudget(policy, Layers(), kTokens, reads, measured, &with);
  ResolveAutoBudget(policy, Layers(), kTokens, {}, measured, &without);
  EXPECT_EQ(with.reason, BudgetReason::kMeetsTarget);
  EXPECT_NEAR(without.budget - with.budget, 0.5 * measured.link.value() / kKv, 0.02);
  policy.allocator = Allocator::kRaw;
  EXPECT_FALSE(ReadsFirst(policy, false, nullptr, Layers(), kTokens).samples);
}

TEST(ResolveAutoBudget, LeavesAnOrdinaryPolicy) {
  Policy policy;
  policy.auto_target_seconds = 2;
  BudgetChoice choice;
  const Policy chosen = ResolveAutoBudget(policy, Layers(), kTokens, {}, Machine(125 * kMB), &choice);
  EXPECT_EQ(chosen.budget, choice.budget);
  EXPECT_EQ(chosen.allocator, Allocator::kGreedy);
  EXPECT_TRUE(chosen.soft_budget);
  EXPECT_EQ(chosen.auto_target_seconds, 0);
  EXPECT_TRUE(Planner::Create(chosen, Layers(), kTokens).ok());
  policy.auto_target_seconds = 5;
  const Policy raw = ResolveAutoBudget(policy, Layers(), kTokens, {}, Machine(125 * kMB), &choice);
  EXPECT_EQ(raw.allocator, Allocator::kRaw);
  EXPECT_TRUE(Planner::Create(raw, Layers(), kTokens).ok()) << "headers make RAW a little larger than 1";
}

TEST(CheckPolicy, RefusesAnAutomaticBudgetThatMakesNoSense) {
  const auto reason = [](auto change) {
    Policy policy;
    policy.auto_target_seconds = 1;
    change(&policy);
    return ReasonOf(CheckPolicy(policy, kTokens, 32));
  };
  EXPECT_EQ(reason([](Policy*) {}), "");
  EXPECT_EQ(reason([](Policy* p) { p->auto_target_seconds = -1; }), "INVALID_BUDGET");
  EXPECT_EQ(reason([](Policy* p) { p->auto_target_seconds = kMaxTargetSeconds; }), "");
  EXPECT_EQ(reason([](Policy* p) { p->auto_target_seconds = kMaxTargetSeconds + 1; }), "INVALID_BUDGET");
  EXPECT_EQ(reason([](Policy* p) { p->auto_target_seconds = std::numeric_limits<double>::quiet_NaN(); }),
            "INVALID_BUDGET");
  EXPECT_EQ(reason([](Policy* p) { p->auto_min_budget = 0; }), "INVALID_BUDGET");
  EXPECT_EQ(reason([](Policy* p) { p->auto_min_budget = 1; }), "");
  EXPECT_EQ(reason([](Policy* p) { p->auto_min_budget = 1.01; }), "INVALID_BUDGET");
  EXPECT_EQ(reason([](Policy* p) { p->payload_only = true; }), "INVALID_POLICY");
  for (const Allocator allocator :
       {Allocator::kRaw, Allocator::kUniform, Allocator::kTwoTier, Allocator::kPdTrim, Allocator::kSlidingWindowSink}) {
    EXPECT_EQ(reason([&](Policy* p) {
                p->allocator = allocator;
                p->tiers = {Tier::kRaw, Tier::kQ8};
              }),
              "INVALID_POLICY")
        << AllocatorName(allocator);
  }
}

}  // namespace
}  // namespace spectrumkv
