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

void SenderTransfer::KeepSource() {
  const TransferReport report = Snapshot();
  RetainedSource kept;
  kept.transfer_id = id();
  kept.token = token();
  kept.pool_id = report.pool_id;
  kept.hold = std::move(source_);
  kept.layers = layers_;
  kept.places = places_;
  kept.retain_ms = static_cast<uint64_t>(retain_ms_);
  kept.kv_bytes = report.kv_bytes;
  kept.wire_bytes = report.wire_bytes;
  kept_ = host().Retain(std::move(kept));
}

}  // namespace spectrumkv
