#include "server/transfer/refinement.h"

#include <algorithm>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/format/chunk.h"
#include "server/base/status.h"
#include "server/pool/rows.h"

namespace spectrumkv {
namespace {

constexpr int64_t kApplyRetryMs = 20;

constexpr int64_t kRoomRetryMs = 200;

}  // namespace

bool StagingRoom::Take(uint64_t bytes) {
  uint64_t used = used_.load();
  do {
    if (bytes > limit_ || used > limit_ - bytes) return false;
  } while (!used_.compare_exchange_weak(used, used + bytes));
  return true;
}

uint64_t StagingRoom::left() const {
  const uint64_t used = used_.load();
  return used < limit_ ? limit_ - used : 0;
}

// Rows of the destination's tokens that are in a strip, in the daemon's memory. The schema is the destination's, with
// strides of dense rows.
class Refinement::StagedHold final : public OwnMemoryHold {
 public:
  explicit StagedHold(std::shared_ptr<const Refinement> refinement)
      : refinement_(std::move(refinement)), schema_(DenseSchema(refinement_->base_->schema)) {}
  const PoolSchema& schema() const override { return schema_; }
  uint32_t token_count() const override { return refinement_->choice_.shape.token_count; }
  // REQUIRES: all `count` tokens are in the strip.
  void FillRows(uint32_t group, uint32_t layer_slot, PlaneId plane, uint32_t token_first, uint32_t count,
                uint8_t** rows) const override {
    const Refinement& r = *refinement_;
    const bool values = plane == PlaneId::kV;
    size_t strip = 0;
    while (r.places_[strip].group != group || r.places_[strip].layer_slot != layer_slot ||
           r.places_[strip].values != values) {
      ++strip;
    }
    const std::vector<TokenRange>& runs = r.choice_.rows[strip];
    const auto after = std::upper_bound(runs.begin(), runs.end(), token_first,
                                        [](uint32_t token, const TokenRange& run) { return token < run.first; });
    const size_t run = static_cast<size_t>(after - runs.begin()) - 1;
    const TensorSchema& tensor = schema_.groups[group].layers[layer_slot].k;
    const uint64_t row = r.rows_before_[strip][run] + (token_first - runs[run].first);
    for (uint32_t i = 0; i < count; ++i) {
      rows[i] = r.memory_.get() + r.strip_offset_[strip] + (row + i) * tensor.token_stride_bytes;
    }
  }
  std::shared_ptr<const void> KeepMapped() const override { return refinement_; }

 private:
  const std::shared_ptr<const Refinement> refinement_;
  PoolSchema schema_;
};

Refinement::Refinement(std::shared_ptr<RefineBase> base, RefineChoice choice, Tier tier,
                       std::shared_ptr<StagingRoom> room, bool verify)
    : base_(std::move(base)), choice_(std::move(choice)), tier_(tier), room_(std::move(room)), verify_(verify) {
  cuts_ = CutChunks(choice_.shape);
  chunks_.assign(cuts_.size(), ChunkPlace::kComing);
  uint32_t tokens = 0;
  for (const RefineChoice::Strip& strip : choice_.strips) {
    const LayerPlace& place = base_->places[strip.layer_index];
    places_.push_back({place.group, place.layer_slot, strip.values});
    const GroupSchema& group = base_->schema.groups[place.group];
    strip_first_.push_back(tokens);
    strip_offset_.push_back(memory_bytes_);
    uint32_t count = 0;
    std::vector<uint32_t>& before = rows_before_.emplace_back();
    for (const TokenRange& run : choice_.rows[strip_first_.size() - 1]) {
      before.push_back(count);
      count += run.count;
    }
    memory_bytes_ += uint64_t{count} * group.head_count * group.head_dim * SizeOf(group.dtype);
    tokens += count;
  }
  tiers_.assign(tokens, 0);
}

absl::StatusOr<std::shared_ptr<Refinement>> Refinement::Create(std::shared_ptr<RefineBase> base, RefineChoice choice,
                                                               Tier tier, std::shared_ptr<StagingRoom> room, bool verify) {
  std::shared_ptr<Refinement> refinement(
      new Refinement(std::move(base), std::move(choice), tier, std::move(room), verify));
  if (!refinement->staged()) return refinement;
  if (absl::Status taken = refinement->TakeMemory(); !taken.ok()) return taken;
  return refinement;
}

absl::Status Refinement::TakeMemory() {
  if (!room_->Take(memory_bytes_)) {
    dropped_ = true;
    return MakeError(absl::StatusCode::kResourceExhausted, "REFINE_STAGING_FULL",
                     absl::StrCat("the refinement needs ", memory_bytes_, " bytes of staging, ", room_->left(),
                                  " of refine.staging_bytes (", room_->limit(), ") are free"),
                     {{"field", "refine.staging_bytes"}, {"value", absl::StrCat(memory_bytes_)},
                      {"limit", absl::StrCat(room_->limit())}},
                     kRoomRetryMs);
  }
  memory_.reset(new (std::nothrow) uint8_t[memory_bytes_]);  // pages come as chunks do
  if (memory_ != nullptr) return absl::OkStatus();
  room_->Give(memory_bytes_);
  dropped_ = true;
  return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
                   absl::StrCat("no memory for ", memory_bytes_, " bytes of staging"));
}

