// Who makes a local call. Found once, where the call arrives, and handed down as a value: what a caller registers and
// opens is its own, and no other caller's.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace spectrumkv {

class Caller {
 public:
  // Nobody: of a connection that nobody knows. Owns nothing, may use nothing.
  Caller() = default;
  // The user of a process behind a Unix socket, as the kernel says.
  static Caller Uid(uint32_t uid) { return Caller(Kind::kUid, uid); }
  // Whoever has the bearer token of the TCP port: all of them are one caller.
  static Caller Token() { return Caller(Kind::kToken, 0); }

  bool known() const { return kind_ != Kind::kNobody; }
  bool has_uid() const { return kind_ == Kind::kUid; }
  // REQUIRES: has_uid().
  uint32_t uid() const { return uid_; }
  // "uid 1000", "token", "nobody".
  std::string Name() const;

  friend auto operator<=>(const Caller&, const Caller&) = default;

 private:
  enum class Kind { kNobody, kUid, kToken };
  Caller(Kind kind, uint32_t uid) : kind_(kind), uid_(uid) {}
  Kind kind_ = Kind::kNobody;
  uint32_t uid_ = 0;
};

// Whether `caller` may use what belongs to `owner`; nobody may use anything, also not what is nobody's. OK, or
// PERMISSION_DENIED NOT_OWNER, whose message calls the thing `what` ("pool.pool_id"): the metadata has it as `field`, the
// caller as `value`. It does not say who the owner is.
absl::Status CheckOwner(const Caller& owner, const Caller& caller, const std::string& what);

// "" or what is wrong with `text` as a user id: 0 to 4294967294, digits alone.
std::string CheckUid(const std::string& text);
// REQUIRES: CheckUid finds nothing in any of them.
std::vector<uint32_t> UidsOf(const std::vector<std::string>& texts);

// The id that stands for users who have none in this process's user namespace: two of them look the same. Read from the
// kernel; 65534 where it does not say.
uint32_t OverflowUid();

}  // namespace spectrumkv
