#include "server/transfer/sender.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/codec.h"
#include "server/base/status.h"
#include "server/encode/reconstruction.h"

namespace spectrumkv {
namespace {

constexpr uint64_t kKvBytesPerStream = 4 << 20;
// Chunks of one launch on a GPU: so many that launching is the lesser part, no more than leaves other lanes something to do.
constexpr uint64_t kBatchKvBytes = 2 << 20;

void Observe(const ReconstructionError& error, Metrics* metrics) {
  for (size_t tier = 0; tier < kTierCount; ++tier) {
    for (const auto& ratio : {error.k[tier], error.v[tier]}) {
      if (ratio.has_value()) metrics->ObserveReconstructionError(static_cast<MetricTier>(tier), *ratio);
    }
  }
}

// What coding lost, of some chunks.
void SampleReconstruction(const TransferParts& parts, const EncodeSource& source, const ChunkCut& cut,
                          const uint8_t* data, size_t size) {
  if (!parts.metrics->SampleReconstruction()) return;
  Observe(MeasureReconstruction(*parts.backend, source, cut, data, size, &ThreadEncodeScratch()), parts.metrics);
}

}  // namespace

SenderTransfer::SenderTransfer(TransferSetup setup, SenderSpec spec)
    : Transfer(std::move(setup)),
      source_(std::move(spec.source)),
      policy_(std::move(spec.policy)),
      deadline_ms_(spec.deadline_ms),
      layerwise_(spec.layerwise),
      retain_ms_(spec.retain_ms),
      background_tier_(spec.background_tier),
      refine_(std::move(spec.refine)) {
  layers_ = PlanLayersOf(source_->schema(), &places_);
  if (refine_ != nullptr) {
    layers_ = refine_->shape.layers;
    places_ = refine_->places;
  }
  attention_ = AttentionScores(layers_.size(), source_->token_count());
  if (spec.queries != nullptr) next_queries_ = QueriesByLayer(std::move(spec.queries), layers_);
  written_tokens_.assign(layers_.size(), layerwise_ ? 0 : source_->token_count());
  UpdateReport([&](TransferReport& r) {
    r.tokens = source_->token_count();
    r.budget = policy_.budget;
    r.allocator = policy_.allocator;
    r.importance = policy_.importance;
    if (policy_.allocator == Allocator::kOptimal) r.model_profile = policy_.profile.name;
    r.source_guard = source_->has_generations() ? "generations" : "none";
    r.choice = spec.choice;
    r.pool_id = spec.pool_id;
    r.gate = policy_.gate;
    r.completes = refine_ != nullptr && refine_->verify;
  });
  if (Device* const device = source_->device()) {
    ReportDevice();
    written_events_ = std::make_unique<DeviceEvents>(device);
  }
}

void SenderTransfer::Start() {
  NoteWait();
  ArmDeadline(layerwise_ ? std::max(deadline_ms_, options().max_deadline_ms) : deadline_ms_);
  source_->OnLost([weak = weak_from_this()](absl::Status why) {
    std::shared_ptr<Transfer> self = weak.lock();
    if (self == nullptr) return;
    auto* t = static_cast<SenderTransfer*>(self.get());
    t->Post([t, why] {
      if (t->terminal()) return;
      // What is fully written stays mapped and may finish.
      std::unique_lock<std::mutex> lock(t->advance_mutex_);
      const bool complete = std::all_of(t->written_tokens_.begin(), t->written_tokens_.end(),
                                        [&](uint32_t n) { return n == t->source_->token_count(); });
      lock.unlock();
      if (complete && ReasonOf(why) != "SEGMENT_FAILED") return;
      t->Fail(MakeError(absl::StatusCode::kFailedPrecondition, "SOURCE_GONE",
                        absl::StrCat("the source pool was lost: ", std::string(why.message()))));
    });
  });
  if (planner_.has_value()) {
    OnPlannerReady();
  } else {
    StartFullScan();
  }
}

void SenderTransfer::OnChunk(uint32_t attempt, std::unique_ptr<ReceivedChunk>) {
  Post([this, attempt] {
    if (attempt != attempt_.load()) return;
    Fail(MakeError(absl::StatusCode::kInvalidArgument, "PROTOCOL_VIOLATION", "the receiver sent a chunk"));
  });
}

HelloFrame SenderTransfer::MakeHello() const {
  HelloFrame hello;
  hello.shape = ShapeOf(source_->schema());
  hello.token_count = source_->token_count();
  return hello;
}

absl::Status SenderTransfer::CheckHello(const HelloFrame& hello) {
  if (hello.token_count != source_->token_count()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "SCHEMA_MISMATCH",
                     absl::StrCat("source and destination differ in token_count: ", source_->token_count(), " and ",
                                  hello.token_count),
                     {{"field", "token_count"}, {"source", absl::StrCat(source_->token_count())},
                      {"destination", absl::StrCat(hello.token_count)}});
  }
  if (planner_.has_value() && planner_->shape().kept_count() != source_->token_count() && !hello.accept_dropped) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "DROP_NOT_ACCEPTED",
                     "the policy drops tokens and the destination did not say accept_dropped");
  }
  return CompareShapes(ShapeOf(source_->schema()), hello.shape, /*exact_conversion=*/false);
}

