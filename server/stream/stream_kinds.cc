// Control and Data streams on top of StreamCore.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include <grpcpp/support/proto_buffer_reader.h>
#include "server/base/status.h"
#include "server/stream/data_codec.h"
#include "server/stream/frame_codec.h"
#include "server/stream/stream_core.h"

namespace spectrumkv {
namespace {

constexpr size_t kMaxControlQueue = 64;
constexpr size_t kMaxDataQueue = 5;  // DataOpen and four chunks

// A chunk in the slices gRPC received it in.
class SliceChunk final : public ReceivedChunk {
 public:
  SliceChunk(std::vector<grpc::Slice> slices, ChunkExtent extent) : slices_(std::move(slices)), size_(extent.bytes) {
    size_t skip = extent.offset, left = extent.bytes;
    for (const grpc::Slice& slice : slices_) {
      const size_t here = std::min(slice.size() - std::min(skip, slice.size()), left);
      if (here > 0) pieces_.push_back({slice.begin() + skip, here});
      skip -= std::min(skip, slice.size());
      left -= here;
    }
  }
  size_t size() const override { return size_; }
  const std::vector<ByteSpan>& pieces() const override { return pieces_; }

 private:
  std::vector<grpc::Slice> slices_;
  std::vector<ByteSpan> pieces_;
  size_t size_ = 0;
};

}  // namespace

ControlCore::ControlCore(StreamEnv* env, Side side, std::string peer)
    : StreamCore(env, side, std::move(peer), kMaxControlQueue, true) {}

void ControlCore::Send(ControlFrame frame) {
  // ControlRequest and ControlResponse have the same one field.
  v1::ControlRequest request;
  *request.mutable_frame() = FrameToProto(frame);
  const grpc::Slice slice(request.SerializeAsString());
  Enqueue(grpc::ByteBuffer(&slice, 1));
}

void ControlCore::ExpectHello() {
  expects_hello_ = true;
  ArmTimer(env_->limits().open_timeout_ms, MakeError(absl::StatusCode::kDeadlineExceeded, "NO_HELLO",
                                                     "the Control stream did not begin with hello in time"));
}

absl::Status ControlCore::HandleMessage(grpc::ByteBuffer* message) {
  v1::ControlRequest request;
  grpc::ProtoBufferReader reader(message);
  if (!reader.status().ok() || !request.ParseFromZeroCopyStream(&reader)) {
    return MalformedFrame("frame", "does not parse");
  }
  absl::StatusOr<ControlFrame> frame = FrameFromProto(request.frame());
  if (!frame.ok()) return frame.status();
  if (std::exchange(expects_hello_, false)) DisarmTimer();
  listener_->OnFrame(*std::move(frame));
  return absl::OkStatus();
}

void ControlCore::HandleClosed(const absl::Status& status) {
  const std::shared_ptr<ControlListener> listener = std::move(listener_);
  if (listener != nullptr) listener->OnClosed(status);
}

// A chunk on loan to gRPC; the slices over it own this together.
struct DataCore::LentChunk {
  std::shared_ptr<DataCore> core;
  OutgoingChunk chunk;
  std::function<void(bool sent)> done;
  std::atomic<size_t> slices;
};

DataCore::DataCore(StreamEnv* env, Side side, std::string peer, PeerAcceptor* acceptor)
    : StreamCore(env, side, std::move(peer), kMaxDataQueue, false), acceptor_(acceptor) {}

void DataCore::SendOpen(const DataOpenFrame& open) {
  const grpc::Slice slice(SerializeDataOpen(open));
  Enqueue(grpc::ByteBuffer(&slice, 1));
}

void DataCore::ExpectOpen() {
  ArmTimer(env_->limits().open_timeout_ms, MakeError(absl::StatusCode::kDeadlineExceeded, "NO_OPEN",
                                                     "the Data stream did not begin with DataOpen in time"));
}

void DataCore::SendChunk(OutgoingChunk chunk, std::function<void(bool sent)> done) {
  ChunkBegins();
  uint8_t prefix[kMaxChunkPrefixBytes];
  const size_t prefix_bytes = WriteChunkPrefix(chunk.bytes(), prefix);
  const size_t pieces = 1 + chunk.lent.size();
  auto* lent = new LentChunk{std::static_pointer_cast<DataCore>(shared_from_this()), std::move(chunk), std::move(done),
                             pieces};
  std::vector<grpc::Slice> slices;
  slices.reserve(1 + pieces);
  slices.emplace_back(prefix, prefix_bytes);
  slices.emplace_back(lent->chunk.slot.data(), lent->chunk.slot_bytes, &DataCore::ReturnLent, lent);
  for (const ByteSpan& span : lent->chunk.lent) {
    slices.emplace_back(const_cast<uint8_t*>(span.data), span.size, &DataCore::ReturnLent, lent);
  }
  Enqueue(grpc::ByteBuffer(slices.data(), slices.size()));
}

// The end of a slice: on any thread, inside any call of gRPC's.
void DataCore::ReturnLent(void* lent_chunk) {
  auto* lent = static_cast<LentChunk*>(lent_chunk);
  if (lent->slices.fetch_sub(1) != 1) return;
  const bool sent = !lent->core->failed();
  StreamEnv* env = lent->core->env_;
  env->PostEnd([lent, sent] {
    const std::unique_ptr<LentChunk> owned(lent);
    owned->chunk = {};
    if (owned->done) owned->done(sent);
    owned->done = nullptr;
    owned->core->ChunkEnds();
  });
}

absl::Status DataCore::HandleMessage(grpc::ByteBuffer* message) {
  std::vector<grpc::Slice> slices;
  if (!message->Dump(&slices).ok()) return MalformedFrame("frame", "cannot be read");
  std::vector<ByteSpan> pieces;
  pieces.reserve(slices.size());
  for (const grpc::Slice& slice : slices) pieces.push_back({slice.begin(), slice.size()});
  absl::StatusOr<DataMessage> parsed = ParseDataMessage(pieces);
  if (!parsed.ok()) return parsed.status();
  if (const auto* open = std::get_if<DataOpenFrame>(&*parsed)) {
    if (acceptor_ == nullptr || listener_ != nullptr) return MalformedFrame("open", "comes where a chunk must");
    return Accept(*open);
  }
  if (listener_ == nullptr) return MalformedFrame("chunk", "comes before open");
  listener_->OnChunk(std::make_unique<SliceChunk>(std::move(slices), std::get<ChunkExtent>(*parsed)));
  return absl::OkStatus();
}

absl::Status DataCore::Accept(const DataOpenFrame& open) {
  DisarmTimer();
  auto listener = acceptor_->OnData(std::static_pointer_cast<DataCore>(shared_from_this()), open);
  if (listener == nullptr) {
    return MakeError(absl::StatusCode::kNotFound, "UNKNOWN_SESSION", "no transfer waits for this Data stream",
                     {{"transfer_id", open.transfer_id}});
  }
  listener_ = std::move(listener);
  return absl::OkStatus();
}

void DataCore::HandleClosed(const absl::Status& status) {
  const std::shared_ptr<DataListener> listener = std::move(listener_);
  if (listener != nullptr) {
    listener->OnClosed(status);
  } else if (acceptor_ != nullptr && !status.ok()) {
    acceptor_->OnDataRefused(status);
  }
}

}  // namespace spectrumkv
