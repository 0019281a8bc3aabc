// The decoding half of ReceiverTransfer: chunks that have arrived, on the compute executor.
#include <algorithm>
#include <iterator>
#include <utility>

#include "server/decode/device_decode.h"
#include "server/transfer/receiver.h"

namespace spectrumkv {
namespace {

DecodeScratch& ThreadScratch() {
  static thread_local DecodeScratch scratch;
  return scratch;
}

// What a thread needs to check a chunk where it lies.
struct VerifyScratch {
  std::vector<Piece> pieces;
  Workspace room;
};

// `place`: of the chunk among those that this thread looks at together; the view is good until the place's next use.
absl::StatusOr<ChunkView> Verify(const ReceivedChunk& chunk, const DecodeTarget& target, size_t place = 0) {
  static thread_local VerifyScratch scratches[gpu::kMaxBatch];
  VerifyScratch& scratch = scratches[place];
  scratch.pieces.clear();
  for (const ByteSpan& piece : chunk.pieces()) scratch.pieces.push_back({piece.data, piece.size});
  return VerifyChunk({scratch.pieces.data(), scratch.pieces.size()}, scratch.room.Reserve(chunk.size()), target);
}

}  // namespace

void ReceiverTransfer::DecodeOne(uint32_t attempt, const std::shared_ptr<ReceivedChunk>& chunk,
                                 std::shared_ptr<Slot> slot) {
  Arrived arrived{chunk, std::move(slot), {}, {}};
  if (!VerifyArrived(0, &arrived)) return;
  if (!gate_.Enter()) return Post([this, slot = arrived.slot] { ReturnSlot(slot); });
  const int64_t verified_ns = NowNs();
  Decoded& decoded = arrived.decoded;
  decoded.duplicate = !coverage_->Claim(decoded.chunk_index);
  if (!decoded.duplicate) {
    decoded.result = DecodeChunk(*parts().backend, arrived.view, decode_target_, &ThreadScratch());
    NotePlaced(arrived.view);
  }
  gate_.Leave();
  decoded.decode_seconds = static_cast<double>(NowNs() - verified_ns) * 1e-9;
  Dispatch([this, decoded, slot = arrived.slot] {
    OnDecoded(decoded);
    ReturnSlot(slot);
  });
}

bool ReceiverTransfer::VerifyArrived(size_t place, Arrived* arrived) {
  const int64_t begin_ns = NowNs();
  absl::StatusOr<ChunkView> view = Verify(*arrived->chunk, decode_target_, place);
  if (!view.ok()) {
    Post([this, slot = arrived->slot, why = view.status()] {
      ReturnSlot(slot);
      Fail(why);
    });
    return false;
  }
  arrived->view = *view;
  Decoded& decoded = arrived->decoded;
  decoded.chunk_index = view->header.chunk_index;
  decoded.chunk_bytes = arrived->chunk->size();
  decoded.kv_bytes = KvBytes(view->dims);
  decoded.counts = view->counts;
  decoded.receive_seconds = static_cast<double>(NowNs() - begin_ns) * 1e-9;
  return true;
}

void ReceiverTransfer::DecodeArrived() {
  std::vector<Arrived> batch;
  {
    std::lock_guard<std::mutex> lock(slots_mutex_);
    const auto end = arrived_.begin() + static_cast<ptrdiff_t>(std::min<size_t>(arrived_.size(), gpu::kMaxBatch));
    batch.assign(std::make_move_iterator(arrived_.begin()), std::make_move_iterator(end));
    arrived_.erase(arrived_.begin(), end);
  }
  std::vector<Arrived> good;
  for (Arrived& arrived : batch) {
    if (VerifyArrived(good.size(), &arrived)) good.push_back(std::move(arrived));
  }
  if (good.empty()) return;
  const auto give_back = [this, &good](const absl::Status& why) {
    for (Arrived& arrived : good) Post([this, slot = arrived.slot] { ReturnSlot(slot); });
    if (!why.ok()) Post([this, why] { Fail(why); });
  };
  if (!gate_.Enter()) return give_back(absl::OkStatus());
  const int64_t begin_ns = NowNs();
  std::vector<DeviceDecode> jobs;
  for (Arrived& arrived : good) {
    arrived.decoded.duplicate = !coverage_->Claim(arrived.decoded.chunk_index);
    if (!arrived.decoded.duplicate) jobs.push_back({arrived.view.pieces(), &arrived.view, {}});
  }
  absl::Status done;
  if (!jobs.empty()) done = DecodeOnDevice(decode_target_, &ThreadScratch(), &jobs);
  size_t next = 0;
  for (Arrived& arrived : good) {
    if (!done.ok() || arrived.decoded.duplicate) continue;
    arrived.decoded.result = jobs[next++].result;
    NotePlaced(arrived.view);  // before another may write there
  }
  gate_.Leave();
  if (!done.ok()) return give_back(done);
  const double seconds = static_cast<double>(NowNs() - begin_ns) * 1e-9 / static_cast<double>(good.size());
  for (Arrived& arrived : good) {
    arrived.decoded.decode_seconds = seconds;
    Dispatch([this, decoded = arrived.decoded, slot = arrived.slot] {
      OnDecoded(decoded);
      ReturnSlot(slot);
    });
  }
}

}  // namespace spectrumkv
