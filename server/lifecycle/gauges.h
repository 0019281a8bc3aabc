// Keeps the gauges of connections, pools, staging slots and GPUs current: once at the start, then every second.
#pragma once

#include <memory>

#include "server/base/clock.h"
#include "server/lifecycle/caller_table.h"
#include "server/memory/device.h"
#include "server/memory/slot_pool.h"
#include "server/metrics/metrics.h"
#include "server/pool/pool.h"
#include "server/transfer/transfer_manager.h"

namespace spectrumkv {

class GaugeRefresher {
 public:
  struct Sources {  // borrowed
    Clock* clock = nullptr;
    Metrics* metrics = nullptr;
    const PoolRegistry* pools = nullptr;
    const TransferManager* transfers = nullptr;
    const SlotPool* send_slots = nullptr;
    const SlotPool* receive_slots = nullptr;
    CallerTable* callers = nullptr;
    const Devices* devices = nullptr;
  };
  explicit GaugeRefresher(const Sources& sources);
  // No source is touched after it.
  ~GaugeRefresher();
  GaugeRefresher(const GaugeRefresher&) = delete;
  GaugeRefresher& operator=(const GaugeRefresher&) = delete;

 private:
  struct State;
  static void Refresh(const std::shared_ptr<State>& state);
  std::shared_ptr<State> state_;
};

}  // namespace spectrumkv
