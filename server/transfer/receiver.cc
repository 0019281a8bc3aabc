#include "server/transfer/receiver.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/ids.h"
#include "server/base/status.h"
#include "server/transfer/part_group.h"

namespace spectrumkv {
namespace {

// Chunks under way until the first layer is ready: more of them are of later layers and take time from it.
constexpr uint32_t kFirstCredits = 16;
// Chunks of a refinement on their way: what sockets and switches hold of them is all that another transfer has to wait for.
constexpr uint32_t kRefineCredits = 2;

absl::Status Violation(const std::string& what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "PROTOCOL_VIOLATION", what);
}

bool SameManifest(const ManifestFrame& a, const ManifestFrame& b) {
  return a.token_count == b.token_count && a.chunk_count == b.chunk_count &&
         std::equal(a.kept_tokens.begin(), a.kept_tokens.end(), b.kept_tokens.begin(), b.kept_tokens.end(),
                    [](const FrameRun& x, const FrameRun& y) { return x.first == y.first && x.count == y.count; }) &&
         CompareShapes(a.shape, b.shape, true).ok();
}

std::vector<TokenRange> DroppedOf(const TransferShape& shape) {
  std::vector<TokenRange> dropped;
  uint32_t at = 0;
  for (const TokenRange& run : shape.kept) {
    if (run.first > at) dropped.push_back({at, run.first - at});
    at = run.first + run.count;
  }
  if (at < shape.token_count) dropped.push_back({at, shape.token_count - at});
  return dropped;
}

}  // namespace

ReceiverTransfer::ReceiverTransfer(TransferSetup setup, ReceiverSpec spec)
    : Transfer(std::move(setup)),
      target_(std::move(spec.target)),
      deadline_ms_(spec.deadline_ms),
      accept_dropped_(spec.accept_dropped && spec.part.count == 1),  // parts would drop different tokens
      exact_conversion_(spec.exact_conversion),
      refinable_(spec.refinable && spec.part.count == 1),
      refine_direct_(spec.refine_direct),
      refinement_(std::move(spec.refinement)),
      fence_(RandomU64()),
      on_device_(target_->device() != nullptr) {
  UpdateReport([&](TransferReport& r) {
    r.tokens = target_->token_count();
    r.pool_id = spec.pool_id;
  });
  if (on_device_) ReportDevice();
}

void ReceiverTransfer::Start() {
  ArmDeadline(deadline_ms_);
  target_->OnLost([weak = weak_from_this()](absl::Status why) {
    std::shared_ptr<Transfer> self = weak.lock();
    if (self == nullptr) return;
    Transfer* t = self.get();
    t->Post([t, why] {
      t->Fail(MakeError(absl::StatusCode::kFailedPrecondition, "DESTINATION_GONE",
                        absl::StrCat("the destination pool was lost: ", std::string(why.message()))));
    });
  });
  if (dials()) Dial();
}

HelloFrame ReceiverTransfer::MakeHello() const {
  HelloFrame hello;
  hello.shape = ShapeOf(target_->schema());
  hello.token_count = target_->token_count();
  hello.accept_dropped = accept_dropped_;
  if (refinement_ != nullptr) hello.refine = refinement_->Request();
  return hello;
}

absl::Status ReceiverTransfer::CheckHello(const HelloFrame& hello) {
  if (hello.token_count != target_->token_count()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "SCHEMA_MISMATCH",
                     absl::StrCat("source and destination differ in token_count: ", hello.token_count, " and ",
                                  target_->token_count()),
                     {{"field", "token_count"}, {"source", absl::StrCat(hello.token_count)},
                      {"destination", absl::StrCat(target_->token_count())}});
  }
  return CompareShapes(hello.shape, ShapeOf(target_->schema()), exact_conversion_);
}

void ReceiverTransfer::HandleFrame(ControlFrame& frame) {
  if (auto* reply = std::get_if<HelloReplyFrame>(&frame)) return OnHelloReply(*reply);
  if (auto* manifest = std::get_if<ManifestFrame>(&frame)) return OnManifest(*manifest);
  if (auto* cancel = std::get_if<CancelFrame>(&frame)) {
    if (cancel->reason == "OUTCOME_UNKNOWN") {  // to the sender; here it is known that nothing was committed
      cancel->code = static_cast<int32_t>(absl::StatusCode::kUnavailable);
      cancel->reason = "PEER_GAVE_UP";
    }
    return PeerEnded(*cancel, "sender");
  }
  Fail(Violation("a sender does not send this frame"));
}

