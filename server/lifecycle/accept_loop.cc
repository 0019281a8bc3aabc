#include "server/lifecycle/accept_loop.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

#include "server/base/listen.h"
#include "server/base/log.h"
#include "server/lifecycle/socket_guard.h"

namespace spectrumkv {
namespace {

constexpr int64_t kLogPeriodMs = 10'000;

int64_t NowMs() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// 0 or errno.
int BindAndListen(int fd, const AcceptLoop::Options& options) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (options.socket.size() >= sizeof(address.sun_path)) return ENAMETOOLONG;
  std::memcpy(address.sun_path, options.socket.data(), options.socket.size());
  const PrivateUmask mask(options.socket_mode);
  if (bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) return errno;
  return listen(fd, SOMAXCONN) == 0 ? 0 : errno;
}

bool IsShortage(int error) { return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM; }

}  // namespace

AcceptLoop::AcceptLoop(Options options, int listener, int wake)
    : options_(std::move(options)),
      overflow_uid_(OverflowUid()),
      own_uid_(geteuid()),
      listener_(listener),
      wake_(wake) {}

absl::StatusOr<std::unique_ptr<AcceptLoop>> AcceptLoop::Listen(Options options) {
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (listener < 0) return ListenFailed(options.socket_key, options.socket, errno);
  int error = BindAndListen(listener, options);
  const int wake = error == 0 ? eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK) : -1;
  if (error == 0 && wake < 0) error = errno;
  if (error != 0) {
    close(listener);
    return ListenFailed(options.socket_key, options.socket, error);
  }
  return std::unique_ptr<AcceptLoop>(new AcceptLoop(std::move(options), listener, wake));
}

AcceptLoop::~AcceptLoop() {
  Stop();
  close(wake_);
}

void AcceptLoop::Run(std::function<void(int fd)> take) {
  take_ = std::move(take);
  thread_ = std::thread([this] { Loop(); });
}

void AcceptLoop::Stop() {
  if (listener_ < 0) return;
  const uint64_t one = 1;
  while (write(wake_, &one, sizeof(one)) < 0 && errno == EINTR) {
  }
  if (thread_.joinable()) thread_.join();
  close(std::exchange(listener_, -1));
}

bool AcceptLoop::Wait(bool for_connection, int timeout_ms) const {
  pollfd places[2] = {{wake_, POLLIN, 0}, {listener_, POLLIN, 0}};
  const int ready = poll(places, for_connection ? 2 : 1, timeout_ms);
  return ready <= 0 || places[0].revents == 0;  // EINTR is as nothing ready: the caller looks again
}

void AcceptLoop::Loop() {
  while (Wait(/*for_connection=*/true, -1)) {
    if (!AcceptOne() && !Wait(/*for_connection=*/false, options_.retry_ms)) return;
  }
}

bool AcceptLoop::Lets(uint32_t uid) const {
  const std::vector<uint32_t>& allowed = options_.allowed_uids;
  if (std::find(allowed.begin(), allowed.end(), uid) != allowed.end()) return true;
  return allowed.empty() && (uid != overflow_uid_ || uid == own_uid_);
}

bool AcceptLoop::AcceptOne() {
  const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) {
    const int error = errno;
    // Gone again, or nothing there.
    if (error == EAGAIN || error == EINTR || error == ECONNABORTED) return true;
    Refuse(IsShortage(error) ? MetricRefusal::kNoDescriptor : MetricRefusal::kSystem,
           std::generic_category().message(error));
    return false;
  }
  ucred peer = {};
  socklen_t size = sizeof(peer);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
    Refuse(MetricRefusal::kSystem, std::generic_category().message(errno));
    close(fd);
    return true;
  }
  const std::string who = "uid " + std::to_string(peer.uid) + ", pid " + std::to_string(peer.pid);
  const bool lets = Lets(peer.uid);
  if (!lets || !options_.callers->HasRoom(peer.uid)) {
    Refuse(lets ? MetricRefusal::kFull : MetricRefusal::kUid, who);  // first: who sees the end finds it counted
    close(fd);
    return true;
  }
  const int number = options_.callers->Add(fd, peer.uid);
  if (number < 0) {
    Refuse(IsShortage(-number) ? MetricRefusal::kNoDescriptor : MetricRefusal::kSystem,
           std::generic_category().message(-number));
    return false;
  }
  take_(number);
  return true;
}

void AcceptLoop::Refuse(MetricRefusal why, const std::string& what) {
  options_.on_refused(why);
  Told& told = told_[static_cast<size_t>(why)];
  const int64_t now_ms = NowMs();
  if (told.at_ms != 0 && now_ms - told.at_ms < kLogPeriodMs) {
    ++told.since;
    return;
  }
  SPECTRUMKV_LOG(kWarning, "lifecycle", "connection refused", {"address", "unix:" + options_.socket},
                 {"cause", MetricLabelOf(why)}, {"detail", what}, {"untold", told.since});
  told = {now_ms, 0};
}

}  // namespace spectrumkv
