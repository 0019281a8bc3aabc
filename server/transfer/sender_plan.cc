// The planning half of SenderTransfer: what is written, scanned and planned, batch by batch.
#include <algorithm>
#include <array>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/codec.h"
#include "server/base/status.h"
#include "server/transfer/predict.h"
#include "server/transfer/scan_chunks.h"
#include "server/transfer/sender.h"

namespace spectrumkv {
namespace {

constexpr size_t kScanWorkersMax = 8;
// How often a worker's events are asked for: well below the time that a chunk takes on the network.
constexpr int64_t kEventPollNs = 200'000;

// Position in the request of the last kept token of each chunk.
std::vector<uint32_t> LastPositions(const TransferShape& shape, const std::vector<ChunkCut>& cuts) {
  const std::vector<uint32_t> positions = PositionsOf(shape.kept);
  std::vector<uint32_t> last;
  last.reserve(cuts.size());
  for (const ChunkCut& cut : cuts) last.push_back(positions[cut.token_first + cut.token_count - 1]);
  return last;
}

}  // namespace

absl::StatusOr<std::shared_ptr<SenderTransfer>> SenderTransfer::Create(TransferSetup setup, SenderSpec spec) {
  const std::string written_event = spec.written_event;
  std::vector<LayerPlace> places;
  const std::vector<PlanLayer> layers = PlanLayersOf(spec.source->schema(), &places);
  if (absl::Status ok = CheckQueriesFor(*spec.source, spec.policy, spec.queries.get(), layers, spec.layerwise); !ok.ok()) {
    return ok;
  }
  if (spec.refine != nullptr) {
    auto refinement = std::make_shared<SenderTransfer>(std::move(setup), std::move(spec));
    const RefineSource& refine = *refinement->refine_;
    if (absl::Status ok = refinement->AdoptPlanner(Planner::CreateFixed(refine.shape, refine.tier)); !ok.ok()) return ok;
    return refinement;
  }
  const SourceReads reads =
      ReadsFirst(spec.policy, spec.layerwise, spec.queries.get(), layers, spec.source->token_count());
  auto transfer = std::make_shared<SenderTransfer>(std::move(setup), std::move(spec));
  if (absl::Status awaited = transfer->AwaitWritten(written_event); !awaited.ok()) return awaited;
  const Policy& policy = transfer->policy_;
  transfer->scans_ = reads.scans;
  transfer->samples_ = reads.samples;
  transfer->attended_bytes_ = reads.attended_bytes;
  if (ScanChooses(policy, transfer->layerwise_)) {
    if (transfer->layerwise_) {  // then by keys
      return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_POLICY",
                       absl::StrCat("a layer-wise source cannot drop tokens by ", ImportanceSourceName(policy.importance),
                                    ": they are chosen before the first layer"));
    }
    if (absl::Status ok =
            CheckPolicy(policy, transfer->source_->token_count(), static_cast<uint32_t>(transfer->layers_.size()));
        !ok.ok()) {
      return ok;
    }
    return transfer;
  }
  const uint32_t tokens = transfer->source_->token_count();
  if (absl::Status adopted = transfer->AdoptPlanner(Planner::Create(policy, transfer->layers_, tokens));
      !adopted.ok()) {
    return adopted;
  }
  return transfer;
}

absl::Status SenderTransfer::AdoptPlanner(absl::StatusOr<Planner> planner) {
  if (!planner.ok()) return planner.status();
  planner_.emplace(*std::move(planner));
  const TransferShape& shape = planner_->shape();
  chunk_state_.assign(planner_->cuts().size(), ChunkState::kUnwritten);
  planned_.resize(planner_->cuts().size());
  last_position_ = LastPositions(shape, planner_->cuts());
  encode_source_ = EncodeSource{source_.get(), &shape, &places_, scans_};
  UpdateReport([&](TransferReport& r) {
    r.kept_tokens = shape.kept_count();
    r.dropped = planner_->dropped();
    r.kv_bytes = KvBytesOf(shape);
    r.chunks_total = planner_->cuts().size();
    r.values = 0;
    for (size_t l = 0; l < shape.layers.size(); ++l) {
      r.values += KvBytes(DimsOf(shape.layers[l], 1)) / SizeOf(shape.layers[l].dtype) * shape.tokens_of(l);
    }
  });
  return absl::OkStatus();
}

void SenderTransfer::OnPlannerReady() {
  if (NeedsScan()) MakeRoomForScan();
  if (dials()) {
    Dial();
  } else if (link_.control != nullptr) {
    OnGreeted();
  }
  MaybePlan();
}

void SenderTransfer::MakeRoomForScan() {
  MakeRoomForScans(layers_, planner_->shape().kept_count(), {scans_, samples_}, &scan_);
}

