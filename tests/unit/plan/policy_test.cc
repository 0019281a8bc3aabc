// Names, and what CheckPolicy says to bad values: the reason, and the field in the message.
#include <cmath>
#include <functional>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/status.h"
#include "tests/unit/plan/plan_fixture.h"

namespace spectrumkv {
namespace {

using testing::HasSubstr;

constexpr uint32_t kTokens = 10, kLayers = 3;

struct BadPolicy {
  const char* what;
  std::function<void(Policy*)> spoil;
  const char* reason;
  const char* message;
};

Policy WithScores(size_t count) {
  Policy policy;
  policy.importance = ImportanceSource::kScores;
  policy.scores.assign(count, 0.5f);
  return policy;
}

TEST(CheckPolicy, RefusesBadValues) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  const float nan_f = std::numeric_limits<float>::quiet_NaN(), inf_f = std::numeric_limits<float>::infinity();
  const std::vector<BadPolicy> table = {
      {"budget NaN", [=](Policy* p) { p->budget = nan; }, "INVALID_BUDGET", "policy.budget is nan"},
      {"budget infinite", [=](Policy* p) { p->budget = inf; }, "INVALID_BUDGET", "(0, 10]"},
      {"budget 0", [](Policy* p) { p->budget = 0; }, "INVALID_BUDGET", "policy.budget is 0.0"},
      {"budget negative", [](Policy* p) { p->budget = -0.5; }, "INVALID_BUDGET", "policy.budget is -0.5"},
      {"budget above", [](Policy* p) { p->budget = std::nextafter(10.0, 11.0); }, "INVALID_BUDGET", "(0, 10]"},
      {"no tiers", [](Policy* p) { p->tiers.clear(); }, "INVALID_TIERS", "empty"},
      {"tier twice", [](Policy* p) { p->tiers.push_back(Tier::kQ4); }, "INVALID_TIERS", "Q4 twice"},
      {"tier unknown", [](Policy* p) { p->tiers.push_back(static_cast<Tier>(7)); }, "INVALID_TIERS", "id 7"},
      {"uniform unknown",
       [](Policy* p) {
         p->allocator = Allocator::kUniform;
         p->uniform_tier = static_cast<Tier>(200);
       },
       "INVALID_TIERS", "policy.uniform_tier is the unknown tier id 200"},
      {"two tier without 8 bits",
       [](Policy* p) {
         p->allocator = Allocator::kTwoTier;
         p->tiers = {Tier::kRaw, Tier::kQ4};
       },
       "INVALID_TIERS", "needs P8 or Q8"},
      {"scores missing", [](Policy* p) { *p = WithScores(0); }, "INVALID_SCORES", "policy.scores is empty"},
      {"scores short", [](Policy* p) { *p = WithScores(9); }, "INVALID_SCORES", "has 9 values, expected 10"},
      {"scores long", [](Policy* p) { *p = WithScores(11); }, "INVALID_SCORES", "has 11 values, expected 10"},
      {"scores for every layer, not asked for", [](Policy* p) { *p = WithScores(30); }, "INVALID_SCORES",
       "expected 10"},
      {"scores per layer short",
       [](Policy* p) {
         *p = WithScores(10);
         p->scores_per_layer = true;
       },
       "INVALID_SCORES", "expected 30 (layers * tokens)"},
      {"scores not used, wrong length",
       [](Policy* p) {
         *p = WithScores(9);
         p->importance = ImportanceSource::kPosition;
       },
       "INVALID_SCORES", "expected 10"},
      {"score NaN", [=](Policy* p) { (*p = WithScores(10)).scores[3] = nan_f; }, "INVALID_SCORES",
       "policy.scores[3] is nan"},
      {"score infinite", [=](Policy* p) { (*p = WithScores(10)).scores[9] = inf_f; }, "INVALID_SCORES", "[9] is inf"},
      {"score negative", [](Policy* p) { (*p = WithScores(10)).scores[0] = -1; }, "INVALID_SCORES", "[0] is -1"},
      {"decay NaN", [=](Policy* p) { p->decay_lambda = nan; }, "INVALID_DECAY", "decay_lambda is nan"},
      {"decay infinite", [=](Policy* p) { p->decay_lambda = inf; }, "INVALID_DECAY", "decay_lambda is inf"},
      {"decay negative", [](Policy* p) { p->decay_lambda = -1e-9; }, "INVALID_DECAY", "not negative"},
  };
  for (const BadPolicy& bad : table) {
    Policy policy;
    bad.spoil(&policy);
    const absl::Status status = CheckPolicy(policy, kTokens, kLayers);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.what;
    EXPECT_EQ(ReasonOf(status), bad.reason) << bad.what;
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.message)) << bad.what;
    // Create checks it too.
    EXPECT_EQ(Planner::Create(policy, Layers(kLayers), kTokens).status(), status) << bad.what;
  }
}

