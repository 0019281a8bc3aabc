#include "server/lifecycle/caller_table.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <iterator>

namespace spectrumkv {
namespace {

// Numbers below are left to everybody else. Each number costs the kernel some ten bytes, so that more are not worth it.
constexpr int kFirstNumber = 1024, kNumbers = 16384;

int FilesAllowed() {
  struct rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return kFirstNumber;
  return static_cast<int>(std::min<rlim_t>(files.rlim_cur, kFirstNumber + kNumbers));
}

bool StartsWith(const std::string& text, const char* begin) { return text.rfind(begin, 0) == 0; }

}  // namespace

CallerTable::CallerTable(uint32_t max_connections)
    : max_connections_(max_connections),
      first_number_(std::min(kFirstNumber, FilesAllowed() / 2)),
      end_number_(FilesAllowed()),
      next_number_(first_number_) {}

bool CallerTable::IsOpen(int fd, const Connection& connection) {
  struct stat info = {};
  return fstat(fd, &info) == 0 && S_ISSOCK(info.st_mode) && info.st_dev == connection.device &&
         info.st_ino == connection.inode;
}

size_t CallerTable::SweepLocked() {
  for (auto it = connections_.begin(); it != connections_.end();) {
    it = IsOpen(it->first, it->second) ? std::next(it) : connections_.erase(it);
  }
  return connections_.size();
}

size_t CallerTable::Sweep() {
  std::lock_guard<std::mutex> lock(mutex_);
  return SweepLocked();
}

bool CallerTable::HasRoom(uint32_t uid) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto room = [&] {
    const auto own = std::count_if(connections_.begin(), connections_.end(),
                                   [uid](const auto& entry) { return entry.second.uid == uid; });
    return connections_.size() < max_connections_ &&
           static_cast<size_t>(own) < max_connections_ - connections_.size();
  };
  if (room()) return true;
  SweepLocked();
  return room();
}

int CallerTable::MoveUp(int fd) {
  int number = fcntl(fd, F_DUPFD_CLOEXEC, next_number_);
  // None from there on: EMFILE; EINVAL where the process's limit was lowered meanwhile.
  if (number < 0 || number >= end_number_) {
    if (number >= 0) close(number);
    number = fcntl(fd, F_DUPFD_CLOEXEC, first_number_);
  }
  return number < 0 ? -errno : number;
}

int CallerTable::Add(int fd, uint32_t uid) {
  struct stat info = {};
  std::lock_guard<std::mutex> lock(mutex_);
  const int number = fstat(fd, &info) == 0 ? MoveUp(fd) : -errno;
  close(fd);
  if (number < 0) return number;
  next_number_ = number + 1 < end_number_ ? number + 1 : first_number_;
  connections_[number] = Connection{uid, info.st_dev, info.st_ino};
  return number;
}

Caller CallerTable::Find(const std::string& peer) const {
  if (StartsWith(peer, "ipv4:") || StartsWith(peer, "ipv6:")) return Caller::Token();
  if (!StartsWith(peer, "fd:")) return Caller();
  int number = -1;
  const char* const end = peer.data() + peer.size();
  const auto parsed = std::from_chars(peer.data() + 3, end, number);
  if (parsed.ec != std::errc() || parsed.ptr != end) return Caller();
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = connections_.find(number);
  if (found == connections_.end() || !IsOpen(number, found->second)) return Caller();
  return Caller::Uid(found->second.uid);
}

}  // namespace spectrumkv
