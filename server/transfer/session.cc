#include "server/transfer/session.h"

#include <utility>

#include "server/base/status.h"
#include "server/transfer/transfer.h"

namespace spectrumkv {
namespace {

// A dialler sends at most a manifest, a cancel and a few heartbeats before it has heard from us.
constexpr size_t kMaxBacklog = 64;

}  // namespace

void ControlSession::BindStream(std::shared_ptr<ControlStream> stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  stream_ = std::move(stream);
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
    lock.unlock();  // what runs in Dispatch may ask us for the stream
    return transfer->Dispatch([t = transfer.get(), self = shared_from_this(), f = std::move(frame)]() mutable {
      t->OnControlFrame(self, std::move(f));
    });
  }
  if (!hello_seen_) {
    HelloFrame* hello = std::get_if<HelloFrame>(&frame);
    const std::shared_ptr<ControlStream> stream = stream_;
    hello_seen_ = true;
    lock.unlock();
    if (hello == nullptr) {
      return stream->Close(MakeError(absl::StatusCode::kInvalidArgument, "MALFORMED_FRAME",
                                     "the first frame of a control stream must be hello"));
    }
    return on_hello_(shared_from_this(), std::move(*hello));
  }
  if (std::holds_alternative<HeartbeatFrame>(frame)) return;
  backlog_.push_back(std::move(frame));
  if (backlog_.size() > kMaxBacklog) {
    const std::shared_ptr<ControlStream> stream = stream_;
    lock.unlock();
    stream->Close(MakeError(absl::StatusCode::kResourceExhausted, "TOO_MANY_FRAMES",
                            "more than 64 frames before the transfer was joined"));
  }
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