void ReceiverTransfer::OnHelloReply(const HelloReplyFrame& reply) {
  if (!dials()) return;
  if (!CheckPeerEpoch(reply.epoch)) return;
  link_.session_id = reply.session;
}

void ReceiverTransfer::OnManifest(const ManifestFrame& manifest) {
  const uint32_t attempt = attempt_.load();
  if (manifest_attempt_ == attempt) return Fail(Violation("a second manifest in one attempt"));
  manifest_attempt_ = attempt;
  if (dials() && link_.session_id == 0) return Fail(Violation("manifest before hello_reply"));
  if (!manifest_.has_value()) {
    if (absl::Status adopted = AdoptManifest(manifest); !adopted.ok()) return Fail(adopted);
  } else if (!SameManifest(*manifest_, manifest)) {
    return Fail(Violation("the manifest of this attempt differs from that of the first"));
  }
  AdmitWhenThereIsRoom();
}

absl::Status ReceiverTransfer::AdoptManifest(const ManifestFrame& manifest) {
  HelloFrame as_hello;
  as_hello.shape = manifest.shape;
  as_hello.token_count = manifest.token_count;
  if (absl::Status fits = CheckHello(as_hello); !fits.ok()) return fits;
  absl::StatusOr<TransferShape> shape = ShapeOfPeer(manifest);
  if (!shape.ok()) return shape.status();
  shape_ = *std::move(shape);
  if (shape_.kept_count() != shape_.token_count && !accept_dropped_) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "DROP_NOT_ACCEPTED",
                     "the source drops tokens and this destination did not say accept_dropped");
  }
  cuts_ = CutChunks(shape_);
  if (cuts_.size() != manifest.chunk_count) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_MANIFEST",
                     absl::StrCat("the manifest says ", manifest.chunk_count, " chunks, its cut gives ", cuts_.size()));
  }
  for (const PlanLayer& layer : shape_.layers) {
    const uint64_t bytes = MaxChunkBytes(DimsOf(layer, TokensPerChunk(layer.heads, layer.head_dim, layer.dtype, layer.has_v)));
    if (bytes > parts().receive_slots->slot_bytes()) {
      return MakeError(absl::StatusCode::kInvalidArgument, "CHUNK_TOO_LARGE",
                       absl::StrCat("a chunk of layer ", layer.layer, " may take ", bytes, " bytes, memory.slot_bytes is ",
                                    parts().receive_slots->slot_bytes()));
    }
  }
  decode_target_.hold = target_.get();
  decode_target_.shape = &shape_;
  decode_target_.cuts = &cuts_;
  SetPlaces();
  for (const GroupSchema& group : target_->schema().groups) decode_target_.group_head_first.push_back(group.head_first);
  decode_target_.fence = fence_;
  coverage_ = std::make_unique<Coverage>(cuts_, static_cast<uint32_t>(shape_.layers.size()));
  if (manifest.retention.has_value() && refinable_) tiers_ = std::make_unique<TierMap>(shape_);
  manifest_ = manifest;
  if (refinement_ != nullptr) refinement_->SetChecksums(manifest.checksums);
  UpdateReport([&](TransferReport& r) {
    r.kept_tokens = shape_.kept_count();
    r.dropped = DroppedOf(shape_);
    r.kv_bytes = KvBytesOf(shape_);
    r.chunks_total = cuts_.size();
    for (size_t l = 0; l < shape_.layers.size(); ++l) {
      r.values += KvBytes(DimsOf(shape_.layers[l], 1)) / SizeOf(shape_.layers[l].dtype) * shape_.tokens_of(l);
    }
  });
  return absl::OkStatus();
}

void ReceiverTransfer::AdmitWhenThereIsRoom() {
  bool owns_slots;
  {
    std::lock_guard<std::mutex> lock(slots_mutex_);
    owns_slots = slots_owned_ > 0 || coverage_->full();
  }
  if (owns_slots) return Accept();  // a later attempt keeps the slots of the first
  if (waits_for_slot_) return;      // asked for by an earlier attempt
  waits_for_slot_ = true;
  auto held = std::make_shared<Slot>(parts().receive_slots->TryAcquire());
  if (*held) return OnFirstSlot(std::move(held));
  slot_asked_ns_ = NowNs();
  slot_wait_ = parts().receive_slots->Acquire([this, self = shared_from_this()](Slot granted) {
    auto shared = std::make_shared<Slot>(std::move(granted));
    Post([this, shared] { OnFirstSlot(shared); });
  });
}