absl::Status SenderTransfer::ScanSome(const uint32_t* chunks, size_t count) {
  std::array<ChunkCut, gpu::kMaxBatch> cuts;
  for (size_t i = 0; i < count; ++i) cuts[i] = planner_->cuts()[chunks[i]];
  return ScanChunks(*parts().backend, encode_source_, absl::MakeConstSpan(cuts.data(), count),
                    {scans_, samples_, policy_.sinks}, &scan_);
}

void SenderTransfer::PlanAgainWhenStill() {
  if (!plan_again_ || planning_ || encoding_ > 0 || terminal()) return;
  plan_again_ = false;
  scans_ = encode_source_.escapes_known = true;
  MakeRoomForScan();
  credits_ += static_cast<uint32_t>(encoded_.size());
  for (Encoded& encoded : encoded_) PutBack(encoded.chunk_index);
  encoded_.clear();
  ready_.clear();
  std::vector<const PlannedChunk*> withdrawn;
  for (uint32_t i = 0; i < chunk_state_.size(); ++i) {
    if (chunk_state_[i] != ChunkState::kReady) continue;
    chunk_state_[i] = ChunkState::kUnwritten;
    withdrawn.push_back(&planned_[i]);
  }
  const TierTotals totals = planner_->Withdraw(withdrawn);
  UpdateReport([&](TransferReport& r) {
    for (int tier = 0; tier < kTierCount; ++tier) {
      r.tiers.k[tier] -= totals.k[tier];
      r.tiers.v[tier] -= totals.v[tier];
    }
  });
  MaybePlan();
}

// Scans everything, as if nothing were dropped, to choose the tokens that travel; the batch scan is done again later
// over those alone.
void SenderTransfer::StartFullScan() {
  if (!EventsReached(&SenderTransfer::StartFullScan)) return;
  parts().compute->Post([this, self = shared_from_this()] {
    if (!gate_.Enter()) return;
    TransferShape all;
    all.token_count = source_->token_count();
    all.kept = {{0, all.token_count}};
    all.layers = layers_;
    const EncodeSource source{source_.get(), &all, &places_};
    constexpr ScanWish kScan{/*scans=*/true};
    std::vector<LayerScan> scan;
    MakeRoomForScans(layers_, all.token_count, kScan, &scan);
    absl::Status scanned;
    Policy policy = policy_;
    if (const std::shared_ptr<AttentionWork> attention = TakeQueries(); attention != nullptr) {
      for (size_t job = 0; job < attention->jobs() && scanned.ok() && !gate_.closed(); ++job) {
        scanned = attention->Run(job, *parts().backend, source);
      }
      if (scanned.ok() && !gate_.closed()) attention->MoveTo(&attention_);
      if (!attention_.empty()) policy.scores = attention_.ByLayer();
      policy.scores_per_layer = !policy.scores.empty();
    }
    if (scanned.ok()) scanned = ScanAllChunks(*parts().backend, source, CutChunks(all), kScan, &scan);
    auto planner = std::make_shared<absl::StatusOr<Planner>>(
        scanned.ok() ? Planner::Create(std::move(policy), layers_, all.token_count, &scan) : absl::StatusOr<Planner>(scanned));
    gate_.Leave();
    Post([this, planner] {
      if (terminal()) return;
      if (absl::Status adopted = AdoptPlanner(std::move(*planner)); !adopted.ok()) return Fail(adopted);
      OnPlannerReady();
    });
  });
}

absl::Status SenderTransfer::AwaitWritten(const std::string& written_event) {
  if (written_event.empty()) return absl::OkStatus();
  if (written_events_ == nullptr) {
    return MakeError(absl::StatusCode::kInvalidArgument, "NOT_ON_DEVICE",
                     "written_event is given, but the source pool is in host memory", {{"field", "written_event"}});
  }
  return written_events_->Add(written_event);
}

bool SenderTransfer::EventsReached(void (SenderTransfer::*then)()) {
  if (written_events_ == nullptr) return true;
  if (event_timer_ != 0) return false;
  const absl::StatusOr<bool> reached = written_events_->Reached();
  if (!reached.ok()) Fail(reached.status());
  if (!reached.ok() || *reached) return reached.ok();
  event_timer_ = parts().clock->CallAt(NowNs() + kEventPollNs, [weak = weak_from_this(), then] {
    std::shared_ptr<Transfer> self = weak.lock();
    if (self == nullptr) return;
    auto* t = static_cast<SenderTransfer*>(self.get());
    t->Post([t, then] {
      t->event_timer_ = 0;
      if (!t->terminal()) (t->*then)();
    });
  });
  return false;
}

