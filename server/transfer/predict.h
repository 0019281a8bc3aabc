// How long a transfer would take, and which budget to choose for a time. Pure; docs/allocators.md, "Budget chosen by
// the daemon", says it in words.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "server/plan/plan.h"
#include "server/scan/attention.h"
#include "server/transfer/rates.h"

namespace spectrumkv {

// What a sender reads of the source before it plans.
struct SourceReads {
  bool scans = false;    // all of it
  bool samples = false;  // OPTIMAL: a few values of each token
  double attended_bytes = 0;  // RECENT_QUERIES: AttendedBytes
};
// queries: null, or checked for these layers and tokens (CheckQueries).
SourceReads ReadsFirst(const Policy& policy, bool layerwise, const RecentQueries* queries,
                       const std::vector<PlanLayer>& layers, uint32_t tokens);

// Something to move.
struct TransferWork {
  ByFamily kv_bytes{};  // by the family of the tier on the wire
  double wire_bytes = 0;
  double chunks = 1;
  SourceReads reads;
};

// What is not known and would be needed.
enum class Missing : uint8_t { kNothing, kLink, kStage };

struct Prediction {
  Missing missing = Missing::kNothing;
  double seconds = 0;  // where nothing is missing
  Limit limited_by = Limit::kUnknown;
};
// Stages overlap: the slowest of encode, link and decode decides; one chunk must pass the others before and after it;
// attention, scan, sample, plan and handshake come before. Families that nobody measured and that are less than a hundredth of the bytes
// go at the pace of the slowest known one. A peer whose decoder was never measured is taken to decode as this daemon
// does.
Prediction Predict(const TransferWork& work, const Measured& measured);

// What each budget means for one source: wire bytes and families, for each rung of the policy's ladder.
struct BudgetCurve {
  struct Point {
    double wire_bytes = 0;
    ByFamily kv_bytes{};
  };
  std::vector<Point> points;  // ascending by wire_bytes, not empty
  double kv_bytes = 0;
  double chunks = 1;
  SourceReads reads;
  bool raw_allowed = false;  // the last point is RAW
};
// REQUIRES: a policy that CheckPolicy accepts, and an allocator that is BudgetDecides.
BudgetCurve BudgetCurveOf(const Policy& policy, const std::vector<PlanLayer>& layers, uint32_t tokens,
                          SourceReads reads);
// Of a budget: as GREEDY does, the highest rung for all and the next one for as many as fit.
TransferWork WorkAt(const BudgetCurve& curve, double budget);

// Numbers as BudgetReason in report.proto.
enum class BudgetReason : uint8_t {
  kUnknown = 0,
  kRawMeetsTarget = 1,
  kRawNotSlower = 2,
  kMeetsTarget = 3,
  kOutOfReach = 4,
  kLinkUnknown = 5,
  kStageUnknown = 6
};
constexpr int kBudgetReasonCount = 7;
// "raw_meets_target", ...
const char* BudgetReasonName(BudgetReason reason);

struct BudgetChoice {
  double target_seconds = 0, min_budget = 0;
  double budget = 0;  // 1 stands for RAW where the reason says so
  BudgetReason reason = BudgetReason::kUnknown;
  std::optional<double> predicted_seconds, link_bytes_per_second;
  bool raw() const { return reason == BudgetReason::kRawMeetsTarget || reason == BudgetReason::kRawNotSlower; }
};
// Budgets are tried from above in steps of 0.01. `otherwise`: the budget where something is not known.
BudgetChoice ChooseBudget(const BudgetCurve& curve, const Measured& measured, double target_seconds, double min_budget,
                          double otherwise);

// The policy with the budget chosen in it, no longer open; `choice` says which.
Policy ResolveAutoBudget(Policy policy, const std::vector<PlanLayer>& layers, uint32_t tokens, SourceReads reads,
                         const Measured& measured, BudgetChoice* choice);

}  // namespace spectrumkv