void ReceiverTransfer::OnFirstSlot(std::shared_ptr<Slot> slot) {
  slot_wait_ = 0;
  waits_for_slot_ = false;
  if (slot_asked_ns_ != 0) slot_seconds_ = static_cast<double>(NowNs() - slot_asked_ns_) * 1e-9;
  if (terminal()) return;
  const uint32_t most = refines() ? kRefineCredits : options().credits_per_transfer;
  slots_wanted_ = static_cast<uint32_t>(std::min<uint64_t>(most, cuts_.size()));
  {
    std::lock_guard<std::mutex> lock(slots_mutex_);
    free_slots_.push_back(std::move(*slot));
    while (free_slots_.size() < slots_wanted_) {
      Slot more = SpareSlot();
      if (!more) break;
      free_slots_.push_back(std::move(more));
    }
    slots_owned_ = static_cast<uint32_t>(free_slots_.size());
  }
  if (manifest_attempt_ == attempt_.load() && link_.control != nullptr && !link_.joined) Accept();
}

// One more than the first. A credit that was given cannot be taken back, and its peer may be long in using it: a source
// that pauses between layers. So the last quarter is for transfers that have no slot yet.
Slot ReceiverTransfer::SpareSlot() {
  SlotPool* const slots = parts().receive_slots;
  return slots->count() - slots->used() > slots->count() / 4 ? slots->TryAcquire() : Slot();
}

void ReceiverTransfer::Accept() {
  AcceptFrame accept;
  accept.fence = fence_;
  accept.chunks_received = coverage_->DoneRuns();
  accept.streams = std::max(1u, std::min(options().streams, manifest_->streams));
  {
    std::lock_guard<std::mutex> lock(slots_mutex_);
    accept.credits = static_cast<uint32_t>(free_slots_.size());
  }
  credits_kept_ = 0;
  if (coverage_->layers_ready() == 0 && accept.credits > kFirstCredits) {
    credits_kept_ = accept.credits - kFirstCredits;
    accept.credits = kFirstCredits;
  }
  accept.refinable = tiers_ != nullptr;
  credits_owed_ = 0;
  receiving_.store(true, std::memory_order_release);
  Joined();
  Tell(accept);
  if (dials()) OpenDataStreams(accept.streams);
}

void ReceiverTransfer::OnChunk(uint32_t attempt, std::unique_ptr<ReceivedChunk> chunk) {
  if (attempt != attempt_.load()) return;  // of an attempt that has ended; the sender sends it again
  Heard();
  if (!receiving_.load(std::memory_order_acquire)) return Post([this] { Fail(Violation("a chunk before accept")); });
  auto slot = std::make_shared<Slot>();
  {
    std::lock_guard<std::mutex> lock(slots_mutex_);
    if (attempt != attempt_.load()) return;  // the next one has counted its credits by the slots that are free
    if (!free_slots_.empty()) {
      *slot = std::move(free_slots_.back());
      free_slots_.pop_back();
      if (chunks_held_++ == 0) held_since_ns_ = NowNs();
      if (first_chunk_ns_ == 0) first_chunk_ns_ = held_since_ns_;
    }
  }
  if (!*slot) {
    return Post([this, attempt] {
      if (attempt == attempt_.load()) Fail(Violation("a chunk without a credit"));
    });
  }
  if (chunk->size() > parts().receive_slots->slot_bytes()) {
    return Post([this, slot, bytes = chunk->size()] {
      ReturnSlot(slot);
      Fail(MakeError(absl::StatusCode::kResourceExhausted, "CHUNK_TOO_LARGE",
                     absl::StrCat("a chunk of ", bytes, " bytes does not fit a slot of ",
                                  parts().receive_slots->slot_bytes())));
    });
  }
  std::shared_ptr<ReceivedChunk> shared = std::move(chunk);
  if (on_device_) {  // whoever decodes there waits for it
    {
      std::lock_guard<std::mutex> lock(slots_mutex_);
      arrived_.push_back({std::move(shared), slot, {}, {}});
    }
    return parts().compute->Post([this, self = shared_from_this()] { DecodeArrived(); });
  }
  if (shared->size() <= options().inline_chunk_bytes) return DecodeOne(attempt, shared, slot);
  parts().compute->Post([this, self = shared_from_this(), attempt, shared, slot] { DecodeOne(attempt, shared, slot); });
}

