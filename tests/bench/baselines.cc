#include "tests/bench/baselines.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace spectrumkv::bench {
namespace {

constexpr uint64_t kPiece = 1 << 20;

sockaddr_in AddressOf(const Place& place, in_port_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = port;
  inet_pton(AF_INET, place.host.c_str(), &address.sin_addr);
  return address;
}

// A socket belongs to the namespace of the thread that made it, for good; so the thread is one of its own.
int SocketIn(const Place& place) {
  int made = -1;
  std::thread([&] {
    if (!place.netns.empty()) {
      const int netns = open(("/run/netns/" + place.netns).c_str(), O_RDONLY | O_CLOEXEC);
      const bool entered = netns >= 0 && setns(netns, CLONE_NEWNET) == 0;
      if (netns >= 0) close(netns);
      if (!entered) return;
    }
    made = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  }).join();
  return made;
}

struct Descriptor {
  int fd = -1;
  ~Descriptor() {
    if (fd >= 0) close(fd);
  }
};

void Write(int fd, const uint8_t* data, uint64_t bytes) {
  for (uint64_t at = 0; at < bytes;) {
    const ssize_t n = send(fd, data + at, std::min(kPiece, bytes - at), MSG_NOSIGNAL);
    if (n <= 0) break;
    at += static_cast<uint64_t>(n);
  }
  shutdown(fd, SHUT_WR);
}

}  // namespace

Cost MemcpyCost(const uint8_t* from, uint8_t* to, uint64_t bytes) {
  const double cpu = ProcessCpuSeconds(getpid()), begin = Now();
  std::memcpy(to, from, bytes);
  return {Now() - begin, ProcessCpuSeconds(getpid()) - cpu};
}

absl::StatusOr<Cost> SocketCost(const Place& from, const Place& to, const uint8_t* data, uint64_t bytes) {
  const Descriptor listener{SocketIn(to)}, out{SocketIn(from)};
  sockaddr_in address = AddressOf(to, 0);
  socklen_t length = sizeof address;
  if (bind(listener.fd, reinterpret_cast<sockaddr*>(&address), length) != 0 || listen(listener.fd, 1) != 0 ||
      getsockname(listener.fd, reinterpret_cast<sockaddr*>(&address), &length) != 0 ||
      connect(out.fd, reinterpret_cast<sockaddr*>(&address), length) != 0) {
    return absl::UnavailableError("plain socket from " + from.host + " to " + to.host + ": " + strerror(errno));
  }
  const Descriptor in{accept(listener.fd, nullptr, nullptr)};
  std::vector<uint8_t> buffer(kPiece, 1);
  const double cpu = ProcessCpuSeconds(getpid()), begin = Now();
  std::thread writer([&] { Write(out.fd, data, bytes); });
  uint64_t got = 0;
  for (ssize_t n; (n = recv(in.fd, buffer.data(), buffer.size(), 0)) > 0;) got += static_cast<uint64_t>(n);
  const Cost cost{Now() - begin, ProcessCpuSeconds(getpid()) - cpu};
  writer.join();
  if (got != bytes) return absl::DataLossError("the plain socket lost bytes");
  return cost;
}

}  // namespace spectrumkv::bench