void SenderTransfer::OnGreeted() {
  accepted_ = false;
  if (!planner_.has_value()) return;  // OnPlannerReady comes back here
  if (AwaitChecksums()) return;
  ManifestFrame manifest = ManifestOf(planner_->shape(), source_->schema(), planner_->cuts().size(), StreamsWanted());
  if (retain_ms_ > 0) manifest.retention = Offer();
  manifest.checksums = checksums_;
  Tell(std::move(manifest));
}

// A connection more for every few chunks' worth of bytes: opening one costs as much as a small transfer.
uint32_t SenderTransfer::StreamsWanted() const {
  if (refines()) return 1;  // it has time
  const uint64_t by_size = KvBytesOf(planner_->shape()) / kKvBytesPerStream;
  return static_cast<uint32_t>(std::clamp<uint64_t>(by_size, 1, options().streams));
}

void SenderTransfer::HandleFrame(ControlFrame& frame) {
  if (auto* reply = std::get_if<HelloReplyFrame>(&frame)) return OnHelloReply(*reply);
  if (auto* accept = std::get_if<AcceptFrame>(&frame)) return OnAccept(*accept);
  if (auto* credit = std::get_if<CreditFrame>(&frame)) {
    // More credits than chunks mean nothing.
    credits_ = static_cast<uint32_t>(std::min<uint64_t>(uint64_t{credits_} + credit->credits, chunk_state_.size()));
    return Pump();
  }
  if (auto* receipt = std::get_if<ReceiptFrame>(&frame)) return OnReceipt(*receipt);
  if (auto* cancel = std::get_if<CancelFrame>(&frame)) return OnCancelFrame(*cancel);
  Fail(MakeError(absl::StatusCode::kInvalidArgument, "PROTOCOL_VIOLATION", "a receiver does not send this frame"));
}

void SenderTransfer::OnHelloReply(const HelloReplyFrame& reply) {
  if (!dials() || !CheckPeerEpoch(reply.epoch)) return;
  link_.session_id = reply.session;
}

void SenderTransfer::OnAccept(const AcceptFrame& accept) {
  if (accepted_ || accept.fence == 0 || accept.streams == 0 || (fence_ != 0 && accept.fence != fence_)) {
    return Fail(MakeError(absl::StatusCode::kInvalidArgument, "PROTOCOL_VIOLATION", "accept does not fit the attempt"));
  }
  accepted_ = true;
  peer_refines_ = accept.refinable;
  fence_ = accept.fence;
  peer_key_ = dials() ? peer_address() : PeerKey(link_.control->peer(), /*dialled=*/false);
  times_.starved = uint64_t{4} * accept.credits <= std::min<uint64_t>(options().credits_per_transfer, chunk_state_.size());
  credits_ = static_cast<uint32_t>(std::min<uint64_t>(accept.credits, chunk_state_.size()));
  for (const FrameRun& run : accept.chunks_received) {
    for (uint64_t i = run.first; i < uint64_t{run.first} + run.count && i < chunk_state_.size(); ++i) {
      if (chunk_state_[i] == ChunkState::kHanded) chunk_state_[i] = ChunkState::kReceived;
    }
  }
  for (uint32_t i = static_cast<uint32_t>(chunk_state_.size()); i-- > 0;) {
    if (chunk_state_[i] != ChunkState::kHanded) continue;
    --handed_;
    PutBack(i);
    UpdateReport([](TransferReport& r) { ++r.chunks_resent; });
    parts().metrics->CountChunkResent();
  }
  Joined();
  if (dials()) {
    const uint32_t streams = std::min(accept.streams, StreamsWanted());
    outstanding_.assign(streams, 0);
    OpenDataStreams(streams);
  }
  Pump();
}

