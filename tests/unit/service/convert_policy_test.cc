// Policies, and what goes with them, from their messages.
#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "gtest/gtest.h"
#include "server/service/convert.h"
#include "tests/unit/service/expect_error.h"

namespace spectrumkv {
namespace {

TEST(PolicyFromProto, LeavesOpenFieldsToTheDefaults) {
  Policy defaults;
  defaults.budget = 0.3;
  defaults.allocator = Allocator::kBalanced;
  defaults.tiers = {Tier::kRaw, Tier::kP8};
  defaults.sinks = 9;
  defaults.decay_lambda = 0.5;
  const auto policy = PolicyFromProto({}, defaults);
  ASSERT_TRUE(policy.ok());
  EXPECT_EQ(policy->budget, 0.3);
  EXPECT_EQ(policy->allocator, Allocator::kBalanced);
  EXPECT_EQ(policy->tiers, defaults.tiers);
  EXPECT_EQ(policy->sinks, 9u);
  EXPECT_EQ(policy->decay_lambda, 0.5);
  EXPECT_EQ(policy->importance, ImportanceSource::kPosition);
  EXPECT_FALSE(policy->allow_drop);
}

TEST(PolicyFromProto, FewerSinksWhereAttentionIsKnown) {
  v1::Policy proto;
  proto.set_allocator(v1::ALLOCATOR_OPTIMAL);
  const auto sinks = [&proto](uint32_t of_daemon) {
    Policy defaults;
    defaults.sinks = of_daemon;
    return PolicyFromProto(proto, defaults)->sinks;
  };
  EXPECT_EQ(sinks(4), 4u);
  proto.mutable_importance()->mutable_queries()->add_positions(3);
  EXPECT_EQ(sinks(4), 1u);
  EXPECT_EQ(sinks(0), 0u) << "a daemon that pins none";
  proto.mutable_importance()->set_sinks(3);
  EXPECT_EQ(sinks(4), 3u) << "what the request says";
  proto.mutable_importance()->Clear();
  proto.mutable_importance()->add_scores(1);
  EXPECT_EQ(sinks(4), 1u);
  proto.set_allocator(v1::ALLOCATOR_GREEDY);
  EXPECT_EQ(sinks(4), 4u);
}

TEST(PolicyFromProto, TakesEveryField) {
  v1::Policy proto;
  proto.set_budget(0.25);
  proto.set_allocator(v1::ALLOCATOR_UNIFORM);
  proto.set_uniform_tier(v1::TIER_P4);
  proto.set_random_seed(3);
  for (const v1::Tier tier : {v1::TIER_RAW, v1::TIER_Q8, v1::TIER_P4, v1::TIER_DROP}) proto.add_tiers(tier);
  proto.mutable_importance()->add_scores(1);
  proto.mutable_importance()->add_scores(2);
  proto.mutable_importance()->set_scores_per_layer(true);
  proto.mutable_importance()->set_decay_lambda(0.1);
  proto.mutable_importance()->set_sinks(0);
  proto.set_strict_budget(true);
  proto.set_payload_only(true);
  const auto policy = PolicyFromProto(proto, Policy());
  ASSERT_TRUE(policy.ok()) << policy.status();
  EXPECT_EQ(policy->budget, 0.25);
  EXPECT_EQ(policy->allocator, Allocator::kUniform);
  EXPECT_EQ(policy->uniform_tier, Tier::kP4);
  EXPECT_EQ(policy->random_seed, 3u);
  EXPECT_EQ(policy->tiers, (std::vector<Tier>{Tier::kRaw, Tier::kQ8, Tier::kP4}));
  EXPECT_TRUE(policy->allow_drop);
  EXPECT_EQ(policy->importance, ImportanceSource::kScores) << "scores were given";
  EXPECT_EQ(policy->scores, (std::vector<float>{1, 2}));
  EXPECT_TRUE(policy->scores_per_layer && policy->strict_budget && policy->payload_only);
  EXPECT_EQ(policy->sinks, 0u);
}

TEST(PolicyFromProto, QueriesAreASourceOfImportance) {
  v1::Policy proto;
  proto.mutable_importance()->mutable_queries()->add_positions(3);
  auto policy = PolicyFromProto(proto, Policy());
  ASSERT_TRUE(policy.ok()) << policy.status();
  EXPECT_EQ(policy->importance, ImportanceSource::kRecentQueries);
  proto.mutable_importance()->set_source(v1::IMPORTANCE_SOURCE_RECENT_QUERIES);
  proto.mutable_importance()->clear_queries();
  policy = PolicyFromProto(proto, Policy());
  ASSERT_TRUE(policy.ok()) << "a layer-wise source has them later";
  EXPECT_EQ(policy->importance, ImportanceSource::kRecentQueries);
  proto.mutable_importance()->mutable_queries()->add_positions(3);
  proto.mutable_importance()->add_scores(1);
  EXPECT_ERROR(PolicyFromProto(proto, Policy()).status(), kInvalidArgument, "INVALID_POLICY");
}

TEST(QueriesFromProto, TakesEveryFieldAndRefusesOtherTypes) {
  v1::RecentQueries proto;
  EXPECT_ERROR(QueriesFromProto(proto).status(), kInvalidArgument, "INVALID_QUERIES");
  proto.set_data_type(v1::DATA_TYPE_FLOAT8_E4M3);
  EXPECT_ERROR(QueriesFromProto(proto).status(), kInvalidArgument, "INVALID_QUERIES");
  proto.set_data_type(v1::DATA_TYPE_BFLOAT16);
  proto.add_positions(7);
  v1::LayerQueries* layer = proto.add_layers();
  layer->set_layer(5);
  layer->set_queries("abc");
  layer->set_query_heads(6);
  layer->set_softmax_scale(0.5);
  layer->set_logit_soft_cap(30);
  layer->set_window_tokens(512);
  const auto queries = QueriesFromProto(proto);
  ASSERT_TRUE(queries.ok()) << queries.status();
  EXPECT_EQ((*queries)->dtype, DType::kBFloat16);
  EXPECT_EQ((*queries)->positions, std::vector<uint32_t>{7});
  const LayerQueries& got = (*queries)->layers.at(0);
  EXPECT_EQ(got.layer, 5u);
  EXPECT_EQ(got.words, "abc");
  EXPECT_EQ(got.query_heads, 6u);
  EXPECT_EQ(got.softmax_scale, 0.5f);
  EXPECT_EQ(got.soft_cap, 30.0f);
  EXPECT_EQ(got.window, 512u);
  for (int i = 0; i < kMaxLayers; ++i) proto.add_layers();
  EXPECT_ERROR(QueriesFromProto(proto).status(), kInvalidArgument, "INVALID_QUERIES");
}

TEST(ProfileOf, IsThatOfThePoolsModelForItsLayers) {
  ProfileFile file;
  file.name = "file";
  file.model = "m";
  file.k_weight = 2;
  file.k_errors = {{"Q4", 0.5}};
  file.v_errors = {{"Q2", 0.25}};
  file.layer_weights = {10, 11, 12, 13};
  PoolSchema schema;
  schema.model = "m";
  std::vector<PlanLayer> layers(3);
  layers[0].layer = 1;
  layers[1].layer = 3;
  layers[2].layer = 4;  // the file does not know it
  const ModelProfile profile = ProfileOf({file}, schema, layers);
  EXPECT_EQ(profile.name, "file");
  EXPECT_EQ(profile.k_weight, 2);
  EXPECT_EQ(profile.k_errors[static_cast<size_t>(Tier::kQ4)], 0.5);
  EXPECT_EQ(profile.k_errors[static_cast<size_t>(Tier::kQ2)], 0);
  EXPECT_EQ(profile.v_errors[static_cast<size_t>(Tier::kQ2)], 0.25);
  EXPECT_EQ(profile.layer_weights, (std::vector<float>{11, 13, 1}));
  EXPECT_TRUE(profile.layer_budgets.empty());
  Policy policy;
  policy.profile = profile;
  EXPECT_TRUE(CheckPolicy(policy, 10, 3).ok());
  schema.model = "other";
  const ModelProfile none = ProfileOf({file}, schema, layers);
  EXPECT_EQ(none.name, "default");
  EXPECT_EQ(none.k_weight, ModelProfile().k_weight);
}

TEST(PolicyFromProto, RefusesUnknownValues) {
  v1::Policy proto;
  proto.set_allocator(static_cast<v1::Allocator>(77));
  EXPECT_ERROR(PolicyFromProto(proto, Policy()).status(), kUnimplemented, "UNKNOWN_ALLOCATOR");
  proto.Clear();
  proto.add_tiers(static_cast<v1::Tier>(9));
  EXPECT_ERROR(PolicyFromProto(proto, Policy()).status(), kUnimplemented, "UNKNOWN_TIER");
  proto.set_tiers(0, v1::TIER_UNSPECIFIED);
  EXPECT_ERROR(PolicyFromProto(proto, Policy()).status(), kInvalidArgument, "INVALID_TIERS");
  proto.Clear();
  proto.set_uniform_tier(v1::TIER_DROP);
  EXPECT_ERROR(PolicyFromProto(proto, Policy()).status(), kInvalidArgument, "INVALID_TIERS");
  proto.Clear();
  proto.mutable_importance()->set_source(static_cast<v1::ImportanceSource>(50));
  EXPECT_ERROR(PolicyFromProto(proto, Policy()).status(), kInvalidArgument, "INVALID_POLICY");
}

TEST(RefineFromProto, TakesEveryField) {
  v1::RefineRequest proto;
  proto.set_transfer_id("t");
  proto.set_refine_id("r");
  auto plain = RefineFromProto(proto, RequestDefaults());
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ(plain->tier, Tier::kRaw);
  EXPECT_FALSE(plain->direct || plain->budget.has_value());
  EXPECT_EQ(plain->deadline_ms, RequestDefaults().deadline_ms);
  proto.mutable_selection()->add_tokens()->set_first(3);
  proto.mutable_selection()->mutable_tokens(0)->set_count(2);
  proto.mutable_selection()->add_layers(7);
  proto.mutable_selection()->add_scores(0.5f);
  proto.set_tier(v1::TIER_Q8);
  proto.set_budget(0.25);
  proto.set_mode(v1::REFINE_MODE_DIRECT);
  proto.set_deadline_ms(1234);
  const auto spec = RefineFromProto(proto, RequestDefaults());
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->transfer_id, "t");
  EXPECT_EQ(spec->refine_id, "r");
  EXPECT_EQ(spec->selection.tokens, (std::vector<TokenRange>{{3, 2}}));
  EXPECT_EQ(spec->selection.layers, std::vector<uint32_t>{7});
  EXPECT_EQ(spec->selection.scores, std::vector<float>{0.5f});
  EXPECT_EQ(spec->tier, Tier::kQ8);
  EXPECT_EQ(*spec->budget, 0.25);
  EXPECT_TRUE(spec->direct);
  EXPECT_EQ(spec->deadline_ms, 1234);
  EXPECT_NE(spec->fingerprint, plain->fingerprint);
}

TEST(RefineFromProto, RefusesByReason) {
  const auto with = [](const std::function<void(v1::RefineRequest*)>& change) {
    v1::RefineRequest proto;
    proto.set_transfer_id("t");
    proto.set_refine_id("r");
    change(&proto);
    return RefineFromProto(proto, RequestDefaults()).status();
  };
  EXPECT_ERROR(with([](auto* r) { r->set_refine_id("t"); }), kInvalidArgument, "INVALID_TRANSFER_ID");
  EXPECT_ERROR(with([](auto* r) { r->set_refine_id("no space"); }), kInvalidArgument, "INVALID_TRANSFER_ID");
  EXPECT_ERROR(with([](auto* r) { r->set_transfer_id(""); }), kInvalidArgument, "INVALID_TRANSFER_ID");
  EXPECT_ERROR(with([](auto* r) { r->set_tier(v1::TIER_DROP); }), kInvalidArgument, "INVALID_TIERS");
  EXPECT_ERROR(with([](auto* r) { r->set_tier(static_cast<v1::Tier>(9)); }), kInvalidArgument, "UNKNOWN_TIER");
  EXPECT_ERROR(with([](auto* r) { r->set_budget(0); }), kInvalidArgument, "INVALID_BUDGET");
  EXPECT_ERROR(with([](auto* r) { r->set_budget(std::nan("")); }), kInvalidArgument, "INVALID_BUDGET");
  EXPECT_ERROR(with([](auto* r) { r->set_mode(static_cast<v1::RefineMode>(3)); }), kInvalidArgument, "INVALID_MODE");
  EXPECT_ERROR(with([](auto* r) { r->set_deadline_ms(UINT64_MAX); }), kInvalidArgument, "OUT_OF_RANGE");
}

TEST(Retention, InTheBackgroundToATier) {
  v1::Policy proto;
  EXPECT_FALSE(BackgroundTierOf(proto)->has_value());
  proto.mutable_refine();
  EXPECT_ERROR(BackgroundTierOf(proto).status(), kInvalidArgument, "INVALID_POLICY");
  proto.set_retain_seconds(1);
  EXPECT_EQ(**BackgroundTierOf(proto), Tier::kRaw);
  proto.mutable_refine()->set_final(v1::TIER_Q8);
  EXPECT_EQ(**BackgroundTierOf(proto), Tier::kQ8);
  proto.mutable_refine()->set_final(v1::TIER_DROP);
  EXPECT_ERROR(BackgroundTierOf(proto).status(), kInvalidArgument, "INVALID_TIERS");
  EXPECT_FALSE(*IsDirect(v1::REFINE_MODE_UNSPECIFIED, "mode") || *IsDirect(v1::REFINE_MODE_STAGED, "mode"));
  EXPECT_TRUE(*IsDirect(v1::REFINE_MODE_DIRECT, "mode"));
}

TEST(Retention, SecondsUpToTheDaemonsLimitOfOnePart) {
  v1::Policy proto;
  EXPECT_EQ(*RetainMsOf(proto, {}, RequestDefaults()), 0);
  proto.set_retain_seconds(0.0001);
  EXPECT_EQ(*RetainMsOf(proto, {}, RequestDefaults()), 1) << "not none";
  proto.set_retain_seconds(600);
  EXPECT_EQ(*RetainMsOf(proto, {}, RequestDefaults()), 600000);
  EXPECT_ERROR(RetainMsOf(proto, {0, 2}, RequestDefaults()).status(), kUnimplemented, "RETENTION_OF_PARTS");
  for (const double seconds : {-1.0, 600.1, std::nan(""), std::numeric_limits<double>::infinity()}) {
    proto.set_retain_seconds(seconds);
    EXPECT_ERROR(RetainMsOf(proto, {}, RequestDefaults()).status(), kInvalidArgument, "OUT_OF_RANGE");
  }
}

TEST(PolicyFromProto, TakesAnAutomaticBudget) {
  v1::Policy proto;
  proto.mutable_auto_budget()->set_target_seconds(0.5);
  Policy defaults;
  defaults.auto_min_budget = 0.25;
  auto policy = PolicyFromProto(proto, defaults);
  ASSERT_TRUE(policy.ok()) << policy.status();
  EXPECT_EQ(policy->auto_target_seconds, 0.5);
  EXPECT_EQ(policy->auto_min_budget, 0.25);
  proto.mutable_auto_budget()->set_min_budget(0.3);
  policy = PolicyFromProto(proto, defaults);
  ASSERT_TRUE(policy.ok()) << policy.status();
  EXPECT_EQ(policy->auto_min_budget, 0.3);
  proto.set_budget(0.5);
  EXPECT_ERROR(PolicyFromProto(proto, defaults).status(), kInvalidArgument, "INVALID_POLICY");
  proto.clear_budget();
  proto.mutable_auto_budget()->set_target_seconds(0);
  EXPECT_ERROR(PolicyFromProto(proto, defaults).status(), kInvalidArgument, "INVALID_BUDGET");
}

}  // namespace
}  // namespace spectrumkv