void ReceiverTransfer::ReturnSlot(std::shared_ptr<Slot> slot) {
  if (terminal()) return slot->Release();
  uint32_t owned;
  {
    std::lock_guard<std::mutex> lock(slots_mutex_);
    owned = slots_owned_;
    last_return_ns_ = NowNs();
    if (--chunks_held_ == 0) busy_ns_ += last_return_ns_ - held_since_ns_;
    // Room that others wait for goes to them, down to the one slot that keeps this transfer moving.
    if ((is_part() && coverage_->full()) || (owned > 1 && parts().receive_slots->waiting() > 0)) {
      --slots_owned_;
    } else {
      free_slots_.push_back(std::move(*slot));
      ++credits_owed_;
      // There was less room when it was admitted.
      const uint32_t most = coverage_->layers_ready() == 0 ? std::min(slots_wanted_, kFirstCredits) : slots_wanted_;
      if (Slot more = owned < most ? SpareSlot() : Slot()) {
        free_slots_.push_back(std::move(more));
        ++slots_owned_;
        ++credits_owed_;
      }
    }
  }
  slot->Release();
  // Withholding less than a quarter cannot stall: the rest is on its way here.
  const uint32_t given = owned - std::min(owned, credits_kept_);
  if (credits_owed_ >= std::max(1u, given / 4)) GiveCredits();
}

void ReceiverTransfer::GiveCredits() {
  if (!link_.joined || credits_owed_ == 0) return;
  Tell(CreditFrame{credits_owed_});
  credits_owed_ = 0;
}

void ReceiverTransfer::OnDecoded(const Decoded& decoded) {
  if (terminal()) return;
  Apply(Event::kDataStarted);
  parts().metrics->CountChunk(MetricRole::kReceiver, decoded.kv_bytes, decoded.chunk_bytes);
  if (decoded.duplicate) {
    parts().metrics->CountChunkDuplicate();
    UpdateReport([&](TransferReport& r) {
      ++r.chunks_duplicate;
      r.wire_bytes += decoded.chunk_bytes;
    });
    return;
  }
  AddStage(Stage::kReceive, decoded.receive_seconds);
  AddStage(Stage::kDecode, decoded.decode_seconds);
  const uint32_t before = coverage_->layers_ready();
  coverage_->Done(cuts_[decoded.chunk_index]);
  const uint32_t layers = coverage_->layers_ready();
  UpdateReport([&](TransferReport& r) {
    ++r.chunks;
    r.wire_bytes += decoded.chunk_bytes;
    r.rounded_words += decoded.result.rounded_words;
    r.layers_ready = refines() ? 0 : layers;
    for (int tier = 0; tier < kTierCount; ++tier) {
      r.tiers.k[tier] += decoded.counts.k[tier];
      r.tiers.v[tier] += decoded.counts.v[tier];
    }
    if (before == 0 && layers > 0 && !refines()) r.first_layer_ready_seconds = SecondsSinceStart();
  });
  if (before == 0 && layers > 0) {
    if (!refines()) parts().metrics->ObserveFirstLayerReady(SecondsSinceStart());
    credits_owed_ += std::exchange(credits_kept_, 0);
    GiveCredits();
  }
  if (!refines()) NotifyLayers(layers);
  if (!coverage_->full()) return;
  if (is_part()) LetGoOfSlots();
  Apply(Event::kDataComplete);
}

// A part that has everything waits for the others, which need the room.
void ReceiverTransfer::LetGoOfSlots() {
  std::lock_guard<std::mutex> lock(slots_mutex_);
  slots_owned_ -= static_cast<uint32_t>(free_slots_.size());
  free_slots_.clear();
  credits_owed_ = credits_kept_ = 0;
}

void ReceiverTransfer::OnAction(Action action) {
  if (action != Action::kStartCommit) return;
  is_part() ? group_->OnComplete(part().index) : Commit();
}

