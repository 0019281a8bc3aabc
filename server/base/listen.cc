#include "server/base/listen.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "server/base/host_port.h"
#include "server/base/status.h"

namespace spectrumkv {
namespace {

struct Cause {
  std::string name, words;
};

Cause CauseOf(int error) {
  const char* name = strerrorname_np(error);
  return {name != nullptr ? name : std::to_string(error), std::generic_category().message(error)};
}

// 0, or the errno of listening there.
int TryToListen(const addrinfo& place) {
  const int fd = socket(place.ai_family, place.ai_socktype | SOCK_CLOEXEC, place.ai_protocol);
  if (fd < 0) return errno;
  const int on = 1;
  // As servers do: what is left of an earlier daemon's connections is no reason to refuse.
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  const bool works = bind(fd, place.ai_addr, place.ai_addrlen) == 0 && listen(fd, 1) == 0;
  const int error = works ? 0 : errno;
  close(fd);
  return error;
}

Cause Ask(const std::string& address) {
  const HostPort place_of = SplitHostPort(address);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int resolved = getaddrinfo(place_of.host.c_str(), place_of.port.c_str(), &hints, &found);
  if (resolved == EAI_SYSTEM) return CauseOf(errno);
  if (resolved != 0) return {"NOT_RESOLVED", gai_strerror(resolved)};
  int error = 0;
  for (const addrinfo* place = found; place != nullptr && error == 0; place = place->ai_next) {
    error = TryToListen(*place);
  }
  freeaddrinfo(found);
  return error == 0 ? Cause{"UNKNOWN", "the cause has gone meanwhile"} : CauseOf(error);
}

absl::Status ErrorOf(const std::string& key, const std::string& address, const Cause& cause) {
  return MakeError(absl::StatusCode::kUnavailable, "LISTEN_FAILED",
                   key + ": cannot listen on " + address + ": " + cause.words + " (" + cause.name + ")",
                   {{"key", key}, {"address", address}, {"cause", cause.name}});
}

}  // namespace

absl::Status ListenFailed(const std::string& key, const std::string& address, int error) {
  return ErrorOf(key, address, CauseOf(error));
}

absl::Status ListenFailed(const std::string& key, const std::string& address) {
  // Unix sockets are guarded by locks of their own; what remains is the system's, and not to be tried again lightly.
  const Cause cause = address.find(':') == std::string::npos || address[0] == '/'
                          ? Cause{"UNKNOWN", "the socket cannot be bound"}
                          : Ask(address);
  return ErrorOf(key, address, cause);
}

}  // namespace spectrumkv
