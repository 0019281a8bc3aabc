// Listeners that record, and an acceptor made of them.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/memory/slot_pool.h"
#include "server/stream/transport.h"

namespace spectrumkv {

// What a stream told its listener. Counts calls after OnClosed and calls that overlap: both must stay 0.
class Recorder : public ControlListener, public DataListener {
 public:
  void OnFrame(ControlFrame frame) override {
    Enter();
    if (on_frame) on_frame(frame);
    std::lock_guard<std::mutex> lock(mutex_);
    frames_.push_back(std::move(frame));
    Leave();
  }
  void OnChunk(std::unique_ptr<ReceivedChunk> chunk) override {
    Enter();
    std::vector<uint8_t> bytes;
    bool empty_piece = false;
    for (const ByteSpan& piece : chunk->pieces()) {
      bytes.insert(bytes.end(), piece.data, piece.data + piece.size);
      empty_piece = empty_piece || piece.size == 0;
    }
    const bool wrong_pieces = empty_piece || bytes.size() != chunk->size();
    if (on_chunk) on_chunk(bytes);
    std::lock_guard<std::mutex> lock(mutex_);
    if (wrong_pieces) ++faults_;
    chunk_bytes_ += bytes.size();
    ++chunks_;
    if (keep_chunks) kept_.push_back(std::move(bytes));
    Leave();
  }
  void OnClosed(absl::Status status) override {
    Enter();
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_.has_value()) ++faults_;
    closed_ = std::move(status);
    Leave();
  }

  bool WaitFor(const std::function<bool()>& done, int ms = 15'000) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::milliseconds(ms), done);
  }
  bool WaitFrames(size_t n) {
    return WaitFor([&] { return frames_.size() >= n; });
  }
  bool WaitChunks(size_t n) {
    return WaitFor([&] { return chunks_ >= n; });
  }
  // The status of OnClosed; nothing within the time limit is an UNKNOWN "not closed".
  absl::Status WaitClosed(int ms = 15'000) {
    WaitFor([&] { return closed_.has_value(); }, ms);
    std::lock_guard<std::mutex> lock(mutex_);
    return closed_.value_or(absl::UnknownError("not closed"));
  }
  std::vector<ControlFrame> frames() {
    std::lock_guard<std::mutex> lock(mutex_);
    return frames_;
  }
  std::vector<std::vector<uint8_t>> kept() {
    std::lock_guard<std::mutex> lock(mutex_);
    return kept_;
  }
  size_t chunks() {
    std::lock_guard<std::mutex> lock(mutex_);
    return chunks_;
  }
  bool closed() {
    std::lock_guard<std::mutex> lock(mutex_);
    return closed_.has_value();
  }
  int faults() {
    std::lock_guard<std::mutex> lock(mutex_);
    return faults_;
  }

  std::function<void(const ControlFrame&)> on_frame;
  std::function<void(const std::vector<uint8_t>&)> on_chunk;
  bool keep_chunks = true;

 private:
  void Enter() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (inside_ || closed_.has_value()) ++faults_;
    inside_ = true;
  }
  void Leave() {  // under mutex_
    inside_ = false;
    changed_.notify_all();
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<ControlFrame> frames_;
  std::vector<std::vector<uint8_t>> kept_;
  size_t chunks_ = 0, chunk_bytes_ = 0;
  std::optional<absl::Status> closed_;
  int faults_ = 0;
  bool inside_ = false;
};

// Takes every stream unless told to refuse.
class RecordingAcceptor : public PeerAcceptor {
 public:
  struct Control {
    std::shared_ptr<ControlStream> stream;
    std::shared_ptr<Recorder> listener;
  };
  struct Data {
    std::shared_ptr<DataStream> stream;
    std::shared_ptr<Recorder> listener;
    DataOpenFrame open;
  };
  std::shared_ptr<ControlListener> OnControl(std::shared_ptr<ControlStream> stream) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (refuse_control) return nullptr;
    auto listener = std::make_shared<Recorder>();
    if (prepare) prepare(*listener);
    controls_.push_back({std::move(stream), listener});
    changed_.notify_all();
    return listener;
  }
  std::shared_ptr<DataListener> OnData(std::shared_ptr<DataStream> stream, const DataOpenFrame& open) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (refuse_data) return nullptr;
    auto listener = std::make_shared<Recorder>();
    if (prepare) prepare(*listener);
    datas_.push_back({std::move(stream), listener, open});
    changed_.notify_all();
    return listener;
  }
  // The n-th stream ever accepted; empty if it does not come.
  Control WaitControl(size_t n = 0) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(15), [&] { return controls_.size() > n || given_up_; });
    return controls_.size() > n ? controls_[n] : Control{};
  }
  Data WaitData(size_t n = 0) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(15), [&] { return datas_.size() > n; });
    return datas_.size() > n ? datas_[n] : Data{};
  }

  // Control streams accepted so far.
  size_t controls() {
    std::lock_guard<std::mutex> lock(mutex_);
    return controls_.size();
  }
  // Ends WaitControl.
  void GiveUp() {
    std::lock_guard<std::mutex> lock(mutex_);
    given_up_ = true;
    changed_.notify_all();
  }

  bool refuse_control = false, refuse_data = false;
  std::function<void(Recorder&)> prepare;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool given_up_ = false;
  std::vector<Control> controls_;
  std::vector<Data> datas_;
};

