// Dials peers over gRPC. Each (peer, stream index) has its own TCP connection, the control stream another; connections
// are kept for a while and reused. OnClosed, OnFrame and OnChunk are not called after Shutdown (or the destructor)
// has returned. `done` and OnClosed may come before Open* has returned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/stream/peer_security.h"
#include "server/stream/probe_result.h"
#include "server/stream/transport.h"

namespace spectrumkv {

struct GrpcTransportOptions {
  PeerSecurity security;
  int64_t connect_timeout_ms = 3000;
  // A connection that has delivered nothing of what was sent for so long is broken off (TCP_USER_TIMEOUT), instead of
  // trying again at ever longer intervals: what waits on it can dial anew.
  int64_t undelivered_timeout_ms = 10'000;
  // A larger message from a peer closes its stream (RESOURCE_EXHAUSTED MESSAGE_TOO_LARGE).
  size_t max_message_bytes = size_t{16} << 20;
  // Connections kept, over all peers; the least recently used go first.
  size_t max_connections = 64;
};

class GrpcTransport final : public Transport {
 public:
  // Fails only where the security's files do (peer_security.h).
  static absl::StatusOr<std::unique_ptr<GrpcTransport>> Create(const GrpcTransportOptions& options);
  ~GrpcTransport() override;

  std::shared_ptr<ControlStream> OpenControl(const std::string& peer_address,
                                             std::shared_ptr<ControlListener> listener) override;
  std::shared_ptr<DataStream> OpenData(const std::string& peer_address, const DataOpenFrame& open,
                                       std::shared_ptr<DataListener> listener) override;
  void GiveUp(const std::string& peer_address) override;

  // Looks at a peer on a connection of its own. Blocks: at most timeout_ms until the peer has answered, then about a second;
  // StopProbes breaks it off. Errors: those of OpenControl's OnClosed; UNIMPLEMENTED NOT_A_PEER also where the peer is a
  // daemon from before there was Probe. Not from a callback.
  absl::StatusOr<ProbeResult> Probe(const std::string& peer_address, int64_t timeout_ms);
  // None goes on, and none begins any more. Shutdown does it, too; before a server ends whose calls wait for them.
  void StopProbes();

  // Reads the security's files again; true where they have changed. New connections use them from then on, those there
  // are end with their streams. Where it fails, all is as it was. Thread-safe.
  absl::StatusOr<bool> ReloadSecurity();

  // Breaks off all streams and waits until their OnClosed and all `done` have come: at most about ten seconds, usually
  // milliseconds. Idempotent. Streams opened later are closed at once (UNAVAILABLE SHUTTING_DOWN, inside Open*). Must
  // not be called from a callback.
  void Shutdown();

 private:
  class Impl;
  explicit GrpcTransport(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace spectrumkv