void SenderTransfer::OnReceipt(const ReceiptFrame& receipt) {
  receipt_ns_ = NowNs();
  times_.span_seconds = receipt.span_seconds;
  times_.busy_seconds = receipt.busy_seconds;
  peer_decoded_by_ = receipt.decoded_on_gpu ? CodedBy::kGpu : CodedBy::kCpu;
  if (receipt.state == TransferState::kCommitted) {
    // The receipt may overtake our own bookkeeping of the last chunk.
    if (handed_ == chunk_state_.size() || state() == TransferState::kVerifying) {
      UpdateReport([&](TransferReport& r) {
        r.chunks_duplicate = receipt.chunks_duplicate;
        r.first_layer_ready_seconds = receipt.first_layer_ready_seconds;
      });
      return Apply(Event::kCommit);
    }
    return Fail(MakeError(absl::StatusCode::kInvalidArgument, "PROTOCOL_VIOLATION",
                          "the receiver says COMMITTED before everything was sent"));
  }
  OnCancelFrame(CancelFrame{receipt.state, receipt.code, receipt.reason, receipt.message});
}

void SenderTransfer::OnCancelFrame(const CancelFrame& cancel) {
  if (absl::Status memory = LookAtLent(); !memory.ok()) return Fail(std::move(memory));
  PeerEnded(cancel, "receiver");
}

void SenderTransfer::OnLinkLost() {
  if (absl::Status memory = LookAtLent(); !memory.ok()) return Fail(std::move(memory));
  accepted_ = false;
  credits_ = 0;
  outstanding_.clear();
  for (Encoded& encoded : encoded_) PutBack(encoded.chunk_index);
  encoded_.clear();
  NoteWait();
}

void SenderTransfer::OnAction(Action action) {
  if (action == Action::kAskPeer) {
    if (link_.control == nullptr) {
      return Fail(MakeError(absl::StatusCode::kUnavailable, "PEER_GONE", "cancelled without a link to the receiver"));
    }
    Tell(CancelFrame{TransferState::kCancelled, static_cast<int32_t>(absl::StatusCode::kCancelled), "CANCELLED",
                     "the worker cancelled the transfer"});
  }
}

const char* SenderTransfer::HeartbeatReason() const {
  if (!accepted_) return "waiting_peer";
  if (!ready_.empty()) return credits_ == 0 ? "waiting_credit" : "sending";
  return handed_ + encoding_ + encoded_.size() < chunk_state_.size() ? "waiting_source" : "sending";
}

void SenderTransfer::PutBack(uint32_t chunk_index) {
  chunk_state_[chunk_index] = ChunkState::kReady;
  ready_.push_front(chunk_index);
}

// Looks twice: what was waited for has come, and what is coded inside TakeSlots takes time of its own.
void SenderTransfer::Pump() {
  NoteWait();
  TakeSlots();
  PostBatch(/*full=*/false);
  NoteWait();
}

// As many as there are credits, planned chunks and room on the streams.
void SenderTransfer::TakeSlots() {
  if (terminal() || !accepted_ || link_.data.empty()) return;
  if (outstanding_.size() < link_.data.size()) outstanding_.resize(link_.data.size(), 0);
  HandToNetwork();
  while (!terminal() && !plan_again_ && !wants_slot_ && !ready_.empty() && credits_ > 0 &&
         encoding_ + encoded_.size() < InWorkMax()) {
    if (refines() && MustPause()) return;
    Slot slot = parts().send_slots->TryAcquire();
    if (!slot) {
      wants_slot_ = true;
      slot_wait_ = parts().send_slots->Acquire([self = shared_from_this(), this](Slot granted) {
        auto shared = std::make_shared<Slot>(std::move(granted));
        Post([this, shared] { OnSlot(std::move(*shared)); });
      });
      return;
    }
    const uint32_t chunk_index = ready_.front();
    ready_.pop_front();
    StartEncode(chunk_index, std::move(slot));
    HandToNetwork();  // what was encoded at once
  }
}

