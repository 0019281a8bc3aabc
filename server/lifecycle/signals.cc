#include "server/lifecycle/signals.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cstdint>

namespace spectrumkv {

StopSignals::StopSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  signal(SIGPIPE, SIG_IGN);
  signals_ = signalfd(-1, &set, SFD_CLOEXEC);
  wake_ = eventfd(0, EFD_CLOEXEC);
}

StopSignals::~StopSignals() {
  close(signals_);
  close(wake_);
}

int StopSignals::Wait() {
  pollfd fds[2] = {{signals_, POLLIN, 0}, {wake_, POLLIN, 0}};
  while (poll(fds, 2, -1) < 0) {
  }
  if ((fds[0].revents & POLLIN) != 0) {
    signalfd_siginfo info{};
    if (read(signals_, &info, sizeof(info)) == static_cast<ssize_t>(sizeof(info)))
      return static_cast<int>(info.ssi_signo);
  }
  uint64_t count = 0;
  (void)!read(wake_, &count, sizeof(count));
  return 0;
}

void StopSignals::Wake() {
  const uint64_t one = 1;
  (void)!write(wake_, &one, sizeof(one));
}

}  // namespace spectrumkv
