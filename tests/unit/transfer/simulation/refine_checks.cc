// What is promised of refinements: they end once, bring what was asked for and nothing else, leave their base as it was
// told, and are counted.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "tests/unit/metrics/exposition.h"
#include "tests/unit/transfer/simulation/simulation.h"

namespace spectrumkv {
namespace {

const std::set<std::string>& RefusalsOfApply() {
  static const auto* const kKnown = new std::set<std::string>{
      "UNKNOWN_TRANSFER", "NOT_A_REFINEMENT", "NOT_RETAINED", "NOT_STAGED", "REFINEMENT_DROPPED", "BLOCKS_REUSED",
      "BLOCKS_IN_USE",    "POOL_CLOSING",     "UNKNOWN_POOL", "NOT_EXACT"};
  return *kKnown;
}

// Root of the mean square of the difference over that of the words, both of halves.
double LossOf(const std::string& words, const std::string& want) {
  double lost = 0, all = 0;
  for (size_t at = 0; at + 1 < want.size(); at += 2) {
    _Float16 is, should;
    std::memcpy(&is, &words[at], 2);
    std::memcpy(&should, &want[at], 2);
    const double difference = static_cast<double>(is) - static_cast<double>(should);
    lost += difference * difference;
    all += static_cast<double>(should) * static_cast<double>(should);
  }
  return std::sqrt(lost / all);
}

// Above what a tier loses of such values, below what the next coarser one does.
double MostLossOf(Tier tier) { return tier == Tier::kQ8 || tier == Tier::kP8 ? 0.02 : 0.25; }

bool Names(const RefineSelection& selection, uint32_t layer, uint32_t token) {
  const auto holds = [token](const TokenRange& run) { return token >= run.first && token - run.first < run.count; };
  const bool of_layers = selection.layers.empty() ||
                         std::count(selection.layers.begin(), selection.layers.end(), layer) != 0;
  return of_layers && (selection.tokens.empty() || std::any_of(selection.tokens.begin(), selection.tokens.end(), holds));
}

double SumOf(const std::map<std::string, double>& series, const std::string& name) {
  double sum = 0;
  for (const auto& [key, value] : series) sum += key.compare(0, name.size(), name) == 0 ? value : 0;
  return sum;
}

}  // namespace

void Simulation::OnRefinementEnd(SimTransfer* refinement, Role role, const TransferReport& report) {
  ++engines_[refinement->half(role).engine].refined_ends;
  const std::string who = role == Role::kSender ? "sender" : "receiver";
  const std::string reason = report.error.ok() ? "" : ", " + ReasonOf(report.error);
  ++counts_->refined[who + " " + StateName(report.state) + reason];
  if (report.error.ok() && report.attempts > 1) ++counts_->refined[who + " COMMITTED, though its link had broken"];
  EXPECT_EQ(report.saved_bytes(), 0u);
  if (SimTransfer* const refined = BaseNamed(report.refines); refined != nullptr && Here(refined->half(role))) {
    refined->half(role).refined_wire_bytes += report.wire_bytes;
    if (bug_ == SimBug::kBytesMissing && report.wire_bytes > 0) --refined->half(role).refined_wire_bytes;
    CheckBase(*refined, role);
  }
  SimTransfer* const base = refinement->base;
  EXPECT_TRUE(lied_ || base != nullptr);
  if (base == nullptr || role == Role::kSender) return;
  EXPECT_EQ(report.refines, base->id);
  if (report.state == TransferState::kCommitted) {
    EXPECT_TRUE(refinement->sender.started) << refinement->id << " has committed without its source";
  }
  if (ReasonOf(report.error) == "NOT_EXACT") {
    EXPECT_TRUE(lied_ || !base->lost.empty()) << refinement->id << ": nobody else has written";
  }
  if (!base->in_use) return;
  SimPool& pool = *base->receiver.pool;
  if (refinement->ask.direct && pool.alive() && pool.closing()) {
    for (const BlockRange& run : base->receiver.runs) {
      if (base->lost.count(run.first) == 0) pool.AcceptLater({run});
    }
  } else if (refinement->ask.direct) {
    counts_->refined["cells that a direct one wrote"] += AcceptCells(*refinement);
  }
  if (report.exact) CheckExact(*base);
}

uint64_t Simulation::AcceptCells(const SimTransfer& refinement) {
  const SimTransfer& base = *refinement.base;
  const SimHalf& half = base.receiver;
  uint64_t cells = 0;
  for (size_t i = 0; i < half.runs.size(); ++i) {
    const uint64_t block = half.runs[i].first;
    if (base.lost.count(block) != 0) continue;
    const auto first = static_cast<uint32_t>(i * target_layout_.block_tokens);
    cells += half.pool->AcceptChanges(
        block, [&](size_t plane, uint32_t token, const std::string& before, const std::string& now) {
          CheckCell(refinement, plane, first + token, before, now);
        });
  }
  return cells;
}

void Simulation::CheckCell(const SimTransfer& refinement, size_t plane, uint32_t token, const std::string& before,
                           const std::string& now) const {
  const SimTransfer& base = *refinement.base;
  EXPECT_LT(token, base.tokens) << refinement.id << " has written behind the last token";
  EXPECT_TRUE(Names(refinement.ask.selection, static_cast<uint32_t>(plane / 2), token))
      << refinement.id << " has written token " << token << " of plane " << plane << ", which was not asked for";
  if (lied_ || token >= base.tokens || base.sent.empty()) return;
  const std::string want = base.sent[plane].substr(token * now.size(), now.size());
  EXPECT_FALSE(before == want) << refinement.id << ": a cell that was exact has changed";
  if (refinement.ask.tier == Tier::kRaw) {
    EXPECT_TRUE(now == want) << refinement.id << ": a cell is neither the base's nor the source's";
  } else {
    EXPECT_LE(LossOf(now, want), MostLossOf(refinement.ask.tier)) << refinement.id << ": a cell is not of its tier";
  }
}

void Simulation::CheckApplied(SimTransfer* refinement, const absl::StatusOr<RefinementApplied>& applied) {
  const SimTransfer* const base = refinement->base;
  if (base == nullptr) return;
  const uint64_t cell_bytes = uint64_t{target_layout_.heads} * target_layout_.head_dim * SizeOf(target_layout_.dtype);
  const bool ours = Here(refinement->receiver) && base->in_use;
  const uint64_t changed = ours && !refinement->ask.direct ? AcceptCells(*refinement) : 0;
  SimEngine& engine = engines_[refinement->receiver.engine];
  const auto report = engine.manager->Get(kMe, refinement->id, Role::kReceiver);
  if (!applied.ok()) {
    const std::string reason = ReasonOf(applied.status());
    ++counts_->refined["apply: " + reason];
    EXPECT_EQ(RefusalsOfApply().count(reason), 1u) << applied.status();
    if (reason != "NOT_EXACT") {
      EXPECT_EQ(changed, 0u) << refinement->id << ": refused, and done: " << applied.status();
      return;
    }
    EXPECT_TRUE(lied_ || !base->lost.empty()) << refinement->id << ": nobody else has written";
    if (report.ok()) refinement->applied_bytes = report->applied_bytes;
    return;
  }
  EXPECT_TRUE(ours) << refinement->id << " was applied to blocks that had been released";
  EXPECT_LE(changed * cell_bytes, applied->applied_bytes) << refinement->id << " has written more than it says";
  refinement->applied_bytes += applied->applied_bytes;
  engine.applied_bytes += applied->applied_bytes;
  counts_->refined["cells applied"] += changed;
  counts_->refined["cells left alone, their blocks are others'"] += applied->stale_cells;
  if (applied->complete) {
    EXPECT_EQ(applied->staged_bytes, 0u) << refinement->id;
  }
  if (report.ok()) {
    EXPECT_EQ(report->applied_bytes, refinement->applied_bytes) << refinement->id;
    EXPECT_LE(report->applied_bytes + report->stale_cells * cell_bytes + report->staged_bytes,
              report->cells * cell_bytes)
        << refinement->id << " has applied more cells than there are";
  }
  if (applied->exact && applied->applied_bytes > 0) CheckExact(*base);
}

void Simulation::CheckExact(const SimTransfer& base) {
  ++counts_->refined["exact"];
  const uint32_t block_tokens = target_layout_.block_tokens;
  for (size_t i = 0; i < base.receiver.runs.size() && i * block_tokens < base.tokens && !lied_; ++i) {
    const BlockRange run = base.receiver.runs[i];
    const uint32_t tokens = std::min<uint32_t>(block_tokens, base.tokens - static_cast<uint32_t>(i) * block_tokens);
    const std::vector<std::string> now = base.receiver.pool->Read({run}, tokens);
    for (size_t plane = 0; plane < now.size(); ++plane) {
      const size_t first = i * (now[plane].size() / tokens) * block_tokens;
      EXPECT_EQ(base.sent[plane].compare(first, now[plane].size(), now[plane]), 0)
          << base.id << " is said to be exact, plane " << plane << " of block " << i << " is not";
    }
  }
}

void Simulation::CheckBase(const SimTransfer& base, Role role) {
  const SimHalf& half = base.half(role);
  if (!Here(half) || half.terminals == 0 || half.report.state != TransferState::kCommitted) return;
  const auto report = engines_[half.engine].manager->Get(kMe, base.id, role);
  if (!report.ok()) return;  // forgotten
  EXPECT_EQ(bug_ == SimBug::kBaseFails ? TransferState::kFailed : report->state, TransferState::kCommitted)
      << base.id << " has committed, and a refinement has changed that";
  EXPECT_TRUE(report->error.ok()) << report->error;
  EXPECT_EQ(report->refined_wire_bytes, half.refined_wire_bytes)
      << base.id << ": bytes that its refinements moved do not add up";
}

// REQUIRES: its life is over and nothing is kept any more.
void Simulation::CheckMetrics(const SimEngine& engine) {
  const std::map<std::string, double> series = ParseExposition(engine.metrics->Render());
  EXPECT_EQ(SumOf(series, "spectrumkv_refinements_total"), static_cast<double>(engine.refined_ends))
      << "refinements were begun or ended that nobody was told of";
  EXPECT_EQ(SumOf(series, "spectrumkv_refinement_applied_bytes_total"), static_cast<double>(engine.applied_bytes));
  for (const Role role : {Role::kSender, Role::kReceiver}) {
    uint64_t saved = 0;
    for (const auto& transfer : transfers_) {
      const SimHalf& half = transfer->half(role);
      if (transfer->refines || half.epoch != engine.epoch || half.terminals == 0) continue;
      if (half.report.state != TransferState::kCommitted) continue;
      const uint64_t moved = half.report.wire_bytes + half.refined_wire_bytes;
      saved += half.report.kv_bytes > moved ? half.report.kv_bytes - moved : 0;
    }
    const std::string name = role == Role::kSender ? "sender" : "receiver";
    EXPECT_EQ(SumOf(series, "spectrumkv_saved_bytes_total{role=\"" + name + "\"}"), static_cast<double>(saved)) << name;
  }
}

bool Simulation::HoldsSource(const SimTransfer& transfer, const SimTransfer& but, uint64_t block) const {
  const SimHalf& half = transfer.sender;
  if (&transfer == &but || transfer.base == &but || half.pool != but.sender.pool || !half.started) return false;
  if (half.terminals > 0 && !half.kept) return false;
  return std::any_of(half.runs.begin(), half.runs.end(), [block](const BlockRange& run) { return run.first == block; });
}

}  // namespace spectrumkv
