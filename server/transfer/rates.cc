#include "server/transfer/rates.h"

#include <algorithm>
#include <cmath>

namespace spectrumkv {
namespace {

// A sample of this many bytes or more takes kGain of the estimate, smaller ones in proportion.
constexpr double kFullBytes = 16 << 20;
constexpr double kGain = 0.4;
// What 1 MiB gives, in however many samples.
constexpr double kKnownWeight = 0.98 * kGain * (1 << 20) / kFullBytes;
constexpr double kHalfLifeSeconds = 60;
// How far one sample may lie from an estimate that has this much weight.
constexpr double kSettledWeight = 0.2;
constexpr double kMaxStep = 2.0794415416798357;  // log(8)

// Shorter transfers are mostly latency.
constexpr double kLeastLinkBytes = 256 << 10;
// So long a transfer that was held up by the link outweighs what the others suggest.
constexpr double kLinkLimitedSeconds = 300;
// Longer than this is no handshake but a wait for the peer's worker.
constexpr double kMaxSetupSeconds = 0.5;
constexpr double kSetupGrowth = 1.25;

constexpr double kGoodPart = 0.25;
constexpr double kMostPart = 0.75;

double SumOf(const ByFamily& values) { return values[0] + values[1] + values[2]; }

bool IsPositive(double value) { return std::isfinite(value) && value > 0; }

// `rates`, and for what is not known there what `others` say.
StageRates Completed(StageRates rates, const StageRates& others) {
  const auto complete = [](std::optional<double>* rate, const std::optional<double>& other) {
    if (!rate->has_value()) *rate = other;
  };
  complete(&rates.scan, others.scan);
  complete(&rates.sample, others.sample);
  complete(&rates.attend, others.attend);
  for (size_t f = 0; f < kTierFamilies; ++f) {
    complete(&rates.encode[f], others.encode[f]);
    complete(&rates.own_decode[f], others.own_decode[f]);
  }
  return rates;
}

}  // namespace

void RateEstimate::Add(double bytes, double seconds, int64_t now_ns) {
  if (!IsPositive(bytes) || !IsPositive(seconds)) return;
  const double gain = kGain * std::min(1.0, bytes / kFullBytes);
  if (weight_ > 0) weight_ *= std::exp2(-std::max(0.0, Age(now_ns)) / kHalfLifeSeconds);
  double sample = std::log(bytes / seconds);
  if (known_ && weight_ > kSettledWeight) sample = std::clamp(sample, mean_log_ - kMaxStep, mean_log_ + kMaxStep);
  const double weight = weight_ * (1 - gain) + gain;
  mean_log_ += gain / weight * (sample - mean_log_);
  weight_ = weight;
  known_ = known_ || weight_ >= kKnownWeight;
  last_ns_ = now_ns;
}

std::optional<double> RateEstimate::rate() const {
  if (!known_) return std::nullopt;
  return std::exp(mean_log_);
}

void FamilyEstimate::Add(const ByFamily& bytes, double seconds, int64_t now_ns) {
  const double total = SumOf(bytes);
  if (!IsPositive(total) || !IsPositive(seconds)) return;
  ByFamily expected{};
  for (size_t f = 0; f < kTierFamilies; ++f) {
    // What is not known is taken to go as the whole does.
    const double rate = by_family_[f].rate().value_or(total / seconds);
    expected[f] = bytes[f] / rate;
  }
  const double ratio = seconds / SumOf(expected);
  for (size_t f = 0; f < kTierFamilies; ++f) {
    const double least = by_family_[f].rate().has_value() ? kGoodPart : kMostPart;
    if (bytes[f] >= least * total) by_family_[f].Add(bytes[f], expected[f] * ratio, now_ns);
  }
}

FamilyRates FamilyEstimate::rates() const {
  FamilyRates rates;
  for (size_t f = 0; f < kTierFamilies; ++f) rates[f] = by_family_[f].rate();
  return rates;
}

std::string PeerKey(const std::string& address, bool dialled) {
  if (dialled) return address;
  return address.substr(0, address.rfind(':'));
}

RateBook::Peer* RateBook::PeerOf(const std::string& peer) {
  const auto found = peers_.find(peer);
  if (found != peers_.end()) return &found->second;
  if (peers_.size() >= kMaxPeers) {
    peers_.erase(std::min_element(peers_.begin(), peers_.end(),
                                  [](const auto& a, const auto& b) { return a.second.heard_ns < b.second.heard_ns; }));
  }
  return &peers_[peer];
}

// Where the link held the transfer up, what it moved in the time is the link's rate. Else that is only a lower bound;
// the time in which the network had something is a better guess, but an optimistic one (buffers take chunks faster than
// the link does), so it must not undo what was measured.
std::optional<double> RateBook::LearnLink(const SentSample& sample, Peer* peer, int64_t now_ns) {
  if (sample.wire_bytes < kLeastLinkBytes || !IsPositive(sample.wall_seconds)) return std::nullopt;
  const double moved = sample.wire_bytes / sample.wall_seconds;
  if (sample.limit == Limit::kLink) {
    if (!peer->link_limited) peer->link = RateEstimate();  // better than all guesses
    peer->link_limited = true;
    peer->limited_ns = now_ns;
    peer->link.Add(sample.wire_bytes, sample.wall_seconds, now_ns);
    return moved;
  }
  const bool fresh = peer->link_limited && static_cast<double>(now_ns - peer->limited_ns) * 1e-9 < kLinkLimitedSeconds;
  const std::optional<double> known = peer->link.rate();
  if (fresh) {
    if (known.has_value() && moved > *known) peer->link.Add(sample.wire_bytes, sample.wall_seconds, now_ns);
    return moved;
  }
  if (!IsPositive(sample.network_seconds)) return std::nullopt;
  if (peer->link_limited) peer->link = RateEstimate();
  peer->link_limited = false;
  // The network cannot have had a chunk for longer than the transfer took; it may have been asked at odd moments.
  const double seconds = std::min(sample.network_seconds, sample.wall_seconds);
  peer->link.Add(sample.wire_bytes, seconds, now_ns);
  return sample.wire_bytes / seconds;
}

std::optional<double> RateBook::LearnSent(const SentSample& sample, int64_t now_ns) {
  const double kv_bytes = SumOf(sample.kv_bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  Stages& mine = of(sample.by);
  mine.encode.Add(sample.kv_bytes, sample.encode_seconds, now_ns);
  mine.scan.Add(kv_bytes, sample.scan_seconds, now_ns);
  mine.sample.Add(kv_bytes, sample.sample_seconds, now_ns);
  mine.attend.Add(sample.attended_bytes, sample.attend_seconds, now_ns);
  plan_.Add(kv_bytes, sample.plan_seconds, now_ns);
  if (sample.peer.empty()) return std::nullopt;
  Peer* peer = PeerOf(sample.peer);
  peer->heard_ns = now_ns;
  peer->decode[static_cast<size_t>(sample.decoded_by)].Add(sample.kv_bytes, sample.decode_seconds, now_ns);
  peer->decoded_by = sample.decoded_by;
  if (IsPositive(sample.setup_seconds) && sample.setup_seconds <= kMaxSetupSeconds) {
    peer->setup_seconds =
        std::min(sample.setup_seconds, kSetupGrowth * peer->setup_seconds.value_or(sample.setup_seconds));
  }
  return LearnLink(sample, peer, now_ns);
}

void RateBook::LearnDecoded(CodedBy by, const ByFamily& kv_bytes, double seconds, int64_t now_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  of(by).decode.Add(kv_bytes, seconds, now_ns);
}

void RateBook::LearnScanned(double kv_bytes, double seconds, int64_t now_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  of(CodedBy::kCpu).scan.Add(kv_bytes, seconds, now_ns);
}

void RateBook::LearnSampled(double kv_bytes, double seconds, int64_t now_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  of(CodedBy::kCpu).sample.Add(kv_bytes, seconds, now_ns);
}

void RateBook::LearnAttended(double attended_bytes, double seconds, int64_t now_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  of(CodedBy::kCpu).attend.Add(attended_bytes, seconds, now_ns);
}

void RateBook::LearnEncoded(const ByFamily& kv_bytes, double seconds, int64_t now_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  of(CodedBy::kCpu).encode.Add(kv_bytes, seconds, now_ns);
}

StageRates RateBook::Stages::rates() const {
  return {scan.rate(), sample.rate(), attend.rate(), encode.rates(), decode.rates()};
}

StageRates RateBook::StagesOf(CodedBy by) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return of(by).rates();
}

Measured RateBook::Of(const std::string& peer, CodedBy by, int64_t now_ns) const {
  Measured measured;
  measured.threads = threads_;
  measured.inline_chunk_bytes = inline_chunk_bytes_;
  std::lock_guard<std::mutex> lock(mutex_);
  static_cast<StageRates&>(measured) = Completed(of(by).rates(), of(CodedBy::kCpu).rates());
  measured.plan = plan_.rate();
  auto found = peers_.find(peer);
  if (peer.empty()) {
    for (auto it = peers_.begin(); it != peers_.end(); ++it) {
      const std::optional<double> rate = it->second.link.rate();
      if (rate.has_value() && (found == peers_.end() || *rate < *found->second.link.rate())) found = it;
    }
  }
  if (found == peers_.end()) return measured;
  measured.link = found->second.link.rate();
  measured.link_age_seconds = found->second.link.Age(now_ns);
  measured.setup_seconds = found->second.setup_seconds;
  measured.peer_decode = found->second.decode[static_cast<size_t>(found->second.decoded_by)].rates();
  return measured;
}

}  // namespace spectrumkv
