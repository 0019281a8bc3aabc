// Two daemons' engines on one thread, under a clock that stands still and over a network in memory. One seed chooses all:
// sizes, requests, the order of everything that could happen at one time, and what goes wrong at the seams (network,
// clock, memory, codec). After each event the promises that hold at every moment are checked, and in Finish, when
// faults have ended and time has passed, those of the end:
//
//   one terminal state of each half, told once; what one half says of the other is true; committed RAW bytes are those
//   of the source; no slot, lease, credit, hold, mapping or timer is left; nothing is written after the end (a fence),
//   and nothing read.
//
// Some transfers are kept after their commit and refined (docs/refinement.md): simulation_refine.cc says what is done to
// them, refine_checks.cc what is promised.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "server/transfer/manager.h"
#include "tests/unit/base/fake_clock.h"
#include "tests/unit/transfer/engine_fixture.h"
#include "tests/unit/transfer/simulation/faulty_backend.h"
#include "tests/unit/transfer/simulation/scheduler.h"
#include "tests/unit/transfer/simulation/sim_pool.h"

namespace spectrumkv {

// What happened, over any number of simulations.
struct SimCounts {
  uint64_t events = 0, steps = 0, transfers = 0, restarts = 0;
  std::array<uint64_t, 9> ends{};  // by TransferState, of halves
  std::map<std::string, uint64_t> faults, reasons;
  // What was done with refinements, and what became of them.
  std::map<std::string, uint64_t> refined;
};

// A promise that is broken on purpose, by the engine's surroundings or by what the checks are told. See Hurt.
enum class SimBug {
  kNone,
  kFreshLies,      // a ticket says of blocks that others have had that they are still the request's
  kSourceChanges,  // a worker writes into a source that is kept
  kReuseUntold,    // a worker uses a destination's blocks for other things and says nothing
  kEndUntold,      // the end of a refinement is not told
  kBaseFails,      // a base is said to have failed
  kBytesMissing,   // a refinement is said to have moved one byte less
  kNeverReleased,  // a refinement's staging is never given back
};

struct SimHalf {
  bool started = false;
  int terminals = 0, cancels_asked = 0, cancels_answered = 0, releases_asked = 0, releases_answered = 0;
  int lives = 0;  // a refinement's sender may begin again where it was forgotten
  TransferReport report;
  size_t engine = 0;
  uint64_t epoch = 0;               // of the engine's life that it is part of
  bool kept = false;                // a source that may still be kept
  uint64_t refined_wire_bytes = 0;  // of its refinements that have ended
  std::shared_ptr<SimPool> pool;
  std::vector<BlockRange> runs;
};

// A transfer: both halves, or one whose other never comes. Or a refinement of one, which has no source of its own and
// whose destination is that of its base.
struct SimTransfer : std::enable_shared_from_this<SimTransfer> {
  std::string id, token;
  uint32_t tokens = 0;
  bool pull = false, layerwise = false, raw = false, both_dial = false;
  uint32_t advanced = 0;
  std::vector<std::string> sent;  // what the source held
  SimHalf sender, receiver;
  // Of one that may be refined.
  int64_t retain_ms = 0;  // 0: its source is not kept
  bool refinable = false, refine_direct = false;
  std::optional<Tier> background;
  bool in_use = false;  // it has committed, and its worker reads the blocks
  std::set<uint64_t> lost;  // of its blocks: others have had them since
  std::vector<std::shared_ptr<SimTransfer>> children;
  // Of a refinement. Null where a damaged frame has made up one.
  SimTransfer* base = nullptr;
  bool refines = false;
  RefineSpec ask;
  RefineStarted answer;
  uint64_t applied_bytes = 0;  // as ApplyRefinement has told

  SimHalf& half(Role role) { return role == Role::kSender ? sender : receiver; }
  const SimHalf& half(Role role) const { return role == Role::kSender ? sender : receiver; }
};

struct SimEngine {
  std::string name;
  uint64_t epoch = 0;
  SimExecutor *control = nullptr, *compute = nullptr;
  SlotPool *send_slots = nullptr, *receive_slots = nullptr;
  std::unique_ptr<FaultyBackend> backend;
  std::unique_ptr<Metrics> metrics;
  std::unique_ptr<PoolRegistry> pools;
  std::unique_ptr<Transport> transport;
  std::unique_ptr<TransferManagerImpl> manager;
  std::shared_ptr<SimPool> source, target;
  std::vector<Slot> hogged;  // slots that others are supposed to have
  uint32_t active = 0;       // halves that were started and have not ended
  bool cut_off = false;      // the peer cannot reach it
  uint64_t drains_until = 0;  // it drains, and is started anew with this event; 0: it does not
  // Of this life: refinements that ended here, and what ApplyRefinement has told.
  uint64_t refined_ends = 0, applied_bytes = 0;
};

class Simulation {
 public:
  // Sums up in `counts`.
  Simulation(uint64_t seed, SimCounts* counts);
  ~Simulation();
  // From now on that bug is in, and little else goes wrong. `caught`: whether a check has failed, which ends Run; the
  // running test does not know.
  void Hurt(SimBug bug, std::function<bool()> caught);
  // So many events; stops early once the running test has failed.
  void Run(uint64_t events);
  void Finish();

 private:
  friend class SimWatcher;
  // Chosen once.
  struct Rates {
    uint64_t message = 0;  // a fault at one message in so many; 0: never
    bool frames = false;   // frames are lost, doubled and damaged too, which a connection does not do
    bool memory = false, codec = false, stalls = false;
    bool refine = false;  // most transfers may be refined, and are
  };

