// Listeners that carry what peers say onto a transfer's strand.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "server/base/fair_share.h"
#include "server/stream/transport.h"

namespace spectrumkv {

class Transfer;

// Manifests of long prompts that drop many tokens are of some hundred KB, others of some hundred bytes.
constexpr size_t kWaitingFrameBytes = 64u << 20;

// Bytes of frames that wait for their transfers, of all peers together, by host.
struct FrameRoom {
  explicit FrameRoom(size_t limit) : limit_bytes(limit) {}
  const size_t limit_bytes;
  FairShare<std::string> bytes;
};

// A control stream. A dialler's session is attached to its transfer from the start; an acceptor's waits for Hello, then
// for the transfer it names. Thread-safe.
class ControlSession final : public ControlListener, public std::enable_shared_from_this<ControlSession> {
 public:
  using HelloHandler = std::function<void(std::shared_ptr<ControlSession>, HelloFrame)>;
  using ClosedHandler = std::function<void(const ControlSession*, const absl::Status&)>;

  ControlSession() = default;
  // For an acceptor: `on_hello` once, then `on_closed` if the stream ends before Attach. What comes until then waits in
  // `room` (null: unbounded in bytes).
  ControlSession(HelloHandler on_hello, ClosedHandler on_closed, std::shared_ptr<FrameRoom> room = nullptr)
      : on_hello_(std::move(on_hello)), on_closed_(std::move(on_closed)), room_(std::move(room)) {}
  ~ControlSession() override;

  void BindStream(std::shared_ptr<ControlStream> stream);
  std::shared_ptr<ControlStream> stream() const;
  // From now on frames go to `transfer`, the ones that came since Hello first.
  void Attach(std::shared_ptr<Transfer> transfer);
  // Of a stream that has ended before Attach: how the dialler said that its half had ended, if it did.
  std::optional<CancelFrame> LastWords() const;

  void OnFrame(ControlFrame frame) override;
  void OnClosed(absl::Status status) override;

 private:
  mutable std::mutex mutex_;
  HelloHandler on_hello_;
  ClosedHandler on_closed_;
  std::shared_ptr<ControlStream> stream_;
  std::shared_ptr<Transfer> transfer_;
  bool hello_seen_ = false;
  bool closed_ = false;
  absl::Status close_status_;
  void GiveRoomLocked();
  absl::Status TakeRoomLocked(const ControlFrame& frame);

  std::vector<ControlFrame> backlog_;
  const std::shared_ptr<FrameRoom> room_;
  std::string host_;           // of stream_
  size_t backlog_bytes_ = 0;   // taken of room_
};

// A data stream of one attempt of one transfer.
class DataSession final : public DataListener {
 public:
  DataSession(std::shared_ptr<Transfer> transfer, uint32_t attempt)
      : transfer_(std::move(transfer)), attempt_(attempt) {}
  void OnChunk(std::unique_ptr<ReceivedChunk> chunk) override;
  void OnClosed(absl::Status status) override;

 private:
  const std::shared_ptr<Transfer> transfer_;
  const uint32_t attempt_;
};

}  // namespace spectrumkv