TEST(CheckPolicy, TakesTheLimits) {
  Policy policy;
  EXPECT_TRUE(CheckPolicy(policy, kTokens, kLayers).ok());
  policy.budget = kMaxBudget;
  EXPECT_TRUE(CheckPolicy(policy, kTokens, kLayers).ok());
  policy.budget = 1e-9;
  EXPECT_TRUE(CheckPolicy(policy, kTokens, kLayers).ok());
  EXPECT_TRUE(CheckPolicy(WithScores(10), kTokens, kLayers).ok());
  policy = WithScores(30);
  policy.scores_per_layer = true;
  policy.scores[4] = 0;
  policy.scores[5] = std::numeric_limits<float>::max();
  EXPECT_TRUE(CheckPolicy(policy, kTokens, kLayers).ok());
  policy.allocator = Allocator::kUniform;  // its tier need not be listed
  policy.uniform_tier = Tier::kP4;
  EXPECT_TRUE(CheckPolicy(policy, kTokens, kLayers).ok());
  // Of profiles, as their files state them: doubles, which those of layers stop being.
  for (const double limit : {0.001, 1000.0}) {
    Policy profiled;
    profiled.profile.k_weight = limit;
    profiled.profile.layer_weights.assign(kLayers, static_cast<float>(limit));
    profiled.profile.layer_budgets.assign(kLayers, static_cast<float>(limit));
    profiled.profile.k_errors[1] = limit == 1000 ? limit : 1e-12;
    profiled.profile.v_errors[1] = limit == 1000 ? limit : 1e-12;
    EXPECT_TRUE(CheckPolicy(profiled, kTokens, kLayers).ok()) << CheckPolicy(profiled, kTokens, kLayers);
  }
}

TEST(CheckPolicy, RefusesProfilesBeyondTheLimits) {
  const auto reason = [](const std::function<void(ModelProfile*)>& spoil) {
    Policy policy;
    policy.profile.layer_weights.assign(kLayers, 1);
    policy.profile.layer_budgets.assign(kLayers, 1);
    spoil(&policy.profile);
    return ReasonOf(CheckPolicy(policy, kTokens, kLayers));
  };
  EXPECT_EQ(reason([](ModelProfile*) {}), "");
  for (const double beyond : {std::nextafter(0.001, 0.0), std::nextafter(1000.0, 2000.0)}) {
    EXPECT_EQ(reason([=](ModelProfile* p) { p->k_weight = beyond; }), "INVALID_PROFILE");
  }
  for (const float beyond : {std::nextafter(0.001f, 0.f), std::nextafter(1000.f, 2000.f)}) {
    EXPECT_EQ(reason([=](ModelProfile* p) { p->layer_weights[1] = beyond; }), "INVALID_PROFILE");
    EXPECT_EQ(reason([=](ModelProfile* p) { p->layer_budgets[2] = beyond; }), "INVALID_PROFILE");
  }
  for (const double beyond : {std::nextafter(1e-12, 0.0), std::nextafter(1000.0, 2000.0)}) {
    EXPECT_EQ(reason([=](ModelProfile* p) { p->k_errors[1] = beyond; }), "INVALID_PROFILE");
    EXPECT_EQ(reason([=](ModelProfile* p) { p->v_errors[1] = beyond; }), "INVALID_PROFILE");
  }
}

TEST(Names, GoThereAndBack) {
  for (int i = 0; i <= static_cast<int>(Allocator::kRaw); ++i) {
    const Allocator allocator = static_cast<Allocator>(i);
    EXPECT_EQ(ParseAllocator(AllocatorName(allocator)).value(), allocator);
  }
  EXPECT_STREQ(AllocatorName(Allocator::kSlidingWindowSink), "SLIDING_WINDOW_SINK");
  for (int id = 0; id < kTierCount; ++id) {
    EXPECT_EQ(ParseTier(TierName(static_cast<Tier>(id))).value(), static_cast<Tier>(id));
  }
  EXPECT_STREQ(ImportanceSourceName(ImportanceSource::kKeyNorm), "KEY_NORM");
  for (const char* name : {"", "greedy", "GREEDY ", "?"}) {
    EXPECT_EQ(ReasonOf(ParseAllocator(name).status()), "INVALID_ALLOCATOR") << name;
    EXPECT_EQ(ReasonOf(ParseTier(name).status()), "INVALID_TIERS") << name;
  }
  EXPECT_THAT(std::string(ParseAllocator("OPTIMUM").status().message()), HasSubstr("OPTIMUM"));
}

