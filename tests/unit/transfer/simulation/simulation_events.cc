// What happens in a simulation: requests of workers, steps of executors, time, mishaps.
#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "tests/unit/memory/failing_memory.h"
#include "tests/unit/transfer/simulation/lying_hold.h"
#include "tests/unit/transfer/simulation/sim_watcher.h"
#include "tests/unit/transfer/simulation/simulation.h"

namespace spectrumkv {

Fault Simulation::OnMessage(const FaultPoint& point) {
  using Kind = Fault::Kind;
  Fault fault;
  if (quiet_ || !random_.OneIn(rates_.message)) return fault;
  // A connection loses and changes nothing; a network without one may.
  constexpr Kind kKinds[] = {Kind::kDelay,   Kind::kBreak,    Kind::kHold, Kind::kDuplicate,
                             Kind::kCorrupt, Kind::kTruncate, Kind::kDrop};
  constexpr const char* kNames[] = {"delay", "break", "reorder", "duplicate", "flip", "truncate", "drop"};
  const uint64_t choice = random_.Below(point.data || rates_.frames ? std::size(kKinds) : 2);
  fault.kind = kKinds[choice];
  fault.delay_ns = static_cast<int64_t>(random_.Below(3'000'000'000));
  fault.behind = static_cast<uint32_t>(random_.Between(1, 4));
  fault.byte = random_.Next() % (1 << 20);
  fault.mask = static_cast<uint8_t>(1u << random_.Below(8));
  if (!point.data && (fault.kind == Kind::kCorrupt || fault.kind == Kind::kTruncate)) lied_ = true;
  Note(std::string(point.data ? "chunk: " : "frame: ") + kNames[choice]);
  return fault;
}

void Simulation::Event() {
  ++counts_->events;
  ++event_;
  for (SimEngine& engine : engines_) {
    if (engine.drains_until != 0 && event_ >= engine.drains_until) Restart(&engine);
  }
  // Whoever is quick asks before the sender has its receipt.
  if (!fresh_bases_.empty() && random_.OneIn(4)) {
    SimTransfer* const base = fresh_bases_.back();
    fresh_bases_.pop_back();
    return StartRefinement(base);
  }
  const uint64_t dice = random_.Below(100);
  if (dice < 74) {
    if (scheduler_.Step(&random_, clock_.NowNs())) {
      ++counts_->steps;
    } else {
      clock_.AdvanceMs(static_cast<int64_t>(random_.Between(1, 40)));
    }
  } else if (dice < 88) {
    ApiEvent();
  } else if (dice < 97) {
    clock_.AdvanceBy(static_cast<int64_t>(random_.Below(20'000'000)));
  } else if (!rates_.refine || random_.OneIn(2)) {
    MishapEvent();
  }
}

void Simulation::ApiEvent() {
  if (rates_.refine && random_.OneIn(2)) return RefineEvent();
  Role role = Role::kSender;
  const std::shared_ptr<SimTransfer> any = AnyTransfer(&role);
  SimEngine& engine = engines_[any == nullptr ? 0 : any->half(role).engine];
  switch (random_.Below(10)) {
    case 0:
      if (any != nullptr && random_.OneIn(3)) CancelHalf(any, role);
      return;
    case 1:
    case 2:
    case 3:
      if (any != nullptr) Advance(any.get());
      return;
    case 4:
      if (any != nullptr) ReleaseHalf(any, role);
      return;
    case 5:
      if (any != nullptr) static_cast<void>(engine.manager->Get(kMe, any->id, std::nullopt));
      EXPECT_GE(engine.manager->List(1000, true).size(), engine.active);
      return;
    default: return StartSomething();
  }
}

void Simulation::MishapEvent() {
  SimEngine& engine = engines_[random_.Below(2)];
  switch (random_.Below(8)) {
    case 0:  // a machine that slept: all timers of that time are late
      Note("clock: a jump");
      clock_.AdvanceMs(static_cast<int64_t>(random_.OneIn(10) ? 12000 : random_.Between(100, 2000)));
      return;
    case 1:
    case 2:
    case 3:
      if (!rates_.stalls) return;
      Note("executor: slow reader, worker or codec");
      scheduler_.AnyOf(&random_)->StallUntil(clock_.NowNs() + static_cast<int64_t>(random_.Below(800'000'000)));
      return;
    case 4: return HogSlots(&engine);
    case 5:
      if (rates_.message == 0) return;
      Note("network: a peer is cut off, or back");
      if (engine.cut_off) {
        network_->AddEnd(engine.name, engine.manager.get());
      } else {
        network_->RemoveEnd(engine.name);
      }
      engine.cut_off = !engine.cut_off;
      return;
    case 6:
      if (random_.OneIn(3)) LosePool(&engine, random_.OneIn(2) ? engine.source : engine.target);
      return;
    default:
      if (random_.OneIn(10)) return Restart(&engine);
      if (random_.OneIn(10)) Drain(&engine);
  }
}

void Simulation::HogSlots(SimEngine* engine) {
  if (!rates_.memory) return;
  if (!engine->hogged.empty()) return engine->hogged.clear();
  Note("memory: slots run out");
  for (SlotPool* slots : {engine->send_slots, engine->receive_slots}) {
    while (Slot slot = slots->TryAcquire()) engine->hogged.push_back(std::move(slot));
  }
}

void Simulation::LosePool(SimEngine* engine, const std::shared_ptr<SimPool>& pool) {
  if (pool == nullptr || !pool->alive()) return;
  if (random_.OneIn(2)) {
    Note("pool: its worker dies");
    const auto hold = engine->pools->OpenHold(kMe, pool->id(), engine->epoch, [](const std::string&) {});
    if (hold.ok()) engine->pools->CloseHold(pool->id(), *hold);
    EXPECT_FALSE(pool->alive());
  } else {
    Note("pool: unregistered");
    engine->manager->EndRefinementsOf(pool->id());
    engine->pools->Unregister(kMe, pool->id(), engine->epoch, 500, [](absl::Status) {});
  }
}

void Simulation::EnsurePools(SimEngine* engine) {
  for (const bool source : {true, false}) {
    std::shared_ptr<SimPool>& pool = source ? engine->source : engine->target;
    if (pool != nullptr && pool->alive()) continue;
    pool = nullptr;
    const bool fails = rates_.memory && random_.OneIn(3);
    const MemoryCall call = random_.OneIn(2) ? MemoryCall::kMap : MemoryCall::kPopulate;
    const int error = random_.OneIn(2) ? ENOSPC : ENOMEM;
    if (fails) SetMemoryFault([call, error](MemoryCall made) { return made == call ? error : 0; });
    const size_t known = engine->pools->List().size();
    const int64_t mapped = LiveMappings();
    auto registered =
        SimPool::Register(engine->pools.get(), engine->epoch, source ? source_layout_ : target_layout_, 600000);
    SetMemoryFault(nullptr);
    if (fails) {
      Note(std::string(call == MemoryCall::kMap ? "memory: a mapping is refused" : "memory: pages are refused") +
           (error == ENOSPC ? ", ENOSPC" : ", ENOMEM"));
      EXPECT_EQ(ReasonOf(registered.status()), "OUT_OF_MEMORY") << registered.status();
      EXPECT_EQ(engine->pools->List().size(), known);
      EXPECT_EQ(LiveMappings(), mapped);
      continue;
    }
    if (!registered.ok()) {
      EXPECT_EQ(ReasonOf(registered.status()), "POOLS_FULL") << registered.status();
      continue;
    }
    pool = *std::move(registered);
    for (uint64_t block = 0; block < pool->layout().num_blocks; ++block) EXPECT_TRUE(pool->Overwrite(block, &random_));
  }
}

std::shared_ptr<SimTransfer> Simulation::AnyTransfer(Role* role) {
  if (transfers_.empty()) return nullptr;
  // Mostly one of the last, which may be alive.
  const size_t last = std::min<size_t>(transfers_.size(), random_.OneIn(8) ? transfers_.size() : 8);
  const std::shared_ptr<SimTransfer>& transfer = transfers_[transfers_.size() - 1 - random_.Below(last)];
  *role = random_.OneIn(2) ? Role::kSender : Role::kReceiver;
  return transfer;
}

// The other half of a transfer that has but one, or a new one.
void Simulation::StartSomething() {
  for (size_t back = 0; back < std::min<size_t>(transfers_.size(), 6) && !random_.OneIn(3); ++back) {
    const std::shared_ptr<SimTransfer> transfer = transfers_[transfers_.size() - 1 - back];
    if (transfer->refines) continue;
    const Role missing = transfer->sender.started ? Role::kReceiver : Role::kSender;
    if (!transfer->half(missing).started) return StartHalf(transfer, missing);
  }
  transfers_.push_back(NewTransfer());
  StartHalf(transfers_.back(), random_.OneIn(2) ? Role::kSender : Role::kReceiver);
}

std::shared_ptr<SimTransfer> Simulation::NewTransfer() {
  auto transfer = std::make_shared<SimTransfer>();
  ++counts_->transfers;
  transfer->id = "t" + std::to_string(next_id_++);
  transfer->sender.engine = random_.Below(2);
  transfer->receiver.engine = 1 - transfer->sender.engine;
  const uint64_t most = 8 * std::min(source_layout_.block_tokens, target_layout_.block_tokens);
  transfer->tokens = static_cast<uint32_t>(random_.Between(1, most));
  transfer->pull = random_.OneIn(2);
  transfer->both_dial = random_.OneIn(40);
  transfer->layerwise = random_.OneIn(3);
  if (random_.OneIn(4)) transfer->token = "0123456789abcdef";
  MakeRefinable(transfer.get());
  return transfer;
}

// Those to avoid only where there are not enough others.
std::vector<BlockRange> Simulation::RandomRuns(const PoolLayout& layout, uint32_t tokens,
                                               const std::set<uint64_t>& avoid) {
  std::vector<uint64_t> blocks(layout.num_blocks);
  std::iota(blocks.begin(), blocks.end(), uint64_t{0});
  for (size_t i = blocks.size(); i-- > 1;) std::swap(blocks[i], blocks[random_.Below(i + 1)]);
  std::stable_partition(blocks.begin(), blocks.end(), [&](uint64_t block) { return avoid.count(block) == 0; });
  const size_t needed = (tokens + layout.block_tokens - 1) / layout.block_tokens;
  blocks.resize(std::min<size_t>(blocks.size(), needed + random_.Below(2)));
  std::vector<BlockRange> runs;
  for (const uint64_t block : blocks) runs.push_back({block, 1});
  return runs;
}

Policy Simulation::RandomPolicy(bool* raw) {
  Policy policy;
  *raw = random_.OneIn(2);
  if (*raw) {
    policy.allocator = Allocator::kRaw;
    policy.budget = 1.2;
  } else {
    policy.allocator = random_.OneIn(3) ? Allocator::kOptimal : Allocator::kGreedy;
    if (random_.OneIn(2)) policy.sinks = 0;
    policy.budget = random_.OneIn(12) ? 0.01 : 0.3 + static_cast<double>(random_.Below(60)) / 100;
  }
  return policy;
}

void Simulation::StartHalf(const std::shared_ptr<SimTransfer>& transfer, Role role) {
  SimHalf& half = transfer->half(role);
  SimEngine& engine = engines_[half.engine];
  EnsurePools(&engine);
  half.pool = role == Role::kSender ? engine.source : engine.target;
  if (half.pool == nullptr) return;
  half.epoch = engine.epoch;
  const bool careful = role == Role::kReceiver && !random_.OneIn(3);
  half.runs = RandomRuns(half.pool->layout(), transfer->tokens, careful ? BlocksInUse(half.engine) : std::set<uint64_t>());
  const absl::Status started =
      role == Role::kSender ? StartSender(transfer.get(), half.runs) : StartReceiver(transfer.get(), half.runs);
  if (!started.ok()) {
    static const auto* const kKnown = new std::set<std::string>{
        "BLOCKS_IN_USE", "BLOCKS_RESERVED", "POOL_CLOSING", "TRANSFERS_FULL", "TRANSFER_EXISTS", "BUDGET_TOO_SMALL",
        "DRAINING"};
    EXPECT_EQ(kKnown->count(ReasonOf(started)), 1u) << started;
    ++counts_->reasons["refused: " + ReasonOf(started)];
    return;
  }
  half.started = true;
  ++engine.active;
  const auto watch =
      engine.manager->Watch(kMe, transfer->id, role, std::make_shared<SimWatcher>(this, transfer, role));
  EXPECT_TRUE(watch.ok()) << watch.status();
}

absl::Status Simulation::StartSender(SimTransfer* transfer, std::vector<BlockRange> runs) {
  SimHalf& half = transfer->sender;
  SimEngine& engine = engines_[half.engine];
  const std::vector<std::string> sent = half.pool->Expected(runs, transfer->tokens);
  auto hold = engine.pools->HoldSource(kMe, half.pool->id(), engine.epoch, {{0, std::move(runs)}}, transfer->tokens);
  if (!hold.ok()) return hold.status();
  SenderSpec spec;
  spec.owner = kMe;
  spec.transfer_id = transfer->id;
  spec.transfer_token = transfer->token;
  if (!transfer->pull || transfer->both_dial) spec.peer = engines_[transfer->receiver.engine].name;
  spec.source = *std::move(hold);
  do {
    spec.policy = RandomPolicy(&transfer->raw);
  } while (transfer->raw && transfer->retain_ms > 0 && !random_.OneIn(6));
  if (transfer->retain_ms > 0 && random_.OneIn(2)) spec.policy.budget = std::min(spec.policy.budget, 0.45);
  spec.pool_id = half.pool->id();
  spec.retain_ms = transfer->retain_ms;
  spec.background_tier = transfer->background;
  spec.deadline_ms = RandomDeadline(*transfer);
  spec.layerwise = transfer->layerwise;
  spec.fingerprint = "f";
  const absl::Status started = engine.manager->StartSender(std::move(spec));
  if (started.ok()) transfer->sent = sent;
  return started;
}

absl::Status Simulation::StartReceiver(SimTransfer* transfer, std::vector<BlockRange> runs) {
  SimHalf& half = transfer->receiver;
  SimEngine& engine = engines_[half.engine];
  half.pool->AcceptWhatIsLate();
  auto hold = engine.pools->ReserveTarget(kMe, half.pool->id(), engine.epoch, {{0, std::move(runs)}}, transfer->tokens);
  if (!hold.ok()) return hold.status();
  MarkLost(half.engine, half.runs);
  ReceiverSpec spec;
  spec.owner = kMe;
  spec.transfer_id = transfer->id;
  spec.transfer_token = random_.OneIn(30) ? "another token 00" : transfer->token;
  if (transfer->pull || transfer->both_dial) spec.peer = engines_[transfer->sender.engine].name;
  spec.pool_id = half.pool->id();
  spec.target = *std::move(hold);
  if (bug_ == SimBug::kFreshLies) spec.target = std::make_unique<LyingHold>(std::move(spec.target));
  spec.refinable = transfer->refinable;
  spec.refine_direct = transfer->refine_direct;
  spec.deadline_ms = RandomDeadline(*transfer);
  spec.fingerprint = "f";
  return engine.manager->StartReceiver(std::move(spec));
}

// Those that are to be refined have more time: else few would come so far.
int64_t Simulation::RandomDeadline(const SimTransfer& transfer) {
  if (random_.OneIn(transfer.retain_ms > 0 ? 20 : 5)) return static_cast<int64_t>(random_.Between(1, 100));
  return static_cast<int64_t>(random_.Between(500, 8000));
}

void Simulation::Advance(SimTransfer* transfer) {
  SimEngine& engine = engines_[transfer->sender.engine];
  const uint32_t layers = std::min(transfer->advanced + 1, source_layout_.layers);
  const absl::Status advanced = engine.manager->Advance(kMe, transfer->id, layers, transfer->tokens, {}, {}, 0);
  if (advanced.ok()) transfer->advanced = layers;
}

void Simulation::CancelHalf(const std::shared_ptr<SimTransfer>& transfer, Role role) {
  SimHalf& half = transfer->half(role);
  ++half.cancels_asked;
  engines_[half.engine].manager->Cancel(kMe, transfer->id, role, [this, transfer, role](absl::StatusOr<TransferReport> report) {
    SimHalf& answered = transfer->half(role);
    ++answered.cancels_answered;
    if (report.ok()) {
      EXPECT_TRUE(IsTerminal(report->state)) << "a cancel is answered when all has ended";
    }
  });
}

}  // namespace spectrumkv
