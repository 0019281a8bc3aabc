// The planning half of SenderTransfer: what is written, scanned and planned, batch by batch.
#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/status.h"
#include "server/scan/scan.h"
#include "server/transfer/predict.h"
#include "server/transfer/sender.h"

namespace spectrumkv {
namespace {

constexpr size_t kScanWorkersMax = 8;

// Position in the request of the last kept token of each chunk.
std::vector<uint32_t> LastPositions(const TransferShape& shape, const std::vector<ChunkCut>& cuts) {
  std::vector<uint32_t> positions;
  positions.reserve(shape.kept_count());
  for (const TokenRange& run : shape.kept) {
    for (uint32_t i = 0; i < run.count; ++i) positions.push_back(run.first + i);
  }
  std::vector<uint32_t> last;
  last.reserve(cuts.size());
  for (const ChunkCut& cut : cuts) last.push_back(positions[cut.token_first + cut.token_count - 1]);
  return last;
}

void ScanCut(const Backend& backend, const SourcePlanes& planes, const ChunkCut& cut, LayerScan* scan) {
  ScanLayer(backend, planes.dims, planes.k, planes.values(), {cut.token_first, cut.token_count}, scan);
}

}  // namespace

absl::StatusOr<std::shared_ptr<SenderTransfer>> SenderTransfer::Create(TransferSetup setup, SenderSpec spec) {
  auto transfer = std::make_shared<SenderTransfer>(std::move(setup), std::move(spec));
  const Policy& policy = transfer->policy_;
  const SourceReads reads = ReadsFirst(policy, transfer->layerwise_);
  transfer->scans_ = reads.scans;
  transfer->samples_ = reads.samples;
  if (ScanChooses(policy, transfer->layerwise_)) {
    if (transfer->layerwise_) {  // then by key norms
      return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_POLICY",
                       "a layer-wise source cannot drop tokens by KEY_NORM: they are chosen before the first layer");
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
    for (const PlanLayer& layer : shape.layers) {
      r.values += KvBytes(DimsOf(layer, 1)) / SizeOf(layer.dtype) * shape.kept_count();
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
  scan_.resize(layers_.size());
  const uint32_t kept = planner_->shape().kept_count();
  for (size_t i = 0; i < scan_.size(); ++i) {
    if (scans_) scan_[i].k.resize(kept);
    if (scans_ && layers_[i].has_v) scan_[i].v.resize(kept);
    if (samples_) scan_[i].k_spread.resize(kept);
    if (samples_ && layers_[i].has_v) scan_[i].v_spread.resize(kept);
  }
}

void SenderTransfer::ScanOne(const ChunkCut& cut) {
  if (layers_[cut.layer_index].raw_only && !scans_) return;
  EncodeScratch* scratch = &ThreadEncodeScratch();
  const SourcePlanes planes = PlanesOf(encode_source_, cut, scratch);
  LayerScan* scan = &scan_[cut.layer_index];
  if (scans_) ScanCut(*parts().backend, planes, cut, scan);
  if (samples_) {
    SpreadChunk(*parts().backend, planes.dims, planes.k, planes.values(), cut.token_first, policy_.sinks,
                &scratch->workspace, scan);
  }
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
  parts().compute->Post([this, self = shared_from_this()] {
    if (!gate_.Enter()) return;
    TransferShape all;
    all.token_count = source_->token_count();
    all.kept = {{0, all.token_count}};
    all.layers = layers_;
    const EncodeSource source{source_.get(), &all, &places_};
    std::vector<LayerScan> scan(layers_.size());
    for (size_t i = 0; i < scan.size(); ++i) {
      scan[i].k.resize(all.token_count);
      if (layers_[i].has_v) scan[i].v.resize(all.token_count);
    }
    for (const ChunkCut& cut : CutChunks(all)) {
      ScanCut(*parts().backend, PlanesOf(source, cut, &ThreadEncodeScratch()), cut, &scan[cut.layer_index]);
    }
    auto planner = std::make_shared<absl::StatusOr<Planner>>(Planner::Create(policy_, layers_, all.token_count, &scan));
    gate_.Leave();
    Post([this, planner] {
      if (terminal()) return;
      if (absl::Status adopted = AdoptPlanner(std::move(*planner)); !adopted.ok()) return Fail(adopted);
      OnPlannerReady();
    });
  });
}

absl::Status SenderTransfer::Advance(uint32_t layers, uint32_t tokens, const std::vector<float>& scores) {
  if (!layerwise_) {
    return MakeError(absl::StatusCode::kInvalidArgument, "NOT_LAYERWISE",
                     "transfer was not opened with layerwise: all its blocks are already final");
  }
  const uint32_t token_count = static_cast<uint32_t>(Snapshot().tokens);
  if (layers > layers_.size() || tokens > token_count) {
    return MakeError(absl::StatusCode::kInvalidArgument, "OUT_OF_RANGE",
                     absl::StrCat("layers ", layers, " of ", layers_.size(), ", tokens ", tokens, " of ", token_count));
  }
  if (!scores.empty()) {
    const bool fits = scores.size() == tokens &&
                      std::all_of(scores.begin(), scores.end(), [](float s) { return s >= 0 && s - s == 0; });
    if (!fits) {
      return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_SCORES",
                       absl::StrCat("scores must be ", tokens, " finite values >= 0, got ", scores.size()));
    }
  }
  {
    std::lock_guard<std::mutex> lock(advance_mutex_);
    for (uint32_t i = 0; i < layers; ++i) written_tokens_[i] = std::max(written_tokens_[i], tokens);
    if (!scores.empty()) next_scores_ = scores;
  }
  Post([this, first = !advanced_.exchange(true)] {
    if (terminal()) return;
    if (first) ArmDeadline(deadline_ms_);
    MaybePlan();
  });
  return absl::OkStatus();
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
  if (batch.empty()) return;
  // Before any of it is read: reading a hole fills it, and nobody could tell afterwards that the file had been cut.
  if (absl::Status whole = source_->LookAtMemory(); !whole.ok()) return Fail(std::move(whole));
  planning_ = true;
  for (uint32_t chunk : batch) chunk_state_[chunk] = ChunkState::kPlanning;
  ScanBatch(std::make_shared<std::vector<uint32_t>>(std::move(batch)));
}

// Several workers take chunks from one list; the last to finish plans.
void SenderTransfer::ScanBatch(std::shared_ptr<std::vector<uint32_t>> batch) {
  struct Work {
    std::atomic<size_t> next{0}, workers{0};
    int64_t begin_ns = 0;
  };
  auto work = std::make_shared<Work>();
  work->begin_ns = NowNs();
  const size_t cores = std::max(1u, std::thread::hardware_concurrency());
  const size_t workers = NeedsScan() ? std::min({batch->size(), cores, kScanWorkersMax}) : 1;
  work->workers = workers;
  for (size_t w = 0; w < workers; ++w) {
    parts().compute->Post([this, self = shared_from_this(), batch, work] {
      const bool entered = gate_.Enter();
      while (entered && NeedsScan()) {
        const size_t i = work->next.fetch_add(1);
        if (i >= batch->size()) break;
        const ChunkCut& cut = planner_->cuts()[(*batch)[i]];
        ScanOne(cut);
      }
      if (work->workers.fetch_sub(1) == 1 && entered) {
        AddStage(Stage::kScan, static_cast<double>(NowNs() - work->begin_ns) * 1e-9);
        PlanBatchNow(*batch);
      }
      if (entered) gate_.Leave();
    });
  }
}

void SenderTransfer::PlanBatchNow(const std::vector<uint32_t>& batch) {
  const int64_t begin_ns = NowNs();
  std::vector<float> scores;
  {
    std::lock_guard<std::mutex> lock(advance_mutex_);
    scores.swap(next_scores_);
  }
  const absl::Status scored = scores.empty() ? absl::OkStatus() : planner_->SetScores(scores);
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
  const double budget = planner_->effective_budget();
  UpdateReport([&](TransferReport& r) {
    r.budget = budget;
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