Refinement::~Refinement() { GiveBackLocked(); }

RefineFrame Refinement::Request() const {
  RefineFrame frame;
  frame.transfer_id = base_->transfer_id;
  frame.tier = static_cast<int32_t>(tier_) + 1;  // the numbers of policy.proto
  frame.verify = verify_;
  const std::vector<TokenRange>* before = nullptr;
  for (size_t s = 0; s < choice_.strips.size(); ++s) {
    const std::vector<TokenRange>& tokens = choice_.shape.strips[s];
    if (before == nullptr || *before != tokens) {
      auto& set = frame.token_sets.emplace_back();
      for (const TokenRange& run : tokens) set.push_back({run.first, run.count});
    }
    before = &tokens;
    frame.strips.push_back({choice_.shape.layers[s].layer, choice_.strips[s].values,
                            static_cast<uint32_t>(frame.token_sets.size() - 1)});
  }
  return frame;
}

absl::StatusOr<std::unique_ptr<BlockHold>> Refinement::NewTarget() {
  // The transfer owns the hold, and the manager the refinement: no circle.
  if (staged()) return std::unique_ptr<BlockHold>(std::make_unique<StagedHold>(shared_from_this()));
  auto hold = base_->ticket->Reserve();
  if (!hold.ok()) return hold.status();
  for (size_t s = 0; s < places_.size(); ++s) {
    for (const TokenRange& run : choice_.rows[s]) {
      for (uint32_t t = 0; t < run.count; ++t) {
        if ((*hold)->Fresh(places_[s].group, run.first + t)) continue;
        return MakeError(absl::StatusCode::kFailedPrecondition, "BLOCKS_REUSED",
                         absl::StrCat("the block of token ", run.first + t, " has been written or given to others since"));
      }
    }
  }
  return hold;
}

uint64_t Refinement::BytesOf(const ChunkCut& cut) const {
  const GroupSchema& group = base_->schema.groups[places_[cut.layer_index].group];
  return uint64_t{cut.token_count} * group.head_count * group.head_dim * SizeOf(group.dtype);
}

void Refinement::Arrived(const ChunkCut& cut, const uint8_t* tier_map) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::copy_n(tier_map, cut.token_count, tiers_.begin() + strip_first_[cut.layer_index] + cut.token_first);
  if (!staged()) {
    applied_bytes_ += BytesOf(cut);
    ++applied_chunks_;
    chunks_[cut.chunk_index] = ChunkPlace::kApplied;
    return MarkTiers(cut);
  }
  if (dropped_) return;
  chunks_[cut.chunk_index] = ChunkPlace::kStaged;
  staged_bytes_ += BytesOf(cut);
}

