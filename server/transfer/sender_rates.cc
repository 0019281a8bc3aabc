// What SenderTransfer learns about time: what it waits for, what limited it, how fast its stages and the link were.
#include <algorithm>

#include "server/transfer/sender.h"

namespace spectrumkv {

// What the time from now on is spent on. Behind the encoder the sender sees only that it has no room (kLink) or no
// credit (kCredits); the receipt says more.
Limit SenderTransfer::WaitNow() const {
  if (terminal()) return Limit::kUnknown;
  if (!planner_.has_value()) return Limit::kPlan;  // the peer waits for the manifest
  if (!accepted_) return Limit::kPeer;
  if (credits_ == 0 && !ready_.empty()) return Limit::kCredits;
  const bool room = std::any_of(outstanding_.begin(), outstanding_.end(),
                                [](uint32_t chunks) { return chunks < kMaxOutstandingPerStream; });
  if ((!encoded_.empty() && !room) || handed_ == chunk_state_.size()) return Limit::kLink;
  if (wants_slot_) return NetworkHasChunks() ? Limit::kLink : Limit::kStaging;
  if (encoding_ > 0 || !ready_.empty() || !encoded_.empty()) return Limit::kEncode;
  return planning_ || plan_again_ ? Limit::kPlan : Limit::kSource;
}

bool SenderTransfer::NetworkHasChunks() const {
  return std::any_of(outstanding_.begin(), outstanding_.end(), [](uint32_t chunks) { return chunks > 0; });
}

void SenderTransfer::NoteWait() {
  const bool had_no_credit = times_.waits.current() == Limit::kCredits;
  const double seconds = times_.waits.Switch(WaitNow(), NowNs());
  if (had_no_credit) parts().metrics->AddCreditStall(seconds);
  if (network_busy_) network_seconds_ += seconds;
  network_busy_ = NetworkHasChunks();
}

void SenderTransfer::Conclude() {
  NoteWait();
  const TransferReport report = Snapshot();
  times_.scan_seconds = report.stage_seconds[static_cast<size_t>(Stage::kScan)];
  times_.plan_seconds = report.stage_seconds[static_cast<size_t>(Stage::kPlan)];
  const LimitShare share = LimitOfSender(times_);
  std::optional<double> seen, known;
  if (state() == TransferState::kCommitted && !refines()) {  // which gives way, and is no measure of the link
    SentSample sample;
    sample.peer = peer_key_;
    sample.by = report.coded_by();
    sample.decoded_by = peer_decoded_by_;
    sample.limit = share.limit;
    // What broke off and was sent again says nothing about the link.
    if (report.chunks_resent == 0 && report.attempts == 1) {
      sample.wire_bytes = static_cast<double>(report.wire_bytes);
      sample.wall_seconds = static_cast<double>(receipt_ns_ - first_handed_ns_) * 1e-9;
      sample.network_seconds = network_seconds_;
    }
    sample.kv_bytes = report.KvBytesByFamily();
    sample.encode_seconds = report.stage_seconds[static_cast<size_t>(Stage::kEncode)];
    // All is one stage: where two things were at work it says nothing about either.
    const bool alone = scans_ != samples_ && !attended_;
    if (attended_ && !scans_ && !samples_) {
      sample.attended_bytes = attended_bytes_;
      sample.attend_seconds = times_.scan_seconds;
    }
    sample.scan_seconds = alone && scans_ ? times_.scan_seconds : 0;
    sample.sample_seconds = alone && samples_ ? times_.scan_seconds : 0;
    sample.plan_seconds = times_.plan_seconds;
    sample.decode_seconds = times_.busy_seconds;
    if (dials() && report.attempts == 1)
      sample.setup_seconds = report.stage_seconds[static_cast<size_t>(Stage::kQueue)];
    seen = host().rates().LearnSent(sample, NowNs());
    known = host().rates().Of(peer_key_, sample.by, NowNs()).link;
    if (seen.has_value()) parts().metrics->ObserveLinkRate(*seen);
  }
  UpdateReport([&](TransferReport& r) {
    r.limited_by = share.limit;
    r.limited_seconds = share.seconds;
    r.measured_link = seen;
    r.link = known;
  });
}

}  // namespace spectrumkv