absl::Status SenderTransfer::CheckLater(uint32_t layers, uint32_t tokens, uint32_t token_count,
                                        const LaterImportance& importance) const {
  const std::vector<float>& scores = importance.scores;
  if (!scores.empty()) {
    const bool fits = scores.size() == tokens &&
                      std::all_of(scores.begin(), scores.end(), [](float s) { return s >= 0 && s - s == 0; });
    if (!fits) {
      return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_SCORES",
                       absl::StrCat("scores must be ", tokens, " finite values >= 0, got ", scores.size()));
    }
  }
  if (importance.queries == nullptr) return absl::OkStatus();
  if (policy_.importance != ImportanceSource::kRecentQueries || !scores.empty()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_QUERIES",
                     absl::StrCat("queries are given, but policy.importance is ",
                                  ImportanceSourceName(policy_.importance), scores.empty() ? "" : ", and so are scores"));
  }
  const std::vector<PlanLayer> written(layers_.begin(), layers_.begin() + layers);
  return CheckQueries(*importance.queries, written, token_count);
}

absl::Status SenderTransfer::Advance(uint32_t layers, uint32_t tokens, const LaterImportance& importance,
                                     const std::string& written_event) {
  if (!layerwise_) {
    return MakeError(absl::StatusCode::kInvalidArgument, "NOT_LAYERWISE",
                     "transfer was not opened with layerwise: all its blocks are already final");
  }
  const uint32_t token_count = static_cast<uint32_t>(Snapshot().tokens);
  if (layers > layers_.size() || tokens > token_count) {
    return MakeError(absl::StatusCode::kInvalidArgument, "OUT_OF_RANGE",
                     absl::StrCat("layers ", layers, " of ", layers_.size(), ", tokens ", tokens, " of ", token_count));
  }
  if (absl::Status ok = CheckLater(layers, tokens, token_count, importance); !ok.ok()) return ok;
  if (absl::Status awaited = AwaitWritten(written_event); !awaited.ok()) return awaited;
  {
    std::lock_guard<std::mutex> lock(advance_mutex_);
    for (uint32_t i = 0; i < layers; ++i) written_tokens_[i] = std::max(written_tokens_[i], tokens);
    if (!importance.scores.empty()) {
      next_scores_ = importance.scores;
      next_queries_.clear();
    }
    if (importance.queries != nullptr) {
      next_scores_.clear();
      for (auto& [layer, queries] : QueriesByLayer(importance.queries, layers_)) next_queries_[layer] = queries;
    }
  }
  Post([this, first = !advanced_.exchange(true)] {
    if (terminal()) return;
    if (first) ArmDeadline(deadline_ms_);
    MaybePlan();
  });
  return absl::OkStatus();
}

// Null where there is nothing to attend to.
std::shared_ptr<AttentionWork> SenderTransfer::TakeQueries() {
  std::lock_guard<std::mutex> lock(advance_mutex_);
  if (next_queries_.empty()) return nullptr;
  auto work = std::make_shared<AttentionWork>(source_->device());
  for (auto it = next_queries_.begin(); it != next_queries_.end();) {
    const uint32_t layer = it->first;
    if (written_tokens_[layer] == 0) {  // they came before their keys
      ++it;
      continue;
    }
    work->Add(std::make_unique<LayerAttention>(layer, layers_[layer], written_tokens_[layer], std::move(it->second.all),
                                               it->second.entry));
    it = next_queries_.erase(it);
  }
  if (work->jobs() == 0) return nullptr;
  attended_ = true;
  return work;
}

std::vector<uint32_t> SenderTransfer::WrittenChunks() {
  std::vector<uint32_t> batch;
  std::lock_guard<std::mutex> lock(advance_mutex_);
  const std::vector<ChunkCut>& cuts = planner_->cuts();
  for (uint32_t i = 0; i < cuts.size(); ++i) {
    if (chunk_state_[i] == ChunkState::kUnwritten && last_position_[i] < written_tokens_[cuts[i].layer_index]) {
      batch.push_back(i);
    }
  }
  return batch;
}

void SenderTransfer::MaybePlan() {
  if (planning_ || plan_again_ || terminal() || !planner_.has_value()) return;
  std::vector<uint32_t> batch = WrittenChunks();
  // In this order: a chunk's event was added before it was told to be written.
  if (batch.empty() || !EventsReached(&SenderTransfer::MaybePlan)) return;
  // Before any of it is read: reading a hole fills it, and nobody could tell afterwards that the file had been cut.
  if (absl::Status whole = source_->LookAtMemory(); !whole.ok()) return Fail(std::move(whole));
  planning_ = true;
  for (uint32_t chunk : batch) chunk_state_[chunk] = ChunkState::kPlanning;
  ScanBatch(std::make_shared<std::vector<uint32_t>>(std::move(batch)));
}

