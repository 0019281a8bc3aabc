// What a transfer waits for, and which of it took most of its time. Pure; the strand of the transfer feeds it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace spectrumkv {

// Numbers as LimitedBy in report.proto.
enum class Limit : uint8_t {
  kUnknown = 0,
  kPlan = 1,
  kScan = 2,
  kEncode = 3,
  kLink = 4,
  kDecode = 5,
  kCredits = 6,
  kPeer = 7,
  kSource = 8,
  kStaging = 9
};
constexpr size_t kLimitCount = 10;
// "plan", "link", ...; "unknown".
const char* LimitName(Limit limit);

// Adds up time by what it was spent on: exactly one thing at a time. Not thread-safe.
class WaitClock {
 public:
  // From `now_ns` on the time is spent on `next`; what passed since the last call goes to what that call named. Returns
  // those seconds.
  double Switch(Limit next, int64_t now_ns) {
    const double passed = current_ == Limit::kUnknown ? 0 : static_cast<double>(now_ns - since_ns_) * 1e-9;
    seconds_[static_cast<size_t>(current_)] += passed;
    current_ = next;
    since_ns_ = now_ns;
    return passed;
  }
  Limit current() const { return current_; }
  double seconds(Limit limit) const { return seconds_[static_cast<size_t>(limit)]; }

 private:
  std::array<double, kLimitCount> seconds_{};
  Limit current_ = Limit::kUnknown;
  int64_t since_ns_ = 0;
};

struct LimitShare {
  Limit limit = Limit::kUnknown;
  double seconds = 0;
};

// What a sender knows at its end.
struct SenderTimes {
  WaitClock waits;  // kPlan stands for scan and plan, kLink and kCredits for everything behind the encoder
  double scan_seconds = 0, plan_seconds = 0;
  // From the receiver's receipt; 0 where it does not tell.
  double span_seconds = 0, busy_seconds = 0;
  // The receiver granted a quarter or less of the room that a transfer of this size asks for: other transfers have it.
  bool starved = false;
};
// Behind the encoder it is DECODE where the receiver had a chunk to decode nine tenths of its time: a backlog stays
// until the end where decoding is slowest, and never forms where something else is. CREDITS where the receiver gave it
// little room and the sender mostly waited for that; else LINK, for credits come back late where chunks travel slowly.
LimitShare LimitOfSender(const SenderTimes& times);

// What a receiver knows at its end: time until the first chunk came, less the wait for a first slot; that wait; and
// from the first chunk to the last how long there was a chunk to decode.
struct ReceiverTimes {
  double before_seconds = 0, slot_seconds = 0, span_seconds = 0, busy_seconds = 0;
};
LimitShare LimitOfReceiver(const ReceiverTimes& times);

}  // namespace spectrumkv
