// Two daemons' engines on one thread, under a clock that stands still and over a network in memory. One seed chooses all:
// sizes, requests, the order of everything that could happen at one time, and what goes wrong at the seams (network,
// clock, memory, codec). After each event the promises that hold at every moment are checked, and in Finish, when
// faults have ended and time has passed, those of the end:
//
//   one terminal state of each half, told once; what one half says of the other is true; committed RAW bytes are those
//   of the source; no slot, lease, credit, hold, mapping or timer is left; nothing is written after the end (a fence),
//   and nothing read.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

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
};

struct SimHalf {
  bool started = false;
  int terminals = 0, cancels_asked = 0, cancels_answered = 0;
  TransferReport report;
  size_t engine = 0;
  std::shared_ptr<SimPool> pool;
  std::vector<BlockRange> runs;
};

// A transfer: both halves, or one whose other never comes.
struct SimTransfer {
  std::string id, token;
  uint32_t tokens = 0;
  bool pull = false, layerwise = false, raw = false, both_dial = false;
  uint32_t advanced = 0;
  std::vector<std::string> sent;  // what the source held
  SimHalf sender, receiver;
  SimHalf& half(Role role) { return role == Role::kSender ? sender : receiver; }
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
  std::unique_ptr<TransferManager> manager;
  std::shared_ptr<SimPool> source, target;
  std::vector<Slot> hogged;  // slots that others are supposed to have
  uint32_t active = 0;       // halves that were started and have not ended
  bool cut_off = false;      // the peer cannot reach it
};

class Simulation {
 public:
  // Sums up in `counts`.
  Simulation(uint64_t seed, SimCounts* counts);
  ~Simulation();
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
  };

  void Build(SimEngine* engine);
  void TearDown(SimEngine* engine);
  void Restart(SimEngine* engine);
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
  std::vector<BlockRange> RandomRuns(const PoolLayout& layout, uint32_t tokens);
  SimTransfer* AnyTransfer(Role* role);
  void Advance(SimTransfer* transfer);
  void CancelHalf(const std::shared_ptr<SimTransfer>& transfer, Role role);
  void LosePool(SimEngine* engine);
  void HogSlots(SimEngine* engine);
  void Note(const std::string& fault) { ++counts_->faults[fault]; }

  void OnEnd(const std::shared_ptr<SimTransfer>& transfer, Role role, const TransferReport& report);
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
  std::unique_ptr<MemoryNetwork> network_;
  std::array<SimEngine, 2> engines_;
  std::vector<std::shared_ptr<SimTransfer>> transfers_;
  uint64_t next_id_ = 0, next_epoch_ = 0x100;
};

}  // namespace spectrumkv
