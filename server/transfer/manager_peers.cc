// What TransferManagerImpl knows of peers: what passed, how fast, and which budget that leads to.
#include "absl/strings/str_cat.h"
#include "server/base/status.h"
#include "server/transfer/manager.h"
#include "server/transfer/predict.h"
#include "server/transfer/shape.h"

namespace spectrumkv {
namespace {

constexpr size_t kMaxPeers = 1024;

}  // namespace

void TransferManagerImpl::LearnSpeeds() {
  const StageSpeeds& speeds = options_.speeds;
  const int64_t now_ns = parts_.clock->NowNs();
  for (size_t family = 0; family < kTierFamilies; ++family) {
    ByFamily bytes{};
    bytes[family] = speeds.kv_bytes;
    rates_.LearnEncoded(bytes, speeds.encode_seconds[family], now_ns);
    rates_.LearnDecoded(CodedBy::kCpu, bytes, speeds.decode_seconds[family], now_ns);
  }
  rates_.LearnScanned(speeds.kv_bytes * options_.compute_threads, speeds.scan_seconds, now_ns);
  rates_.LearnSampled(speeds.sampled_kv_bytes * options_.compute_threads, speeds.sample_seconds, now_ns);
  rates_.LearnAttended(speeds.attended_bytes * options_.compute_threads, speeds.attend_seconds, now_ns);
}

// Replaces a budget that was left to the daemon by one for what is known now.
absl::Status TransferManagerImpl::ChooseBudgetOf(SenderSpec* spec) {
  if (spec->policy.auto_target_seconds == 0) return absl::OkStatus();
  std::vector<LayerPlace> places;
  const std::vector<PlanLayer> layers = PlanLayersOf(spec->source->schema(), &places);
  const uint32_t tokens = spec->source->token_count();
  if (absl::Status ok = CheckPolicy(spec->policy, tokens, static_cast<uint32_t>(layers.size())); !ok.ok()) return ok;
  BudgetChoice choice;
  const RecentQueries* const queries = spec->queries.get();
  if (absl::Status ok = CheckQueriesOf(spec->policy, queries, layers, tokens, spec->layerwise); !ok.ok()) return ok;
  const SourceReads reads = ReadsFirst(spec->policy, spec->layerwise, queries, layers, tokens);
  const Measured measured = MeasuredOf(spec->peer, CoderOf(*spec->source));
  spec->policy = ResolveAutoBudget(std::move(spec->policy), layers, tokens, reads, measured, &choice);
  spec->choice = choice;
  parts_.metrics->CountBudgetChoice(static_cast<MetricBudgetReason>(choice.reason));
  return absl::OkStatus();
}

Measured TransferManagerImpl::MeasuredOf(const std::string& peer, CodedBy by) {
  return rates_.Of(peer, by, parts_.clock->NowNs());
}

StageRates TransferManagerImpl::StagesOf(CodedBy by) { return rates_.StagesOf(by); }

std::vector<PeerStatus> TransferManagerImpl::ListPeers() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<PeerStatus> peers;
  for (const auto& [address, peer] : peers_) {
    peers.push_back(peer);
    peers.back().measured = MeasuredOf(PeerKey(address, peer.direction == "dialled"), CodedBy::kCpu);
  }
  return peers;
}

void TransferManagerImpl::CountPeer(const std::string& address, const char* direction, const TransferReport* ended) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (peers_.count(address) == 0 && peers_.size() >= kMaxPeers) peers_.erase(peers_.begin());
  PeerStatus& peer = peers_[address];
  peer.address = address;
  peer.direction = direction;
  if (ended == nullptr) {
    ++peer.sessions_total;
    return;
  }
  (ended->role == Role::kSender ? peer.wire_bytes_sent : peer.wire_bytes_received) += ended->wire_bytes;
  if (!ended->error.ok())
    peer.last_error = absl::StrCat(ReasonOf(ended->error), ": ", std::string(ended->error.message()));
}

}  // namespace spectrumkv