void Refinement::MarkTiers(const ChunkCut& cut) {
  const RefineChoice::Strip& strip = choice_.strips[cut.layer_index];
  const uint8_t* const tiers = tiers_.data() + strip_first_[cut.layer_index] + cut.token_first;
  std::lock_guard<std::mutex> lock(base_->mutex);
  ForEachRun(choice_.rows[cut.layer_index], cut.token_first, cut.token_count,
             [&](uint32_t row, uint32_t count, uint32_t offset) {
               for (uint32_t i = 0; i < count; ++i) {
                 base_->tiers->SetCell(strip.layer_index, strip.values, row + i, TierOfK(tiers[offset + i]));
               }
             });
}

// A cell that another refinement has made as good meanwhile stays, also while this one copies: hence the lock.
absl::Status Refinement::CopyChunk(const ChunkCut& cut, const BlockHold& to, Applied* applied) {
  const RefineChoice::Strip& strip = choice_.strips[cut.layer_index];
  const DecodeTarget::Place& place = places_[cut.layer_index];
  const TensorOfHold tensor{place.group, place.layer_slot, place.values ? PlaneId::kV : PlaneId::kK};
  const uint64_t row_bytes = DenseRowBytes(to, tensor);
  const uint8_t* const tiers = tiers_.data() + strip_first_[cut.layer_index] + cut.token_first;
  const uint8_t* const staged = memory_.get() + strip_offset_[cut.layer_index] + cut.token_first * row_bytes;
  std::lock_guard<std::mutex> lock(base_->mutex);
  TierMap& map = *base_->tiers;
  std::vector<bool> gains(cut.token_count);
  uint64_t stale_cells = 0;
  ForEachRun(choice_.rows[cut.layer_index], cut.token_first, cut.token_count, [&](uint32_t row, uint32_t count, uint32_t offset) {
    for (uint32_t i = 0; i < count; ++i) {
      const bool fresh = to.Fresh(place.group, row + i);
      stale_cells += fresh ? 0 : 1;
      gains[offset + i] = fresh && IsFiner(TierOfK(tiers[offset + i]), map.At(strip.layer_index, strip.values, row + i));
    }
  });
  absl::Status copied;
  ForEachRun(choice_.rows[cut.layer_index], cut.token_first, cut.token_count,
             [&](uint32_t row, uint32_t count, uint32_t offset) {
               for (uint32_t i = 0, end; i < count && copied.ok(); i = end) {
                 end = i + 1;
                 if (!gains[offset + i]) continue;
                 while (end < count && gains[offset + end]) ++end;
                 copied = WriteRows(to, tensor, row + i, end - i, staged + (offset + i) * row_bytes);
                 if (!copied.ok()) return;
                 for (uint32_t t = i; t < end; ++t) {
                   map.SetCell(strip.layer_index, strip.values, row + t, TierOfK(tiers[offset + t]));
                 }
                 applied->bytes += (end - i) * row_bytes;
               }
             });
  if (copied.ok()) applied->stale_cells += stale_cells;  // else they are met again
  return copied;
}

absl::StatusOr<Refinement::Applied> Refinement::Apply(uint64_t max_bytes) {
  if (!staged()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "NOT_STAGED",
                     "the refinement is DIRECT: its cells are in the blocks as they arrive");
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++applying_;
  }
  absl::StatusOr<Applied> applied = ApplyStaged(max_bytes);
  std::vector<std::function<void()>> closers;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--applying_ == 0 && closed_) {
      GiveBackLocked();
      closers.swap(closers_);
    }
  }
  for (const auto& done : closers) done();
  return applied;
}

void Refinement::Close(std::function<void()> done) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    if (applying_ > 0) {
      closers_.push_back(std::move(done));
      return;
    }
    GiveBackLocked();
  }
  done();
}

