// What SenderTransfer does about refinements: how one gives way, and how the source of a transfer outlives it.
#include <algorithm>
#include <utility>

#include "server/transfer/sender.h"
#include "server/transfer/units.h"

namespace spectrumkv {
namespace {

constexpr int64_t kLeastPauseNs = kMsToNs;

}  // namespace

bool SenderTransfer::MustPause() {
  if (pause_timer_ != 0) return true;
  // One chunk at a time: what is on its way when another transfer begins is all that it waits for.
  if (encoding_ > 0 || !encoded_.empty() || NetworkHasChunks()) return true;  // OnSent comes
  const int64_t pause_ns = host().RefinePauseNs();
  if (pause_ns <= 0) return false;
  pause_timer_ = parts().clock->CallAt(NowNs() + std::max(pause_ns, kLeastPauseNs), [weak = weak_from_this()] {
    std::shared_ptr<Transfer> self = weak.lock();
    if (self == nullptr) return;
    auto* t = static_cast<SenderTransfer*>(self.get());
    t->Post([t] {
      t->pause_timer_ = 0;
      t->Pump();
    });
  });
  return true;
}

bool SenderTransfer::AwaitChecksums() {
  if (refine_ == nullptr || !refine_->verify) return false;
  if (checksums_state_ != Checksums::kNone) return checksums_state_ == Checksums::kComing;
  checksums_state_ = Checksums::kComing;
  parts().compute->Post([this, self = shared_from_this()] {
    if (!gate_.Enter()) return;
    auto sums = ChecksumsOf(*source_, refine_->base_layers, refine_->base_places, [this] { return gate_.closed(); });
    gate_.Leave();
    Post([this, sums = std::move(sums)]() mutable {
      if (!sums.ok()) return terminal() ? void() : Fail(sums.status());
      checksums_ = *std::move(sums);
      checksums_state_ = Checksums::kThere;
      if (!terminal() && link_.control != nullptr) OnGreeted();
    });
  });
  return true;
}

// What matters most first, by the mean over a chunk's tokens.
void SenderTransfer::OrderByImportance() {
  if (refine_ == nullptr || refine_->importance == nullptr) return;
  const std::vector<float>& importance = *refine_->importance;
  std::vector<double> mean(planner_->cuts().size(), 0), before;  // of a strip's tokens: the sum up to each
  uint32_t strip = UINT32_MAX;
  for (const ChunkCut& cut : planner_->cuts()) {
    if (cut.layer_index != std::exchange(strip, cut.layer_index)) {
      before.assign(1, 0);
      for (const TokenRange& run : planner_->shape().strips[strip]) {
        for (uint32_t t = 0; t < run.count; ++t) before.push_back(before.back() + importance[run.first + t]);
      }
    }
    mean[cut.chunk_index] = (before[cut.token_first + cut.token_count] - before[cut.token_first]) / cut.token_count;
  }
  std::stable_sort(ready_.begin(), ready_.end(), [&](uint32_t a, uint32_t b) { return mean[a] > mean[b]; });
}

RetentionFrame SenderTransfer::Offer() const {
  const int32_t background = background_tier_.has_value() ? static_cast<int32_t>(*background_tier_) + 1 : 0;
  return {static_cast<uint64_t>(retain_ms_), host().peer_port(), background};
}

// Where all travelled RAW there is nothing to be made better; the receiver sees it from its tier maps.
bool SenderTransfer::CameCoarse(const TransferReport& report) {
  const auto coarse = [](const auto& tokens) {
    return std::any_of(tokens.begin() + 1, tokens.end(), [](uint64_t n) { return n > 0; });  // RAW is the first
  };
  return coarse(report.tiers.k) || coarse(report.tiers.v);
}

void SenderTransfer::KeepSource() {
  const TransferReport report = Snapshot();
  RetainedSource kept;
  kept.transfer_id = id();
  kept.token = token();
  kept.pool_id = report.pool_id;
  kept.peer_epoch = peer_epoch();
  kept.hold = std::move(source_);
  kept.layers = layers_;
  kept.places = places_;
  if (std::vector<float> importance = planner_->TokenImportance(scan_); !importance.empty()) {
    kept.importance = std::make_shared<const std::vector<float>>(std::move(importance));
  }
  kept.retain_ms = static_cast<uint64_t>(retain_ms_);
  kept.kv_bytes = report.kv_bytes;
  kept.wire_bytes = report.wire_bytes;
  kept_ = host().Retain(std::move(kept));
}

}  // namespace spectrumkv
