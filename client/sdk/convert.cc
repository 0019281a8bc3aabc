#include "client/sdk/convert.h"

#include <utility>

#include "client/cpp/blocks.h"
#include "client/cpp/client.h"
#include "client/cpp/policies.h"
#include "client/cpp/status.h"

namespace spectrumkv {
namespace {

// Public enumerations have the numbers of the protos; a number added there needs a name here.
template <typename Ours, typename Theirs>
constexpr bool Same(Ours ours, Theirs theirs) {
  return static_cast<int>(ours) == static_cast<int>(theirs);
}
static_assert(Same(DataType::kOpaqueBytes, v1::DATA_TYPE_OPAQUE_BYTES) && v1::DataType_ARRAYSIZE == 7);
static_assert(Same(GroupKind::kOpaqueState, v1::GROUP_KIND_OPAQUE_STATE) && v1::GroupKind_ARRAYSIZE == 5);
static_assert(Same(Tier::kDrop, v1::TIER_DROP) && v1::Tier_ARRAYSIZE == 9);
static_assert(Same(Tier::kQ8, v1::TIER_Q8) && Same(Tier::kP4, v1::TIER_P4) && Same(Tier::kP8, v1::TIER_P8));
static_assert(Same(Allocator::kOptimal, v1::ALLOCATOR_OPTIMAL) && v1::Allocator_ARRAYSIZE == 11);
static_assert(Same(Allocator::kRaw, v1::ALLOCATOR_RAW) && Same(Allocator::kUniform, v1::ALLOCATOR_UNIFORM));
static_assert(Same(ImportanceSource::kRecentQueries, v1::IMPORTANCE_SOURCE_RECENT_QUERIES) &&
              v1::ImportanceSource_ARRAYSIZE == 6);
static_assert(Same(Role::kReceiver, v1::TRANSFER_ROLE_RECEIVER) && v1::TransferRole_ARRAYSIZE == 3);
static_assert(Same(State::kCommitted, v1::TRANSFER_STATE_COMMITTED) && v1::TransferState_ARRAYSIZE == 9);

template <typename Runs>
std::vector<TokenRun> TokenRuns(const Runs& runs) {
  std::vector<TokenRun> out;
  for (const v1::TokenRun& run : runs) out.push_back({run.first(), run.count()});
  return out;
}

template <typename Counts>
std::vector<TierCount> TierCounts(const Counts& counts) {
  std::vector<TierCount> out;
  for (const v1::TierCount& count : counts) {
    out.push_back({static_cast<Tier>(count.tier()), count.k_tokens(), count.v_tokens()});
  }
  return out;
}

void FillIn(const Tensor& tensor, v1::TensorView* view) {
  view->set_segment(tensor.segment);
  view->set_offset_bytes(tensor.offset_bytes);
  view->set_block_stride_bytes(tensor.block_stride_bytes);
  view->set_token_stride_bytes(tensor.token_stride_bytes);
  view->set_head_stride_bytes(tensor.head_stride_bytes);
  view->set_dim_stride_bytes(tensor.dim_stride_bytes);
}

void FillIn(const RecentQueries& queries, v1::RecentQueries* out) {
  out->set_data_type(static_cast<v1::DataType>(queries.data_type));
  out->mutable_positions()->Add(queries.positions.begin(), queries.positions.end());
  for (const LayerQueries& layer : queries.layers) {
    v1::LayerQueries* to = out->add_layers();
    to->set_layer(layer.layer);
    to->set_queries(layer.words);
    to->set_query_heads(layer.query_heads);
    to->set_softmax_scale(layer.softmax_scale);
    to->set_logit_soft_cap(layer.logit_soft_cap);
    to->set_window_tokens(layer.window_tokens);
  }
}

void FillIn(const Group& group, v1::LayerGroup* out) {
  out->set_kind(static_cast<v1::GroupKind>(group.kind));
  out->set_data_type(static_cast<v1::DataType>(group.data_type));
  out->set_heads_total(group.heads_total);
  out->set_head_first(group.head_first);
  out->set_head_count(group.head_count);
  out->set_head_dim(group.head_dim);
  out->set_block_tokens(group.block_tokens);
  out->set_num_blocks(group.num_blocks);
  out->set_sliding_window_tokens(group.sliding_window_tokens);
  for (const Layer& layer : group.layers) {
    v1::LayerTensors* tensors = out->add_layers();
    tensors->set_layer(layer.layer);
    FillIn(layer.k, tensors->mutable_k());
    if (layer.v) FillIn(*layer.v, tensors->mutable_v());
  }
}

void FillIn(const Segment& segment, v1::MemorySegment* out) {
  switch (segment.kind) {
    case Segment::Kind::kPosixShm:
      out->mutable_posix_shm()->set_name(segment.name);
      out->mutable_posix_shm()->set_size_bytes(segment.size_bytes);
      return;
    case Segment::Kind::kFile:
      out->mutable_file()->set_path(segment.name);
      out->mutable_file()->set_size_bytes(segment.size_bytes);
      return;
    case Segment::Kind::kDaemonOwned: out->mutable_daemon_owned()->set_size_bytes(segment.size_bytes); return;
  }
}

}  // namespace

Status FromAbsl(const absl::Status& status) {
  if (status.ok()) return {};
  return {static_cast<Code>(status.code()), client::ReasonOf(status), std::string(status.message()),
          client::MetadataOf(status), client::RetryAfterMsOf(status)};
}

absl::Status ToAbsl(const Status& status) {
  if (status.ok()) return absl::OkStatus();
  return client::MakeError(static_cast<absl::StatusCode>(status.code), status.reason, status.message);
}

v1::PoolSchema ToProto(const Cache& cache) {
  v1::PoolSchema schema;
  schema.set_model(cache.model);
  schema.set_revision(cache.revision);
  schema.set_tensor_parallel_rank(cache.tensor_parallel_rank);
  schema.set_tensor_parallel_size(cache.tensor_parallel_size);
  for (const Group& group : cache.groups) FillIn(group, schema.add_groups());
  for (const Segment& segment : cache.segments) FillIn(segment, schema.add_segments());
  if (cache.generations) {
    schema.mutable_generations()->set_segment(cache.generations->segment);
    schema.mutable_generations()->set_offset_bytes(cache.generations->offset_bytes);
  }
  return schema;
}

v1::Policy ToProto(const Policy& policy) {
  v1::Policy out = policy.target_seconds ? client::AutoBudget(*policy.target_seconds) : v1::Policy();
  if (policy.min_budget) out.mutable_auto_budget()->set_min_budget(*policy.min_budget);
  if (policy.budget) out.set_budget(*policy.budget);
  out.set_allocator(static_cast<v1::Allocator>(policy.allocator));
  out.set_uniform_tier(static_cast<v1::Tier>(policy.uniform_tier));
  out.set_random_seed(policy.random_seed);
  for (const Tier tier : policy.tiers) out.add_tiers(static_cast<v1::Tier>(tier));
  v1::Importance* importance = out.mutable_importance();
  importance->set_source(static_cast<v1::ImportanceSource>(policy.importance));
  importance->mutable_scores()->Add(policy.scores.begin(), policy.scores.end());
  importance->set_scores_per_layer(policy.scores_per_layer);
  importance->set_decay_lambda(policy.decay_lambda);
  if (policy.sinks) importance->set_sinks(*policy.sinks);
  if (policy.queries) FillIn(*policy.queries, importance->mutable_queries());
  out.set_strict_budget(policy.strict_budget);
  out.set_payload_only(policy.payload_only);
  return out;
}

v1::TransferKey ToProto(const std::string& transfer_id, Role role) {
  v1::TransferKey key;
  key.set_transfer_id(transfer_id);
  key.set_role(static_cast<v1::TransferRole>(role));
  return key;
}

void FillIn(const BlockTables& tables, google::protobuf::RepeatedPtrField<v1::GroupBlocks>* blocks) {
  for (size_t group = 0; group < tables.size(); ++group) {
    *blocks->Add() = client::Blocks(static_cast<uint32_t>(group), tables[group]);
  }
}

Report FromProto(const v1::TransferReport& report) {
  Report out;
  out.transfer_id = report.transfer_id();
  out.role = static_cast<Role>(report.role());
  out.state = static_cast<State>(report.state());
  if (out.state > State::kCommitted) out.outcome = FromAbsl(client::OutcomeOf(report));
  out.tokens = report.tokens();
  out.kept_tokens = report.kept_tokens();
  out.dropped_tokens = TokenRuns(report.dropped_tokens());
  out.kv_bytes = report.kv_bytes();
  out.wire_bytes = report.wire_bytes();
  out.saved_bytes = report.saved_bytes();
  out.budget = report.budget();
  out.bits_per_value = report.bits_per_value();
  out.tiers = TierCounts(report.tiers());
  out.chunks = report.chunks();
  out.chunks_resent = report.chunks_resent();
  out.nonfinite_values = report.nonfinite_values();
  out.rounded_words = report.rounded_words();
  out.allocator = static_cast<Allocator>(report.allocator());
  out.backend = report.backend();
  out.path = report.path();
  out.source_guard = report.source_guard();
  out.layers_ready = report.layers_ready();
  out.first_layer_ready_seconds = report.first_layer_ready_seconds();
  out.duration_seconds = report.duration_seconds();
  if (report.limited_by() != v1::LIMITED_BY_UNSPECIFIED) {
    out.limited_by = v1::LimitedBy_Name(report.limited_by()).substr(sizeof("LIMITED_BY_") - 1);
  }
  if (report.has_part()) out.part = {report.part().index(), report.part().count()};
  for (const v1::TransferReport& part : report.parts()) out.parts.push_back(FromProto(part));
  return out;
}

Progress FromProto(const v1::Progress& progress) {
  return {static_cast<State>(progress.state()), progress.chunks_done(), progress.chunks_total(), progress.wire_bytes()};
}

PlanAnswer FromProto(const v1::PlanResponse& response) {
  PlanAnswer out;
  out.kv_bytes = response.kv_bytes();
  out.wire_bytes = response.wire_bytes();
  out.budget_used = response.budget_used();
  out.least_budget = response.least_budget();
  out.bits_per_value = response.bits_per_value();
  out.predicted_distortion = response.predicted_distortion();
  out.tiers = TierCounts(response.tiers());
  out.dropped_tokens = TokenRuns(response.dropped_tokens());
  if (response.has_predicted_seconds()) out.predicted_seconds = response.predicted_seconds();
  return out;
}

}  // namespace spectrumkv
