// Listeners that carry what peers say onto a transfer's strand.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "server/stream/transport.h"

namespace spectrumkv {

class Transfer;

// A control stream. A dialler's session is attached to its transfer from the start; an acceptor's waits for Hello, then
// for the transfer it names. Thread-safe.
class ControlSession final : public ControlListener, public std::enable_shared_from_this<ControlSession> {
 public:
  using HelloHandler = std::function<void(std::shared_ptr<ControlSession>, HelloFrame)>;
  using ClosedHandler = std::function<void(const ControlSession*, const absl::Status&)>;

  ControlSession() = default;
  // For an acceptor: `on_hello` once, then `on_closed` if the stream ends before Attach.
  ControlSession(HelloHandler on_hello, ClosedHandler on_closed)
      : on_hello_(std::move(on_hello)), on_closed_(std::move(on_closed)) {}

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
  std::vector<ControlFrame> backlog_;
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