// What several workers take from one list; the last to finish plans.
struct SenderTransfer::ScanWork {
  std::shared_ptr<std::vector<uint32_t>> batch;
  std::shared_ptr<AttentionWork> attention;
  size_t step = 1;             // chunks of a job
  size_t heads = 0, jobs = 0;  // heads of keys to attend to come first: they take longest; then chunks to scan
  std::atomic<size_t> next{0}, workers{0};
  int64_t begin_ns = 0;
};

void SenderTransfer::ScanBatch(std::shared_ptr<std::vector<uint32_t>> batch) {
  auto work = std::make_shared<ScanWork>();
  work->begin_ns = NowNs();
  work->attention = TakeQueries();
  work->heads = work->attention == nullptr ? 0 : work->attention->jobs();
  work->step = ChunksAtATime(encode_source_);
  work->jobs = work->heads + (NeedsScan() ? (batch->size() + work->step - 1) / work->step : 0);
  work->batch = std::move(batch);
  const size_t cores = std::max(1u, std::thread::hardware_concurrency());
  const size_t workers = std::max<size_t>(1, std::min({work->jobs, cores, kScanWorkersMax}));
  work->workers = workers;
  for (size_t w = 0; w < workers; ++w) {
    parts().compute->Post([this, self = shared_from_this(), work] { RunScan(work); });
  }
}

void SenderTransfer::RunScan(const std::shared_ptr<ScanWork>& work) {
  const bool entered = gate_.Enter();
  const size_t first = entered ? work->next.fetch_add(1) : work->jobs;
  if (first < work->heads) {
    if (const absl::Status attended = work->attention->Run(first, *parts().backend, encode_source_); !attended.ok()) {
      Post([this, attended] { Fail(attended); });
    }
    gate_.Leave();
    // One at a time: what other transfers have to do comes in between.
    parts().compute->Post([this, self = shared_from_this(), work] { RunScan(work); });
    return;
  }
  for (size_t i = first; i < work->jobs; i = work->next.fetch_add(1)) {
    const size_t begin = (i - work->heads) * work->step;
    const absl::Status scanned =
        ScanSome(work->batch->data() + begin, std::min(work->step, work->batch->size() - begin));
    if (scanned.ok()) continue;
    Post([this, scanned] { Fail(scanned); });  // before the plan of this batch, which is of no use then
    break;
  }
  if (work->workers.fetch_sub(1) == 1 && entered) {
    AddStage(Stage::kScan, static_cast<double>(NowNs() - work->begin_ns) * 1e-9);
    PlanBatchNow(*work->batch, work->attention.get());
  }
  if (entered) gate_.Leave();
}

void SenderTransfer::PlanBatchNow(const std::vector<uint32_t>& batch, AttentionWork* attention) {
  const int64_t begin_ns = NowNs();
  std::vector<float> scores;
  {
    std::lock_guard<std::mutex> lock(advance_mutex_);
    scores.swap(next_scores_);
  }
  absl::Status scored = scores.empty() ? absl::OkStatus() : planner_->SetScores(scores);
  if (attention != nullptr && scored.ok()) {
    attention->MoveTo(&attention_);
    if (!attention_.empty()) scored = planner_->SetAttention(attention_.ByLayer());
  }
  auto plan = std::make_shared<absl::StatusOr<PlanBatch>>(scored.ok() ? planner_->Plan(batch, scan_)
                                                                      : absl::StatusOr<PlanBatch>(scored));
  AddStage(Stage::kPlan, static_cast<double>(NowNs() - begin_ns) * 1e-9);
  Post([this, batch, plan] { OnPlanned(batch, std::move(*plan)); });
}

void SenderTransfer::OnPlanned(const std::vector<uint32_t>& batch, absl::StatusOr<PlanBatch> plan) {
  planning_ = false;
  if (terminal()) return;
  if (!plan.ok()) return Fail(plan.status());
  for (PlannedChunk& chunk : plan->chunks) {
    const uint32_t index = chunk.cut.chunk_index;
    planned_[index] = std::move(chunk);
    chunk_state_[index] = ChunkState::kReady;
    ready_.push_back(index);
  }
  OrderByImportance();
  const double budget = planner_->effective_budget();
  const ImportanceSource importance = planner_->importance();
  UpdateReport([&](TransferReport& r) {
    r.budget = budget;
    r.importance = importance;
    r.escape_overrun_bytes += plan->escape_overrun_bytes;
    for (int tier = 0; tier < kTierCount; ++tier) {
      r.tiers.k[tier] += plan->totals.k[tier];
      r.tiers.v[tier] += plan->totals.v[tier];
    }
  });
  PlanAgainWhenStill();
  Pump();
  MaybePlan();
}

}  // namespace spectrumkv
