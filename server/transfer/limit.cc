#include "server/transfer/limit.h"

#include <initializer_list>

namespace spectrumkv {
namespace {

constexpr double kBacklogShare = 0.9;

LimitShare LargestOf(std::initializer_list<LimitShare> shares) {
  LimitShare largest;
  for (const LimitShare& share : shares) {
    if (share.seconds > largest.seconds) largest = share;
  }
  return largest;
}

bool HasBacklog(double busy_seconds, double span_seconds) {
  return span_seconds > 0 && busy_seconds >= kBacklogShare * span_seconds;
}

}  // namespace

const char* LimitName(Limit limit) {
  static const char* const kNames[kLimitCount] = {"unknown", "plan",    "scan", "encode", "link",
                                                  "decode",  "credits", "peer", "source", "staging"};
  return kNames[static_cast<size_t>(limit)];
}

LimitShare LimitOfSender(const SenderTimes& times) {
  const WaitClock& waits = times.waits;
  const double link = waits.seconds(Limit::kLink), credits = waits.seconds(Limit::kCredits);
  const Limit behind = HasBacklog(times.busy_seconds, times.span_seconds) ? Limit::kDecode
                       : credits > link && times.starved                  ? Limit::kCredits
                                                                          : Limit::kLink;
  const Limit before = times.scan_seconds > times.plan_seconds ? Limit::kScan : Limit::kPlan;
  return LargestOf({{behind, link + credits},
                    {before, waits.seconds(Limit::kPlan)},
                    {Limit::kEncode, waits.seconds(Limit::kEncode)},
                    {Limit::kPeer, waits.seconds(Limit::kPeer)},
                    {Limit::kSource, waits.seconds(Limit::kSource)},
                    {Limit::kStaging, waits.seconds(Limit::kStaging)}});
}

LimitShare LimitOfReceiver(const ReceiverTimes& times) {
  const bool backlog = HasBacklog(times.busy_seconds, times.span_seconds);
  const double peer = times.before_seconds + (backlog ? 0 : times.span_seconds);
  return LargestOf({{Limit::kPeer, peer},
                    {Limit::kCredits, times.slot_seconds},
                    {Limit::kDecode, backlog ? times.span_seconds : 0}});
}

}  // namespace spectrumkv
