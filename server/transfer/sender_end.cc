// The end of a sender, and what it has on loan to the network until then: a RAW chunk's words stay in the worker's
// blocks, so nobody hears of an end before they have come back.
#include <cassert>
#include <utility>

#include "server/base/log.h"
#include "server/base/status.h"
#include "server/transfer/sender.h"
#include "server/transfer/units.h"

namespace spectrumkv {
namespace {

// How long an end waits for words that a peer's full connection still holds on loan.
constexpr int64_t kLentLingerMs = 1000;

}  // namespace

OutgoingChunk SenderTransfer::ToSend(Encoded encoded) {
  OutgoingChunk chunk;
  chunk.slot = std::move(*encoded.slot);
  chunk.slot_bytes = encoded.bytes;
  if (encoded.lent.empty()) return chunk;
  lends_ = true;
  const bool open = lent_gate_.Enter();
  assert(open && "closed by the end, after which nothing is sent");
  (void)open;
  chunk.mapped = source_->KeepMapped();
  chunk.lent.reserve(encoded.lent.size());
  for (const Piece& piece : encoded.lent) {
    chunk.lent.push_back({piece.data, piece.size});
    chunk.slot_bytes -= piece.size;
  }
  return chunk;
}

absl::Status SenderTransfer::LookAtLent() const {
  return lends_ && !terminal() ? source_->LookAtMemory() : absl::OkStatus();
}

void SenderTransfer::StopWork() {
  if (event_timer_ != 0) parts().clock->Cancel(event_timer_);
  if (pause_timer_ != 0) parts().clock->Cancel(pause_timer_);
  if (wants_slot_ && slot_wait_ != 0) parts().send_slots->Cancel(slot_wait_);
  encoded_.clear();
  ready_.clear();
  batch_.clear();
  NoteWait();
  // What is on loan comes back at once when its streams break, unless it waits in a connection that the peer does not
  // read. The receiver of a committed transfer has it all.
  if (lends_ && state() != TransferState::kCommitted) {
    for (auto& stream : link_.data) stream->Close(absl::CancelledError("the transfer has ended"));
  }
  gate_.Close([self = shared_from_this(), this] { Post([this] { AwaitLent(); }); });
}

// After the last encoder.
void SenderTransfer::AwaitLent() {
  if (!lends_) return Settle();
  lent_timer_ = parts().clock->CallAt(NowNs() + kLentLingerMs * kMsToNs, [weak = weak_from_this()] {
    std::shared_ptr<Transfer> self = weak.lock();
    if (self == nullptr) return;
    auto* t = static_cast<SenderTransfer*>(self.get());
    t->Post([t] {
      if (t->settled()) return;
      SPECTRUMKV_LOG(kWarning, "transfer", "the network still holds words of the source", {"transfer", t->id()});
      t->parts().metrics->CountError(MetricStage::kSend, absl::StatusCode::kDeadlineExceeded);
      t->SettleOnce();
    });
  });
  lent_gate_.Close([self = shared_from_this(), this] { Post([this] { SettleOnce(); }); });
}

void SenderTransfer::SettleOnce() {
  if (settled()) return;
  parts().clock->Cancel(lent_timer_);
  Settle();
}

void SenderTransfer::SayGoodbye() {
  if (error_.ok()) return;
  Tell(CancelFrame{state() == TransferState::kVerifying ? TransferState::kFailed : state(),
                   static_cast<int32_t>(error_.code()), ReasonOf(error_), std::string(error_.message())});
}

void SenderTransfer::ReleaseAll() {
  if (state() == TransferState::kCommitted && retain_ms_ > 0 && peer_refines_ && CameCoarse(Snapshot())) KeepSource();
  source_.reset();
  planned_.clear();
  planned_.shrink_to_fit();
  scan_.clear();
}

}  // namespace spectrumkv
