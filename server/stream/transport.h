// The network as a seam: control and data streams between daemons. Moves frames and opaque chunks; knows no tier and
// decides nothing. GrpcTransport is the real one, MemoryTransport (server/stream/memory_transport.h) joins two ends in
// one process for tests.
//
// Threads: every method may be called from any thread. Listener callbacks come from transport threads, one at a time
// per stream, and must return quickly. A stream keeps its listener alive until OnClosed, which comes exactly once and
// last.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/memory/slot_pool.h"
#include "server/stream/frames.h"

namespace spectrumkv {

// Reason of a dial (UNAVAILABLE) that the peer's machine refused: no process listens at this address.
inline constexpr char kNobodyListens[] = "NOBODY_LISTENS";

struct ByteSpan {
  const uint8_t* data = nullptr;
  size_t size = 0;
};

// What one chunk is sent from: the first slot_bytes of a slot, then `lent`, which lies in memory that `mapped` keeps.
struct OutgoingChunk {
  Slot slot;
  size_t slot_bytes = 0;
  std::vector<ByteSpan> lent;
  std::shared_ptr<const void> mapped;

  size_t bytes() const {
    size_t sum = slot_bytes;
    for (const ByteSpan& span : lent) sum += span.size;
    return sum;
  }
};

// Bytes of one received chunk, wherever the transport holds them: not copied on their way from the network to here.
class ReceivedChunk {
 public:
  virtual ~ReceivedChunk() = default;
  virtual size_t size() const = 0;
  // In order, none of them empty; as long as this lives.
  virtual const std::vector<ByteSpan>& pieces() const = 0;
};

class ControlListener {
 public:
  virtual ~ControlListener() = default;
  virtual void OnFrame(ControlFrame frame) = 0;
  // OK: the peer ended the stream in good order. Otherwise why it broke: UNAVAILABLE, DEADLINE_EXCEEDED, the status the
  // peer closed with (its reason kept), or what Close was called with on this side.
  virtual void OnClosed(absl::Status status) = 0;
};

class ControlStream {
 public:
  virtual ~ControlStream() = default;
  // Queued without bound on memory only up to 64 frames; beyond that the stream is closed (RESOURCE_EXHAUSTED). Ignored
  // after Close.
  virtual void Send(ControlFrame frame) = 0;
  // Sends what is queued, then ends the stream; the peer sees `status` (a dialler can only end in good order with OK,
  // or break off). Idempotent. OnClosed follows, at the latest a few seconds later.
  virtual void Close(absl::Status status) = 0;
  // Who is at the other end, for logs and ListPeers.
  virtual std::string peer() const = 0;
};

class DataListener {
 public:
  virtual ~DataListener() = default;
  // The next chunk is read only after this returns.
  virtual void OnChunk(std::unique_ptr<ReceivedChunk> chunk) = 0;
  virtual void OnClosed(absl::Status status) = 0;
};

class DataStream {
 public:
  virtual ~DataStream() = default;
  // Lends the chunk to the network without a copy. `done` comes exactly once, when the bytes are no longer needed (true)
  // or will never be sent (false); slot and mapping are released just before. At most 4 may be
  // outstanding per stream. OnClosed comes after every `done`, save where a peer has stopped reading and the network
  // holds on to chunks for more than two seconds.
  virtual void SendChunk(OutgoingChunk chunk, std::function<void(bool sent)> done) = 0;
  // As ControlStream::Close; waits for queued chunks only when status is OK.
  virtual void Close(absl::Status status) = 0;
};

// Answers streams that peers open.
class PeerAcceptor {
 public:
  virtual ~PeerAcceptor() = default;
  // The listener of a new control stream, or null to refuse it (UNAVAILABLE DRAINING).
  virtual std::shared_ptr<ControlListener> OnControl(std::shared_ptr<ControlStream> stream) = 0;
  // Called after the peer's DataOpen. Null refuses it (NOT_FOUND UNKNOWN_SESSION).
  virtual std::shared_ptr<DataListener> OnData(std::shared_ptr<DataStream> stream, const DataOpenFrame& open) = 0;
  // A peer's stream was refused for what its certificate says.
  virtual void OnStranger(const absl::Status& status) { (void)status; }
  // A Data stream that a peer opened has ended with an error and never had a listener.
  virtual void OnDataRefused(const absl::Status& status) { (void)status; }
};

class Transport {
 public:
  virtual ~Transport() = default;
  // Dials lazily; a peer that is not there shows as OnClosed(UNAVAILABLE PEER_UNREACHABLE) within connect_timeout_ms, or
  // as kNobodyListens where its machine says so, one whose certificate does not fit as PEER_IDENTITY or PEER_HANDSHAKE,
  // one that speaks TLS where we do not, or the other way round, as PEER_SECURITY_MISMATCH (peer_security.h).
  virtual std::shared_ptr<ControlStream> OpenControl(const std::string& peer_address,
                                                     std::shared_ptr<ControlListener> listener) = 0;
  // `open.stream` chooses the connection: each index has its own TCP connection to the peer.
  virtual std::shared_ptr<DataStream> OpenData(const std::string& peer_address, const DataOpenFrame& open,
                                               std::shared_ptr<DataListener> listener) = 0;
  // The peer is silent on what was dialled to it. Its connections may hang in the network's back-off long after the
  // network is well again, so what is opened from now on has new ones. Streams that are open stay as they are.
  virtual void GiveUp(const std::string& peer_address) = 0;
};

}  // namespace spectrumkv
