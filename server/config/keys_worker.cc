// Keys about the workers of this daemon.
#include <utility>

#include "server/config/key_tables.h"

namespace spectrumkv {

namespace {

std::vector<KeySpec> QuotaKeys() {
  return {
      {"quota.pools_per_user",
       KeyKind::kCount,
       Ref(FIELD(quota.pools_per_user)),
       "pools",
       1,
       65536,
       {},
       "Pools that one user may have registered at a time, of memory.max_pools. All callers of worker.tcp_address are "
       "one user."},
      {"quota.user_bytes",
       KeyKind::kBytes,
       Ref(FIELD(quota.user_bytes)),
       "bytes",
       1,
       64 * kTiB,
       {},
       "Bytes of all segments that one user may have registered at a time, its own and the daemon's."},
      // At most half of what the daemon can guard (server/memory/sigbus_guard.h): no user takes all of it.
      {"quota.segments_per_user",
       KeyKind::kCount,
       Ref(FIELD(quota.segments_per_user)),
       "segments",
       1,
       8192,
       {},
       "Segments of all pools that one user may have registered at a time, however small: the daemon can guard 16384 of "
       "all users against being cut short. A pool has at most 4096."},
      {"quota.holds_per_user",
       KeyKind::kCount,
       Ref(FIELD(quota.holds_per_user)),
       "streams",
       1,
       1e6,
       {},
       "HoldPool streams that one user may have open at a time. A pool has at most 64."},
      {"quota.transfers_per_user",
       KeyKind::kCount,
       Ref(FIELD(quota.transfers_per_user)),
       "transfers",
       1,
       1e6,
       {},
       "Transfers of one user that are not terminal, of transfer.max_active, both roles together. More are refused at once "
       "with a retry delay."},
      {"quota.transfers_per_pool",
       KeyKind::kCount,
       Ref(FIELD(quota.transfers_per_pool)),
       "transfers",
       1,
       1e6,
       {},
       "The same for the transfers of one pool."},
  };
}

}  // namespace

std::vector<KeySpec> MakeWorkerKeys() {
  std::vector<KeySpec> keys = {
      {"worker.socket",
       KeyKind::kSocket,
       Ref(FIELD(worker.socket)),
       "path",
       0,
       0,
       {},
       "Where inference workers reach WorkerService. Each user has its own pools and transfers there, and sees no others."},
      {"worker.socket_mode",
       KeyKind::kMode,
       Ref(FIELD(worker.socket_mode)),
       "octal",
       0,
       0,
       {"0600", "0660"},
       "Permission bits of worker.socket. 0660 lets workers of the socket's group in, 0600 this user alone."},
      {"worker.allowed_uids",
       KeyKind::kUids,
       Ref(FIELD(worker.allowed_uids)),
       "",
       0,
       0,
       {},
       "User ids that may connect to worker.socket, as the kernel tells them. Empty: whoever its permission bits let in, "
       "because a worker beside the daemon often runs as another user than the daemon, or as root. Users without an id in "
       "the daemon's user namespace all look like the kernel's overflow id (65534), so that one gets in only where it is "
       "named here or is the daemon's own."},
      {"worker.max_connections",
       KeyKind::kCount,
       Ref(FIELD(worker.max_connections)),
       "connections",
       2,
       8192,
       {},
       "Connections to worker.socket at a time; more are closed at once. One user may have at most as many as there is "
       "room left: half of them where it is alone, and a user that comes later still finds room."},
      {"worker.tcp_address",
       KeyKind::kLoopback,
       Ref(FIELD(worker.tcp_address)),
       "host:port",
       0,
       0,
       {},
       "A second way to WorkerService for clients that cannot use Unix sockets. Off when empty; loopback only, because "
       "it is not encrypted, and only for callers with the token of worker.tcp_token_file."},
      {"worker.tcp_token_file",
       KeyKind::kFile,
       Ref(FIELD(worker.tcp_token_file)),
       "path",
       0,
       0,
       {},
       "What callers of worker.tcp_address must send as \"authorization: Bearer TOKEN\": every user of this machine "
       "can "
       "reach that. 16 to 1024 visible characters, read at the start. Only the name is kept here; the token itself is "
       "never printed."},
  };
  for (KeySpec& key : QuotaKeys()) keys.push_back(std::move(key));
  return keys;
}

}  // namespace spectrumkv
