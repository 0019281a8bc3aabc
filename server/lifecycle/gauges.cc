#include "server/lifecycle/gauges.h"

#include <mutex>

namespace spectrumkv {
namespace {

constexpr int64_t kPeriodNs = 1'000'000'000;

}  // namespace

struct GaugeRefresher::State {
  Sources sources;
  std::mutex mutex;  // held while refreshing, so that the destructor waits
  bool stopped = false;
  TimerId timer = 0;
};

GaugeRefresher::GaugeRefresher(const Sources& sources) : state_(std::make_shared<State>()) {
  state_->sources = sources;
  Refresh(state_);
}

GaugeRefresher::~GaugeRefresher() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->stopped = true;
  state_->sources.clock->Cancel(state_->timer);
}

void GaugeRefresher::Refresh(const std::shared_ptr<State>& state) {
  std::lock_guard<std::mutex> lock(state->mutex);
  if (state->stopped) return;
  const Sources& s = state->sources;
  uint64_t total = 0, sending = 0, receiving = 0;
  for (const PoolStatus& pool : s.pools->List()) {
    total += pool.blocks_total;
    sending += pool.blocks_sending;
    receiving += pool.blocks_receiving;
  }
  s.metrics->SetPoolBlocks(MetricBlocks::kSending, sending);
  s.metrics->SetPoolBlocks(MetricBlocks::kReceiving, receiving);
  s.metrics->SetPoolBlocks(MetricBlocks::kFree, total > sending + receiving ? total - sending - receiving : 0);
  s.metrics->SetWorkerConnections(s.callers->Sweep());
  const auto staging = [&s](const SlotPool& slots, MetricStaging used, MetricStaging free) {
    const uint64_t in_use = slots.used();
    s.metrics->SetStagingBytes(used, in_use * slots.slot_bytes());
    s.metrics->SetStagingBytes(free, (slots.count() - in_use) * slots.slot_bytes());
  };
  staging(*s.send_slots, MetricStaging::kSendUsed, MetricStaging::kSendFree);
  staging(*s.receive_slots, MetricStaging::kReceiveUsed, MetricStaging::kReceiveFree);
  const RefineMemory refine = s.transfers->refine_memory();
  s.metrics->SetRefineBytes(MetricRefineMemory::kStaging, refine.staging_bytes);
  s.metrics->SetRefineBytes(MetricRefineMemory::kCache, refine.cache_bytes);
  Device::Use devices;
  for (const auto& device : s.devices->all()) {
    const Device::Use use = device->use();
    *devices.context_bytes += use.context_bytes.value_or(0);
    devices.owned_bytes += use.owned_bytes;
    devices.lane_bytes += use.lane_bytes;
  }
  s.metrics->SetDeviceBytes(MetricDevice::kContext, *devices.context_bytes);
  s.metrics->SetDeviceBytes(MetricDevice::kPools, devices.owned_bytes);
  s.metrics->SetDeviceBytes(MetricDevice::kLanes, devices.lane_bytes);
  state->timer = s.clock->CallAt(s.clock->NowNs() + kPeriodNs, [state] { Refresh(state); });
}

}  // namespace spectrumkv
