// Verdicts of probes: which tiers are open to a model. Kept in memory and, where a file is configured, in that.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/format/types.h"
#include "server/probe/trials.h"

namespace spectrumkv {

// What a verdict is about. A new revision of the model, or a new chunk format, has none yet.
struct VerdictKey {
  std::string owner;  // Caller::Name of who reported
  std::string model, revision;
  uint32_t codec_version = 0;
  Tier tier = Tier::kQ4;
  friend auto operator<=>(const VerdictKey&, const VerdictKey&) = default;
};

struct Score {
  uint32_t passed = 0, trials = 0;
  friend bool operator==(const Score&, const Score&) = default;
};

struct Verdict {
  VerdictKey key;
  bool open = false;
  std::array<Score, std::size(kTrialKinds)> scores{};  // as kTrialKinds
  int64_t unix_seconds = 0;
  friend bool operator==(const Verdict&, const Verdict&) = default;
};

inline constexpr size_t kMaxVerdicts = 4096, kMaxVerdictsOfOwner = 1024;
// Of a name in a verdict.
inline constexpr size_t kMaxVerdictNameBytes = 256;

// The file's text: a line for each verdict and a checksum. ParseVerdicts takes nothing else: FAILED_PRECONDITION
// VERDICTS_FILE, with the line; more than kMaxVerdicts, or two about the same, are refused too.
std::string FormatVerdicts(const std::vector<Verdict>& verdicts);
absl::StatusOr<std::vector<Verdict>> ParseVerdicts(const std::string& text);

// Thread-safe.
class VerdictBook {
 public:
  // `changed` is called under the book's lock, after every change and once at the start: counts of open and closed
  // verdicts by tier id.
  using Counts = std::array<std::array<uint64_t, 2>, kTierCount>;
  explicit VerdictBook(std::function<void(const Counts&)> changed = nullptr);

  // Takes what `path` has, and keeps it there from now on; a file that is not there is an empty one. "": in memory
  // alone. FAILED_PRECONDITION VERDICTS_FILE: cannot be read or made, belongs to another user, may be written by
  // others, or its content is not what FormatVerdicts makes. The book is empty then.
  absl::Status Open(const std::string& path);

  // In place of earlier verdicts with the same keys; the owner's oldest make room where it has too many.
  // RESOURCE_EXHAUSTED VERDICTS_FULL: others have all of kMaxVerdicts. UNAVAILABLE VERDICTS_NOT_WRITTEN. Nothing has
  // changed then.
  absl::Status Put(const std::vector<Verdict>& verdicts);
  std::optional<Verdict> Find(const VerdictKey& key) const;
  std::vector<Verdict> OfOwner(const std::string& owner) const;
  // "": all revisions. How many there were. VERDICTS_NOT_WRITTEN.
  absl::StatusOr<uint32_t> Delete(const std::string& owner, const std::string& model, const std::string& revision);

 private:
  using Map = std::map<VerdictKey, Verdict>;
  absl::Status Adopt(Map next);  // REQUIRES mutex_

  const std::function<void(const Counts&)> changed_;
  mutable std::mutex mutex_;
  std::string path_;
  Map verdicts_;
};

}  // namespace spectrumkv
