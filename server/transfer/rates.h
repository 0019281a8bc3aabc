// Running estimates of how fast things go: the link to each peer, the stages of this daemon, decoding at each peer. What a
// GPU does and what the CPU does are apart: one figure for both would be wrong for either.
//
// An estimate is a mean of logarithms: ten times too fast and ten times too slow count the same. Old samples fade with
// time and with what has been moved since; a sample counts by its bytes, so that small transfers, which mostly measure
// latency, move it little; and one sample alone cannot move a settled estimate by more than a factor.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "kernels/format/types.h"
#include "server/transfer/limit.h"

namespace spectrumkv {

// What tiers cost alike: words as they are; scaled; rotated and scaled.
enum class TierFamily : uint8_t { kRaw, kPlain, kRotated };
constexpr size_t kTierFamilies = 3;
constexpr TierFamily FamilyOf(Tier tier) {
  return IsRotated(tier) ? TierFamily::kRotated : IsPlain(tier) ? TierFamily::kPlain : TierFamily::kRaw;
}
// Bytes, or seconds, by family.
using ByFamily = std::array<double, kTierFamilies>;
// Bytes a second; nothing where it is not known.
using FamilyRates = std::array<std::optional<double>, kTierFamilies>;

// What reads and codes the blocks of a pool.
enum class CodedBy : uint8_t { kCpu, kGpu };
constexpr size_t kCoders = 2;

// Not thread-safe.
class RateEstimate {
 public:
  // `bytes` took `seconds`. Ignored unless both are finite and above 0.
  void Add(double bytes, double seconds, int64_t now_ns);
  // Bytes a second, once 1 MiB has been seen.
  std::optional<double> rate() const;
  // Seconds since the last sample that counted.
  double Age(int64_t now_ns) const { return static_cast<double>(now_ns - last_ns_) * 1e-9; }

 private:
  double mean_log_ = 0;
  double weight_ = 0;  // 0: nothing seen; towards 1 as samples come
  bool known_ = false;
  int64_t last_ns_ = 0;
};

// Rates by family from samples that mix them: the seconds of a mixture are shared out in the ratio that the present
// estimates give. A family learns only from samples in which it has a good part, and its first from one that is mostly
// it.
class FamilyEstimate {
 public:
  void Add(const ByFamily& bytes, double seconds, int64_t now_ns);
  FamilyRates rates() const;

 private:
  std::array<RateEstimate, kTierFamilies> by_family_;
};

// What a sender that has committed has learnt.
struct SentSample {
  CodedBy by = CodedBy::kCpu, decoded_by = CodedBy::kCpu;
  std::string peer;  // PeerKey
  double wire_bytes = 0;
  double wall_seconds = 0;     // from the first chunk handed over to the receipt
  double network_seconds = 0;  // while the network had a chunk
  Limit limit = Limit::kUnknown;
  ByFamily kv_bytes{};
  double encode_seconds = 0;  // of all threads
  double scan_seconds = 0, sample_seconds = 0, plan_seconds = 0;
  double attended_bytes = 0, attend_seconds = 0;  // AttendedBytes (server/scan/attention.h); 0: not measured
  double decode_seconds = 0;  // while the receiver had a chunk
  double setup_seconds = 0;   // 0: not measured
};

// Of this daemon, by the CPU or by its GPUs.
struct StageRates {
  std::optional<double> scan, sample;  // KV bytes a second, all threads
  std::optional<double> attend;        // AttendedBytes a second, all threads
  FamilyRates encode;                  // of one thread
  FamilyRates own_decode;              // of one thread
};

// All that a prediction needs.
struct Measured : StageRates {
  std::optional<double> link;  // wire bytes a second
  double link_age_seconds = 0;
  std::optional<double> setup_seconds;
  std::optional<double> plan;  // KV bytes a second
  FamilyRates peer_decode;     // of all threads of the peer, as it decoded last
  uint32_t threads = 1;
  uint64_t inline_chunk_bytes = 0;  // chunks up to this size are coded one after the other
};

// A peer's address as estimates know it: dialled addresses as they are, accepted ones without their port, which is
// another each time.
std::string PeerKey(const std::string& address, bool dialled);

// Thread-safe; asked once or twice in the life of a transfer, never for a chunk. Remembers kMaxPeers peers: the one not
// heard of for longest goes.
class RateBook {
 public:
  static constexpr size_t kMaxPeers = 1024;
  RateBook(uint32_t threads, uint64_t inline_chunk_bytes)
      : threads_(threads), inline_chunk_bytes_(inline_chunk_bytes) {}

  // The link as this transfer saw it, if it moved enough to say.
  std::optional<double> LearnSent(const SentSample& sample, int64_t now_ns);
  void LearnDecoded(CodedBy by, const ByFamily& kv_bytes, double seconds, int64_t now_ns);
  // Of the CPU.
  void LearnScanned(double kv_bytes, double seconds, int64_t now_ns);
  void LearnSampled(double kv_bytes, double seconds, int64_t now_ns);
  void LearnAttended(double attended_bytes, double seconds, int64_t now_ns);
  void LearnEncoded(const ByFamily& kv_bytes, double seconds, int64_t now_ns);

  // `peer` empty: nobody knows yet who will fetch, so the slowest link of all. What a GPU was not measured at yet it is
  // taken to do as the CPU does, which is slower.
  Measured Of(const std::string& peer, CodedBy by, int64_t now_ns) const;
  // What was measured, and no more.
  StageRates StagesOf(CodedBy by) const;

 private:
  struct Peer {
    RateEstimate link;
    bool link_limited = false;  // `link` has seen a transfer that the link held up
    int64_t limited_ns = 0;     // the last of them
    int64_t heard_ns = 0;
    std::array<FamilyEstimate, kCoders> decode;
    CodedBy decoded_by = CodedBy::kCpu;  // the last time
    std::optional<double> setup_seconds;
  };
  struct Stages {
    RateEstimate scan, sample, attend;
    FamilyEstimate encode, decode;
    StageRates rates() const;
  };
  std::optional<double> LearnLink(const SentSample& sample, Peer* peer, int64_t now_ns);
  Peer* PeerOf(const std::string& peer);
  Stages& of(CodedBy by) { return stages_[static_cast<size_t>(by)]; }
  const Stages& of(CodedBy by) const { return stages_[static_cast<size_t>(by)]; }

  const uint32_t threads_;
  const uint64_t inline_chunk_bytes_;
  mutable std::mutex mutex_;
  std::map<std::string, Peer> peers_;
  std::array<Stages, kCoders> stages_;
  RateEstimate plan_;
};

}  // namespace spectrumkv
