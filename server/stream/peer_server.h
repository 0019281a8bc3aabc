// Serves PeerService, and nothing else, on one TCP address: no health, no reflection.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/stream/peer_security.h"
#include "server/stream/transport.h"

namespace spectrumkv {

struct PeerServerOptions {
  // host:port; port 0 takes a free one.
  std::string listen_address = "127.0.0.1:0";
  PeerSecurity security;
  // What those are told who look at this daemon (GrpcTransport::Probe).
  std::string version;
  uint64_t epoch = 0;
  size_t max_message_bytes = size_t{16} << 20;
  // HTTP/2 streams per connection; a peer that opens more waits.
  int max_streams_per_connection = 4096;
  // As GrpcTransportOptions::undelivered_timeout_ms.
  int64_t undelivered_timeout_ms = 10'000;
  // From the start of a stream to its hello or DataOpen.
  int64_t open_timeout_ms = 10'000;
  // Connections without a stream: those of peers that vanished without a word would stay for ever. Longer than diallers
  // keep theirs.
  int64_t idle_connection_timeout_ms = 120'000;
};

class PeerServer {
 public:
  // Serves when it returns. UNAVAILABLE LISTEN_FAILED where the address is taken, not local or not permitted; the
  // errors of peer_security.h. `acceptor` must outlive the server.
  static absl::StatusOr<std::unique_ptr<PeerServer>> Start(const PeerServerOptions& options, PeerAcceptor* acceptor);
  // As Shutdown.
  ~PeerServer();

  int port() const;
  // listen_address with the real port.
  const std::string& address() const;

  // Reads the security's files again; true where they have changed. Streams that begin from then on are held to them,
  // also on older connections; new connections see them within about a second. Where it fails, all is as it was.
  // Thread-safe.
  absl::StatusOr<bool> ReloadSecurity();

  // Ends all streams (the peers see UNAVAILABLE DRAINING) and waits until their OnClosed and all `done` have come: at
  // most about ten seconds, usually milliseconds. No callback comes later. Idempotent; not from a callback.
  void Shutdown();

 private:
  class Impl;
  explicit PeerServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace spectrumkv
