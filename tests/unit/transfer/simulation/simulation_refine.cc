// What happens to transfers that have committed and are kept: their workers ask for refinements, apply, cancel and release
// them, give blocks to others, write behind the last token; daemons drain.
#include <algorithm>
#include <utility>

#include "tests/unit/transfer/simulation/failing_new.h"
#include "tests/unit/transfer/simulation/sim_watcher.h"
#include "tests/unit/transfer/simulation/simulation.h"

namespace spectrumkv {
namespace {

const std::set<std::string>& RefusalsOfRefine() {
  static const auto* const kKnown = new std::set<std::string>{
      "NOT_COMMITTED",     "NOT_RETAINED",        "PEER_UNKNOWN",  "BUDGET_TOO_SMALL", "INVALID_SELECTION",
      "OUT_OF_MEMORY",     "REFINE_STAGING_FULL", "BLOCKS_REUSED", "BLOCKS_IN_USE",    "POOL_CLOSING",
      "UNKNOWN_POOL",      "TRANSFERS_FULL",      "DRAINING",      "UNKNOWN_TRANSFER", "TRANSFER_EXISTS"};
  return *kKnown;
}

}  // namespace

void Simulation::MakeRefinable(SimTransfer* transfer) {
  if (!rates_.refine || random_.OneIn(6)) return;
  if (!random_.OneIn(12)) {
    transfer->retain_ms = static_cast<int64_t>(random_.OneIn(6) ? random_.Between(1, 300) : random_.Between(500, 8000));
  }
  transfer->refinable = !random_.OneIn(12);
  transfer->refine_direct = random_.OneIn(2);
  if (random_.OneIn(3)) transfer->background = random_.OneIn(3) ? Tier::kQ8 : Tier::kRaw;
}

void Simulation::RefineEvent() {
  SimTransfer* const base = AnyBase();
  if (base == nullptr) return StartSomething();
  const std::shared_ptr<SimTransfer> child = AnyChild(*base);
  const Role role = random_.OneIn(2) ? Role::kSender : Role::kReceiver;
  switch (random_.Below(22)) {
    case 0:
      if (child != nullptr && random_.OneIn(2)) CancelHalf(child, role);
      return;
    case 1:
      if (child != nullptr && random_.OneIn(2)) ReleaseHalf(child, role);
      return;
    case 2:
      if (random_.OneIn(3)) ReleaseHalf(base->shared_from_this(), role);
      return;
    case 3: return WriteTail(base);
    case 4: return ReuseSource(base, /*released=*/false);
    case 5:
      if (child != nullptr) CheckRepeat(*child);
      return;
    case 6:
      if (child == nullptr || child->half(role).terminals > 0 || !Here(base->half(role))) return;
      return LosePool(&engines_[base->half(role).engine], base->half(role).pool);
    case 7: return GiveAway(base);
    case 8:
    case 9:
    case 10:
    case 11:
    case 12:
    case 13:
    case 14:
      if (child != nullptr) ApplySome(child);
      return;
    default: return StartRefinement(base);
  }
}

SimTransfer* Simulation::AnyBase() {
  const size_t last = std::min<size_t>(bases_.size(), 4);
  std::vector<SimTransfer*> latest(bases_.end() - static_cast<std::ptrdiff_t>(last), bases_.end());
  if (latest.empty() || random_.OneIn(6)) {  // also one that was released, or that its daemon has forgotten
    const size_t most = std::min<size_t>(bases_.size(), 12);
    return latest.empty() ? nullptr : bases_[bases_.size() - 1 - random_.Below(most)];
  }
  latest.erase(std::remove_if(latest.begin(), latest.end(), [](SimTransfer* base) { return !base->in_use; }), latest.end());
  return latest.empty() ? nullptr : latest[random_.Below(latest.size())];
}

// Mostly one that runs, or has committed.
std::shared_ptr<SimTransfer> Simulation::AnyChild(const SimTransfer& base) {
  if (base.children.empty()) return nullptr;
  if (random_.OneIn(5)) return base.children[random_.Below(base.children.size())];
  std::vector<std::shared_ptr<SimTransfer>> good;
  for (const auto& child : base.children) {
    const SimHalf& half = child->receiver;
    if (half.terminals == 0 || half.report.state == TransferState::kCommitted) good.push_back(child);
  }
  return good.empty() ? nullptr : good[random_.Below(good.size())];
}

RefineSelection Simulation::RandomSelection(const SimTransfer& base) {
  RefineSelection selection;
  if (random_.OneIn(3)) {
    for (uint32_t at = static_cast<uint32_t>(random_.Below(4)); at < base.tokens;) {
      const auto count = static_cast<uint32_t>(std::min<uint64_t>(random_.Between(1, 9), base.tokens - at));
      selection.tokens.push_back({at, count});
      at += count + static_cast<uint32_t>(random_.Between(1, 12));
    }
  }
  if (random_.OneIn(3)) selection.layers.push_back(static_cast<uint32_t>(random_.Below(target_layout_.layers)));
  if (random_.OneIn(4)) {
    for (uint32_t i = 0; i < base.tokens; ++i) selection.scores.push_back(static_cast<float>(random_.Below(100)));
  }
  return selection;
}

RefineSpec Simulation::RandomAsk(const SimTransfer& base) {
  constexpr Tier kCoarser[] = {Tier::kQ8, Tier::kP8, Tier::kQ4, Tier::kP4};
  RefineSpec ask;
  ask.transfer_id = base.id;
  ask.refine_id = base.id + ".r" + std::to_string(base.children.size());
  ask.owner = kMe;
  if (!base.pull || random_.OneIn(2)) ask.peer = engines_[base.sender.engine].name;
  if (random_.OneIn(40)) ask.peer.clear();
  if (random_.OneIn(5)) ask.tier = kCoarser[random_.Below(std::size(kCoarser))];
  if (random_.OneIn(2)) ask.selection = RandomSelection(base);
  if (random_.OneIn(40)) ask.selection.tokens = {{base.tokens, 1}};
  if (random_.OneIn(4)) ask.budget = 0.01 + static_cast<double>(random_.Below(100)) / 100;
  ask.direct = random_.OneIn(3);
  ask.deadline_ms = static_cast<int64_t>(random_.OneIn(6) ? random_.Between(1, 100) : random_.Between(500, 8000));
  ask.fingerprint = "f";
  return ask;
}

void Simulation::StartRefinement(SimTransfer* base) {
  SimEngine& engine = engines_[base->receiver.engine];
  if (bug_ == SimBug::kSourceChanges) ReuseSource(base, /*released=*/false);
  const auto refinement = std::make_shared<SimTransfer>();
  refinement->ask = RandomAsk(*base);
  refinement->id = refinement->ask.refine_id;
  const bool fails = rates_.memory && random_.OneIn(8);
  RefuseNothrowNew(fails);
  const auto started = engine.manager->Refine(refinement->ask);
  RefuseNothrowNew(false);
  if (fails && ReasonOf(started.status()) == "OUT_OF_MEMORY") Note("memory: none for staging");
  if (!started.ok()) {
    EXPECT_EQ(RefusalsOfRefine().count(ReasonOf(started.status())), 1u) << started.status();
    ++counts_->refined["refused: " + ReasonOf(started.status())];
    return;
  }
  EXPECT_FALSE(fails && !refinement->ask.direct && started->cells > 0) << "staged in memory that was not there";
  EXPECT_EQ(started->cells == 0, started->kv_bytes == 0);
  if (started->cells == 0) {
    EXPECT_EQ(ReasonOf(engine.manager->Get(kMe, refinement->id, Role::kReceiver).status()), "UNKNOWN_TRANSFER");
    ++counts_->refined["nothing to gain"];
    return;
  }
  ++counts_->refined[refinement->ask.direct ? "begun, direct" : "begun, staged"];
  EXPECT_TRUE(Here(base->receiver)) << base->id << " is refined by a daemon that has never had it";
  EXPECT_TRUE(base->in_use) << base->id << " is refined though it was released";
  refinement->answer = *started;
  Enter(refinement, base, refinement->id);
  Adopt(refinement, Role::kReceiver);
}

void Simulation::Enter(const std::shared_ptr<SimTransfer>& refinement, SimTransfer* base, const std::string& key) {
  refinements_[key] = refinement;
  transfers_.push_back(refinement);
  refinement->refines = true;
  refinement->base = base;
  if (base == nullptr) return;
  base->children.push_back(refinement);
  refinement->tokens = base->tokens;
  for (const Role role : {Role::kSender, Role::kReceiver}) {
    refinement->half(role).engine = base->half(role).engine;
    refinement->half(role).pool = base->half(role).pool;
    refinement->half(role).runs = base->half(role).runs;
  }
}

void Simulation::CheckRepeat(const SimTransfer& refinement) {
  if (!Here(refinement.receiver) || refinement.receiver.terminals > 0 || refinement.answer.cells == 0) return;
  SimEngine& engine = engines_[refinement.receiver.engine];
  RefineSpec ask = refinement.ask;
  const auto again = engine.manager->Refine(ask);
  if (again.ok()) {
    EXPECT_EQ(again->cells, refinement.answer.cells);
    EXPECT_EQ(again->cells_left, refinement.answer.cells_left);
    ++counts_->refined["asked again"];
  } else {
    EXPECT_EQ(ReasonOf(again.status()), "TRANSFER_EXISTS") << again.status();  // it has ended, and nobody was told yet
  }
  ask.fingerprint = "another";
  EXPECT_EQ(ReasonOf(engine.manager->Refine(ask).status()), "TRANSFER_EXISTS");
}

void Simulation::Adopt(const std::shared_ptr<SimTransfer>& refinement, Role role) {
  SimHalf& half = refinement->half(role);
  SimEngine& engine = engines_[half.engine];
  half.epoch = engine.epoch;
  half.started = true;
  half.terminals = 0;
  ++half.lives;
  ++engine.active;
  const auto watch =
      engine.manager->Watch(kMe, refinement->id, role, std::make_shared<SimWatcher>(this, refinement, role));
  EXPECT_TRUE(watch.ok()) << watch.status();
}

void Simulation::Discover(SimEngine* engine) {
  if (engine->manager == nullptr || engine->manager->active() == engine->active) return;
  const auto index = static_cast<size_t>(engine - engines_.data());
  for (const TransferReport& report : engine->manager->List(1000, /*active_only=*/true)) {
    if (report.refines.empty()) continue;
    const std::shared_ptr<SimTransfer> refinement = Discovered(report, index);
    const SimHalf& half = refinement->half(report.role);
    if (half.started && half.terminals == 0 && half.engine == index) continue;
    Adopt(refinement, report.role);
  }
}

std::shared_ptr<SimTransfer> Simulation::Discovered(const TransferReport& report, size_t engine) {
  const auto known = refinements_.find(report.transfer_id);
  if (known != refinements_.end() && known->second->half(report.role).engine == engine) return known->second;
  const std::string key = report.transfer_id + (report.role == Role::kSender ? "/sender " : "/receiver ") +
                          engines_[engine].name;
  const auto stray = refinements_.find(key);
  if (stray != refinements_.end()) return stray->second;
  const auto refinement = std::make_shared<SimTransfer>();
  refinement->id = report.transfer_id;
  SimTransfer* const base = BaseNamed(report.refines);
  if (known == refinements_.end() && report.role == Role::kReceiver && base != nullptr && base->background.has_value() &&
      base->receiver.engine == engine) {
    refinement->ask.tier = *base->background;
    refinement->ask.direct = base->refine_direct;
    ++counts_->refined[base->refine_direct ? "begun in the background, direct" : "begun in the background, staged"];
    Enter(refinement, base, refinement->id);
    return refinement;
  }
  EXPECT_TRUE(lied_) << report.transfer_id << " refines " << report.refines << ", which nobody has asked for";
  Enter(refinement, nullptr, key);
  refinement->half(report.role).engine = engine;
  return refinement;
}

SimTransfer* Simulation::BaseNamed(const std::string& id) const {
  const auto base = std::find_if(bases_.rbegin(), bases_.rend(), [&](const SimTransfer* b) { return b->id == id; });
  return base == bases_.rend() ? nullptr : *base;
}

void Simulation::ApplySome(const std::shared_ptr<SimTransfer>& refinement) {
  SimEngine& engine = engines_[refinement->receiver.engine];
  if (bug_ == SimBug::kFreshLies) GiveAway(refinement->base);
  if (bug_ == SimBug::kReuseUntold) Reuse(refinement->base);
  const uint64_t max_bytes = random_.OneIn(3) ? 0 : random_.Between(1, 1 << random_.Between(4, 14));
  ApplySpec spec;
  spec.refine_id = refinement->id;
  spec.owner = kMe;
  spec.max_bytes = max_bytes;
  int answers = 0;
  engine.manager->ApplyRefinement(std::move(spec), [&](const absl::StatusOr<RefinementApplied>& applied) {
    ++answers;
    CheckApplied(refinement.get(), applied);
  });
  EXPECT_EQ(answers, 1) << refinement->id << ": an apply is answered at once";
}

void Simulation::ReleaseHalf(const std::shared_ptr<SimTransfer>& transfer, Role role) {
  SimHalf& half = transfer->half(role);
  if (!Here(half)) return;
  if (bug_ == SimBug::kReuseUntold && role == Role::kReceiver && transfer->in_use) return Reuse(transfer.get());
  if (bug_ == SimBug::kNeverReleased && (transfer->refines || transfer->in_use)) return;
  SimEngine& engine = engines_[half.engine];
  ++half.releases_asked;
  // What the daemon does when refinements have ended may take a while to go on.
  const bool later = !quiet_ && random_.OneIn(2);
  engine.manager->EndRefinements(kMe, transfer->id, role, [this, transfer, role, later, &engine] {
    if (!later) return OnRefinementsEnded(transfer, role);
    engine.control->Post([this, transfer, role] { OnRefinementsEnded(transfer, role); });
  });
}

void Simulation::OnRefinementsEnded(const std::shared_ptr<SimTransfer>& transfer, Role role) {
  SimHalf& half = transfer->half(role);
  SimEngine& engine = engines_[half.engine];
  ++half.releases_answered;
  const absl::Status released = engine.manager->Release(kMe, transfer->id, role);
  if (!released.ok()) {
    const std::string reason = ReasonOf(released);
    EXPECT_TRUE(reason == "TRANSFER_ACTIVE" || reason == "STILL_RETAINED" || reason == "UNKNOWN_TRANSFER") << released;
    if (reason == "STILL_RETAINED") ++counts_->refined["released in the moment of its commit"];
    if (reason != "UNKNOWN_TRANSFER") return;
  }
  for (const auto& child : transfer->children) {
    if (!child->half(role).started || !Here(child->half(role))) continue;
    const auto report = engine.manager->Get(kMe, child->id, role);
    EXPECT_TRUE(!report.ok() || IsTerminal(report->state)) << child->id << " runs on, though its base was released";
    if (report.ok() && released.ok() && role == Role::kReceiver) {
      EXPECT_EQ(report->staged_bytes, 0u) << child->id << " keeps what nobody can apply any more";
    }
  }
  if (transfer->refines || half.terminals == 0) return;
  ++counts_->refined["released"];
  if (role == Role::kSender) return ReuseSource(transfer.get(), /*released=*/true);
  Reuse(transfer.get());
  for (const auto& child : transfer->children) ApplySome(child);  // nothing must come of it
}

// Its blocks are for other things at once, and the daemon need not hear of it.
void Simulation::Reuse(SimTransfer* transfer) {
  const SimHalf& half = transfer->receiver;
  if (!transfer->in_use) return;
  for (const auto& child : transfer->children) {
    if (child->ask.direct && child->receiver.started && child->receiver.terminals == 0) AcceptCells(*child);
  }
  transfer->in_use = false;
  if (!half.pool->alive() || half.pool->closing()) return;
  for (const BlockRange& run : half.runs) {
    if (transfer->lost.count(run.first) != 0) continue;
    const bool told = bug_ != SimBug::kReuseUntold && random_.OneIn(2);
    const bool done = told ? half.pool->Overwrite(run.first, &random_) : half.pool->Scribble(run.first, 0, &random_);
    EXPECT_TRUE(done) << transfer->id << ": its blocks are not free, though it was released";
  }
}

void Simulation::ReuseSource(SimTransfer* transfer, bool released) {
  SimHalf& half = transfer->sender;
  if (!half.started || half.terminals == 0 || !Here(half) || !half.pool->alive() || half.pool->closing()) return;
  for (const BlockRange& run : half.runs) {
    if (bug_ == SimBug::kSourceChanges && half.kept) half.pool->Scribble(run.first, 0, &random_);
    if (half.pool->Overwrite(run.first, &random_) || !released) continue;
    const bool others = std::any_of(transfers_.begin(), transfers_.end(),
                                    [&](const auto& t) { return HoldsSource(*t, *transfer, run.first); });
    EXPECT_TRUE(others) << transfer->id << ": its source is not free, though it was released";
  }
  if (released) half.kept = false;
}

// Decode goes on where the prompt ends.
void Simulation::WriteTail(SimTransfer* base) {
  const SimHalf& half = base->receiver;
  const uint32_t block_tokens = target_layout_.block_tokens, used = base->tokens % block_tokens;
  if (used == 0 || !base->in_use || !half.pool->alive() || half.pool->closing()) return;
  const uint64_t block = half.runs[base->tokens / block_tokens].first;
  if (base->lost.count(block) != 0) return;
  if (half.pool->Scribble(block, used, &random_)) ++counts_->refined["decode wrote behind the last token"];
}

// Its worker puts something else into one of its blocks.
void Simulation::GiveAway(SimTransfer* base) {
  const SimHalf& half = base->receiver;
  if (!base->in_use || !half.pool->alive() || half.pool->closing()) return;
  const uint64_t block = half.runs[random_.Below(half.runs.size())].first;
  if (base->lost.count(block) == 0 && half.pool->Overwrite(block, &random_)) MarkLost(half.engine, {{block, 1}});
}

void Simulation::MarkLost(size_t engine, const std::vector<BlockRange>& runs) {
  for (SimTransfer* base : bases_) {
    if (!base->in_use || base->receiver.engine != engine || base->receiver.pool != engines_[engine].target) continue;
    for (const BlockRange& own : base->receiver.runs) {
      const bool taken = std::any_of(runs.begin(), runs.end(), [&](const BlockRange& run) { return run.first == own.first; });
      if (taken && base->lost.insert(own.first).second) ++counts_->refined["a block of a base went to others"];
    }
  }
}

std::set<uint64_t> Simulation::BlocksInUse(size_t engine) const {
  std::set<uint64_t> blocks;
  for (const SimTransfer* base : bases_) {
    if (!base->in_use || base->receiver.engine != engine || base->receiver.pool != engines_[engine].target) continue;
    for (const BlockRange& run : base->receiver.runs) {
      if (base->lost.count(run.first) == 0) blocks.insert(run.first);
    }
  }
  return blocks;
}

void Simulation::Drain(SimEngine* engine) {
  if (engine->drains_until != 0) return;
  Note("daemon: drains");
  engine->drains_until = event_ + random_.Between(20, 200);
  engine->manager->StartDraining([] {});
}

// A daemon's process has ended, and with it all that it knew.
void Simulation::ForgetLife(size_t engine) {
  for (SimTransfer* base : bases_) {
    if (base->receiver.engine == engine) base->in_use = false;
    if (base->sender.engine == engine) base->sender.kept = false;
  }
}

void Simulation::ReleaseAll() {
  for (size_t i = 0; i < transfers_.size(); ++i) {
    for (const Role role : {Role::kSender, Role::kReceiver}) {
      if (transfers_[i]->half(role).started) ReleaseHalf(transfers_[i], role);
    }
  }
  RunAll();
  for (const auto& transfer : transfers_) {
    for (const Role role : {Role::kSender, Role::kReceiver}) {
      const SimHalf& half = transfer->half(role);
      EXPECT_EQ(half.releases_answered, half.releases_asked) << transfer->id << ": each release is answered once";
    }
  }
}

}  // namespace spectrumkv
