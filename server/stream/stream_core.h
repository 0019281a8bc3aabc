// The life of one gRPC stream, the same for both ends and both kinds: write queue, closing, time limits, and the one
// OnClosed. Reactors (dial_reactor.h, peer_server.cc) are thin and only pass on. Internal to server/stream.
//
// Locks: nothing of the listener's or of gRPC's that could call back is run under `mutex_`. gRPC may destroy slices
// inside any of its calls, so a slice's end only posts to the env's thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include <grpcpp/support/byte_buffer.h>
#include "absl/status/status.h"
#include "server/stream/stream_env.h"
#include "server/stream/transport.h"

namespace spectrumkv {

// What a reactor does for its core. Called under the core's mutex, never after Finished.
class Wire {
 public:
  virtual ~Wire() = default;
  virtual void Write(const grpc::ByteBuffer* message) = 0;
  // No Write follows; called once. Dialler: half-closes, or lets go of a call that is lost. Acceptor: finishes.
  virtual void End(const absl::Status& status, bool lost) = 0;
  virtual void Cancel() = 0;
};

class StreamCore : public std::enable_shared_from_this<StreamCore> {
 public:
  enum class Side { kDialler, kAcceptor };

  // `flush_on_error`: an acceptor that closes with an error sends what is queued first.
  StreamCore(StreamEnv* env, Side side, std::string peer, size_t max_queue, bool flush_on_error);
  virtual ~StreamCore() = default;
  StreamCore(const StreamCore&) = delete;
  StreamCore& operator=(const StreamCore&) = delete;

  const std::string& peer_name() const { return peer_; }
  // First. False: the endpoint stops; OnClosed has been called and nothing else may be.
  bool Register();
  // Before any reaction.
  void Attach(Wire* wire);
  void CloseWith(const absl::Status& status);

  // Reactions of the call. Connected: the peer answered (dialler). Read returns whether to read on.
  void Connected();
  bool Read(bool ok, bool cancelled, grpc::ByteBuffer* message);
  void Written(bool ok);
  void Cancelled();
  // Finished destroys `call` on the env's thread.
  void Finished(const absl::Status& wire_status, std::shared_ptr<void> call);

 protected:
  // Bytes of a message from the peer; an error closes the stream with it.
  virtual absl::Status HandleMessage(grpc::ByteBuffer* message) = 0;
  virtual void HandleClosed(const absl::Status& status) = 0;

  // False: the stream is closing and `message` was dropped. Too many queued close the stream.
  bool Enqueue(grpc::ByteBuffer message);
  // Closes the stream with `status`, which the peer sees, after `delay_ms`, unless DisarmTimer comes first.
  void ArmTimer(int64_t delay_ms, absl::Status status);
  void DisarmTimer();
  bool failed() const { return failed_.load(std::memory_order_relaxed); }

  void ChunkBegins();
  void ChunkEnds();
  StreamEnv* const env_;

 private:
  void CloseLocked(const absl::Status& status);
  enum class WhenLate { kClose, kCut };
  void ArmTimerLocked(int64_t delay_ms, absl::Status status, WhenLate then = WhenLate::kCut);
  void DisarmTimerLocked();
  void TimerFired(uint64_t serial, const absl::Status& status, WhenLate then);
  void LoseLocked();
  void PumpLocked();
  void DeliverClosed(const absl::Status& status);
  absl::Status FinalStatusLocked(const absl::Status& wire_status) const;

  const Side side_;
  const std::string peer_;
  const size_t max_queue_;
  const bool flush_on_error_;
  std::mutex mutex_;
  Wire* wire_ = nullptr;
  std::deque<grpc::ByteBuffer> queue_;
  grpc::ByteBuffer writing_message_;
  bool writing_ = false;
  bool connected_ = false;
  bool closing_ = false;      // end the stream when the queue is empty
  bool lost_ = false;         // the call broke or was cut: nothing more is written
  bool deaf_ = false;         // closed with an error here: nothing more is delivered
  bool ended_ = false;        // Wire::End was called
  bool finished_ = false;     // Finished came
  absl::Status local_error_;  // what this side closed with, if not OK
  TimerId timer_ = 0;
  uint64_t timer_serial_ = 0;
  size_t chunks_ = 0;
  bool closed_pending_ = false;
  absl::Status closed_status_;
  std::atomic<bool> failed_{false};
};

class ControlCore final : public StreamCore, public ControlStream {
 public:
  ControlCore(StreamEnv* env, Side side, std::string peer);
  // Before Attach.
  void SetListener(std::shared_ptr<ControlListener> listener) { listener_ = std::move(listener); }
  // Before Attach: a peer that says nothing is cut.
  void ExpectHello();
  void Send(ControlFrame frame) override;
  void Close(absl::Status status) override { CloseWith(status); }
  std::string peer() const override { return peer_name(); }

 private:
  absl::Status HandleMessage(grpc::ByteBuffer* message) override;
  void HandleClosed(const absl::Status& status) override;
  std::shared_ptr<ControlListener> listener_;
  bool expects_hello_ = false;
};

class DataCore final : public StreamCore, public DataStream {
 public:
  // The acceptor side finds its listener with the peer's first message.
  DataCore(StreamEnv* env, Side side, std::string peer, PeerAcceptor* acceptor);
  void SetListener(std::shared_ptr<DataListener> listener) { listener_ = std::move(listener); }
  void SendOpen(const DataOpenFrame& open);
  void ExpectOpen();
  void SendChunk(OutgoingChunk chunk, std::function<void(bool sent)> done) override;
  void Close(absl::Status status) override { CloseWith(status); }

 private:
  struct LentChunk;
  static void ReturnLent(void* lent);
  absl::Status HandleMessage(grpc::ByteBuffer* message) override;
  void HandleClosed(const absl::Status& status) override;
  absl::Status Accept(const DataOpenFrame& open);

  PeerAcceptor* const acceptor_;
  std::shared_ptr<DataListener> listener_;
};

}  // namespace spectrumkv