// Two batches for a GPU: one is coded while the other waits for the network.
size_t SenderTransfer::InWorkMax() const {
  if (refines()) return 1;  // whoever comes first waits for no more than what is on its way
  const size_t by_streams = link_.data.size() * (kMaxOutstandingPerStream + 1);
  return source_->device() == nullptr ? by_streams : std::max<size_t>(by_streams, 2 * gpu::kMaxBatch);
}

void SenderTransfer::OnSlot(Slot slot) {
  wants_slot_ = false;
  slot_wait_ = 0;
  if (!terminal() && !plan_again_ && accepted_ && !ready_.empty() && credits_ > 0) {
    const uint32_t chunk_index = ready_.front();
    ready_.pop_front();
    StartEncode(chunk_index, std::move(slot));
  } else {
    slot.Release();
  }
  Pump();
}

void SenderTransfer::StartEncode(uint32_t chunk_index, Slot slot) {
  --credits_;
  ++encoding_;
  chunk_state_[chunk_index] = ChunkState::kEncoding;
  EncodeJob job{chunk_index, attempt_.load(), fence_, std::make_shared<Slot>(std::move(slot))};
  const uint64_t kv_bytes = KvBytesOfChunk(chunk_index);
  if (source_->device() != nullptr) {
    if (!batch_.empty() && batch_kv_bytes_ + kv_bytes > kBatchKvBytes) PostBatch(/*full=*/true);
    batch_.push_back(std::move(job));
    batch_kv_bytes_ += kv_bytes;
    if (batch_.size() == gpu::kMaxBatch) PostBatch(/*full=*/true);
    return;
  }
  if (kv_bytes <= options().inline_chunk_bytes) {
    Encode(&job);
    return TakeEncoded(job);
  }
  parts().compute->Post([this, self = shared_from_this(), job = std::move(job)]() mutable {
    Encode(&job);
    Dispatch([this, job = std::move(job)]() mutable {
      TakeEncoded(job);
      Pump();
    });
  });
}

uint64_t SenderTransfer::KvBytesOfChunk(uint32_t chunk_index) const {
  const ChunkCut& cut = planned_[chunk_index].cut;
  return KvBytes(DimsOf(planner_->shape().layers[cut.layer_index], cut.token_count));
}

void SenderTransfer::PostBatch(bool full) {
  if (batch_.empty() || (!full && batches_coding_ > 0)) return;
  batch_kv_bytes_ = 0;
  ++batches_coding_;
  parts().compute->Post([this, self = shared_from_this(), jobs = std::exchange(batch_, {})]() mutable {
    EncodeBatch(&jobs);
    Dispatch([this, jobs = std::move(jobs)]() mutable {
      --batches_coding_;
      for (EncodeJob& job : jobs) TakeEncoded(job);
      Pump();
    });
  });
}

// Any thread, which waits for the GPU. All have one fence, also those of different attempts.
void SenderTransfer::EncodeBatch(std::vector<EncodeJob>* jobs) {
  if (!gate_.Enter()) return;
  const int64_t begin_ns = NowNs();
  std::vector<BatchedChunk> chunks;
  for (EncodeJob& job : *jobs) {
    chunks.emplace_back();
    chunks.back().chunk = &planned_[job.chunk_index];
    chunks.back().out = job.slot->data();
  }
  EncodeScratch& scratch = ThreadEncodeScratch();
  EncodeChunksOnDevice(encode_source_, jobs->front().fence, parts().send_slots->slot_bytes(), &scratch, &chunks);
  const double seconds = static_cast<double>(NowNs() - begin_ns) * 1e-9 / static_cast<double>(jobs->size());
  std::vector<MeasuredChunk> sampled;
  for (size_t i = 0; i < jobs->size(); ++i) {
    EncodeJob& job = (*jobs)[i];
    job.result = std::move(chunks[i].result);
    job.seconds = seconds;
    // Where a chunk came out longer than planned, the slot holds what was there before.
    if (!job.result.ok() || job.result->chunk_bytes != chunks[i].chunk->chunk_bytes) continue;
    if (!parts().metrics->SampleReconstruction()) continue;
    sampled.push_back({&chunks[i].chunk->cut, job.slot->data(), job.result->chunk_bytes,
                       std::move(chunks[i].generations_before), {}});
  }
  if (!sampled.empty()) MeasureReconstructionsOnDevice(encode_source_, &scratch, &sampled);
  for (const MeasuredChunk& chunk : sampled) Observe(chunk.error, parts().metrics);
  gate_.Leave();
}

