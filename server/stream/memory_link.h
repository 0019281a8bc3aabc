// One stream of a MemoryNetwork: two sides and the messages between them. Internal to server/stream.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "server/base/executor.h"
#include "server/stream/memory_transport.h"

namespace spectrumkv {

// Side 0 dialled, side 1 accepted. All callbacks run on one strand.
class MemoryLink : public std::enable_shared_from_this<MemoryLink> {
 public:
  MemoryLink(MemoryNetwork* network, std::string dialler, std::string acceptor, bool data, DataOpenFrame open);

  // Before Connect; the listener of the side that dials.
  void SetListener(std::shared_ptr<ControlListener> listener) { control_[0] = std::move(listener); }
  void SetListener(std::shared_ptr<DataListener> listener) { data_listener_[0] = std::move(listener); }
  void Connect();

  void SendFrame(int side, ControlFrame frame);
  void SendChunk(int side, OutgoingChunk chunk, std::function<void(bool)> done);
  void Close(int side, absl::Status status);
  void Break();
  const std::string& name(int side) const { return names_[side]; }

 private:
  struct Message {
    enum class Kind { kFrame, kChunk, kClose } kind = Kind::kFrame;
    ControlFrame frame;
    std::shared_ptr<OutgoingChunk> chunk;
    std::function<void(bool)> done;
    absl::Status status;
  };
  struct Held {
    Message message;
    uint32_t behind = 0;
  };

  void Accept();
  bool Push(int side, Message message);
  void Pump(int from);
  void Deliver(int from, Message message);
  void Hand(int from, Message& message, const Fault& fault);
  void HandFrame(int from, const ControlFrame& frame, const Fault& fault);
  void ReleaseHeld(int from, bool all);
  void DeliverClose(int from, const absl::Status& status);
  void Terminate(const absl::Status& dialler, const absl::Status& acceptor);
  static void Return(Message& message, bool sent);

  MemoryNetwork* const network_;
  const std::string names_[2];
  const bool is_data_;
  const DataOpenFrame open_;
  Strand strand_;

  std::mutex mutex_;
  std::deque<Message> queue_[2];  // by sender
  bool closing_[2] = {false, false};
  absl::Status local_error_[2];
  bool terminated_ = false;
  bool paused_[2] = {false, false};

  // Only on the strand.
  std::vector<Held> held_[2];
  uint64_t index_[2] = {0, 0};
  std::shared_ptr<ControlListener> control_[2];
  std::shared_ptr<DataListener> data_listener_[2];
};

std::shared_ptr<ControlStream> NewMemoryControl(std::shared_ptr<MemoryLink> link, int side);
std::shared_ptr<DataStream> NewMemoryData(std::shared_ptr<MemoryLink> link, int side);

}  // namespace spectrumkv