absl::StatusOr<Refinement::Applied> Refinement::ApplyStaged(uint64_t max_bytes) {
  const std::unique_lock<std::mutex> one(apply_mutex_, std::try_to_lock);
  if (!one.owns_lock()) {  // it may take seconds: nobody's thread is to wait
    return MakeError(absl::StatusCode::kResourceExhausted, "APPLY_PENDING",
                     "another ApplyRefinement of this refinement is writing", {}, kApplyRetryMs);
  }
  std::vector<uint32_t> due;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (applied_chunks_ == chunks_.size()) return Applied{};
    if (dropped_ || closed_) {
      return MakeError(absl::StatusCode::kFailedPrecondition, "REFINEMENT_DROPPED",
                       "what the refinement had staged is gone: it failed, was cancelled or released");
    }
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < chunks_.size(); ++i) {
      if (chunks_[i] != ChunkPlace::kStaged) continue;
      bytes += BytesOf(cuts_[i]);
      if (max_bytes != 0 && bytes > max_bytes && !due.empty()) break;
      due.push_back(i);
    }
  }
  Applied sum;
  if (due.empty()) return sum;
  auto target = base_->ticket->Reserve();
  if (!target.ok()) return target.status();
  if (absl::Status whole = (*target)->LookAtMemory(); !whole.ok()) return whole;
  absl::Status health;
  size_t copied = 0;
  for (; copied < due.size() && health.ok(); copied += health.ok()) health = CopyChunk(cuts_[due[copied]], **target, &sum);
  due.resize(copied);
  if (health.ok()) health = (*target)->Health();
  if (health.ok() && sum.stale_cells == 0 && Remaining() == due.size()) health = Verify(**target);
  target->reset();
  std::lock_guard<std::mutex> lock(mutex_);
  for (const uint32_t index : due) {
    chunks_[index] = ChunkPlace::kApplied;
    staged_bytes_ -= BytesOf(cuts_[index]);
  }
  applied_chunks_ += due.size();
  applied_bytes_ += sum.bytes;
  stale_cells_ += sum.stale_cells;
  if (applied_chunks_ == chunks_.size()) GiveBackLocked();
  if (!health.ok()) return health;
  return sum;
}

size_t Refinement::Remaining() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return chunks_.size() - applied_chunks_;
}

void Refinement::SetChecksums(std::vector<uint32_t> checksums) {
  std::lock_guard<std::mutex> lock(mutex_);
  checksums_ = std::move(checksums);
}

absl::Status Refinement::Verify(const BlockHold& target) {
  std::vector<uint32_t> want;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!verify_ || checksums_.empty() || stale_cells_ > 0) return absl::OkStatus();
    want = checksums_;
  }
  const auto got = ChecksumsOf(target, base_->shape.layers, base_->places, [] { return false; });
  if (!got.ok()) return got.status();
  if (*got != want) {
    return MakeError(absl::StatusCode::kDataLoss, "NOT_EXACT",
                     "all cells are RAW, but the checksums of source and destination differ: one of them was written");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  exact_ = true;
  return absl::OkStatus();
}

bool Refinement::exact() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return exact_;
}

void Refinement::GiveBackLocked() {
  if (!staged() || dropped_) return;
  dropped_ = true;
  staged_bytes_ = 0;
  memory_.reset();
  room_->Give(memory_bytes_);
}

void Refinement::AddTo(TransferReport* report) const {
  std::lock_guard<std::mutex> lock(mutex_);
  report->cells = choice_.cells;
  report->cells_left = choice_.cells_left;
  report->staged_bytes = staged_bytes_;
  report->applied_bytes = applied_bytes_;
  report->stale_cells = stale_cells_;
  report->exact = exact_;
}

bool Refinement::closed() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return closed_;
}

bool Refinement::StillGains() const {
  std::lock_guard<std::mutex> lock(base_->mutex);
  for (size_t s = 0; s < choice_.strips.size(); ++s) {
    const RefineChoice::Strip& strip = choice_.strips[s];
    for (const TokenRange& run : choice_.rows[s]) {
      for (uint32_t t = run.first; t < run.first + run.count; ++t) {
        if (!IsFiner(tier_, base_->tiers->At(strip.layer_index, strip.values, t))) return false;
      }
    }
  }
  return true;
}

bool Refinement::TakeCompletion() {
  std::lock_guard<std::mutex> lock(mutex_);
  return applied_chunks_ == chunks_.size() && !std::exchange(completion_taken_, true);
}

bool Refinement::complete() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return applied_chunks_ == chunks_.size();
}

}  // namespace spectrumkv
