// A network in memory for tests: named ends in one process, with the semantics of GrpcTransport (order per stream,
// OnClosed once and last, slots on loan until delivered, bounded queues) and a hook that makes faults.
//
//   MemoryNetwork network(&executor);
//   network.AddEnd("decode", &acceptor);
//   auto transport = network.TransportOf("prefill");
//   transport->OpenControl("decode", listener);
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "server/base/clock.h"
#include "server/base/executor.h"
#include "server/stream/transport.h"

namespace spectrumkv {

// One message about to be delivered.
struct FaultPoint {
  std::string from, to;
  bool data = false;    // a chunk, else a frame
  uint32_t stream = 0;  // of a Data stream
  uint64_t index = 0;   // of the message in its direction of its stream, from 0
  const ControlFrame* frame = nullptr;
  size_t chunk_bytes = 0;
};

struct Fault {
  enum class Kind {
    kPass,
    kDrop,       // the sender believes it was sent
    kDelay,      // this message and those behind it wait delay_ns; needs a clock
    kDuplicate,  // delivered twice
    kCorrupt,   // byte `byte` (modulo the length) is XORed with `mask`; a frame that no longer parses closes the stream
    kTruncate,  // all from byte `byte` (modulo the length) on is missing; as for kCorrupt
    kHold,      // delivered after `behind` later messages of its direction, or before the stream ends
    kBreak      // the connection breaks before this message
  };
  Kind kind = Kind::kPass;
  int64_t delay_ns = 0;
  uint32_t behind = 1;
  size_t byte = 0;
  uint8_t mask = 0xFF;
};
using FaultHook = std::function<Fault(const FaultPoint&)>;

// Thread-safe. Must outlive its transports and streams.
class MemoryNetwork {
 public:
  // Callbacks run on `executor`, which must outlive the network and run all it was given; null: a thread of the
  // network's own. `clock` is needed for Fault::kDelay only.
  explicit MemoryNetwork(Executor* executor = nullptr, Clock* clock = nullptr);
  // Breaks what is open.
  ~MemoryNetwork();

  // From now on `name` can be dialled. `acceptor` must live until RemoveEnd or the end of the network.
  void AddEnd(const std::string& name, PeerAcceptor* acceptor);
  // `name` is gone as if its process had died: nobody reaches it and its streams break.
  void RemoveEnd(const std::string& name);
  // Dials as `name`, which need not be an end itself.
  std::unique_ptr<Transport> TransportOf(const std::string& name);

  // Called for every message, one at a time per stream, before it is delivered. Null: no faults.
  void SetFaultHook(FaultHook hook);

 private:
  friend class MemoryLink;
  friend class MemoryDialler;
  void Track(const std::shared_ptr<class MemoryLink>& link);
  PeerAcceptor* FindEnd(const std::string& name);
  Fault AskHook(const FaultPoint& point);

  std::mutex mutex_;
  std::map<std::string, PeerAcceptor*> ends_;
  std::vector<std::weak_ptr<class MemoryLink>> links_;
  FaultHook hook_;
  Clock* const clock_;
  std::unique_ptr<ThreadPool> own_executor_;
  Executor* executor_;
};

}  // namespace spectrumkv
