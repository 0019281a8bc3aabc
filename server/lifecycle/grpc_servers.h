// The local gRPC servers of a daemon. A C++ gRPC server shows all its services on all its ports, so each is an object
// of its own: Worker (service, health, reflection), Admin (service, reflection), Health (health alone). The Peer server
// is server/stream/peer_server.h.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <grpcpp/impl/service_type.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include "absl/status/statusor.h"
#include "server/lifecycle/accept_loop.h"
#include "server/lifecycle/caller_table.h"

namespace grpc {
class CallbackGenericService;
}

namespace spectrumkv {

// One running server. Not thread-safe, but for SetServing.
class LocalServer {
 public:
  struct Options {
    std::string socket;               // path, or ""
    std::string socket_key, tcp_key;  // configuration keys of the addresses, for errors
    unsigned socket_mode = 0600;
    // Set: connections to the socket are accepted by a loop of our own (accept_loop.h), which enters them there.
    std::shared_ptr<CallerTable> callers;
    std::vector<uint32_t> allowed_uids;  // the next two: of that loop
    std::function<void(MetricRefusal)> on_refused = [](MetricRefusal) {};
    std::string tcp_address;                                   // host:port, or ""; port 0 takes a free one
    std::shared_ptr<grpc::ServerCredentials> tcp_credentials;  // null: none asked for
    std::vector<grpc::Service*> services;                      // borrowed
    bool health = false;
    bool reflection = false;
  };
  // Serves when it returns. ListenFailed (server/base/listen.h) where an address is taken or not permitted. While a
  // socket is bound the process's umask is that of socket_mode. Servers must be started one after the other.
  static absl::StatusOr<std::unique_ptr<LocalServer>> Start(const Options& options);
  ~LocalServer();

  // tcp_address with the real port; "" where there is none.
  const std::string& tcp_address() const { return tcp_address_; }
  // Of a server with health: `name` answers SERVING or NOT_SERVING. Nothing after Shutdown.
  void SetServing(const std::string& name, bool serving);
  // Takes no more connections, ends calls that are left after grace_ms by cancelling them, waits for all. Idempotent.
  void Shutdown(int grace_ms);

 private:
  LocalServer() = default;
  absl::Status StartAccepting(const Options& options);
  std::unique_ptr<grpc::CallbackGenericService> refuse_all_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<AcceptLoop> accept_loop_;
  std::string tcp_address_;
};

}  // namespace spectrumkv
