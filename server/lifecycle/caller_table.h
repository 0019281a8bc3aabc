// Who is behind which connection of a Unix socket. gRPC names a connection that it was handed by the number of its socket,
// "fd:17", and numbers are used again. So that a call is never taken for one of another connection's user:
//
// - a number is entered before gRPC gets the socket, and names the new connection from then on;
// - gRPC keeps a socket open until the last call of its connection is gone, so that the kernel gives its number to nobody
//   else as long as there is a call that could ask;
// - were that different, numbers rise from one connection to the next and begin again only when thousands were used, and
//   a number whose socket is not the one that was entered is nobody's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "server/base/caller.h"

namespace spectrumkv {

// Thread-safe.
class CallerTable {
 public:
  explicit CallerTable(uint32_t max_connections);

  // Whether one more connection of this user may be added: below the limit, and no more of one user than there is room
  // left, so that a user that comes later finds some.
  bool HasRoom(uint32_t uid);
  // Gives the socket a number of its own, enters it, and answers the number. Consumes `fd`. -errno where the process
  // may not have another descriptor.
  int Add(int fd, uint32_t uid);
  // The caller named so by grpc::ServerContext::peer: of a number, its user; of a TCP address, who has the token; nobody
  // otherwise.
  Caller Find(const std::string& peer) const;
  // Forgets connections whose sockets are closed; how many are left. Each costs a system call.
  size_t Sweep();

 private:
  struct Connection {
    uint32_t uid = 0;
    uint64_t device = 0, inode = 0;  // of the socket: no two open ones have the same
  };
  static bool IsOpen(int fd, const Connection& connection);
  size_t SweepLocked();
  int MoveUp(int fd);

  const uint32_t max_connections_;
  const int first_number_, end_number_;

  mutable std::mutex mutex_;
  int next_number_;
  std::map<int, Connection> connections_;
};

}  // namespace spectrumkv
