#include "server/probe/verdicts.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "server/base/status.h"

namespace spectrumkv {
namespace {

// Of a line: three names that are percent-coded throughout, and numbers.
constexpr off_t kMaxFileBytes = static_cast<off_t>(kMaxVerdicts * (3 * 3 * kMaxVerdictNameBytes + 128) + 64);

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int fd() const { return fd_; }

 private:
  const int fd_;
};

std::string ErrorText() { return std::generic_category().message(errno); }

absl::Status BadFile(const std::string& path, const std::string& what) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "VERDICTS_FILE", path + " " + what, {{"file", path}});
}

// Whoever can write the file opens gates.
absl::Status CheckFile(const std::string& path, int fd) {
  struct stat info {};
  if (fstat(fd, &info) != 0) return BadFile(path, "cannot be looked at: " + ErrorText());
  if (!S_ISREG(info.st_mode)) return BadFile(path, "is no regular file");
  if (info.st_uid != geteuid() && info.st_uid != 0) return BadFile(path, "belongs to another user");
  if ((info.st_mode & (S_IWGRP | S_IWOTH)) != 0) return BadFile(path, "may be written by others");
  if (info.st_size > kMaxFileBytes) return BadFile(path, "is larger than " + std::to_string(kMaxFileBytes) + " bytes");
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (file.fd() < 0 && errno == ENOENT) return FormatVerdicts({});
  if (file.fd() < 0) return BadFile(path, "cannot be opened: " + ErrorText());
  if (absl::Status ok = CheckFile(path, file.fd()); !ok.ok()) return ok;
  std::string text;
  char buffer[65536];
  while (text.size() <= static_cast<size_t>(kMaxFileBytes)) {
    const ssize_t got = read(file.fd(), buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return BadFile(path, "cannot be read: " + ErrorText());
    if (got == 0) return text;
    text.append(buffer, static_cast<size_t>(got));
  }
  return BadFile(path, "grows while it is read");
}

bool WriteAll(int fd, const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t put = write(fd, text.data() + done, text.size() - done);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return false;
    done += static_cast<size_t>(put);
  }
  return fsync(fd) == 0;
}

absl::Status NotWritten(const std::string& path) {
  return MakeError(absl::StatusCode::kUnavailable, "VERDICTS_NOT_WRITTEN",
                   "quality.verdicts_file " + path + " cannot be written: " + ErrorText() + "; no verdict has changed",
                   {{"file", path}});
}

// A reader finds the old text or the new one, also after a loss of power.
absl::Status ReplaceFile(const std::string& path, const std::string& text) {
  const std::string temporary = path + ".new";
  if (unlink(temporary.c_str()) != 0 && errno != ENOENT) return NotWritten(path);
  {
    const Descriptor file(open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (file.fd() < 0) return NotWritten(path);
    if (!WriteAll(file.fd(), text)) {
      const absl::Status failed = NotWritten(path);
      unlink(temporary.c_str());
      return failed;
    }
  }
  if (rename(temporary.c_str(), path.c_str()) != 0) return NotWritten(path);
  const Descriptor folder(open(path.substr(0, path.rfind('/') + 1).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.fd() >= 0)
    fsync(folder.fd());  // the rename has happened: what fails here is only how soon it is on the disk
  return absl::OkStatus();
}

}  // namespace

VerdictBook::VerdictBook(std::function<void(const Counts&)> changed) : changed_(std::move(changed)) {
  if (changed_) changed_(Counts{});
}

absl::Status VerdictBook::Open(const std::string& path) {
  std::lock_guard<std::mutex> lock(mutex_);
  path_.clear();
  if (path.empty()) return absl::OkStatus();
  const auto text = ReadFile(path);
  if (!text.ok()) return text.status();
  const auto verdicts = ParseVerdicts(*text);
  if (!verdicts.ok()) return BadFile(path, std::string(verdicts.status().message()));
  Map next;
  for (const Verdict& verdict : *verdicts) next.emplace(verdict.key, verdict);
  path_ = path;
  if (absl::Status written = Adopt(std::move(next)); !written.ok()) {  // now, not when the first verdict comes
    path_.clear();
    return BadFile(path, std::string(written.message()));
  }
  return absl::OkStatus();
}

absl::Status VerdictBook::Adopt(Map next) {
  if (!path_.empty()) {
    std::vector<Verdict> all;
    for (const auto& [key, verdict] : next) all.push_back(verdict);
    if (absl::Status written = ReplaceFile(path_, FormatVerdicts(all)); !written.ok()) return written;
  }
  verdicts_ = std::move(next);
  if (changed_) {
    Counts counts{};
    for (const auto& [key, verdict] : verdicts_) ++counts[static_cast<size_t>(key.tier)][verdict.open ? 0 : 1];
    changed_(counts);
  }
  return absl::OkStatus();
}

absl::Status VerdictBook::Put(const std::vector<Verdict>& verdicts) {
  std::lock_guard<std::mutex> lock(mutex_);
  Map next = verdicts_;
  for (const Verdict& verdict : verdicts) next.insert_or_assign(verdict.key, verdict);
  for (const Verdict& verdict : verdicts) {
    const auto of_owner = [&](const auto& entry) { return entry.first.owner == verdict.key.owner; };
    while (static_cast<size_t>(std::count_if(next.begin(), next.end(), of_owner)) > kMaxVerdictsOfOwner) {
      auto oldest = next.end();
      for (auto it = next.begin(); it != next.end(); ++it) {
        if (!of_owner(*it)) continue;
        if (oldest == next.end() || it->second.unix_seconds < oldest->second.unix_seconds) oldest = it;
      }
      next.erase(oldest);
    }
  }
  if (next.size() > kMaxVerdicts) {
    return MakeError(absl::StatusCode::kResourceExhausted, "VERDICTS_FULL",
                     "the daemon keeps " + std::to_string(kMaxVerdicts) + " verdicts, and other users have them",
                     {{"limit", std::to_string(kMaxVerdicts)}});
  }
  return Adopt(std::move(next));
}

std::optional<Verdict> VerdictBook::Find(const VerdictKey& key) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = verdicts_.find(key);
  return it == verdicts_.end() ? std::nullopt : std::optional<Verdict>(it->second);
}

std::vector<Verdict> VerdictBook::OfOwner(const std::string& owner) const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Verdict> out;
  for (const auto& [key, verdict] : verdicts_) {
    if (key.owner == owner) out.push_back(verdict);
  }
  return out;
}

absl::StatusOr<uint32_t> VerdictBook::Delete(const std::string& owner, const std::string& model,
                                             const std::string& revision) {
  std::lock_guard<std::mutex> lock(mutex_);
  Map next = verdicts_;
  const size_t deleted = std::erase_if(next, [&](const auto& entry) {
    return entry.first.owner == owner && entry.first.model == model &&
           (revision.empty() || entry.first.revision == revision);
  });
  if (deleted == 0) return 0u;
  if (absl::Status written = Adopt(std::move(next)); !written.ok()) return written;
  return static_cast<uint32_t>(deleted);
}

}  // namespace spectrumkv
