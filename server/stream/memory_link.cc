#include "server/stream/memory_link.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "server/base/status.h"
#include "server/stream/frame_codec.h"

namespace spectrumkv {
namespace {

constexpr size_t kMaxQueue = 64;

absl::Status PeerGone(const std::string& peer) {
  return MakeError(absl::StatusCode::kUnavailable, "PEER_GONE", peer + " broke off", {{"peer", peer}});
}

// What a fault does to the bytes of a message.
template <typename Bytes>
void Damage(const Fault& fault, Bytes* bytes) {
  if (bytes->empty()) return;
  const size_t at = fault.byte % bytes->size();
  if (fault.kind == Fault::Kind::kCorrupt) (*bytes)[at] = static_cast<typename Bytes::value_type>((*bytes)[at] ^ fault.mask);
  if (fault.kind == Fault::Kind::kTruncate) bytes->resize(at);
}

class CopiedChunk final : public ReceivedChunk {
 public:
  // In pieces of an odd size, as from a network.
  explicit CopiedChunk(std::vector<uint8_t> bytes) : bytes_(std::move(bytes)) {
    for (size_t at = 0; at < bytes_.size(); at += kPieceBytes) {
      pieces_.push_back({bytes_.data() + at, std::min(kPieceBytes, bytes_.size() - at)});
    }
  }
  size_t size() const override { return bytes_.size(); }
  const std::vector<ByteSpan>& pieces() const override { return pieces_; }

 private:
  static constexpr size_t kPieceBytes = 16375;
  const std::vector<uint8_t> bytes_;
  std::vector<ByteSpan> pieces_;
};

class MemoryControl final : public ControlStream {
 public:
  MemoryControl(std::shared_ptr<MemoryLink> link, int side) : link_(std::move(link)), side_(side) {}
  void Send(ControlFrame frame) override { link_->SendFrame(side_, std::move(frame)); }
  void Close(absl::Status status) override { link_->Close(side_, std::move(status)); }
  std::string peer() const override { return link_->name(1 - side_); }

 private:
  const std::shared_ptr<MemoryLink> link_;
  const int side_;
};

class MemoryData final : public DataStream {
 public:
  MemoryData(std::shared_ptr<MemoryLink> link, int side) : link_(std::move(link)), side_(side) {}
  void SendChunk(OutgoingChunk chunk, std::function<void(bool sent)> done) override {
    link_->SendChunk(side_, std::move(chunk), std::move(done));
  }
  void Close(absl::Status status) override { link_->Close(side_, std::move(status)); }

 private:
  const std::shared_ptr<MemoryLink> link_;
  const int side_;
};

}  // namespace

std::shared_ptr<ControlStream> NewMemoryControl(std::shared_ptr<MemoryLink> link, int side) {
  return std::make_shared<MemoryControl>(std::move(link), side);
}
std::shared_ptr<DataStream> NewMemoryData(std::shared_ptr<MemoryLink> link, int side) {
  return std::make_shared<MemoryData>(std::move(link), side);
}

MemoryLink::MemoryLink(MemoryNetwork* network, std::string dialler, std::string acceptor, bool data, DataOpenFrame open)
    : network_(network),
      names_{std::move(dialler), std::move(acceptor)},
      is_data_(data),
      open_(std::move(open)),
      strand_(network->executor_) {}

void MemoryLink::Connect() {
  strand_.Post([self = shared_from_this()] { self->Accept(); });
}

void MemoryLink::Accept() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (terminated_) return;
  }
  PeerAcceptor* acceptor = network_->FindEnd(names_[1]);
  if (acceptor == nullptr) {
    const absl::Status nobody = MakeError(absl::StatusCode::kUnavailable, kNobodyListens, "no such peer: " + names_[1],
                                          {{"peer", names_[1]}});
    return Terminate(nobody, nobody);
  }
  if (is_data_) {
    data_listener_[1] = acceptor->OnData(NewMemoryData(shared_from_this(), 1), open_);
    if (data_listener_[1] != nullptr) return;
    const absl::Status refused =
        MakeError(absl::StatusCode::kNotFound, "UNKNOWN_SESSION", "no transfer waits for this Data stream",
                  {{"transfer_id", open_.transfer_id}});
    return Terminate(refused, refused);
  }
  control_[1] = acceptor->OnControl(NewMemoryControl(shared_from_this(), 1));
  if (control_[1] != nullptr) return;
  const absl::Status draining =
      MakeError(absl::StatusCode::kUnavailable, "DRAINING", "this daemon takes no new streams", {}, 1000);
  Terminate(draining, draining);
}

