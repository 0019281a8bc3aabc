#include "server/service/plan_call.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "server/base/status.h"
#include "server/plan/distortion.h"
#include "server/service/gate_call.h"
#include "server/transfer/attend.h"
#include "server/transfer/predict.h"
#include "server/transfer/scan_chunks.h"
#include "server/transfer/shape.h"

namespace spectrumkv {
namespace {

constexpr int64_t kPlanRetryMs = 200;
// Of chunks, a step: each is well below a millisecond.
constexpr size_t kScansPerStep = 16;

// Null where the request has none.
absl::StatusOr<std::shared_ptr<const RecentQueries>> QueriesAsked(const v1::Importance& importance, const BlockHold& hold,
                                                                  const Policy& policy,
                                                                  const std::vector<PlanLayer>& layers) {
  std::shared_ptr<const RecentQueries> queries;
  if (importance.has_queries()) {
    auto given = QueriesFromProto(importance.queries());
    if (!given.ok()) return given.status();
    queries = *std::move(given);
  }
  if (absl::Status ok = CheckQueriesFor(hold, policy, queries.get(), layers, /*layerwise=*/false); !ok.ok()) return ok;
  return queries;
}

// From positions of the request to kept tokens.
std::vector<TokenScan> Compact(const std::vector<TokenScan>& all, const std::vector<TokenRange>& kept) {
  std::vector<TokenScan> out;
  if (all.empty()) return out;
  for (const TokenRange& run : kept)
    out.insert(out.end(), all.begin() + run.first, all.begin() + run.first + run.count);
  return out;
}

// Of one plane of one chunk, weighed by the energy of its tokens.
void AddDistortion(const std::vector<TokenScan>& scan, uint32_t first, const std::vector<uint8_t>& tier_map, bool is_k,
                   uint32_t head_dim, double* error, double* energy) {
  for (uint32_t t = 0; t < tier_map.size(); ++t) {
    const uint8_t log2_energy = first + t < scan.size() ? scan[first + t].energy_log2 : 128;
    if (log2_energy == 0) continue;
    const double e = std::exp2((static_cast<double>(log2_energy) - 128) / 4);
    const Tier tier = is_k ? TierOfK(tier_map[t]) : TierOfV(tier_map[t]);
    *energy += e;
    *error += e * TierError(tier, head_dim);
  }
}

double PredictDistortion(const TransferShape& shape, const PlanBatch& batch, const std::vector<LayerScan>& scan) {
  double error = 0, energy = 0;
  for (const PlannedChunk& chunk : batch.chunks) {
    const uint32_t layer = chunk.cut.layer_index;
    AddDistortion(scan[layer].k, chunk.cut.token_first, chunk.tier_map, true, shape.layers[layer].head_dim, &error,
                  &energy);
    if (shape.layers[layer].has_v) {
      AddDistortion(scan[layer].v, chunk.cut.token_first, chunk.tier_map, false, shape.layers[layer].head_dim, &error,
                    &energy);
    }
  }
  return energy > 0 ? error / energy : 0;
}

// Tiers of each kept token before escapes, where every layer has the same: cells that escaped are RAW in the map, so a
// token's tier is the one its other layers show.
void FillTokenTiers(const TransferShape& shape, const PlanBatch& batch, const std::vector<LayerScan>& scan,
                    v1::PlanResponse* response) {
  const uint32_t kept = shape.kept_count();
  constexpr int kUnknown = -1;
  for (const bool is_k : {true, false}) {
    std::vector<int> tiers(kept, kUnknown);
    bool same = true;
    for (const PlannedChunk& chunk : batch.chunks) {
      const uint32_t layer = chunk.cut.layer_index;
      if (shape.layers[layer].raw_only || (!is_k && !shape.layers[layer].has_v)) continue;
      const std::vector<TokenScan>& cells = is_k ? scan[layer].k : scan[layer].v;
      for (uint32_t t = 0; t < chunk.tier_map.size() && same; ++t) {
        const uint32_t token = chunk.cut.token_first + t;
        const int tier = static_cast<int>(is_k ? TierOfK(chunk.tier_map[t]) : TierOfV(chunk.tier_map[t]));
        const bool escaped = tier == 0 && token < cells.size() && cells[token].escape != kEscapeNone;
        if (escaped) continue;
        same = tiers[token] == kUnknown || tiers[token] == tier;
        tiers[token] = tier;
      }
    }
    if (!same) return response->clear_token_tiers_k();
    if (!is_k && std::all_of(tiers.begin(), tiers.end(), [](int t) { return t == kUnknown; })) return;
    for (const int tier : tiers) {
      const v1::Tier out = TierToProto(tier == kUnknown ? Tier::kRaw : static_cast<Tier>(tier));
      if (is_k) {
        response->add_token_tiers_k(out);
      } else {
        response->add_token_tiers_v(out);
      }
    }
  }
}

uint64_t ValuesOf(const TransferShape& shape) {
  uint64_t values = 0;
  for (const PlanLayer& layer : shape.layers) values += KvBytes(DimsOf(layer, 1)) / SizeOf(layer.dtype);
  return values * shape.kept_count();
}

absl::StatusOr<std::unique_ptr<BlockHold>> HoldFor(const ServiceContext& context, const Caller& caller,
                                                  const v1::PlanRequest& request) {
  absl::Status status = CheckPoolRef(request.pool());
  if (status.ok()) status = CheckEpoch(context, request.pool().epoch());
  if (status.ok()) status = CheckTokenCount(request.token_count(), context.defaults);
  if (!status.ok()) return status;
  const auto blocks = BlocksFromProto(request.blocks());
  if (!blocks.ok()) return blocks.status();
  return context.pools->HoldSource(caller, request.pool().pool_id(), request.pool().epoch(), *blocks,
                                   request.token_count());
}

// Which rates the request means; what it says of the link goes first. Without a peer, as for Publish.
Measured MeasuredFor(const ServiceContext& context, const v1::PlanRequest& request, CodedBy by) {
  Measured measured = context.transfers->MeasuredOf(PeerOf(context, request.peer()).value_or(request.peer()), by);
  if (request.has_link_bytes_per_second()) measured.link = request.link_bytes_per_second();
  return measured;
}

absl::Status CheckLink(const ServiceContext& context, const v1::PlanRequest& request) {
  if (request.has_link_bytes_per_second()) {
    if (absl::Status rate = CheckLinkRate(request.link_bytes_per_second()); !rate.ok()) return rate;
  }
  if (request.peer().empty() || PeerOf(context, request.peer()).ok()) return absl::OkStatus();
  return CheckPeerAddress(request.peer());
}

void PredictTime(const v1::PlanRequest& request, const TransferShape& shape, const PlanBatch& batch, SourceReads reads,
                 const Measured& measured, v1::PlanResponse* response) {
  if (request.peer().empty() && !request.has_link_bytes_per_second()) {
    return response->set_prediction_missing("NO_LINK_ASKED");
  }
  TransferReport moved;
  moved.tokens = shape.token_count;
  moved.kept_tokens = shape.kept_count();
  moved.kv_bytes = KvBytesOf(shape);
  moved.tiers = batch.totals;
  TransferWork work;
  work.kv_bytes = moved.KvBytesByFamily();
  work.wire_bytes = static_cast<double>(batch.wire_bytes);
  work.chunks = static_cast<double>(batch.chunks.size());
  work.reads = reads;
  const Prediction prediction = Predict(work, measured);
  if (measured.link.has_value()) response->set_link_bytes_per_second(*measured.link);
  if (prediction.missing != Missing::kNothing) {
    return response->set_prediction_missing(prediction.missing == Missing::kLink ? "LINK_UNKNOWN" : "STAGE_UNKNOWN");
  }
  response->set_predicted_seconds(prediction.seconds);
  response->set_predicted_limited_by(static_cast<v1::LimitedBy>(prediction.limited_by));
}

// One Plan: opened, then all queries attended, then all chunks scanned, then planned.
class PlanRun : public std::enable_shared_from_this<PlanRun> {
 public:
  PlanRun(const ServiceContext* context, PlanCall call)
      : context_(*context), call_(std::move(call)), request_(*call_.request), response_(call_.response) {}

