#include "server/base/caller.h"

#include <charconv>
#include <fstream>

#include "server/base/status.h"

namespace spectrumkv {
namespace {

constexpr uint32_t kUsualOverflowUid = 65534;
constexpr uint32_t kNoUid = UINT32_MAX;  // "unchanged" to the kernel: never a user

}  // namespace

std::string Caller::Name() const {
  switch (kind_) {
    case Kind::kUid: return "uid " + std::to_string(uid_);
    case Kind::kToken: return "token";
    case Kind::kNobody: break;
  }
  return "nobody";
}

absl::Status CheckOwner(const Caller& owner, const Caller& caller, const std::string& what) {
  if (caller.known() && caller == owner) return absl::OkStatus();
  return MakeError(absl::StatusCode::kPermissionDenied, "NOT_OWNER", what + " belongs to another user than " + caller.Name(),
                   {{"field", what}, {"value", caller.Name()}, {"limit", "its owner"}});
}

std::string CheckUid(const std::string& text) {
  uint32_t uid = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), uid);
  const bool digits = !text.empty() && parsed.ptr == text.data() + text.size();
  if (parsed.ec == std::errc::result_out_of_range || (digits && uid == kNoUid)) return "is above 4294967294";
  if (!digits || parsed.ec != std::errc() || (text.size() > 1 && text[0] == '0')) {
    return "is no user id such as 1000";
  }
  return "";
}

std::vector<uint32_t> UidsOf(const std::vector<std::string>& texts) {
  std::vector<uint32_t> uids;
  for (const std::string& text : texts) {
    uint32_t uid = kNoUid;
    std::from_chars(text.data(), text.data() + text.size(), uid);
    uids.push_back(uid);
  }
  return uids;
}

uint32_t OverflowUid() {
  std::ifstream file("/proc/sys/kernel/overflowuid");
  uint32_t uid = 0;
  return file >> uid ? uid : kUsualOverflowUid;
}

}  // namespace spectrumkv
