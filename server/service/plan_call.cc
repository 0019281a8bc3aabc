#include "server/service/plan_call.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "server/plan/distortion.h"
#include "server/service/gate_call.h"
#include "server/transfer/attend.h"
#include "server/transfer/predict.h"
#include "server/transfer/scan_chunks.h"
#include "server/transfer/shape.h"

namespace spectrumkv {
namespace {

// Every token of every layer. samples: samples them too, with the first `pinned` tokens RAW.
absl::StatusOr<std::vector<LayerScan>> ScanAll(const Backend& backend, const BlockHold& hold,
                                               const std::vector<PlanLayer>& layers,
                                               const std::vector<LayerPlace>& places, bool samples, uint32_t pinned) {
  TransferShape all;
  all.token_count = hold.token_count();
  all.kept = {{0, all.token_count}};
  all.layers = layers;
  const ScanWish wish{/*scans=*/true, samples, pinned};
  std::vector<LayerScan> scans;
  MakeRoomForScans(layers, all.token_count, wish, &scans);
  const EncodeSource source{&hold, &all, &places};
  if (absl::Status done = ScanAllChunks(backend, source, CutChunks(all), wish, &scans); !done.ok()) return done;
  return scans;
}

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

// What the request's queries attend to, into the policy as its scores.
absl::Status AttendAll(const ServiceContext& context, const BlockHold& hold, const std::vector<PlanLayer>& layers,
                       const std::vector<LayerPlace>& places, const std::shared_ptr<const RecentQueries>& queries,
                       Policy* policy) {
  if (queries == nullptr) return absl::OkStatus();
  const uint32_t tokens = hold.token_count();
  TransferShape all;
  all.token_count = tokens;
  all.kept = {{0, tokens}};
  all.layers = layers;
  const EncodeSource source{&hold, &all, &places};
  AttentionWork work(hold.device());
  for (auto& [layer, mine] : QueriesByLayer(queries, layers)) {
    work.Add(std::make_unique<LayerAttention>(layer, layers[layer], tokens, mine.all, mine.entry));
  }
  for (size_t job = 0; job < work.jobs(); ++job) {
    if (absl::Status done = work.Run(job, *context.backend, source); !done.ok()) return done;
  }
  AttentionScores scores(layers.size(), tokens);
  work.MoveTo(&scores);
  policy->scores = scores.ByLayer();
  policy->scores_per_layer = true;
  return absl::OkStatus();
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

}  // namespace

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

absl::Status PlanNow(const ServiceContext& context, const Caller& caller, const v1::PlanRequest& request,
                     v1::PlanResponse* response) {
  auto policy = PolicyFromProto(request.policy(), context.defaults.policy);
  if (!policy.ok()) return policy.status();
  if (absl::Status link = CheckLink(context, request); !link.ok()) return link;
  const auto hold = HoldFor(context, caller, request);
  if (!hold.ok()) return hold.status();
  JudgePolicy(context, caller, (*hold)->schema(), request.policy(), &*policy);
  GateToProto(policy->gate, response);
  std::vector<LayerPlace> places;
  const std::vector<PlanLayer> layers = PlanLayersOf((*hold)->schema(), &places);
  if (policy->allocator == Allocator::kOptimal) {
    policy->profile = ProfileOf(context.defaults.profiles, (*hold)->schema(), layers);
    response->set_model_profile(policy->profile.name);
  }
  absl::Status status = CheckPolicy(*policy, request.token_count(), static_cast<uint32_t>(layers.size()));
  if (!status.ok()) return status;
  const auto queries = QueriesAsked(request.policy().importance(), **hold, *policy, layers);
  if (!queries.ok()) return queries.status();
  const Measured measured = MeasuredFor(context, request, CoderOf(**hold));
  if (policy->auto_target_seconds > 0) {
    BudgetChoice choice;
    const SourceReads reads = ReadsFirst(*policy, /*layerwise=*/false, queries->get(), layers, request.token_count());
    policy = ResolveAutoBudget(*std::move(policy), layers, request.token_count(), reads, measured, &choice);
    BudgetChoiceToProto(choice, response->mutable_budget_choice());
  }

  status = AttendAll(context, **hold, layers, places, *queries, &*policy);
  if (!status.ok()) return status;
  const auto scanned =
      ScanAll(*context.backend, **hold, layers, places, policy->allocator == Allocator::kOptimal, policy->sinks);
  if (!scanned.ok()) return scanned.status();
  const std::vector<LayerScan>& all = *scanned;
  status = (*hold)->Health();
  if (!status.ok()) return status;
  // As a sender does.
  const bool scan_chooses = ScanChooses(*policy, /*layerwise=*/false);
  auto planner = Planner::Create(*policy, layers, request.token_count(), scan_chooses ? &all : nullptr);
  if (!planner.ok()) return WithGate(policy->gate, planner.status());
  const TransferShape& shape = planner->shape();
  std::vector<LayerScan> scan;
  for (const LayerScan& layer : all) {  // where there are spreads all tokens are kept
    scan.push_back({Compact(layer.k, shape.kept), Compact(layer.v, shape.kept), layer.k_spread, layer.v_spread});
  }
  response->set_least_budget(planner->LeastBudget(scan));

  std::vector<uint32_t> chunks(planner->cuts().size());
  std::iota(chunks.begin(), chunks.end(), 0);
  const auto batch = planner->Plan(chunks, scan);
  if (!batch.ok()) return WithGate(policy->gate, batch.status());
  const uint64_t kv_bytes = KvBytesOf(shape);
  response->set_kv_bytes(kv_bytes);
  response->set_wire_bytes(batch->wire_bytes);
  response->set_budget_used(static_cast<double>(batch->wire_bytes) / static_cast<double>(kv_bytes));
  response->set_bits_per_value(8.0 * static_cast<double>(batch->wire_bytes) / static_cast<double>(ValuesOf(shape)));
  TierCountsToProto(batch->totals, response->mutable_tiers());
  TokenRunsToProto(planner->dropped(), response->mutable_dropped_tokens());
  FillTokenTiers(shape, *batch, scan, response);
  response->set_escaped_tokens(batch->escaped);
  response->set_predicted_distortion(PredictDistortion(shape, *batch, scan));
  PredictTime(request, shape, *batch,
              ReadsFirst(*policy, /*layerwise=*/false, queries->get(), layers, request.token_count()), measured, response);
  return absl::OkStatus();
}

}  // namespace spectrumkv