  void Build(SimEngine* engine);
  void TearDown(SimEngine* engine);
  void Restart(SimEngine* engine);
  void CancelAll(SimEngine* engine);
  void EnsurePools(SimEngine* engine);
  Fault OnMessage(const FaultPoint& point);

  void Event();
  void ApiEvent();
  void MishapEvent();
  void StartSomething();
  std::shared_ptr<SimTransfer> NewTransfer();
  void StartHalf(const std::shared_ptr<SimTransfer>& transfer, Role role);
  absl::Status StartSender(SimTransfer* transfer, std::vector<BlockRange> runs);
  absl::Status StartReceiver(SimTransfer* transfer, std::vector<BlockRange> runs);
  Policy RandomPolicy(bool* raw);
  int64_t RandomDeadline(const SimTransfer& transfer);
  std::vector<BlockRange> RandomRuns(const PoolLayout& layout, uint32_t tokens, const std::set<uint64_t>& avoid);
  std::shared_ptr<SimTransfer> AnyTransfer(Role* role);
  void Advance(SimTransfer* transfer);
  void CancelHalf(const std::shared_ptr<SimTransfer>& transfer, Role role);
  void LosePool(SimEngine* engine, const std::shared_ptr<SimPool>& pool);
  void HogSlots(SimEngine* engine);
  void Note(const std::string& fault) { ++counts_->faults[fault]; }
  bool Broken() const { return caught_ ? caught_() : testing::Test::HasFailure(); }

  // Refinements (simulation_refine.cc).
  void MakeRefinable(SimTransfer* transfer);
  void RefineEvent();
  SimTransfer* AnyBase();
  std::shared_ptr<SimTransfer> AnyChild(const SimTransfer& base);
  RefineSpec RandomAsk(const SimTransfer& base);
  RefineSelection RandomSelection(const SimTransfer& base);
  void StartRefinement(SimTransfer* base);
  void CheckRepeat(const SimTransfer& refinement);
  // It is one of the life's transfers, of this base.
  void Enter(const std::shared_ptr<SimTransfer>& refinement, SimTransfer* base, const std::string& key);
  SimTransfer* BaseNamed(const std::string& id) const;
  // A half of it runs from now on, or has been found to: it is watched.
  void Adopt(const std::shared_ptr<SimTransfer>& refinement, Role role);
  // What daemons have begun on their own: refinements in the background, and the senders of all.
  void Discover(SimEngine* engine);
  std::shared_ptr<SimTransfer> Discovered(const TransferReport& report, size_t engine);
  void ApplySome(const std::shared_ptr<SimTransfer>& refinement);
  // As the worker's call: refinements end, then the transfer is forgotten.
  void ReleaseHalf(const std::shared_ptr<SimTransfer>& transfer, Role role);
  void OnRefinementsEnded(const std::shared_ptr<SimTransfer>& transfer, Role role);
  void Reuse(SimTransfer* transfer);       // a destination that was released
  void ReuseSource(SimTransfer* transfer, bool released);
  void WriteTail(SimTransfer* base);
  void GiveAway(SimTransfer* base);
  void MarkLost(size_t engine, const std::vector<BlockRange>& runs);
  std::set<uint64_t> BlocksInUse(size_t engine) const;
  void Drain(SimEngine* engine);
  void ForgetLife(size_t engine);
  void ReleaseAll();

  // Refinements (refine_checks.cc).
  void OnRefinementEnd(SimTransfer* refinement, Role role, const TransferReport& report);
  // What has changed in the base's blocks is what the refinement was to bring; answers how many cells.
  uint64_t AcceptCells(const SimTransfer& refinement);
  void CheckCell(const SimTransfer& refinement, size_t plane, uint32_t token, const std::string& before,
                 const std::string& now) const;
  void CheckApplied(SimTransfer* refinement, const absl::StatusOr<RefinementApplied>& applied);
  void CheckExact(const SimTransfer& base);
  void CheckBase(const SimTransfer& base, Role role);
  void CheckMetrics(const SimEngine& engine);
  bool HoldsSource(const SimTransfer& transfer, const SimTransfer& but, uint64_t block) const;
  bool Here(const SimHalf& half) const { return half.epoch == engines_[half.engine].epoch; }

  void OnEnd(const std::shared_ptr<SimTransfer>& transfer, Role role, const TransferReport& report);
  void CheckLanded(const SimTransfer& transfer);
  void CheckNow();
  void CheckBlocks(SimEngine* engine);
  void CheckPair(const SimTransfer& transfer);
  void CheckNothingIsLeft(SimEngine* engine);
  void RunAll();
  void Settle(int64_t ms);

  const uint64_t seed_;
  SimCounts* const counts_;
  SimRandom random_;
  FakeClock clock_;
  SimScheduler scheduler_;
  SimExecutor* const network_executor_;
  Rates rates_;
  TransferOptions options_;
  PoolLayout source_layout_, target_layout_;
  size_t slots_ = 4;
  bool quiet_ = false;  // no faults, nothing new
  bool lied_ = false;   // a frame was damaged: what halves say of each other may be wrong
  SimBug bug_ = SimBug::kNone;
  std::function<bool()> caught_;
  uint64_t event_ = 0;
  std::unique_ptr<MemoryNetwork> network_;
  std::array<SimEngine, 2> engines_;
  std::vector<std::shared_ptr<SimTransfer>> transfers_;
  std::vector<SimTransfer*> bases_, fresh_bases_;  // that committed, to be refined; those that nobody has refined
  std::map<std::string, std::shared_ptr<SimTransfer>> refinements_;
  uint64_t next_id_ = 0, next_epoch_ = 0x100;
};

}  // namespace spectrumkv