void ReceiverTransfer::Commit() {
  parts().compute->Post([this, self = shared_from_this()] {
    const int64_t begin_ns = NowNs();
    if (!gate_.Enter()) return;
    // A file that was cut and grown again has lost what was written, without a fault. Tails could fill its holes.
    absl::Status health = target_->LookAtMemory();
    // Behind the tokens of a refinement lie those that were decoded since.
    if (health.ok() && !refines()) health = target_->ZeroTail(shape_.kept_count());
    if (health.ok()) health = target_->Health();
    if (health.ok() && refinement_ != nullptr && !refinement_->staged()) health = refinement_->Verify(*target_);
    gate_.Leave();
    const double seconds = static_cast<double>(NowNs() - begin_ns) * 1e-9;
    Post([this, health, seconds] {
      if (terminal()) return;
      AddStage(Stage::kCommit, seconds);
      if (!health.ok()) return Fail(health);
      if (is_part()) return group_->OnVerified(part().index);
      Apply(Event::kCommit);
    });
  });
}

const char* ReceiverTransfer::HeartbeatReason() const {
  if (waits_for_slot_) return "waiting_credit";
  if (is_part() && state() == TransferState::kVerifying) return "waiting_parts";
  return link_.joined ? "decoding" : "waiting_peer";
}

void ReceiverTransfer::StopWork() {
  if (slot_wait_ != 0) parts().receive_slots->Cancel(slot_wait_);
  gate_.Close([this, self = shared_from_this()] {
    Post([this] {
      if (refinement_ == nullptr || state() == TransferState::kCommitted) return Settle();
      // What had arrived may be on its way into the blocks.
      refinement_->Close([this, self = shared_from_this()] { Post([this] { Settle(); }); });
    });
  });
}

void ReceiverTransfer::SayGoodbye() {
  if (link_.control == nullptr) return;
  const TransferReport report = Snapshot();
  ReceiptFrame receipt;
  receipt.state = state();
  receipt.code = static_cast<int32_t>(error_.code());
  receipt.reason = ReasonOf(error_);
  receipt.message = std::string(error_.message());
  receipt.chunks_received = report.chunks;
  receipt.chunks_duplicate = report.chunks_duplicate;
  receipt.first_layer_ready_seconds = report.first_layer_ready_seconds;
  const ReceiverTimes times = Times();
  receipt.span_seconds = times.span_seconds;
  receipt.busy_seconds = times.busy_seconds;
  receipt.decoded_on_gpu = report.coded_by() == CodedBy::kGpu;
  Tell(receipt);
}

ReceiverTimes ReceiverTransfer::Times() {
  ReceiverTimes times;
  times.slot_seconds = slot_seconds_;
  times.before_seconds = SecondsSinceStart() - slot_seconds_;
  std::lock_guard<std::mutex> lock(slots_mutex_);
  if (first_chunk_ns_ == 0 || last_return_ns_ == 0) return times;
  times.before_seconds -= static_cast<double>(NowNs() - first_chunk_ns_) * 1e-9;
  times.span_seconds = static_cast<double>(last_return_ns_ - first_chunk_ns_) * 1e-9;
  times.busy_seconds = static_cast<double>(busy_ns_) * 1e-9;
  return times;
}

void ReceiverTransfer::Conclude() {
  const LimitShare share = LimitOfReceiver(Times());
  const TransferReport report = Snapshot();
  if (state() == TransferState::kCommitted && !refines()) {
    host().rates().LearnDecoded(report.coded_by(), report.KvBytesByFamily(),
                                report.stage_seconds[static_cast<size_t>(Stage::kReceive)] +
                                    report.stage_seconds[static_cast<size_t>(Stage::kDecode)],
                                NowNs());
  }
  UpdateReport([&](TransferReport& r) {
    r.limited_by = share.limit;
    r.limited_seconds = share.seconds;
    if (refinement_ != nullptr) refinement_->AddTo(&r);
  });
}

void ReceiverTransfer::ReleaseAll() {
  if (state() == TransferState::kCommitted && tiers_ != nullptr && tiers_->CoarseCells(shape_) > 0) KeepBase();
  {
    std::lock_guard<std::mutex> lock(slots_mutex_);
    free_slots_.clear();
    slots_owned_ = 0;
  }
  target_.reset();
}

}  // namespace spectrumkv