  void PostStep() {
    context_.compute->Post([self = shared_from_this()] { self->Step(); });
  }

 private:
  void Step();
  absl::Status Open();
  absl::Status Attend();
  absl::Status Scan();
  absl::Status Finish();
  void Report(const Planner& planner, const PlanBatch& batch, const std::vector<LayerScan>& scan);
  SourceReads Reads() const { return ReadsFirst(policy_, /*layerwise=*/false, queries_.get(), layers_, request_.token_count()); }
  void End(const absl::Status& status);

  const ServiceContext& context_;
  const PlanCall call_;
  const v1::PlanRequest& request_;
  v1::PlanResponse* const response_;
  Policy policy_;
  std::unique_ptr<BlockHold> hold_;
  std::vector<LayerPlace> places_;
  std::vector<PlanLayer> layers_;
  std::shared_ptr<const RecentQueries> queries_;  // null: none
  Measured measured_;
  TransferShape all_;  // as if nothing were dropped
  EncodeSource source_;
  std::unique_ptr<AttentionWork> attention_;  // null: none
  ScanWish wish_;
  std::vector<ChunkCut> cuts_;
  std::vector<LayerScan> scans_;
  size_t next_job_ = 0, next_cut_ = 0;
  bool over_ = false;
};

void PlanRun::Step() {
  absl::Status status;
  if (call_.cancelled()) {
    status = CallerGone();
  } else if (hold_ == nullptr) {
    status = Open();
  } else if (attention_ != nullptr) {
    status = Attend();
  } else if (next_cut_ < cuts_.size()) {
    status = Scan();
  } else {
    status = Finish();
    over_ = true;
  }
  if (!status.ok() || over_) return End(status);
  PostStep();
}

absl::Status PlanRun::Open() {
  auto policy = PolicyFromProto(request_.policy(), context_.defaults.policy);
  if (!policy.ok()) return policy.status();
  if (absl::Status link = CheckLink(context_, request_); !link.ok()) return link;
  auto hold = HoldFor(context_, call_.caller, request_);
  if (!hold.ok()) return hold.status();
  hold_ = *std::move(hold);
  policy_ = *std::move(policy);
  JudgePolicy(context_, call_.caller, hold_->schema(), request_.policy(), &policy_);
  GateToProto(policy_.gate, response_);
  layers_ = PlanLayersOf(hold_->schema(), &places_);
  const bool optimal = policy_.allocator == Allocator::kOptimal;
  if (optimal) {
    policy_.profile = ProfileOf(context_.defaults.profiles, hold_->schema(), layers_);
    response_->set_model_profile(policy_.profile.name);
  }
  const uint32_t tokens = request_.token_count();
  absl::Status status = CheckPolicy(policy_, tokens, static_cast<uint32_t>(layers_.size()));
  if (!status.ok()) return status;
  auto queries = QueriesAsked(request_.policy().importance(), *hold_, policy_, layers_);
  if (!queries.ok()) return queries.status();
  queries_ = *std::move(queries);
  measured_ = MeasuredFor(context_, request_, CoderOf(*hold_));
  if (policy_.auto_target_seconds > 0) {
    BudgetChoice choice;
    const SourceReads reads = Reads();
    policy_ = ResolveAutoBudget(std::move(policy_), layers_, tokens, reads, measured_, &choice);
    BudgetChoiceToProto(choice, response_->mutable_budget_choice());
  }
  all_.token_count = tokens;
  all_.kept = {{0, tokens}};
  all_.layers = layers_;
  source_ = EncodeSource{hold_.get(), &all_, &places_};
  if (queries_ != nullptr) {
    attention_ = std::make_unique<AttentionWork>(hold_->device());
    for (auto& [layer, mine] : QueriesByLayer(queries_, layers_)) {
      attention_->Add(std::make_unique<LayerAttention>(layer, layers_[layer], tokens, mine.all, mine.entry));
    }
  }
  wish_ = {/*scans=*/true, /*samples=*/policy_.allocator == Allocator::kOptimal, policy_.sinks};
  cuts_ = CutChunks(all_);
  MakeRoomForScans(layers_, tokens, wish_, &scans_);
  return absl::OkStatus();
}

// One head of one layer, on a GPU one layer. With the last: what all came to, into the policy as its scores.
absl::Status PlanRun::Attend() {
  if (next_job_ < attention_->jobs()) {
    if (absl::Status done = attention_->Run(next_job_++, *context_.backend, source_); !done.ok()) return done;
    if (next_job_ < attention_->jobs()) return absl::OkStatus();
  }
  AttentionScores scores(layers_.size(), request_.token_count());
  attention_->MoveTo(&scores);
  attention_.reset();
  policy_.scores = scores.ByLayer();
  policy_.scores_per_layer = true;
  return absl::OkStatus();
}

absl::Status PlanRun::Scan() {
  const size_t at_a_time = ChunksAtATime(source_);
  for (size_t i = 0; i < kScansPerStep && next_cut_ < cuts_.size(); ++i) {
    if (call_.cancelled()) return CallerGone();
    const absl::Span<const ChunkCut> some = absl::MakeConstSpan(cuts_).subspan(next_cut_, at_a_time);
    if (absl::Status done = ScanChunks(*context_.backend, source_, some, wish_, &scans_); !done.ok()) return done;
    next_cut_ += some.size();
  }
  return absl::OkStatus();
}

absl::Status PlanRun::Finish() {
  if (absl::Status whole = hold_->Health(); !whole.ok()) return whole;
  // As a sender does.
  const bool scan_chooses = ScanChooses(policy_, /*layerwise=*/false);
  auto planner = Planner::Create(policy_, layers_, request_.token_count(), scan_chooses ? &scans_ : nullptr);
  if (!planner.ok()) return WithGate(policy_.gate, planner.status());
  const TransferShape& shape = planner->shape();
  std::vector<LayerScan> scan;
  for (const LayerScan& layer : scans_) {  // where there are spreads all tokens are kept
    scan.push_back({Compact(layer.k, shape.kept), Compact(layer.v, shape.kept), layer.k_spread, layer.v_spread});
  }
  response_->set_least_budget(planner->LeastBudget(scan));
  std::vector<uint32_t> chunks(planner->cuts().size());
  std::iota(chunks.begin(), chunks.end(), 0);
  const auto batch = planner->Plan(chunks, scan);
  if (!batch.ok()) return WithGate(policy_.gate, batch.status());
  Report(*planner, *batch, scan);
  return absl::OkStatus();
}

void PlanRun::Report(const Planner& planner, const PlanBatch& batch, const std::vector<LayerScan>& scan) {
  const TransferShape& shape = planner.shape();
  const uint64_t kv_bytes = KvBytesOf(shape);
  response_->set_kv_bytes(kv_bytes);
  response_->set_wire_bytes(batch.wire_bytes);
  response_->set_budget_used(static_cast<double>(batch.wire_bytes) / static_cast<double>(kv_bytes));
  response_->set_bits_per_value(8.0 * static_cast<double>(batch.wire_bytes) / static_cast<double>(ValuesOf(shape)));
  TierCountsToProto(batch.totals, response_->mutable_tiers());
  TokenRunsToProto(planner.dropped(), response_->mutable_dropped_tokens());
  FillTokenTiers(shape, batch, scan, response_);
  response_->set_escaped_tokens(batch.escaped);
  response_->set_predicted_distortion(PredictDistortion(shape, batch, scan));
  PredictTime(request_, shape, batch, Reads(), measured_, response_);
}

void PlanRun::End(const absl::Status& status) {
  attention_.reset();
  hold_.reset();
  call_.done(status);
}

}  // namespace

absl::Status PlanPlaces::Take(const Caller& caller, uint32_t most) {
  if (share_.Take(caller, 1, most)) return absl::OkStatus();
  return MakeError(absl::StatusCode::kResourceExhausted, "PLANS_FULL",
                   absl::StrCat(share_.taken(), " Plans are under way; the daemon takes ", most,
                                " at once, and of no caller more than there are places left"),
                   {{"limit", absl::StrCat(most)}}, kPlanRetryMs);
}

void StartPlan(const ServiceContext* context, PlanCall call) {
  std::make_shared<PlanRun>(context, std::move(call))->PostStep();
}

}  // namespace spectrumkv