TEST(Create, RefusesBadShapes) {
  struct Bad {
    const char* message;
    std::vector<PlanLayer> layers;
    uint32_t tokens;
  };
  std::vector<PlanLayer> unordered = Layers(3);
  unordered[2].layer = 1;
  const std::vector<Bad> table = {
      {"token_count is 0", Layers(1), 0},
      {"no layers", {}, 10},
      {"layer 1 is not above", unordered, 10},
      {"0 heads", Layers(1, 0), 10},
      {"1025 heads", Layers(1, 1025), 10},
      {"head_dim 0", Layers(1, 1, 0), 10},
      {"head_dim 12", Layers(1, 1, 12), 10},
      {"head_dim 1032", Layers(1, 1, 1032), 10},
      {"chunks; the limit is 4194304", Layers(1, 1024, 1024), 4194305},
      {"chunks; the limit is 4194304", Layers(500, 1024, 1024), 4294967295u},
  };
  for (const Bad& bad : table) {
    const absl::Status status = Planner::Create(Policy(), bad.layers, bad.tokens).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ReasonOf(status), "INVALID_SHAPE");
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.message));
  }
}

TEST(Create, NamesTheLeastBudget) {
  Policy policy;
  policy.budget = 0.05;
  const absl::Status status = Planner::Create(policy, Layers(2), 1024).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  ASSERT_EQ(ReasonOf(status), "BUDGET_TOO_SMALL");
  const std::string least = MetadataOf(status)["least_budget"];
  EXPECT_THAT(std::string(status.message()), HasSubstr("policy.budget 0.05"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("least possible " + least));
  policy.budget = std::stod(least);
  EXPECT_TRUE(Planner::Create(policy, Layers(2), 1024).ok());
  policy.budget -= 1e-6;
  EXPECT_FALSE(Planner::Create(policy, Layers(2), 1024).ok());
}

TEST(Create, SinksThatDoNotFitNameTheLeastBudget) {
  Policy policy;
  policy.budget = 0.3;
  policy.sinks = 400;
  const absl::Status status = Planner::Create(policy, Layers(2), 1000).status();
  ASSERT_EQ(ReasonOf(status), "BUDGET_TOO_SMALL");
  const double least = std::stod(MetadataOf(status)["least_budget"]);
  EXPECT_GT(least, 0.4);
  EXPECT_LT(least, 0.5);
}

TEST(Create, ASoftBudgetIsRaisedToTheLeastThatCanBeMetAndNoFurther) {
  for (const uint32_t tokens : {1u, 2u, 5u, 64u, 1000u}) {
    Policy policy;
    policy.budget = 0.05;
    policy.soft_budget = true;
    absl::StatusOr<Planner> planner = Planner::Create(policy, Layers(2), tokens);
    ASSERT_TRUE(planner.ok()) << planner.status();
    const double raised = planner->effective_budget();
    EXPECT_GT(raised, 0.05);
    EXPECT_NEAR(raised, planner->LeastBudget(NoScan(*planner)), 1e-9);
    const absl::StatusOr<PlanBatch> batch = planner->Plan(AllChunks(*planner), NoScan(*planner));
    ASSERT_TRUE(batch.ok()) << batch.status();
    EXPECT_LE(static_cast<double>(batch->wire_bytes), raised * static_cast<double>(batch->kv_bytes) + 0.5);
    EXPECT_EQ(batch->escape_overrun_bytes, 0u);
  }
  Policy enough;
  enough.soft_budget = true;
  EXPECT_EQ(Planner::Create(enough, Layers(2), 1000)->effective_budget(), enough.budget);
}

TEST(Create, ASoftBudgetPaysForEscapesToo) {
  Policy policy;
  policy.budget = 0.2;
  policy.soft_budget = true;
  absl::StatusOr<Planner> planner = Planner::Create(policy, Layers(2), 256);
  ASSERT_TRUE(planner.ok()) << planner.status();
  std::vector<LayerScan> scan(2);
  for (LayerScan& layer : scan) {
    layer.k.assign(256, TokenScan{kEscapeNonFinite, 255});
    layer.v.assign(256, TokenScan{kEscapeNonFinite, 255});
  }
  const absl::StatusOr<PlanBatch> batch = planner->Plan(AllChunks(*planner), scan);
  ASSERT_TRUE(batch.ok()) << batch.status();
  EXPECT_GT(batch->wire_bytes, batch->kv_bytes);
  EXPECT_GT(planner->effective_budget(), 1.0);
}

}  // namespace
}  // namespace spectrumkv