void MemoryLink::SendFrame(int side, ControlFrame frame) {
  Message message;
  message.frame = std::move(frame);
  Push(side, std::move(message));
}

void MemoryLink::SendChunk(int side, OutgoingChunk chunk, std::function<void(bool)> done) {
  Message message;
  message.kind = Message::Kind::kChunk;
  message.chunk = std::make_shared<OutgoingChunk>(std::move(chunk));
  message.done = std::move(done);
  if (Push(side, message)) return;
  strand_.Post([self = shared_from_this(), message = std::move(message)]() mutable { Return(message, false); });
}

// Slot first, then the word that it is free.
void MemoryLink::Return(Message& message, bool sent) {
  if (message.chunk != nullptr) *message.chunk = {};
  message.chunk = nullptr;
  if (message.done) message.done(sent);
  message.done = nullptr;
}

bool MemoryLink::Push(int side, Message message) {
  bool full = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (terminated_ || closing_[side]) return false;
    full = queue_[side].size() >= kMaxQueue;
    if (!full) queue_[side].push_back(std::move(message));
  }
  if (full) {
    Close(side, MakeError(absl::StatusCode::kResourceExhausted, "STREAM_QUEUE_FULL",
                          "more than 64 messages are waiting for " + names_[1 - side]));
    return false;
  }
  strand_.Post([self = shared_from_this(), side] { self->Pump(side); });
  return true;
}

void MemoryLink::Close(int side, absl::Status status) {
  std::deque<Message> dropped;
  bool break_off = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (terminated_ || !local_error_[side].ok() || (closing_[side] && status.ok())) return;
    const bool again = closing_[side];
    closing_[side] = true;
    local_error_[side] = status;
    break_off = !status.ok() && (side == 0 || again);
    if (break_off || (!status.ok() && is_data_)) dropped.swap(queue_[side]);
    if (!break_off) {
      Message message;
      message.kind = Message::Kind::kClose;
      message.status = status;
      queue_[side].push_back(std::move(message));
    }
  }
  strand_.Post([self = shared_from_this(), side, status, break_off, dropped = std::move(dropped)]() mutable {
    for (Message& message : dropped) Return(message, false);
    if (break_off) {
      const absl::Status gone = PeerGone(self->names_[side]);
      self->Terminate(side == 0 ? status : gone, side == 1 ? status : gone);
    } else {
      self->Pump(side);
    }
  });
}

void MemoryLink::Break() {
  strand_.Post([self = shared_from_this()] { self->Terminate(PeerGone(self->names_[1]), PeerGone(self->names_[0])); });
}

void MemoryLink::Pump(int from) {
  Message message;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (terminated_ || paused_[from] || queue_[from].empty()) return;
    message = std::move(queue_[from].front());
    queue_[from].pop_front();
  }
  Deliver(from, std::move(message));
}

void MemoryLink::Deliver(int from, Message message) {
  if (message.kind == Message::Kind::kClose) {
    ReleaseHeld(from, true);
    return DeliverClose(from, message.status);
  }
  FaultPoint point{names_[from],   names_[1 - from], is_data_,           open_.stream,
                   index_[from]++, nullptr,          message.chunk == nullptr ? 0 : message.chunk->bytes()};
  if (!is_data_) point.frame = &message.frame;
  const Fault fault = network_->AskHook(point);
  switch (fault.kind) {
    case Fault::Kind::kDrop: return Return(message, true);
    case Fault::Kind::kBreak: Return(message, false); return Terminate(PeerGone(names_[1]), PeerGone(names_[0]));
    case Fault::Kind::kHold: held_[from].push_back({std::move(message), fault.behind}); return;
    case Fault::Kind::kDelay: {
      auto self = shared_from_this();
      {
        std::lock_guard<std::mutex> lock(mutex_);
        paused_[from] = true;
      }
      auto late = std::make_shared<Message>(std::move(message));
      const int64_t due_ns = network_->clock_->NowNs() + fault.delay_ns;
      network_->clock_->CallAt(due_ns, [self, from, late] {
        self->strand_.Post([self, from, late] {
          size_t waiting = 0;
          {
            std::lock_guard<std::mutex> lock(self->mutex_);
            self->paused_[from] = false;
            waiting = self->queue_[from].size();
          }
          self->Hand(from, *late, Fault{});
          for (size_t i = 0; i < waiting; ++i) self->Pump(from);
        });
      });
      return;
    }
    default: break;
  }
  Hand(from, message, fault);
  ReleaseHeld(from, false);
}