// Sends numbered chunks with at most four outstanding, as the contract asks, and counts what `done` says.
class ChunkSender {
 public:
  ChunkSender(SlotPool* pool, std::shared_ptr<DataStream> stream) : pool_(pool), stream_(std::move(stream)) {}
  ~ChunkSender() { WaitIdle(); }

  // False when a slot or a `done` did not come in time. lent_pieces: of how many pieces of other memory the second half
  // of the chunk is sent.
  bool Send(uint32_t number, size_t bytes, size_t lent_pieces = 0) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (!changed_.wait_for(lock, std::chrono::seconds(15), [&] { return begun_ - done_ < 4; })) return false;
    }
    Slot slot;
    for (int i = 0; i < 15'000 && !slot; ++i) {
      slot = pool_->TryAcquire();
      if (!slot) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (!slot) return false;
    Fill(slot.data(), number, bytes);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++begun_;
    }
    auto once = std::make_shared<int>(0);
    OutgoingChunk chunk{std::move(slot), bytes, {}, nullptr};
    if (lent_pieces > 0) Lend(lent_pieces, &chunk);
    stream_->SendChunk(std::move(chunk), [this, once](bool sent) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (++*once != 1) ++twice_;
      ++done_;
      if (sent) ++sent_;
      changed_.notify_all();
    });
    return true;
  }
  bool WaitIdle() {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(15), [&] { return begun_ == done_; });
  }
  // Memory that was lent and is still kept.
  size_t kept() const { return static_cast<size_t>(std::count_if(lent_.begin(), lent_.end(), [](const auto& memory) {
    return !memory.expired();
  })); }
  size_t sent() { return Locked(sent_); }
  size_t done() { return Locked(done_); }
  size_t twice() { return Locked(twice_); }

  static void Fill(uint8_t* out, uint32_t number, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) out[i] = Byte(number, i);
  }
  static bool Matches(const std::vector<uint8_t>& bytes, uint32_t number) {
    for (size_t i = 0; i < bytes.size(); ++i) {
      if (bytes[i] != Byte(number, i)) return false;
    }
    return true;
  }
  static uint8_t Byte(uint32_t number, size_t i) { return static_cast<uint8_t>(number * 131 + i * 7 + (i >> 8)); }

 private:
  void Lend(size_t pieces, OutgoingChunk* chunk) {
    const size_t half = chunk->slot_bytes / 2;
    const auto memory = std::make_shared<std::vector<uint8_t>>(chunk->slot.data() + half,
                                                               chunk->slot.data() + chunk->slot_bytes);
    std::memset(chunk->slot.data() + half, 0xEE, memory->size());
    chunk->slot_bytes = half;
    const size_t step = (memory->size() + pieces - 1) / pieces;
    for (size_t at = 0; at < memory->size(); at += step) {
      chunk->lent.push_back({memory->data() + at, std::min(step, memory->size() - at)});
    }
    chunk->mapped = memory;
    lent_.push_back(memory);
  }

  size_t Locked(const size_t& value) {
    std::lock_guard<std::mutex> lock(mutex_);
    return value;
  }
  SlotPool* const pool_;
  const std::shared_ptr<DataStream> stream_;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t begun_ = 0, done_ = 0, sent_ = 0, twice_ = 0;
  std::vector<std::weak_ptr<std::vector<uint8_t>>> lent_;
};

inline bool WaitUntil(const std::function<bool()>& done, int ms = 10'000) {
  for (int i = 0; i < ms; ++i) {
    if (done()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return done();
}

inline DataOpenFrame OpenOf(uint32_t stream) { return DataOpenFrame{"transfer-1", 0, 1, stream, 77}; }

}  // namespace spectrumkv
