// What requests say about refinement.
#include <cmath>

#include "server/base/status.h"
#include "server/service/check.h"
#include "server/service/convert.h"

namespace spectrumkv {

absl::StatusOr<int64_t> RetainMsOf(const v1::Policy& proto, const PartId& part, const RequestDefaults& defaults) {
  const double seconds = proto.retain_seconds();
  if (seconds == 0) return 0;
  const double most = static_cast<double>(defaults.max_retain_ms) * 1e-3;
  if (!(seconds > 0 && seconds <= most)) {
    return Invalid("OUT_OF_RANGE", "policy.retain_seconds",
                   "is " + std::to_string(seconds) + ", allowed are 0 to " + std::to_string(most) +
                       " (refine.max_retain_seconds)");
  }
  if (part.count > 1) {
    return MakeError(absl::StatusCode::kUnimplemented, "RETENTION_OF_PARTS",
                     "policy.retain_seconds is given, but a transfer of several parts cannot be refined",
                     {{"field", "policy.retain_seconds"}});
  }
  return static_cast<int64_t>(std::ceil(seconds * 1e3));
}

namespace {

// UNSPECIFIED is RAW.
absl::StatusOr<Tier> FinalTierOf(int tier, const std::string& field) {
  if (tier == v1::TIER_DROP) return Invalid("INVALID_TIERS", field, "is TIER_DROP: nothing would travel");
  if (tier < 0 || tier > v1::TIER_DROP) return Invalid("UNKNOWN_TIER", field, "is " + std::to_string(tier));
  return tier == v1::TIER_UNSPECIFIED ? Tier::kRaw : static_cast<Tier>(tier - 1);
}

}  // namespace

absl::StatusOr<std::optional<Tier>> BackgroundTierOf(const v1::Policy& proto) {
  if (!proto.has_refine()) return std::optional<Tier>();
  if (proto.retain_seconds() == 0) {
    return Invalid("INVALID_POLICY", "policy.refine", "is given without policy.retain_seconds: nothing would be there to refine from");
  }
  const auto tier = FinalTierOf(proto.refine().final(), "policy.refine.final");
  if (!tier.ok()) return tier.status();
  return std::optional<Tier>(*tier);
}

absl::StatusOr<bool> IsDirect(v1::RefineMode mode, const std::string& field) {
  switch (mode) {
    case v1::REFINE_MODE_UNSPECIFIED:
    case v1::REFINE_MODE_STAGED: return false;
    case v1::REFINE_MODE_DIRECT: return true;
    default: return Invalid("INVALID_MODE", field, "is " + std::to_string(static_cast<int>(mode)) + ", no mode");
  }
}

absl::StatusOr<RefineSpec> RefineFromProto(const v1::RefineRequest& proto, const RequestDefaults& defaults) {
  RefineSpec spec;
  if (absl::Status ok = CheckTransferId(proto.transfer_id()); !ok.ok()) return ok;
  if (absl::Status ok = CheckId(proto.refine_id(), "refine_id", "INVALID_TRANSFER_ID"); !ok.ok()) return ok;
  if (proto.refine_id() == proto.transfer_id()) {
    return Invalid("INVALID_TRANSFER_ID", "refine_id", "is the transfer_id; a refinement is a transfer of its own");
  }
  const auto tier = FinalTierOf(proto.tier(), "tier");
  if (!tier.ok()) return tier.status();
  spec.tier = *tier;
  if (proto.has_budget()) {
    if (!(proto.budget() > 0 && proto.budget() <= kMaxBudget)) {
      return Invalid("INVALID_BUDGET", "budget", "is " + std::to_string(proto.budget()) + "; it must be in (0, 10]");
    }
    spec.budget = proto.budget();
  }
  const auto direct = IsDirect(proto.mode(), "mode");
  if (!direct.ok()) return direct.status();
  spec.direct = *direct;
  if (proto.selection().tokens_size() > kMaxBlockRuns || proto.selection().layers_size() > kMaxLayers) {
    return Invalid("INVALID_SELECTION", "selection", "has too many runs of tokens, or layers");
  }
  for (const v1::TokenRun& run : proto.selection().tokens()) spec.selection.tokens.push_back({run.first(), run.count()});
  spec.selection.layers.assign(proto.selection().layers().begin(), proto.selection().layers().end());
  spec.selection.scores.assign(proto.selection().scores().begin(), proto.selection().scores().end());
  const auto deadline_ms = DeadlineOf(proto.deadline_ms(), defaults);
  if (!deadline_ms.ok()) return deadline_ms.status();
  spec.deadline_ms = *deadline_ms;
  spec.transfer_id = proto.transfer_id();
  spec.refine_id = proto.refine_id();
  spec.fingerprint = FingerprintOf(proto) + "R";
  return spec;
}

}  // namespace spectrumkv