void MemoryLink::ReleaseHeld(int from, bool all) {
  std::vector<Held> due;
  for (size_t i = 0; i < held_[from].size();) {
    Held& held = held_[from][i];
    if (!all && held.behind > 1) {
      --held.behind;
      ++i;
      continue;
    }
    due.push_back(std::move(held));
    held_[from].erase(held_[from].begin() + static_cast<std::ptrdiff_t>(i));
  }
  for (Held& held : due) Hand(from, held.message, Fault{});
}

// To the listener of the other side, once or twice.
void MemoryLink::Hand(int from, Message& message, const Fault& fault) {
  const int to = 1 - from;
  bool deaf = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    deaf = terminated_ || !local_error_[to].ok();
  }
  if (deaf) return Return(message, false);
  const int times = fault.kind == Fault::Kind::kDuplicate ? 2 : 1;
  if (!is_data_) {
    for (int i = 0; i < times; ++i) HandFrame(from, message.frame, fault);
    return;
  }
  const uint8_t* data = message.chunk->slot.data();
  std::vector<uint8_t> bytes(data, data + message.chunk->slot_bytes);
  for (const ByteSpan& span : message.chunk->lent) bytes.insert(bytes.end(), span.data, span.data + span.size);
  Damage(fault, &bytes);
  Return(message, true);
  const std::shared_ptr<DataListener> listener = data_listener_[to];
  for (int i = 0; i < times && listener != nullptr; ++i) listener->OnChunk(std::make_unique<CopiedChunk>(bytes));
}

void MemoryLink::HandFrame(int from, const ControlFrame& frame, const Fault& fault) {
  const std::shared_ptr<ControlListener> listener = control_[1 - from];
  if (listener == nullptr) return;
  // What the bounds of the wire would refuse is refused here too.
  std::string bytes = FrameToProto(frame).SerializeAsString();
  Damage(fault, &bytes);
  v1::ControlFrame proto;
  absl::StatusOr<ControlFrame> parsed =
      proto.ParseFromString(bytes) ? FrameFromProto(proto) : MalformedFrame("frame", "does not parse");
  if (!parsed.ok()) return Close(1 - from, parsed.status());
  listener->OnFrame(*std::move(parsed));
}

void MemoryLink::DeliverClose(int from, const absl::Status& status) {
  if (from == 1) {
    absl::Status own;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      own = local_error_[0];
    }
    return Terminate(own.ok() ? status : own, status);
  }
  // The dialler is done; the acceptor sends what it has and ends too.
  Close(1, absl::OkStatus());
}

void MemoryLink::Terminate(const absl::Status& dialler, const absl::Status& acceptor) {
  std::deque<Message> dropped[2];
  absl::Status status[2] = {dialler, acceptor};
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (terminated_) return;
    terminated_ = true;
    for (int side = 0; side < 2; ++side) {
      dropped[side].swap(queue_[side]);
      if (!local_error_[side].ok()) status[side] = local_error_[side];
    }
  }
  for (int side = 0; side < 2; ++side) {
    for (Message& message : dropped[side]) Return(message, false);
    for (Held& held : held_[side]) Return(held.message, false);
    held_[side].clear();
    if (auto listener = std::exchange(control_[side], nullptr)) listener->OnClosed(status[side]);
    if (auto listener = std::exchange(data_listener_[side], nullptr)) listener->OnClosed(status[side]);
  }
}

}  // namespace spectrumkv
