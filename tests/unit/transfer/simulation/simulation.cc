#include "tests/unit/transfer/simulation/simulation.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "tests/unit/memory/failing_memory.h"
#include "tests/unit/metrics/exposition.h"

namespace spectrumkv {
namespace {

constexpr size_t kSlotBytes = 2 << 20;
constexpr int64_t kLeaseMs = 600000;
// Nothing waits longer than this once all goes well: the longest deadline, silence after it, and last words.
constexpr int64_t kEndMs = 30000;

// Their memory is touched once for all simulations.
SlotPool* SlotsOf(size_t engine, SlotPool::Backing backing, size_t count) {
  static auto* const pools = new std::map<std::pair<size_t, size_t>, std::unique_ptr<SlotPool>>[2];
  std::unique_ptr<SlotPool>& pool = pools[backing == SlotPool::Backing::kNone ? 1 : 0][{engine, count}];
  if (pool == nullptr) pool = std::make_unique<SlotPool>(count, kSlotBytes, backing);
  return pool.get();
}

}  // namespace

Simulation::Simulation(uint64_t seed, SimCounts* counts)
    : seed_(seed), counts_(counts), random_(seed), network_executor_(scheduler_.NewExecutor(1)) {
  slots_ = random_.Between(1, 4);
  options_.progress_timeout_ms = static_cast<int64_t>(random_.Between(200, 1500));
  options_.max_deadline_ms = 10000;
  options_.streams = static_cast<uint32_t>(random_.Between(1, 3));
  options_.credits_per_transfer = static_cast<uint32_t>(random_.Between(1, 6));
  options_.inline_chunk_bytes = random_.OneIn(3) ? 128 << 10 : 0;
  options_.max_active = static_cast<uint32_t>(random_.Between(3, 12));
  options_.max_waiting_peers = static_cast<uint32_t>(random_.Between(2, 12));
  options_.terminal_memory_ms = static_cast<int64_t>(random_.Between(100, 5000));
  options_.terminal_memory_count = static_cast<uint32_t>(random_.Between(1, 20));
  options_.max_retained = static_cast<uint32_t>(random_.Between(1, 12));
  if (random_.OneIn(3)) options_.staging_bytes = random_.Between(1, 128) << 8;
  if (random_.OneIn(4)) options_.refine_bytes_per_second = random_.Between(20'000, 2'000'000);
  constexpr uint64_t kOneIn[] = {0, 150, 40, 12};
  rates_.message = kOneIn[random_.Below(4)];
  rates_.frames = random_.OneIn(3);
  rates_.memory = random_.OneIn(2);
  rates_.codec = random_.OneIn(4);
  rates_.stalls = random_.OneIn(2);
  rates_.refine = !random_.OneIn(3);
  const bool large = random_.OneIn(6);  // blocks that are lent to the network, not copied
  source_layout_.layers = target_layout_.layers = static_cast<uint32_t>(random_.Between(1, 5));
  source_layout_.heads = target_layout_.heads = large ? 4 : 2;
  source_layout_.head_dim = target_layout_.head_dim = large ? 128 : 32;
  source_layout_.block_tokens = static_cast<uint32_t>(large ? 16 : random_.Between(1, 16));
  target_layout_.block_tokens = static_cast<uint32_t>(random_.Between(1, 16));
  source_layout_.num_blocks = target_layout_.num_blocks = 24;
  target_layout_.heads_first = random_.OneIn(2);
  network_ = std::make_unique<MemoryNetwork>(network_executor_, &clock_);
  network_->SetFaultHook([this](const FaultPoint& point) { return OnMessage(point); });
  for (size_t i = 0; i < engines_.size(); ++i) {
    SimEngine& engine = engines_[i];
    engine.name = i == 0 ? "a" : "b";
    engine.control = scheduler_.NewExecutor(2);
    engine.compute = scheduler_.NewExecutor(2);
    engine.send_slots = SlotsOf(i, SlotPool::Backing::kMemory, slots_);
    engine.receive_slots = SlotsOf(i, SlotPool::Backing::kNone, slots_);
    Build(&engine);
  }
}

Simulation::~Simulation() { SetMemoryFault(nullptr); }

void Simulation::Build(SimEngine* engine) {
  engine->epoch = ++next_epoch_;
  engine->backend = std::make_unique<FaultyBackend>(ScalarBackend());
  engine->metrics = std::make_unique<Metrics>();
  PoolLimits limits;
  limits.max_owned_bytes = uint64_t{1} << 30;
  limits.max_chunk_bytes = kSlotBytes;
  engine->pools = PoolRegistry::Create(limits, engine->epoch, &clock_, {});
  engine->transport = network_->TransportOf(engine->name);
  TransferOptions options = options_;
  options.epoch = engine->epoch;
  TransferParts parts;
  parts.clock = &clock_;
  parts.control = engine->control;
  parts.compute = engine->compute;
  parts.transport = engine->transport.get();
  parts.send_slots = engine->send_slots;
  parts.receive_slots = engine->receive_slots;
  parts.backend = engine->backend.get();
  parts.metrics = engine->metrics.get();
  engine->manager = std::make_unique<TransferManagerImpl>(options, parts);
  network_->AddEnd(engine->name, engine->manager.get());
  engine->cut_off = false;
  engine->drains_until = engine->refined_ends = engine->applied_bytes = 0;
  if (rates_.codec) {
    engine->backend->SpoilEncoded([this](uint8_t* bytes, uint64_t size) {
      if (quiet_ || !random_.OneIn(20)) return;
      Note("codec: a byte flipped");
      bytes[random_.Below(size)] ^= static_cast<uint8_t>(1u << random_.Below(8));
    });
  }
}

// REQUIRES: its end is off the network and nothing is active.
void Simulation::TearDown(SimEngine* engine) {
  engine->hogged.clear();
  RunAll();
  if (engine->manager->active() > 0) {
    std::fprintf(stderr, "seed %llu: a transfer of %s does not end\n", static_cast<unsigned long long>(seed_),
                 engine->name.c_str());
    std::abort();  // Shutdown would wait for ever
  }
  engine->manager->Shutdown();
  RunAll();
  EXPECT_EQ(engine->manager->kept(), 0u) << engine->name << ": a transfer is kept that nobody can refine any more";
  CheckMetrics(*engine);
  ForgetLife(static_cast<size_t>(engine - engines_.data()));
  engine->manager.reset();
  engine->source.reset();
  engine->target.reset();
  engine->pools.reset();
  EXPECT_EQ(engine->send_slots->used(), 0u) << engine->name << ": a send slot leaked";
  EXPECT_EQ(engine->receive_slots->used(), 0u) << engine->name << ": a receive slot leaked";
}

void Simulation::CancelAll(SimEngine* engine) {
  const auto index = static_cast<size_t>(engine - engines_.data());
  for (size_t i = 0; i < transfers_.size(); ++i) {
    for (const Role role : {Role::kSender, Role::kReceiver}) {
      const SimHalf& half = transfers_[i]->half(role);
      if (half.engine == index && half.started && half.terminals == 0) CancelHalf(transfers_[i], role);
    }
  }
}

// As if the process was killed: its peers hear nothing of the end of its transfers.
void Simulation::Restart(SimEngine* engine) {
  ++counts_->restarts;
  network_->RemoveEnd(engine->name);
  engine->cut_off = true;
  engine->hogged.clear();
  scheduler_.EndStalls();
  for (int64_t ms = 0; ms < kEndMs && engine->active > 0; ms += 50) {
    if (ms % 1000 == 0) CancelAll(engine);  // refinements may begin meanwhile
    Settle(50);
  }
  Settle(3500);  // messages that are delayed
  network_->RemoveEnd(engine->name);
  TearDown(engine);
  Build(engine);
}

void Simulation::Run(uint64_t events) {
  for (uint64_t i = 0; i < events && !Broken(); ++i) {
    Event();
    CheckNow();
    if (i % 64 == 63) {
      for (SimEngine& engine : engines_) CheckBlocks(&engine);
    }
  }
}

void Simulation::Hurt(SimBug bug, std::function<bool()> caught) {
  bug_ = bug;
  rates_ = Rates{};
  rates_.refine = true;
  caught_ = std::move(caught);
}

void Simulation::RunAll() {
  for (int i = 0; i < 1'000'000; ++i) {
    if (!scheduler_.Step(&random_, clock_.NowNs())) return;
    ++counts_->steps;
    for (SimEngine& engine : engines_) Discover(&engine);
  }
  ADD_FAILURE() << "work without end";
}

void Simulation::Settle(int64_t ms) {
  for (int64_t passed = 0; passed < ms; passed += 50) {
    RunAll();
    clock_.AdvanceMs(50);
  }
  RunAll();
}

void Simulation::OnEnd(const std::shared_ptr<SimTransfer>& transfer, Role role, const TransferReport& report) {
  SimHalf& half = transfer->half(role);
  SimEngine& engine = engines_[half.engine];
  if (bug_ == SimBug::kEndUntold && transfer->refines) return;
  if (++half.terminals > 1) {
    ADD_FAILURE() << transfer->id << ": the end was told twice";
    return;
  }
  --engine.active;
  half.report = report;
  ++counts_->ends[static_cast<size_t>(report.state)];
  EXPECT_TRUE(IsTerminal(report.state));
  EXPECT_EQ(report.error.ok(), report.state == TransferState::kCommitted) << report.error;
  if (!report.error.ok()) {
    EXPECT_NE(ReasonOf(report.error), "") << report.error;
    ++counts_->reasons[ReasonOf(report.error)];
  }
  if (transfer->refines) return OnRefinementEnd(transfer.get(), role, report);
  const bool committed = report.state == TransferState::kCommitted;
  if (role == Role::kSender) half.kept = committed && transfer->retain_ms > 0;
  if (role == Role::kReceiver && committed && transfer->refinable) {
    transfer->in_use = true;
    bases_.push_back(transfer.get());
    fresh_bases_.push_back(transfer.get());
  }
  if (!half.pool->alive()) return;
  if (half.pool->closing()) {
    if (role == Role::kReceiver) half.pool->AcceptLater(half.runs);
    return;
  }
  if (role == Role::kReceiver) CheckLanded(*transfer);
  for (const BlockRange& run : half.runs) {
    if (transfer->in_use && role == Role::kReceiver) {
      half.pool->Accept(run.first);
    } else if (!half.pool->Overwrite(run.first, &random_)) {
      // New owners: what is still read or written of the old ones shows. Another source may have the same blocks.
      EXPECT_EQ(role, Role::kSender) << transfer->id << ": its blocks are not free, though its end was told";
    }
  }
}

void Simulation::CheckLanded(const SimTransfer& transfer) {
  const SimHalf& half = transfer.receiver;
  const uint32_t block_tokens = half.pool->layout().block_tokens;
  const uint32_t all = static_cast<uint32_t>(half.runs.size()) * block_tokens;
  const uint32_t written = (transfer.tokens + block_tokens - 1) / block_tokens * block_tokens;
  const std::vector<std::string> now = half.pool->Read(half.runs, all), before = half.pool->Expected(half.runs, all);
  EXPECT_FALSE(now.empty()) << transfer.id << ": its blocks are not free, though its end was told";
  for (size_t i = 0; i < now.size(); ++i) {
    const size_t token_bytes = now[i].size() / all, kept = transfer.tokens * token_bytes;
    EXPECT_EQ(now[i].compare(written * token_bytes, std::string::npos, before[i], written * token_bytes), 0)
        << transfer.id << ": blocks behind its last one were written";
    if (half.report.state != TransferState::kCommitted || lied_) continue;
    EXPECT_EQ(std::count(now[i].begin() + static_cast<std::ptrdiff_t>(kept),
                         now[i].begin() + static_cast<std::ptrdiff_t>(written * token_bytes), '\0'),
              static_cast<std::ptrdiff_t>(written * token_bytes - kept))
        << transfer.id << ": the tail is not zeroed";
    if (transfer.raw && !transfer.sent.empty()) {
      EXPECT_TRUE(now[i].substr(0, kept) == transfer.sent[i]) << transfer.id << ": other bytes than the source's";
    }
  }
}

void Simulation::CheckNow() {
  for (SimEngine& engine : engines_) {
    Discover(&engine);
    EXPECT_EQ(engine.manager->active(), engine.active) << "started, and not told of its end";
  }
}

void Simulation::CheckBlocks(SimEngine* engine) {
  const auto index = static_cast<size_t>(engine - engines_.data());
  std::vector<bool> used(target_layout_.num_blocks, false);
  for (const auto& transfer : transfers_) {
    const SimHalf& half = transfer->receiver;
    if (half.engine != index || !half.started || half.terminals > 0 || half.pool != engine->target) continue;
    if (transfer->refines && !transfer->ask.direct) continue;
    for (const BlockRange& run : half.runs) {
      if (transfer->refines && transfer->base->lost.count(run.first) != 0) continue;
      used[run.first] = true;
    }
  }
  for (const SimTransfer* base : bases_) {
    for (const Role role : {Role::kSender, Role::kReceiver}) CheckBase(*base, role);
  }
  if (engine->target != nullptr) engine->target->ExpectUntouched(used, engine->name + "'s destination");
  const std::vector<bool> none(source_layout_.num_blocks, false);
  if (engine->source != nullptr) engine->source->ExpectUntouched(none, engine->name + "'s source");
}

void Simulation::CheckPair(const SimTransfer& transfer) {
  const SimHalf &sender = transfer.sender, &receiver = transfer.receiver;
  for (const SimHalf* half : {&sender, &receiver}) {
    EXPECT_EQ(half->terminals, half->started ? 1 : 0) << transfer.id << ": one terminal state, and only one";
    EXPECT_EQ(half->cancels_answered, half->cancels_asked) << transfer.id << ": each cancel is answered once";
  }
  if (lied_) return;
  const bool sent = sender.started && sender.report.state == TransferState::kCommitted;
  const bool received = receiver.started && receiver.report.state == TransferState::kCommitted;
  if (sent) {
    EXPECT_TRUE(received) << transfer.id << ": the sender says COMMITTED, the receiver " << receiver.report.error;
  }
  if (received && !sent && sender.lives < 2) {
    EXPECT_EQ(ReasonOf(sender.report.error), "OUTCOME_UNKNOWN")
        << transfer.id << ": the receiver has committed, the sender says " << sender.report.error;
  }
}

void Simulation::CheckNothingIsLeft(SimEngine* engine) {
  EXPECT_EQ(engine->manager->active(), 0u);
  EXPECT_EQ(engine->manager->kept(), 0u) << engine->name << ": a transfer is kept, though its time is over";
  EXPECT_EQ(engine->manager->refine_memory().staging_bytes, 0u) << engine->name << ": staging of refinements is left";
  EXPECT_TRUE(engine->manager->List(100, /*active_only=*/true).empty());
  for (const SlotPool* slots : {engine->send_slots, engine->receive_slots}) {
    EXPECT_EQ(slots->used(), 0u) << engine->name << ": a slot, or the credit it stands for, is left";
    EXPECT_EQ(slots->waiting(), 0u) << engine->name << ": somebody waits for a slot";
  }
  for (const PoolStatus& pool : engine->pools->List()) {
    EXPECT_EQ(pool.blocks_sending, 0u);
    EXPECT_EQ(pool.blocks_receiving, 0u);
  }
  if (engine->target != nullptr && engine->target->alive()) {
    const auto all =
        engine->pools->ReserveTarget(kMe, engine->target->id(), engine->epoch, {{0, {{0, target_layout_.num_blocks}}}}, 1);
    EXPECT_TRUE(all.ok()) << "a hold is left: " << all.status();
  }
  const std::map<std::string, double> series = ParseExposition(engine->metrics->Render());
  const auto inflight = series.find("spectrumkv_inflight_transfers");
  ASSERT_NE(inflight, series.end());
  EXPECT_EQ(inflight->second, 0);
}

void Simulation::Finish() {
  quiet_ = true;
  SetMemoryFault(nullptr);
  scheduler_.EndStalls();
  for (SimEngine& engine : engines_) {
    engine.hogged.clear();
    if (engine.cut_off) network_->AddEnd(engine.name, engine.manager.get());
    engine.cut_off = false;
  }
  Settle(kEndMs);
  for (const auto& transfer : transfers_) CheckPair(*transfer);
  for (SimEngine& engine : engines_) CheckBlocks(&engine);
  ReleaseAll();
  for (SimEngine& engine : engines_) {
    CheckBlocks(&engine);
    CheckNothingIsLeft(&engine);
  }
  clock_.AdvanceMs(kLeaseMs + 1);
  RunAll();
  for (SimEngine& engine : engines_) EXPECT_TRUE(engine.pools->List().empty()) << "a lease does not end";
  for (SimEngine& engine : engines_) network_->RemoveEnd(engine.name);
  for (SimEngine& engine : engines_) TearDown(&engine);
  network_.reset();
  RunAll();
  EXPECT_EQ(clock_.pending(), 0u) << "a timer is left";
}

}  // namespace spectrumkv
