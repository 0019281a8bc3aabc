#include "server/transfer/predict.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "server/plan/cost.h"
#include "server/plan/ladder.h"

namespace spectrumkv {
namespace {

constexpr double kLittlePart = 0.01;
constexpr double kBudgetStep = 0.01;

// Seconds of all the bytes at these rates; nothing where a family that matters has none.
std::optional<double> SecondsOf(const ByFamily& bytes, const FamilyRates& rates) {
  const double total = std::accumulate(bytes.begin(), bytes.end(), 0.0);
  std::optional<double> slowest;
  for (const std::optional<double>& rate : rates) {
    if (rate.has_value()) slowest = std::min(*rate, slowest.value_or(*rate));
  }
  double seconds = 0;
  for (size_t f = 0; f < kTierFamilies; ++f) {
    if (bytes[f] <= 0) continue;
    const std::optional<double> rate = rates[f].has_value() || bytes[f] > kLittlePart * total ? rates[f] : slowest;
    if (!rate.has_value()) return std::nullopt;
    seconds += bytes[f] / *rate;
  }
  return seconds;
}

double Parallel(const TransferWork& work, const Measured& measured, double kv_bytes) {
  if (kv_bytes / work.chunks <= static_cast<double>(measured.inline_chunk_bytes)) return 1;
  return std::max(1.0, std::min<double>(measured.threads, work.chunks));
}

// Seconds with every thread at work.
std::optional<double> DecodeSeconds(const TransferWork& work, const Measured& measured, double parallel) {
  if (const std::optional<double> peer = SecondsOf(work.kv_bytes, measured.peer_decode); peer.has_value()) return peer;
  const std::optional<double> own = SecondsOf(work.kv_bytes, measured.own_decode);
  if (!own.has_value()) return std::nullopt;
  return *own / parallel;
}

}  // namespace

Prediction Predict(const TransferWork& work, const Measured& measured) {
  const double kv_bytes = std::accumulate(work.kv_bytes.begin(), work.kv_bytes.end(), 0.0);
  if (!measured.link.has_value()) return {Missing::kLink};
  const double parallel = Parallel(work, measured, kv_bytes);
  const std::optional<double> encode_alone = SecondsOf(work.kv_bytes, measured.encode);
  const std::optional<double> decode = DecodeSeconds(work, measured, parallel);
  const bool reads_known = (!work.reads.scans || measured.scan.has_value()) &&
                           (!work.reads.samples || measured.sample.has_value()) &&
                           (work.reads.attended_bytes == 0 || measured.attend.has_value());
  if (!encode_alone.has_value() || !decode.has_value() || !reads_known) {
    return {Missing::kStage};
  }
  struct Pace {
    Limit limit;
    double all, one_chunk;
  };
  const double link = work.wire_bytes / *measured.link;
  const Pace stages[] = {{Limit::kEncode, *encode_alone / parallel, *encode_alone / work.chunks},
                          {Limit::kLink, link, link / work.chunks},
                          {Limit::kDecode, *decode, *decode / work.chunks}};
  Pace slowest = stages[0];
  double fill = 0;
  for (const Pace& stage : stages) {
    if (stage.all > slowest.all) slowest = stage;
    fill += stage.one_chunk;
  }
  fill -= slowest.one_chunk;
  const double scan = (work.reads.scans ? kv_bytes / *measured.scan : 0) +
                      (work.reads.samples ? kv_bytes / *measured.sample : 0) +
                      (work.reads.attended_bytes > 0 ? work.reads.attended_bytes / *measured.attend : 0);
  const double plan = measured.plan.has_value() ? kv_bytes / *measured.plan : 0;
  const double before = std::max(scan + plan, measured.setup_seconds.value_or(0));
  Limit limit = slowest.limit;
  if (before > slowest.all) limit = before > scan + plan ? Limit::kPeer : scan > plan ? Limit::kScan : Limit::kPlan;
  return {Missing::kNothing, before + slowest.all + fill, limit};
}

BudgetCurve BudgetCurveOf(const Policy& policy, const std::vector<PlanLayer>& layers, uint32_t tokens,
                          SourceReads reads) {
  const Ladder ladder = LadderOf(policy);
  TransferShape shape;
  shape.token_count = tokens;
  shape.kept = {{0, tokens}};
  shape.layers = layers;
  Unit all{{0, tokens}, std::vector<uint32_t>(layers.size())};
  std::iota(all.layers.begin(), all.layers.end(), 0);
  const uint32_t pinned = std::min(policy.sinks, tokens);
  const std::vector<uint64_t> bytes =
      CostModel(layers, all, CostRules{&ladder, pinned, /*payload_only=*/false}, nullptr).BytesByRung();
  BudgetCurve curve;
  curve.kv_bytes = static_cast<double>(KvBytesOf(shape));
  for (const PlanLayer& layer : layers) {
    const uint32_t step = TokensPerChunk(layer.heads, layer.head_dim, layer.dtype, layer.has_v);
    curve.chunks += std::ceil(static_cast<double>(tokens) / step);
  }
  curve.chunks -= 1;
  curve.reads = reads;
  curve.raw_allowed = ladder.back() == Rung{};
  for (size_t rung = 0; rung < ladder.size(); ++rung) {
    BudgetCurve::Point point;
    point.wire_bytes = static_cast<double>(bytes[rung]);
    for (const PlanLayer& layer : layers) {
      const auto raw = static_cast<double>(KvBytes(DimsOf(layer, layer.raw_only ? tokens : pinned)));
      const double coded = static_cast<double>(KvBytes(DimsOf(layer, tokens))) - raw;
      const double k = layer.has_v ? coded / 2 : coded;
      point.kv_bytes[static_cast<size_t>(TierFamily::kRaw)] += raw;
      point.kv_bytes[static_cast<size_t>(FamilyOf(ladder[rung].k))] += k;
      point.kv_bytes[static_cast<size_t>(FamilyOf(ladder[rung].v))] += coded - k;
    }
    // A higher rung that is cheaper (chunks of very few tokens) takes the place of the lower ones.
    while (!curve.points.empty() && curve.points.back().wire_bytes >= point.wire_bytes) curve.points.pop_back();
    curve.points.push_back(point);
  }
  return curve;
}

TransferWork WorkAt(const BudgetCurve& curve, double budget) {
  const double bytes = budget * curve.kv_bytes;
  TransferWork work;
  work.chunks = curve.chunks;
  work.reads = curve.reads;
  size_t above = 0;
  while (above < curve.points.size() && curve.points[above].wire_bytes <= bytes) ++above;
  const BudgetCurve::Point& low = curve.points[above == 0 ? 0 : above - 1];
  const BudgetCurve::Point& high = curve.points[std::min(above, curve.points.size() - 1)];
  const double width = high.wire_bytes - low.wire_bytes;
  const double part = width > 0 ? std::clamp((bytes - low.wire_bytes) / width, 0.0, 1.0) : 0;
  work.wire_bytes = low.wire_bytes + part * width;
  for (size_t f = 0; f < kTierFamilies; ++f) {
    work.kv_bytes[f] = low.kv_bytes[f] + part * (high.kv_bytes[f] - low.kv_bytes[f]);
  }
  return work;
}

const char* BudgetReasonName(BudgetReason reason) {
  static const char* const kNames[kBudgetReasonCount] = {
      "unknown", "raw_meets_target", "raw_not_slower", "meets_target", "out_of_reach", "link_unknown", "stage_unknown"};
  return kNames[static_cast<size_t>(reason)];
}

BudgetChoice ChooseBudget(const BudgetCurve& curve, const Measured& measured, double target_seconds, double min_budget,
                          double otherwise) {
  BudgetChoice choice;
  choice.target_seconds = target_seconds;
  choice.min_budget = min_budget;
  choice.link_bytes_per_second = measured.link;
  const auto choose = [&](double budget, BudgetReason reason, std::optional<double> seconds) {
    choice.budget = budget;
    choice.reason = reason;
    choice.predicted_seconds = seconds;
    return choice;
  };
  std::optional<double> raw;
  if (curve.raw_allowed) {
    TransferWork work;
    work.kv_bytes = curve.points.back().kv_bytes;
    work.wire_bytes = curve.points.back().wire_bytes;
    work.chunks = curve.chunks;  // RAW reads nothing first
    const Prediction prediction = Predict(work, measured);
    if (prediction.missing == Missing::kLink) return choose(otherwise, BudgetReason::kLinkUnknown, std::nullopt);
    if (prediction.missing == Missing::kStage) return choose(otherwise, BudgetReason::kStageUnknown, std::nullopt);
    raw = prediction.seconds;
    if (*raw <= target_seconds) return choose(1, BudgetReason::kRawMeetsTarget, raw);
  }
  std::optional<double> meets, meets_seconds, quickest, last_seconds;
  // Whole steps, so that the budgets tried do not depend on how sums of 0.01 are rounded.
  for (int step = static_cast<int>(std::lround(1 / kBudgetStep)); step >= 0; --step) {
    const double budget = std::max(step * kBudgetStep, min_budget);
    const Prediction prediction = Predict(WorkAt(curve, budget), measured);
    if (prediction.missing == Missing::kLink) return choose(otherwise, BudgetReason::kLinkUnknown, std::nullopt);
    if (prediction.missing == Missing::kStage) return choose(otherwise, BudgetReason::kStageUnknown, std::nullopt);
    last_seconds = prediction.seconds;
    quickest = std::min(prediction.seconds, quickest.value_or(prediction.seconds));
    if (!meets.has_value() && prediction.seconds <= target_seconds) {
      meets = budget;
      meets_seconds = prediction.seconds;
    }
    if (budget <= min_budget) break;
  }
  if (raw.has_value() && *raw <= *quickest) return choose(1, BudgetReason::kRawNotSlower, raw);
  if (meets.has_value()) return choose(*meets, BudgetReason::kMeetsTarget, meets_seconds);
  return choose(min_budget, BudgetReason::kOutOfReach, last_seconds);
}

Policy ResolveAutoBudget(Policy policy, const std::vector<PlanLayer>& layers, uint32_t tokens, SourceReads reads,
                         const Measured& measured, BudgetChoice* choice) {
  *choice = ChooseBudget(BudgetCurveOf(policy, layers, tokens, reads), measured, policy.auto_target_seconds,
                         policy.auto_min_budget, policy.budget);
  policy.budget = choice->budget;
  policy.soft_budget = true;
  if (choice->raw()) policy.allocator = Allocator::kRaw;
  policy.auto_target_seconds = 0;
  return policy;
}

SourceReads ReadsFirst(const Policy& policy, bool layerwise, const RecentQueries* queries,
                       const std::vector<PlanLayer>& layers, uint32_t tokens) {
  const double attended_bytes = queries == nullptr ? 0 : AttendedBytes(*queries, layers, tokens);
  if (policy.allocator == Allocator::kRaw) return {false, false, attended_bytes};
  const bool scans =
      policy.importance == ImportanceSource::kKeyNorm || policy.strict_budget || ScanChooses(policy, layerwise);
  return {scans, policy.allocator == Allocator::kOptimal, attended_bytes};
}

}  // namespace spectrumkv
