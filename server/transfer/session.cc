#include "server/transfer/session.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/status.h"
#include "server/transfer/parking.h"
#include "server/transfer/transfer.h"

namespace spectrumkv {
namespace {

// A dialler sends at most a manifest and how its half has ended before it has heard from us, and heartbeats.
constexpr size_t kMaxBacklog = 4;

}  // namespace

ControlSession::~ControlSession() { GiveRoomLocked(); }

void ControlSession::GiveRoomLocked() {
  if (room_ != nullptr) room_->bytes.Give(host_, std::exchange(backlog_bytes_, 0));
}

void ControlSession::BindStream(std::shared_ptr<ControlStream> stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  stream_ = std::move(stream);
  host_ = HostOfPeer(stream_->peer());
}

std::shared_ptr<ControlStream> ControlSession::stream() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return stream_;
}

void ControlSession::Attach(std::shared_ptr<Transfer> transfer) {
  std::lock_guard<std::mutex> lock(mutex_);
  transfer_ = std::move(transfer);
  for (ControlFrame& frame : backlog_) {
    transfer_->Post([t = transfer_.get(), self = shared_from_this(), f = std::move(frame)]() mutable {
      t->OnControlFrame(self, std::move(f));
    });
  }
  backlog_.clear();
  GiveRoomLocked();
  if (closed_) {
    transfer_->Post([t = transfer_.get(), self = shared_from_this(), status = close_status_] {
      t->OnControlClosed(self, status);
    });
    transfer_.reset();
    stream_.reset();
  }
}

std::optional<CancelFrame> ControlSession::LastWords() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!closed_) return std::nullopt;
  for (const ControlFrame& frame : backlog_) {
    if (const auto* cancel = std::get_if<CancelFrame>(&frame)) return *cancel;
    const auto* receipt = std::get_if<ReceiptFrame>(&frame);
    if (receipt != nullptr && receipt->state != TransferState::kCommitted) {
      return CancelFrame{receipt->state, receipt->code, receipt->reason, receipt->message};
    }
  }
  return std::nullopt;
}


void ControlSession::OnFrame(ControlFrame frame) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (const std::shared_ptr<Transfer> transfer = transfer_; transfer != nullptr) {
    lock.unlock();  // what runs in Dispatch may ask for the stream
    return transfer->Dispatch([t = transfer.get(), self = shared_from_this(), f = std::move(frame)]() mutable {
      t->OnControlFrame(self, std::move(f));
    });
  }
  if (hello_seen_ && std::holds_alternative<HeartbeatFrame>(frame)) return;
  const absl::Status wrong = TakeRoomLocked(frame);
  const bool first = !std::exchange(hello_seen_, true);
  if (!wrong.ok()) {
    const std::shared_ptr<ControlStream> stream = stream_;
    lock.unlock();
    if (stream != nullptr) stream->Close(wrong);
    return;
  }
  if (!first) return backlog_.push_back(std::move(frame));
  lock.unlock();
  on_hello_(shared_from_this(), std::move(std::get<HelloFrame>(frame)));
}

// What must come first, or may wait.
absl::Status ControlSession::TakeRoomLocked(const ControlFrame& frame) {
  if (!hello_seen_ && !std::holds_alternative<HelloFrame>(frame)) {
    return MakeError(absl::StatusCode::kInvalidArgument, "MALFORMED_FRAME",
                     "the first frame of a control stream must be hello");
  }
  if (backlog_.size() == kMaxBacklog) {
    return MakeError(absl::StatusCode::kResourceExhausted, "TOO_MANY_FRAMES",
                     absl::StrCat("more than ", kMaxBacklog, " frames before the transfer was joined"));
  }
  const size_t bytes = MessageBytes(frame);
  if (room_ != nullptr && !room_->bytes.Take(host_, bytes, room_->limit_bytes)) {
    return MakeError(absl::StatusCode::kResourceExhausted, "WAITING_FULL",
                     absl::StrCat("a frame of ", bytes, " bytes does not fit in what is left of the ", room_->limit_bytes,
                                  " bytes for frames that wait for their transfers"));
  }
  backlog_bytes_ += bytes;
  return absl::OkStatus();
}

void ControlSession::OnClosed(absl::Status status) {
  ClosedHandler on_closed;
  std::shared_ptr<ControlStream> last;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    close_status_ = status;
    if (transfer_ != nullptr) {
      transfer_->Post([t = transfer_.get(), self = shared_from_this(), status] { t->OnControlClosed(self, status); });
      transfer_.reset();
    } else {
      on_closed = on_closed_;
    }
    last = std::move(stream_);
  }
  if (on_closed) on_closed(this, status);
}

void DataSession::OnChunk(std::unique_ptr<ReceivedChunk> chunk) { transfer_->OnChunk(attempt_, std::move(chunk)); }

void DataSession::OnClosed(absl::Status status) {
  transfer_->Post([t = transfer_.get(), attempt = attempt_, status] { t->OnDataClosed(attempt, status); });
}

}  // namespace spectrumkv