// Any thread.
void SenderTransfer::Encode(EncodeJob* job) {
  if (!gate_.Enter()) return;
  const int64_t begin_ns = NowNs();
  const PlannedChunk& planned = planned_[job->chunk_index];
  job->result = EncodeChunk(*parts().backend, encode_source_, planned, job->fence, &ThreadEncodeScratch(),
                            job->slot->data(), parts().send_slots->slot_bytes(), &job->lent);
  job->seconds = static_cast<double>(NowNs() - begin_ns) * 1e-9;
  // Where a chunk on a GPU came out longer than planned, the slot holds what was there before.
  const bool whole = job->result.ok() && (source_->device() == nullptr || job->result->chunk_bytes == planned.chunk_bytes);
  if (whole && job->lent.empty()) {
    SampleReconstruction(parts(), encode_source_, planned.cut, job->slot->data(), job->result->chunk_bytes);
  }
  gate_.Leave();
}

void SenderTransfer::TakeEncoded(EncodeJob& job) {
  --encoding_;
  if (terminal()) return;
  if (!job.result.ok()) return Fail(job.result.status());
  AddStage(Stage::kEncode, job.seconds);
  const bool same_attempt = job.attempt == attempt_.load() && accepted_;
  const bool fits = job.result->chunk_bytes == planned_[job.chunk_index].chunk_bytes;
  if (!same_attempt || !fits || plan_again_) {
    if (same_attempt) ++credits_;
    PutBack(job.chunk_index);
    plan_again_ = plan_again_ || !fits;
    return PlanAgainWhenStill();
  }
  if (job.result->nonfinite_values > 0) {
    UpdateReport([&](TransferReport& r) { r.nonfinite_values += job.result->nonfinite_values; });
    parts().metrics->AddNonfiniteValues(job.result->nonfinite_values);
  }
  encoded_.push_back({job.chunk_index, job.result->chunk_bytes, std::move(job.slot), std::move(job.lent)});
}

void SenderTransfer::HandToNetwork() {
  while (!encoded_.empty()) {
    // The least busy stream; in turn where they are equal, so that all connections are used.
    uint32_t stream = next_stream_ % outstanding_.size();
    for (uint32_t i = 0; i < outstanding_.size(); ++i) {
      if (outstanding_[i] < outstanding_[stream]) stream = i;
    }
    if (outstanding_[stream] >= (refines() ? 1 : kMaxOutstandingPerStream)) return;
    if (handed_ + 1 == chunk_state_.size()) {
      // Before the receiver can have all of it: a file that was cut and grown again was read as zeros without a fault.
      if (absl::Status whole = source_->LookAtMemory(); !whole.ok()) return Fail(std::move(whole));
    }
    next_stream_ = stream + 1;
    Encoded chunk = std::move(encoded_.front());
    encoded_.pop_front();
    ++outstanding_[stream];
    Apply(Event::kDataStarted);
    chunk_state_[chunk.chunk_index] = ChunkState::kHanded;
    ++handed_;
    const uint64_t kv_bytes = KvBytesOfChunk(chunk.chunk_index);
    UpdateReport([&](TransferReport& r) {
      r.wire_bytes += chunk.bytes;
      ++r.chunks;
    });
    parts().metrics->CountChunk(MetricRole::kSender, kv_bytes, chunk.bytes);
    if (refines()) host().CountRefined(chunk.bytes);
    const int64_t begin_ns = NowNs();
    if (first_handed_ns_ == 0) first_handed_ns_ = begin_ns;
    const bool lent = !chunk.lent.empty();
    link_.data[stream]->SendChunk(
        ToSend(std::move(chunk)),
        [this, self = shared_from_this(), attempt = attempt_.load(), stream, begin_ns, lent](bool sent) {
          if (lent) lent_gate_.Leave();
          const double seconds = static_cast<double>(NowNs() - begin_ns) * 1e-9;
          Dispatch([this, attempt, stream, sent, seconds] { OnSent(attempt, stream, sent, seconds); });
        });
    if (handed_ == chunk_state_.size()) Apply(Event::kDataComplete);
  }
}

void SenderTransfer::OnSent(uint32_t attempt, uint32_t stream, bool sent, double seconds) {
  if (terminal()) return;
  if (sent) AddStage(Stage::kSend, seconds);
  if (attempt != attempt_.load() || stream >= outstanding_.size()) return;
  --outstanding_[stream];
  Pump();
}

}  // namespace spectrumkv
